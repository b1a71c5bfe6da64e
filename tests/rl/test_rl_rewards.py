"""Rewards: loading by name, calling with every way to fail, and the verifiable built-ins."""

import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.errors import ConfigError, RewardError
from nereus_jax.rl import rewards
from nereus_jax.rl.rewards import call_reward, load_function

MODULE = "nereus_test_reward"
SOURCE = """
import json
NOT_A_FUNCTION = 3
def word_count(prompts, completions, answers, metadata):
    return [len(c.split()) for c in completions]
def in_library(prompts, completions, answers, metadata):
    return [json.loads(c) for c in completions]
def in_eval(prompts, completions, answers, metadata):
    return [eval(c) for c in completions]
class Judge:
    def strict(prompts, completions, answers, metadata):
        return [0.0] * len(completions)
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    (tmp_path / f"{MODULE}_needs.py").write_text("import nereus_no_such_library\n")
    (tmp_path / f"{MODULE}_syntax.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / f"{MODULE}_raises.py").write_text("\n\nraise OSError('no\\nkey')\n")
    package = tmp_path / f"{MODULE}_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "scoring.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(MODULE)]:
        del sys.modules[name]


def call(function, completions=("a b", "c"), answers=None) -> np.ndarray:
    completions = list(completions)
    answers = ["1"] * len(completions) if answers is None else list(answers)
    return call_reward(
        function, [""] * len(completions), completions, answers, [{} for _ in completions]
    )


def returning(value):
    return lambda prompts, completions, answers, metadata: value


def message_of(error: type[Exception], action) -> str:
    with pytest.raises(error) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    "name",
    [f"{MODULE}.word_count", f"{MODULE}:word_count", f"{MODULE}_package.scoring.word_count"],
)
def test_load_function(user_folder: Path, name: str):
    assert call(load_function(name)).tolist() == [2.0, 1.0]


def test_load_a_nested_or_built_in_function(user_folder: Path):
    assert call(load_function(f"{MODULE}:Judge.strict")).tolist() == [0.0, 0.0]
    assert load_function("nereus_jax.rl.rewards.exact_match") is rewards.exact_match


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("", ["not of the form package.module.function"]),
        ("exact_match", ["nereus_jax.rl.rewards.exact_match"]),
        ("my-module.f", ["not of the form"]),
        (".word_count", ["not of the form"]),
        (f"{MODULE}.word_cuont", ["has no 'word_cuont'", "did you mean 'word_count'?"]),
        (f"{MODULE}.zzzz", ["has no 'zzzz'"]),
        (f"{MODULE}:Judge.strikt", ["did you mean 'strict'?"]),
        (f"{MODULE}.NOT_A_FUNCTION", ["is a int, not a function"]),
        (
            "nereus_test_rewrad.f",
            ["no module 'nereus_test_rewrad'", f"mean '{MODULE}'?", "PYTHONPATH"],
        ),
        (f"{MODULE}_package.scorring.f", ["no module", "did you mean 'scoring'?"]),
        ("json.decoder.deeper.f", ["no module 'json.decoder.deeper'"]),
        (f"{MODULE}_needs.f", ["imports 'nereus_no_such_library'", f"{MODULE}_needs.py:1"]),
        (f"{MODULE}_syntax.f", ["SyntaxError", f"{MODULE}_syntax.py:2"]),
        (f"{MODULE}_raises.f", ["OSError: no key", f"{MODULE}_raises.py:3"]),
    ],
)
def test_names_that_cannot_be_loaded(user_folder: Path, name: str, parts: list[str]):
    message = message_of(ConfigError, lambda: load_function(name))
    for part in [f"reward.function {name!r}", *parts]:
        assert part in message, message


# ------------------------------------------------------------------------------------- calling


@pytest.mark.parametrize(
    "value",
    [
        [0.7, 1],
        (0.7, 1.0),
        np.array([0.7, 1.0]),
        jnp.array([0.7, 1.0]),
        [jnp.float32(0.7), 1.0],
        [Decimal("0.7"), Fraction(1)],
    ],
)
def test_numbers_of_any_kind_become_float32_and_never_int(value):
    got = call(returning(value))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array([0.7, 1.0], np.float32))


def test_booleans_integers_bfloat16_and_no_samples():
    assert call(returning([True, False])).tolist() == [1.0, 0.0]
    assert call(returning(np.array([2, -3], np.int8))).tolist() == [2.0, -3.0]
    assert call(returning(jnp.array([0.5, 2.0], jnp.bfloat16))).tolist() == [0.5, 2.0]
    assert call(returning([]), completions=()).shape == (0,)


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (None, ["returned None"]),
        (1.0, ["float of shape ()", "shape (2,)"]),
        ([1.0], ["list of shape (1,) for 2 samples"]),
        (np.zeros((2, 1)), ["ndarray of shape (2, 1)"]),
        ([1.0, [2.0]], ["unequal shapes"]),
        ({"a": 1.0}, ["dict of shape ()"]),
        (["1", 2.0], ["returned '1', not a number, for sample 0 'a b'"]),
        ([1.0, None], ["returned None, not a number, for sample 1 'c'"]),
        ([1.0, 2j], ["returned 2j, not a number, for sample 1"]),
        ([1.0, float("nan")], ["returned nan, not a finite float32, for sample 1 'c'"]),
        ([float("-inf"), 1.0], ["returned -inf", "sample 0"]),
        ([1.0, 1e300], ["returned 1e+300, not a finite float32, for sample 1"]),
        ([1.0, 10**400], ["not a finite float32, for sample 1"]),
    ],
)
def test_results_that_are_not_one_finite_number_per_sample(value, parts: list[str]):
    message = message_of(RewardError, lambda: call(returning(value)))
    for part in ["reward function ", "returning.<locals>.<lambda>", *parts]:
        assert part in message, message


def test_a_long_completion_is_shortened_and_kept_on_one_line():
    completions = ["first line\n" + "x" * 10_000, "c"]
    message = message_of(RewardError, lambda: call(returning([np.nan, 0.0]), completions))
    assert "first line\\nxxx" in message
    assert len(message) < 300


def test_an_exception_names_the_line_of_the_user(user_folder: Path):
    # The error is raised inside json, but the user's mistake is on line 7 of the file.
    function = load_function(f"{MODULE}.in_library")
    message = message_of(RewardError, lambda: call(function, ["[}"]))
    assert f"{MODULE}.in_library raised JSONDecodeError: Expecting value" in message
    assert message.endswith(f"{MODULE}.py:7")
    function = load_function(f"{MODULE}.in_eval")
    for completion in ("1 +", "undefined_name"):
        assert message_of(RewardError, lambda c=completion: call(function, [c])).endswith(
            f"{MODULE}.py:9"
        )


def test_an_exception_without_a_line_of_its_own():
    message = message_of(RewardError, lambda: call(lambda completions: [0.0]))
    assert "TypeError" in message
    assert "is it a function of prompts, completions, answers, metadata?" in message


def test_a_long_message_of_many_lines_becomes_one_short_line():
    def function(prompts, completions, answers, metadata):
        raise RuntimeError("boom\n" * 1000)

    message = message_of(RewardError, lambda: call(function))
    assert len(message) < 500
    with pytest.raises(RewardError) as caught:
        call(function)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_interrupt_passes_through():
    def function(prompts, completions, answers, metadata):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(function)


def test_the_function_cannot_change_the_lists_of_the_caller():
    def function(prompts, completions, answers, metadata):
        scores = [float(len(c)) for c in completions]
        completions.clear()
        return scores

    completions = ["ab", "c"]
    assert call_reward(function, ["", ""], completions, ["", ""], [{}, {}]).tolist() == [2, 1]
    assert completions == ["ab", "c"]


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="1 prompts, 2 completions"):
        call_reward(returning([0, 0]), [""], ["", ""], ["", ""], [{}, {}])


# ------------------------------------------------------------------------------------- built-ins


def test_exact_match():
    assert call(rewards.exact_match, [" 42\n", "42.", ""], ["42", "42", ""]).tolist() == [1, 0, 1]


def test_digit_match():
    # "1234": all; "1239": 3 of 4; "123": 3 of 4; "12345": 4 of 5; "": 0 of 4
    got = call(rewards.digit_match, ["1234", "1239", "123", "12345", ""], ["1234"] * 5)
    np.testing.assert_allclose(got, [1.0, 0.75, 0.75, 0.8, 0.0], rtol=1e-6)


@given(st.text("0123456789", max_size=8), st.text("0123456789", max_size=8))
def test_digit_match_is_1_only_for_the_answer(completion: str, answer: str):
    reward = call(rewards.digit_match, [completion], [answer])[0]
    assert 0 <= reward <= 1
    assert (reward == 1) == (completion == answer)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("12", "12", 1),
        ("7+5=12", "12", 1),
        ("12 is wrong, it is 13", "12", 0),
        ("12-5", "5", 1),
        ("x = -5", "-5", 1),
        ("(-5)", "-5", 1),
        ("\N{MINUS SIGN}5", "-5", 1),
        ("-5", "5", 0),
        ("3.5", "5", 0),
        ("1,234", "1234", 1),
        ("1, 2, 34", "34", 1),
        ("012", "12", 1),
        ("12.", "12", 1),
        ("twelve", "12", 0),
        ("", "12", 0),
        ("9" * 5000, "9" * 5000, 1),
    ],
)
def test_arithmetic_answer(completion: str, answer: str, reward: int):
    assert call(rewards.arithmetic_answer, [completion], [answer]).tolist() == [reward]


@given(st.integers(), st.integers())
def test_arithmetic_answer_reads_what_python_prints(a: int, b: int):
    assert call(rewards.arithmetic_answer, [f"{a} + {b} = {a + b}"], [str(a + b)])[0] == 1


# (completion, answer, gsm8k, gsm8k_strict)
GSM8K = [
    ("She has 3 + 4 = 7.\n#### 7", "She buys 4.\n#### 7", 1, 1),
    ("#### 7\nand 9 more words", "7", 1, 1),
    ("#### 6\n#### 7", "7", 1, 1),
    ("#### 7\n#### 6", "7", 0, 0),
    ("####\n", "7", 0, 0),
    ("####7", "7", 1, 1),
    ("the answer is 7", "long solution with 3\n#### 7", 1, 0),
    ("#### Step 1: 3 + 4 = 7", "7", 1, 0),
    ("#### The answer is 7", "7", 1, 0),
    ("\\boxed{7}, found in 2 steps", "7", 1, 0),
    ("$\\boxed{\\$1{,}234}$", "1234", 1, 0),
    ("\\boxed{\\frac{1}{2}}", "2", 0, 0),
    ("\\boxed{x} = 7", "7", 0, 0),
    ("\\boxed{8} #### 7", "7", 1, 1),
    ("#### $1,234.50", "1234.5", 1, 1),
    ("#### -$3", "-3", 1, 1),
    ("#### $-3", "-3", 1, 1),
    ("#### +18.00", "18", 1, 1),
    ("#### 42.", "42.0", 1, 1),
    ("#### 18%", "18", 1, 1),
    ("#### .5", "0.5", 1, 1),
    ("#### 1,2345", "12345", 0, 0),
    ("70000", "#### 70,000", 1, 0),
    ("#### 42", "-42", 0, 0),
    ("no idea", "#### 7", 0, 0),
    ("", "0", 0, 0),
    ("#### 1e999", "1", 0, 0),
    ("#### \N{ARABIC-INDIC DIGIT SEVEN}", "7", 0, 0),
]


@pytest.mark.parametrize(("completion", "answer", "flexible", "strict"), GSM8K)
def test_gsm8k(completion: str, answer: str, flexible: int, strict: int):
    assert call(rewards.gsm8k, [completion], [answer]).tolist() == [flexible]
    assert call(rewards.gsm8k_strict, [completion], [answer]).tolist() == [strict]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("2 * (30 - 9)", "42", 1),
        ("It is 2 * 21.", "42", 1),
        ("2 * 21 = 42", "42", 1),
        ("2 * 21 = 43", "42", 0),
        ("x = 3\ny = 3/4", "0.75", 1),
        ("#### 3/4", "0.75", 1),
        ("\\boxed{1/3}", "2/6", 1),
        ("0.1 + 0.2", "0.3", 1),
        ("145", "( 290.0 / 2.0 )", 1),
        ("42 apples", "42", 1),
        ("1/0", "0", 1),  # no value: its last number counts
        ("1/0", "1", 0),
        ("no idea", "1", 0),
        ("9" * 5000, "9" * 5000, 1),
    ],
)
def test_arithmetic_expression(completion: str, answer: str, reward: int):
    assert call(rewards.arithmetic_expression, [completion], [answer]).tolist() == [reward]


@pytest.mark.parametrize(
    "function",
    [
        rewards.arithmetic_answer,
        rewards.arithmetic_expression,
        rewards.gsm8k,
        rewards.gsm8k_strict,
    ],
)
def test_an_answer_without_a_number_is_an_error_not_a_0(function):
    message = message_of(RewardError, lambda: call(function, ["1", "2"], ["1", "two"]))
    assert "the answer of sample 1 has no number: 'two'" in message


def test_rewards_and_balance_load_no_jax():
    code = (
        "import sys, nereus_jax.rl.rewards, nereus_jax.rl.balance, nereus_jax.rl.rollout;"
        "sys.exit('jax' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}
        ).returncode
        == 0
    )
