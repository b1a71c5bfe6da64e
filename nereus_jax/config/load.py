"""Reading a configuration file and the overrides of the command line.

`--config=FILE[:ARG]` and `--config.key.sub=VALUE` mean what they mean in
`ml_collections.config_flags`, which parses the values here. The file is executed here rather than
there: config_flags keeps the module (and a byte code cache) of an earlier file, and loses the line
at which a file failed.
"""

import ast
import inspect
import re
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from absl import flags
from ml_collections import config_dict, config_flags

from nereus_jax.config.fields import FieldType, field_types, shown, unknown_key, walk
from nereus_jax.config.parse import default_config
from nereus_jax.config.plan_entry import canonical_model_stage
from nereus_jax.config.schema import RunConfig
from nereus_jax.core.errors import ConfigError

_FREE = ("plan_changes", "plan", "data.task_options")


def load_config_file(
    path: str, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> config_dict.ConfigDict:
    """Runs `get_config` of a file and applies overrides; `parse_config` checks the result.

    Args:
      path: 'FILE' or 'FILE:ARG'; what follows the first colon is the argument of `get_config`.
      overrides: 'config.key.sub=value' texts as on the command line, or a mapping of dotted key to
        value, where a text is parsed likewise. Leading dashes, the two texts '--config.key' and
        'value', and '--config.flag' or '--noconfig.flag' for a bool are understood; 'config.' may
        be left out. The last value of a key counts; those of a tuple add up.

    Returns:
      The file's ConfigDict with the overrides in place, not locked.

    Raises:
      ConfigError: the file is missing or fails, or an override has an unknown key or a value of
        another type.
    """
    config = run_config_file(path)
    config.unlock()
    grouped = _grouped(overrides)
    for key, values in grouped.items():
        _apply(config, key, values)
    if grouped.get("plan_file", [""])[-1]:
        _give_way(config, grouped)
    return config


def _give_way(config: config_dict.ConfigDict, overrides: Mapping[str, Any]) -> None:
    """The layouts of the configuration file make way for a plan file of the command line."""
    also = next((key for key in overrides if key.startswith("plan.")), None)
    if also is not None:
        raise ConfigError(
            f"override: plan_file={config.plan_file!r} gives all layouts, and {also} one of them "
            f"again; drop one of the two"
        )
    config.plan = config_dict.ConfigDict()


def _execute(file: str, path: Path) -> Callable[..., Any]:
    """Runs the file as a module and returns its `get_config`."""
    if not path.is_file():
        place = path if path.is_dir() else path.parent
        beside = sorted(p.name for p in place.glob("*.py")) if place.is_dir() else []
        found = f" (in {str(place)!r}: {', '.join(beside[:8])})" if beside else ""
        raise ConfigError(
            f"configuration file {file!r} does not exist or is not a file{found}; pass "
            "--config=FILE.py with a get_config() in it"
        )
    module = types.ModuleType("nereus_run_config")
    module.__file__ = str(path)
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise ConfigError(_failure(path, error)) from error
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(
            f"configuration file {file!r} has no function get_config(); define one that returns a "
            "ConfigDict"
        )
    return get_config


def run_config_file(path: str) -> config_dict.ConfigDict:
    """Runs a file's `get_config`.

    Args:
      path: 'FILE' or 'FILE:ARG', as in `load_config_file`.

    Raises:
      ConfigError: the file is missing or fails, or gives no ConfigDict.
    """
    file, colon, argument = path.partition(":")
    return _run_file(file, [argument] if colon else [])


def _run_file(file: str, arguments: list[str]) -> config_dict.ConfigDict:
    path = Path(file).expanduser()
    get_config = _execute(file, path)
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        form = f"{file}:{arguments[0]}" if arguments else file
        raise ConfigError(
            f"get_config{inspect.signature(get_config)} of {file!r} does not take the arguments of "
            f"--config={form} ({error}); write --config={file}{'' if arguments else ':ARGUMENT'}"
        ) from error
    try:
        config = get_config(*arguments)
        if isinstance(config, Mapping):
            config = config_dict.ConfigDict(dict(config))
    except (Exception, SystemExit) as error:
        raise ConfigError(_failure(path, error)) from error
    if not isinstance(config, config_dict.ConfigDict):
        raise ConfigError(
            f"get_config() of {file!r} must return an ml_collections.ConfigDict, got "
            f"{shown(config)}; does it end with 'return config'?"
        )
    # A copy because a frozen one takes no overrides; references between keys stay.
    return config_dict.ConfigDict(cast(Any, config))


def _failure(path: Path, error: BaseException) -> str:
    """One line: the place in the file, the kind of error and its message."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(path):
            line = frame.lineno
    text = " ".join(str(error).split())
    locked = re.search(r'Key "([^"]*)" does not exist and cannot be added', text)
    if locked:
        # The library's message lists all values of the section.
        mean = re.search(r'Did you mean "([^"]*)"', text)
        hint = f"; did you mean {mean[1]!r}?" if mean else ""
        text = f"{locked[1]!r} is not a key of its section{hint}"
    place = f"{path}:{line}" if line else str(path)
    return f"configuration file {place}: {type(error).__name__}: {text or 'no message'}"


def _grouped(overrides: Mapping[str, Any] | Sequence[str]) -> dict[str, list[Any]]:
    """Dotted key -> its values, in the order of their last use."""
    pairs = (
        [(_strip(key), value) for key, value in overrides.items()]
        if isinstance(overrides, Mapping)
        else _split_texts(overrides)
    )
    grouped: dict[str, list[Any]] = {}
    for key, value in pairs:
        # Moving the key to the end keeps the order of the last uses.
        grouped[key] = [*grouped.pop(key, []), value]
    return grouped


def _strip(text: str) -> str:
    return re.sub(r"^-{0,2}(config\.)?", "", text)


def _split_texts(texts: Sequence[str]) -> list[tuple[str, Any]]:
    if isinstance(texts, str):
        raise ConfigError(f"overrides: expected a list of 'config.key=value', got {shown(texts)}")
    bools = {key for key, kind in walk(RunConfig) if kind.base is bool}
    pairs: list[tuple[str, Any]] = []
    waiting = list(texts)
    while waiting:
        text = waiting.pop(0)
        name, equals, value = text.partition("=")
        key = _strip(name)
        negated = re.sub(r"^-{1,2}noconfig\.", "", name)
        if equals:
            pairs.append((key, value))
        elif key in bools:
            pairs.append((key, True))
        elif negated in bools:
            pairs.append((negated, False))
        elif text.startswith("-") and waiting:
            pairs.append((key, waiting.pop(0)))
        else:
            raise ConfigError(
                f"override {text!r} has no value; write --config.{key or 'key'}=VALUE"
            )
    return pairs


def _apply(config: config_dict.ConfigDict, key: str, values: list[Any]) -> None:
    for free in _FREE:
        if key.startswith(free + "."):
            name = key.removeprefix(free + ".")
            parents: list[str] = [*free.split(".")]
            if free == "plan_changes" and "." in name:
                step, name = name.split(".", 1)
                parents.append(step)
            section = _section(config, parents)
            _apply_free(section, name, values[-1], free != "data.task_options")
            return
    kind = _kind(key)
    value = values[-1]
    if isinstance(value, str):
        value = _parse_texts(key, kind, [str(item) for item in values])
    *parents, name = key.split(".")
    section = _section(config, parents)
    with section.ignore_type():
        section[name] = value


def _kind(key: str) -> FieldType:
    """The type of the key; raises ConfigError for an unknown one and for a section."""
    section, prefix = RunConfig, ""
    *parents, last = key.split(".")
    for name in parents:
        kind = field_types(section).get(name)
        if kind is None:
            raise ConfigError("override: " + unknown_key(RunConfig, section, prefix, name))
        if not kind.is_section:
            raise ConfigError(
                f"override: {prefix + name!r} holds {kind.expected} and has no key {last!r}; write "
                f"--config.{prefix + name}=VALUE"
            )
        section, prefix = kind.base, f"{prefix}{name}."
    kind = field_types(section).get(last)
    if kind is None:
        raise ConfigError("override: " + unknown_key(RunConfig, section, prefix, last))
    if kind.is_section or kind.is_free:
        keys = ", ".join(field_types(kind.base)) if kind.is_section else "any"
        raise ConfigError(
            f"override: {key!r} is a section; override its keys, --config.{key}.KEY=VALUE, with "
            f"KEY one of: {keys}"
        )
    return kind


def _parse_texts(key: str, kind: FieldType, texts: list[str]) -> Any:
    """The value that config_flags reads from the texts, given the type of the key."""
    values = flags.FlagValues()
    argv = ["nereus", *(f"--config.{key}={text}" for text in texts)]
    try:
        config_flags.DEFINE_config_dict(
            "config", default_config(), flag_values=values, sys_argv=argv
        )
        values(argv)
        return config_flags.get_override_values(values["config"])[key]
    except (flags.Error, ValueError, TypeError) as error:
        quoting = """; quote every string: "('a b', 'c')\"""" if kind.base is tuple else ""
        raise ConfigError(
            f"override --config.{key}: expected {kind.expected}, got {texts[-1]!r}{quoting}"
        ) from error


def _section(config: config_dict.ConfigDict, names: Sequence[str]) -> config_dict.ConfigDict:
    """The section below `config`, created where the file has none."""
    for position, name in enumerate(names):
        inner = config.get(name)
        if inner is None:
            config[name] = inner = config_dict.ConfigDict()
        if not isinstance(inner, config_dict.ConfigDict):
            raise ConfigError(
                f"{'.'.join(names[: position + 1])}: expected a section (a ConfigDict), got "
                f"{shown(inner)}"
            )
        config = inner
    return config


def _apply_free(section: config_dict.ConfigDict, name: str, value: Any, is_plan: bool) -> None:
    if "." in name:
        example = "plan.actor-TRAIN='dp=1'" if is_plan else "data.task_options.NAME=VALUE"
        raise ConfigError(f"override: {name!r} may not hold a dot; write --config.{example}")
    if is_plan:
        name = canonical_model_stage(name)
        for other in list(section):
            if canonical_model_stage(other) == name:
                del section[other]
    elif isinstance(value, str) and not isinstance(section.get(name), str):
        value = _literal(value)
    with section.ignore_type():
        section[name] = value


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
