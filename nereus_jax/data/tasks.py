"""Tasks that make their own problems, with answers that can be checked.

A problem is a pure function of (seed, index, split, options). Train and eval problems never
coincide: a stable hash of the operands sends a tenth of all problems to eval, and a problem of the
other split is drawn again.
"""

import dataclasses
import difflib
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nereus_jax.core.errors import ConfigError

SPLITS = ("train", "eval")
STYLES = ("plain", "sentence")
MAX_DIGITS = 18  # an operand fits an int64

_EVAL_ONE_IN = 10
_MAX_DRAWS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt with a known answer.

    Attributes:
      prompt: what is asked.
      answer: what a right response says.
      metadata: whatever else is known of the problem; rewards may read it.
      messages: the whole chat, of which `prompt` is the last message; empty: `prompt` is all.
    """

    prompt: str
    answer: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()


def reverse_digits(
    index: int,
    seed: int,
    *,
    split: str = "train",
    digits: int = 4,
    min_digits: int = 0,
    style: str = "plain",
) -> Problem:
    """A string of digits to write backwards: `1240=` -> `0421`.

    Args:
      index: which problem.
      seed: of the whole sequence of problems.
      split: "train" or "eval".
      digits: most digits, 1 to 18; a leading zero may occur.
      min_digits: fewest digits; 0 means `digits`. Lengths are uniform.
      style: "plain" as above, or "sentence": `Reverse the digits of 1240.`

    Raises:
      ConfigError: an option is out of range, or the split has no such problem.
    """
    _check_options(digits, min_digits, style)
    (text,) = _draw("reverse_digits", index, seed, split, digits, min_digits, _digit_string)
    prompt = f"{text}=" if style == "plain" else f"Reverse the digits of {text}."
    return Problem(prompt=prompt, answer=text[::-1], metadata={"operands": [text]})


def sort_digits(
    index: int,
    seed: int,
    *,
    split: str = "train",
    digits: int = 4,
    min_digits: int = 0,
    style: str = "plain",
) -> Problem:
    """A string of digits to write in ascending order: `3142=` -> `1234`.

    Arguments and errors are those of `reverse_digits`; the sentence is `Sort the digits of 3142
    from smallest to largest.`
    """
    _check_options(digits, min_digits, style)
    (text,) = _draw("sort_digits", index, seed, split, digits, min_digits, _digit_string)
    sentence = f"Sort the digits of {text} from smallest to largest."
    prompt = f"{text}=" if style == "plain" else sentence
    return Problem(prompt=prompt, answer="".join(sorted(text)), metadata={"operands": [text]})


def addition(
    index: int,
    seed: int,
    *,
    split: str = "train",
    digits: int = 2,
    min_digits: int = 0,
    style: str = "plain",
) -> Problem:
    """Two numbers to add: `12+30=` -> `42`; a + b and b + a belong to the same split.

    Arguments and errors are those of `reverse_digits`, but for: each operand has its own number of
    digits and no leading zero; the sentence is `What is 12 + 30?`
    """
    _check_options(digits, min_digits, style)
    a, b = _draw("addition", index, seed, split, digits, min_digits, _two_numbers)
    prompt = f"{a}+{b}=" if style == "plain" else f"What is {a} + {b}?"
    answer = str(int(a) + int(b))
    return Problem(prompt=prompt, answer=answer, metadata={"operands": [a, b]})


def two_steps(
    index: int,
    seed: int,
    *,
    split: str = "train",
    digits: int = 2,
    min_digits: int = 0,
    style: str = "plain",
) -> Problem:
    """Three numbers to add or to subtract in two steps: `47+12-30=` -> `29`.

    Arguments and errors are those of `addition`; the sentence is a word problem: `Mia has 47
    apples. She finds 12 more. Then she gives 30 to a friend. How many apples does she have now?`
    No number is 0, no step goes below 0. The split depends on the numbers alone: those of a
    held-out problem, in any order, are in no training problem, whatever its story.
    """
    _check_options(digits, min_digits, style)
    numbers = _draw("two_steps", index, seed, split, digits, min_digits, _three_numbers)
    total, *amounts = (int(n) for n in numbers)
    # Signs and words have a stream of their own: they do not change which numbers are drawn.
    entropy = np.random.SeedSequence((seed, SPLITS.index(split), index, 1))
    rng = np.random.Generator(np.random.Philox(entropy))
    picks = rng.integers(0, 2**32, size=6).tolist()
    equation, signs = numbers[0], ""
    for amount, pick in zip(amounts, picks[:2], strict=True):
        sign = "-" if amount <= total and pick % 2 else "+"
        total += amount if sign == "+" else -amount
        equation, signs = f"{equation}{sign}{amount}", signs + sign
    sentence = _story(numbers, signs, picks[2:])
    prompt = f"{equation}=" if style == "plain" else sentence
    metadata = {"operands": list(numbers), "equation": equation}
    return Problem(prompt=prompt, answer=str(total), metadata=metadata)


TASKS: Mapping[str, Callable[..., Problem]] = {
    "addition": addition,
    "reverse_digits": reverse_digits,
    "sort_digits": sort_digits,
    "two_steps": two_steps,
}

_PEOPLE = (
    *(("She", name) for name in ("Mia", "Anna", "Zoe", "Lily", "Emma", "Ruth", "Nora", "Ines")),
    *(("He", name) for name in ("Tom", "Ben", "Leo", "Max", "Sam", "Paul", "Omar", "Hugo")),
)
_THINGS = (
    *("apples", "pens", "marbles", "stickers", "coins", "books", "shells", "cards", "buttons"),
    *("stamps", "cookies", "balloons"),
)
_GAINS = ("buys {} more", "finds {} more", "gets {} more from a friend", "wins {} more")
_LOSSES = ("gives {} to a friend", "loses {}", "sells {}", "puts {} in a box for the school")


def _story(numbers: Sequence[str], signs: str, picks: Sequence[int]) -> str:
    """Two steps in words; `picks` choose who, what, and how it comes and goes."""
    who, what, *ways = picks
    pronoun, name = _PEOPLE[who % len(_PEOPLE)]
    thing = _THINGS[what % len(_THINGS)]
    first, second = (
        (_GAINS if sign == "+" else _LOSSES)[way % len(_GAINS)].format(number)
        for sign, way, number in zip(signs, ways, numbers[1:], strict=True)
    )
    owned = thing.removesuffix("s") if numbers[0] == "1" else thing
    return (
        f"{name} has {numbers[0]} {owned}. {pronoun} {first}. Then {pronoun.lower()} {second}. "
        f"How many {thing} does {pronoun.lower()} have now?"
    )


def check_task(name: str, options: Mapping[str, Any]) -> Callable[..., Problem]:
    """The function of the task `name`, which takes `options`.

    Raises:
      ConfigError: there is no such task, or it has no such option.
    """
    if name not in TASKS:
        raise ConfigError(
            f"there is no task {name!r}{_nearest(name, TASKS)}; tasks: {', '.join(sorted(TASKS))}"
        )
    parameters = inspect.signature(TASKS[name]).parameters.values()
    allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "split"]
    for option in options:
        if option not in allowed:
            raise ConfigError(
                f"task {name} has no option {option!r}{_nearest(option, allowed)}; "
                f"data.task_options may hold: {', '.join(allowed)}"
            )
    return TASKS[name]


def _nearest(word: str, words: Mapping[str, object] | list[str]) -> str:
    close = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _check_options(digits: object, min_digits: object, style: object) -> None:
    for name, value, low in (("digits", digits, 1), ("min_digits", min_digits, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_DIGITS:
            raise ConfigError(
                f"task option {name} must be an int from {low} to {MAX_DIGITS}, got {value!r}"
            )
    if min_digits > digits:  # pyright: ignore[reportOperatorIssue] (both are ints by now)
        raise ConfigError(
            f"task option min_digits {min_digits} is above digits {digits}; lower it (0: the same)"
        )
    if style not in STYLES:
        raise ConfigError(f"task option style must be one of {', '.join(STYLES)}, got {style!r}")


def _digit_string(rng: np.random.Generator, digits: int, min_digits: int) -> tuple[str, ...]:
    length = int(rng.integers(min_digits, digits, endpoint=True))
    return ("".join(str(d) for d in rng.integers(0, 10, size=length)),)


def _two_numbers(rng: np.random.Generator, digits: int, min_digits: int) -> tuple[str, ...]:
    return _number(rng, digits, min_digits), _number(rng, digits, min_digits)


def _three_numbers(rng: np.random.Generator, digits: int, min_digits: int) -> tuple[str, ...]:
    return tuple(_number(rng, digits, min_digits, least=1) for _ in range(3))


def _number(rng: np.random.Generator, digits: int, min_digits: int, least: int = 0) -> str:
    length = int(rng.integers(min_digits, digits, endpoint=True))
    return str(rng.integers(least if length == 1 else 10 ** (length - 1), 10**length))


def _draw(
    task: str,
    index: int,
    seed: int,
    split: str,
    digits: int,
    min_digits: int,
    sample: Callable[[np.random.Generator, int, int], tuple[str, ...]],
) -> tuple[str, ...]:
    """The operands of a problem of `split`: the first draw of the stream that belongs to it."""
    if split not in SPLITS:
        raise ConfigError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    entropy = np.random.SeedSequence((seed, SPLITS.index(split), index))
    rng = np.random.Generator(np.random.Philox(entropy))
    for _ in range(_MAX_DRAWS):
        operands = sample(rng, digits, min_digits or digits)
        if _split_of(task, operands) == split:
            return operands
    raise ConfigError(
        f"task {task} with digits={digits} has no {split} problem: there are too few; "
        "take more digits"
    )


def _split_of(task: str, operands: tuple[str, ...]) -> str:
    """The split of a problem, by a hash that no version of Python or numpy changes."""
    text = ":".join((task, *sorted(operands)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % _EVAL_ONE_IN == 0 else "train"
