"""The user's reward function: finding it by name, calling it with errors that name the sample.

A reward function has the signature `(prompts, completions, answers, metadata)` -> one number per
sample, where all four arguments are lists of B. Shapes: B samples.
"""

import difflib
import importlib
import importlib.util
import numbers
import os
import pkgutil
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, TypeAlias, cast

import numpy as np

from nereus_jax.core.errors import ConfigError, RewardError

RewardFunction: TypeAlias = Callable[
    [list[str], list[str], list[str], list[dict[str, Any]]], Sequence[float] | np.ndarray
]

_BUILTIN_MODULE = "nereus_jax.rl.rewards"
_LIBRARY_FOLDERS = tuple(
    sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)


def load_function(dotted_name: str) -> RewardFunction:
    """Imports a function by name: `package.module.function` or `package.module:function`.

    Raises:
        ConfigError: the name is malformed, the module is missing or fails to import, or it has no
            such function.
    """
    separator = ":" if ":" in dotted_name else "."
    module_name, _, attribute = dotted_name.rpartition(separator)
    if not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise ConfigError(
            f"reward.function {dotted_name!r} is not of the form package.module.function: name one "
            f"of yours or a built-in such as {_BUILTIN_MODULE}.exact_match"
        )
    found: Any = _import_module(module_name, dotted_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            functions = [name for name in dir(found) if callable(getattr(found, name, None))]
            raise ConfigError(
                f"reward.function {dotted_name!r}: {module_name!r} has no {part!r}"
                f"{_nearest(part, functions)}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"reward.function {dotted_name!r} is a {type(found).__name__}, not a function: "
            "name a function of (prompts, completions, answers, metadata)"
        )
    return cast(RewardFunction, found)


def _import_module(module_name: str, dotted_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(f"{missing}."):
            raise ConfigError(
                f"reward.function {dotted_name!r}: module {module_name!r} imports {missing!r}, "
                f"which is not installed{_location(error)}"
            ) from error
        parent, _, name = missing.rpartition(".")
        raise ConfigError(
            f"reward.function {dotted_name!r}: there is no module {missing!r}"
            f"{_nearest(name, _submodules(parent))}; put its folder on the import path (PYTHONPATH)"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"reward.function {dotted_name!r}: importing {module_name!r} failed with "
            f"{_describe(error)}"
        ) from error


def _submodules(package_name: str) -> list[str]:
    """Names of the modules in a package, or of all that can be imported for the empty name."""
    if not package_name:
        return [module.name for module in pkgutil.iter_modules()]
    spec = importlib.util.find_spec(package_name)
    places = spec.submodule_search_locations if spec else None
    return [module.name for module in pkgutil.iter_modules(places)] if places else []


def _nearest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def call_reward(
    function: RewardFunction,
    prompts: list[str],
    completions: list[str],
    answers: list[str],
    metadata: list[dict[str, Any]],
) -> np.ndarray:
    """Calls a reward function on B samples and checks what it returns.

    Returns:
        float32 [B], all finite.

    Raises:
        RewardError: the function raised, or returned something else than one finite number per
            sample.
        ValueError: the four lists differ in length.
    """
    num_samples = len(completions)
    if not len(prompts) == len(answers) == len(metadata) == num_samples:
        raise ValueError(
            f"call_reward needs four lists of one length, got {len(prompts)} prompts, "
            f"{num_samples} completions, {len(answers)} answers and {len(metadata)} metadata"
        )
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
    try:
        returned = function(list(prompts), list(completions), list(answers), list(metadata))
    except Exception as error:
        raise RewardError(f"reward function {name} raised {_describe(error, function)}") from error
    if returned is None:
        raise RewardError(f"reward function {name} returned None: return one number per sample")
    array = _to_array(returned)
    if array is None or array.shape != (num_samples,):
        got = "values of unequal shapes" if array is None else f"shape {array.shape}"
        raise RewardError(
            f"reward function {name} returned a {type(returned).__name__} of {got} for "
            f"{num_samples} samples: return one number per sample, shape ({num_samples},)"
        )
    rewards_B = _to_float32(array)
    if rewards_B is None:
        index = _first_non_number(returned)
        raise RewardError(
            f"reward function {name} returned {shorten(repr(returned[index]))}, not a number, "
            f"for sample {index} {shorten(repr(completions[index]))}"
        )
    bad_B = ~np.isfinite(rewards_B)
    if bad_B.any():
        index = int(np.argmax(bad_B))
        raise RewardError(
            f"reward function {name} returned {array[index]}, not a finite float32, "
            f"for sample {index} {shorten(repr(completions[index]))}"
        )
    return rewards_B


def _to_array(returned: Any) -> np.ndarray | None:
    try:
        return np.asarray(returned)
    except (TypeError, ValueError):  # numpy refuses ragged lists
        return None


def _to_float32(array: np.ndarray) -> np.ndarray | None:
    """Converts real numbers of any kind; None for anything else (text, None, complex)."""
    if array.dtype.kind == "O" and not all(isinstance(x, numbers.Real | Decimal) for x in array):
        return None
    if array.dtype.kind not in "fiubOV":  # V: bfloat16 and its like, which numpy does not know
        return None
    try:
        with np.errstate(over="ignore"):
            return array.astype(np.float32)
    except (TypeError, ValueError):
        return None
    except OverflowError:  # an int or Fraction too large for a float
        return np.array([_float_or_inf(x) for x in array], dtype=np.float32)


def _float_or_inf(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf")


def _first_non_number(returned: Any) -> int:
    for index, value in enumerate(returned):
        if not isinstance(value, numbers.Real | Decimal):
            return index
    return 0


def _describe(error: BaseException, function: RewardFunction | None = None) -> str:
    message = shorten(" ".join(str(error).split()), 200)
    return f"{type(error).__name__}: {message}{_location(error, function)}"


def _location(error: BaseException, function: RewardFunction | None = None) -> str:
    """Says where the user's code failed: its deepest frame that is not an installed library."""
    if isinstance(error, SyntaxError) and function is None:  # the imported file itself
        return f" at {error.filename}:{error.lineno}"
    own_file = getattr(getattr(function, "__code__", None), "co_filename", None)
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the call in this file
    frames = [f for f in frames if not f.filename.startswith(("<frozen", "<string"))]
    users = [
        frame
        for frame in frames
        if frame.filename == own_file or not frame.filename.startswith(_LIBRARY_FOLDERS)
    ]
    if not frames:
        return " (no line of its own: is it a function of prompts, completions, answers, metadata?)"
    frame = (users or frames)[-1]
    return f" at {frame.filename}:{frame.lineno}"


def shorten(text: str, limit: int = 80) -> str:
    """Cuts the middle out of a text that is longer than `limit` characters."""
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"
