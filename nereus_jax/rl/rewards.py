"""Verifiable rewards: built-in reward functions that compare a completion with its answer.

All have the signature that `call_reward` calls: `(prompts, completions, answers, metadata)`, four
lists of B, -> float32 [B]. Shapes: B samples.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nereus_jax.rl import numbers_in_text
from nereus_jax.rl.reward_function import RewardFunction, call_reward, load_function, shorten

__all__ = [
    "RewardFunction",
    "arithmetic_answer",
    "arithmetic_expression",
    "call_reward",
    "digit_match",
    "exact_match",
    "gsm8k",
    "gsm8k_strict",
    "load_function",
]


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
    return _compare(numbers_in_text.last_number, completions, answers)


def arithmetic_expression(
    prompts: list[str], completions: list[str], answers: list[str], metadata: list[dict[str, Any]]
) -> np.ndarray:
    """1.0 where the expression that the completion ends with has the value of the answer; else 0.0.

    `3/4`, `2 * (30 - 9) = 42` and `It is 1,000 + 1.` count as 3/4, 42 and 1001, exactly; numbers,
    + - * / and parentheses are understood, and nothing runs as code. The answer may be a number, an
    expression such as `( 290.0 / 2.0 )`, or a text that ends with one. A completion without an
    expression counts as in `gsm8k`. Where the prompt is an expression itself, a model is rewarded
    for repeating it: use `arithmetic_answer` there.

    Raises:
        ValueError: an answer without a value.
    """
    return _compare(numbers_in_text.final_value, completions, answers)


def gsm8k(
    prompts: list[str], completions: list[str], answers: list[str], metadata: list[dict[str, Any]]
) -> np.ndarray:
    """1.0 where the final numbers of completion and answer are equal; else 0.0. For GSM8K and its
    like.

    The final number follows the last "####"; without that mark it is the one number in the last
    `\\boxed{}`, and without either the last number of the text. Thousands separators, a dollar
    sign, leading signs and decimals are understood; 42.0 equals 42. The answer may be a whole
    worked solution or just the number.

    Raises:
        ValueError: an answer without a number.

    Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems" (2021), answer format.
    """
    return _compare(numbers_in_text.final_number, completions, answers)


def gsm8k_strict(
    prompts: list[str], completions: list[str], answers: list[str], metadata: list[dict[str, Any]]
) -> np.ndarray:
    """As `gsm8k`, but a completion without "####" right before its number gets 0.0: it also teaches
    the form.

    Raises:
        ValueError: an answer without a number.
    """
    final = numbers_in_text.final_number
    return _compare(numbers_in_text.marked_number, completions, answers, of_answer=final)


def _compare(
    find: Callable[[str], Any],
    completions: list[str],
    answers: list[str],
    of_answer: Callable[[str], Any] | None = None,
) -> np.ndarray:
    wanted = [(of_answer or find)(answer) for answer in answers]
    if None in wanted:
        index = wanted.index(None)
        raise ValueError(
            f"the answer of sample {index} has no number: {shorten(repr(answers[index]))}"
        )
    return np.array([find(c) == w for c, w in zip(completions, wanted, strict=True)], np.float32)
