"""Verifiable rewards: built-in reward functions that compare a completion with its answer.

All have the signature that `call_reward` calls: `(prompts, completions, answers, metadata)`, four
lists of B, -> float32 [B]. Shapes: B samples.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np

from nereus_jax.rl.reward_function import RewardFunction, call_reward, load_function, shorten

__all__ = [
    "RewardFunction",
    "arithmetic_answer",
    "call_reward",
    "digit_match",
    "exact_match",
    "final_number",
    "load_function",
]

# A sign counts only where it cannot be a subtraction ("12-5" holds 12 and 5), commas only as
# thousands separators.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]])[-+])?\$?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def exact_match(
    prompts: list[str], completions: list[str], answers: list[str], metadata: list[dict[str, Any]]
) -> np.ndarray:
    """1.0 where the completion equals the answer, surrounding white space apart; else 0.0."""
    return np.array(
        [c.strip() == a.strip() for c, a in zip(completions, answers, strict=True)], np.float32
    )


def digit_match(
    prompts: list[str], completions: list[str], answers: list[str], metadata: list[dict[str, Any]]
) -> np.ndarray:
    """Share of positions, from the left over the longer text, where both have the same character.

    Partial credit in [0, 1]; 1.0 only if the texts are equal, surrounding white space apart.
    """
    rewards: list[float] = []
    for completion, answer in zip(completions, answers, strict=True):
        got, wanted = completion.strip(), answer.strip()
        right = sum(x == y for x, y in zip(got, wanted, strict=False))
        rewards.append(right / max(len(got), len(wanted)) if got != wanted else 1.0)
    return np.array(rewards, np.float32)


def arithmetic_answer(
    prompts: list[str], completions: list[str], answers: list[str], metadata: list[dict[str, Any]]
) -> np.ndarray:
    """1.0 where the last number in the completion equals the (integer) answer; else 0.0.

    3.5 is one number, not the integer 5; 1,234 is 1234; "12-5" holds 12 and 5, "= -5" holds -5.

    Raises:
        ValueError: an answer without a number.
    """
    return _compare_numbers(_last_number, completions, answers)


def final_number(
    prompts: list[str], completions: list[str], answers: list[str], metadata: list[dict[str, Any]]
) -> np.ndarray:
    """1.0 where the final numbers of completion and answer are equal; else 0.0. For GSM8K and its
    like.

    The final number is the first one after the last "####", and without that mark the last number
    of the text.
    Thousands separators, a dollar sign, leading signs and decimals are understood; 18.0 equals 18.
    The answer may be a whole worked solution or just the number.

    Raises:
        ValueError: an answer without a number.

    Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems" (2021), answer format.
    """
    return _compare_numbers(_final_number, completions, answers)


def _compare_numbers(
    find: Callable[[str], Decimal | None], completions: list[str], answers: list[str]
) -> np.ndarray:
    wanted = [find(answer) for answer in answers]
    if None in wanted:
        index = wanted.index(None)
        raise ValueError(
            f"the answer of sample {index} has no number: {shorten(repr(answers[index]))}"
        )
    return np.array([find(c) == w for c, w in zip(completions, wanted, strict=True)], np.float32)


def _final_number(text: str) -> Decimal | None:
    _, mark, tail = text.rpartition("####")
    if not mark:
        return _last_number(text)
    return next(iter(_numbers(tail)), None)


def _last_number(text: str) -> Decimal | None:
    return next(reversed(_numbers(text)), None)


def _numbers(text: str) -> list[Decimal]:
    matches = _NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-"))
    return [Decimal((m["sign"] or "") + m["digits"].replace(",", "")) for m in matches]
