"""Tasks: right answers, determinism, and no problem in both splits."""

import pytest

from nereus_jax.core.errors import ConfigError
from nereus_jax.data.tasks import (
    SPLITS,
    TASKS,
    addition,
    check_task,
    reverse_digits,
    sort_digits,
    two_steps,
)
from nereus_jax.rl.numbers_in_text import expression_value, numbers_in


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("min_digits", [0, 1])
def test_answers_follow_from_the_prompt(split, min_digits):
    for index in range(50):
        options = {"split": split, "digits": 5, "min_digits": min_digits}
        text = (p := reverse_digits(index, 1, **options)).prompt.removesuffix("=")
        assert p.answer[::-1] == text
        assert (min_digits or 5) <= len(text) <= 5
        text = (p := sort_digits(index, 1, **options)).prompt.removesuffix("=")
        assert p.answer == "".join(sorted(text))
        a, b = (p := addition(index, 1, **options)).prompt.removesuffix("=").split("+")
        assert int(p.answer) == int(a) + int(b)
        assert p.metadata["operands"] == [a, b]
        assert all(len(x) == len(str(int(x))) and (min_digits or 5) <= len(x) <= 5 for x in (a, b))


@pytest.mark.parametrize("split", SPLITS)
def test_two_steps_never_go_below_zero_and_their_story_has_the_same_steps(split):
    gains = ("buys", "finds", "gets", "wins")
    for index in range(200):
        options = {"split": split, "digits": 2, "min_digits": 1}
        plain, story = (two_steps(index, 3, style=s, **options) for s in ("plain", "sentence"))
        equation = plain.prompt.removesuffix("=")
        assert expression_value(equation) == int(plain.answer) >= 0
        first = equation[: max(equation.rfind("+"), equation.rfind("-"))]
        assert (expression_value(first) or 0) >= 0
        assert [*map(int, plain.metadata["operands"])] == [*map(int, numbers_in(story.prompt))]
        steps = story.prompt.split(". ")[1:3]
        told = ["+" if any(f" {word} " in step for word in gains) else "-" for step in steps]
        assert "".join(told) == equation.translate({ord(d): None for d in "0123456789"})
        assert story.answer == plain.answer
        assert story.metadata == plain.metadata == {**plain.metadata, "equation": equation}


def test_sentences_ask_the_same_problem():
    for name, words in {
        "addition": "What is {} + {}?",
        "reverse_digits": "Reverse the digits of {}.",
        "sort_digits": "Sort the digits of {} from smallest to largest.",
    }.items():
        plain, sentence = (TASKS[name](3, 0, style=s) for s in ("plain", "sentence"))
        assert sentence.prompt == words.format(*plain.metadata["operands"])
        assert sentence.answer == plain.answer


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_problem_depends_on_seed_index_and_split_only(name):
    make = TASKS[name]
    problems = [make(i, 7, digits=9) for i in range(20)]
    assert problems == [make(i, 7, digits=9) for i in range(20)]
    assert len({p.prompt for p in problems}) == 20
    assert problems != [make(i, 8, digits=9) for i in range(20)]


def test_problems_never_change_between_releases():
    assert addition(0, 0).prompt == "94+33="
    assert reverse_digits(0, 0, digits=3, split="eval").prompt == "825="
    assert two_steps(2, 0).prompt == "94+63-95="
    assert two_steps(2, 0, style="sentence").prompt == (
        "Leo has 94 apples. He finds 63 more. Then he puts 95 in a box for the school. "
        "How many apples does he have now?"
    )


@pytest.mark.parametrize("name", sorted(TASKS))
@pytest.mark.parametrize("digits", [1, 2, 3])
def test_the_splits_share_no_problem(name, digits):
    train, evaluation = (
        {
            tuple(sorted(TASKS[name](i, seed, split=s, digits=digits).metadata["operands"]))
            for i in range(200)
            for seed in (0, 1)
        }
        for s in SPLITS
    )
    assert train and evaluation
    assert not train & evaluation


def test_an_eval_split_is_a_tenth():
    prompts = {
        s: {reverse_digits(i, 0, digits=2, split=s).prompt for i in range(2000)} for s in SPLITS
    }
    assert len(prompts["train"]) + len(prompts["eval"]) == 100
    assert 4 <= len(prompts["eval"]) <= 16


def test_a_split_without_problems_is_reported(monkeypatch):
    monkeypatch.setattr("nereus_jax.data.tasks._split_of", lambda task, operands: "train")
    monkeypatch.setattr("nereus_jax.data.tasks._MAX_DRAWS", 10)
    with pytest.raises(ConfigError, match=r"digits=1 has no eval problem.*take more digits"):
        reverse_digits(0, 0, split="eval", digits=1)


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"no task 'additon' \(did you mean 'addition'\?\)"):
        check_task("additon", {})
    with pytest.raises(ConfigError, match=r"no option 'digit' \(did you mean 'digits'\?\).*style"):
        check_task("addition", {"digit": 2})
    with pytest.raises(ConfigError, match="no option 'split'"):
        check_task("addition", {"split": "eval"})
    assert check_task("addition", {"digits": 2}) is addition


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digits": 0}, "digits must be an int from 1 to 18, got 0"),
        ({"digits": 19}, "digits must be an int from 1 to 18, got 19"),
        ({"digits": "3"}, "got '3'"),
        ({"digits": True}, "got True"),
        ({"digits": 2, "min_digits": 3}, "min_digits 3 is above digits 2"),
        ({"style": "verse"}, "style must be one of plain, sentence, got 'verse'"),
        ({"split": "test"}, "split must be one of train, eval, got 'test'"),
    ],
)
def test_options_out_of_range(options, message):
    for make in TASKS.values():
        with pytest.raises(ConfigError, match=message):
            make(0, 0, **options)


def test_the_largest_operands():
    for make in (addition, two_steps):
        assert {len(n) for n in make(0, 0, digits=18).metadata["operands"]} == {18}
