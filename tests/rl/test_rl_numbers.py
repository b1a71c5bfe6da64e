"""Numbers in text: read as a person reads them, and never an exception."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.rl.numbers_in_text import (
    expression_value,
    final_number,
    final_value,
    last_box,
    last_number,
    marked_number,
    numbers_in,
)

READERS = (
    expression_value,
    final_number,
    final_value,
    last_box,
    last_number,
    marked_number,
    lambda text: list(numbers_in(text)),
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("12-5 = 7, or -7", ["12", "5", "7", "-7"]),
        ("$1,234.50 and -$3 and $-3", ["1234.50", "-3", "-3"]),
        ("1,2345", ["1", "2345"]),
        ("1,234,567.", ["1234567"]),
        ("18% of .5", ["18", "0.5"]),
        ("2e3, 1.5E-2, 1e999", ["2000", "0.015", "1e999"]),
        ("1e9999", ["1", "9999"]),
        ("\N{MINUS SIGN}4", ["-4"]),
        ("1{,}234 and 1\\,234 and \\$5", ["1234", "1234", "5"]),
        ("٤٢ ４２ ²", []),
        ("", []),
    ],
)
def test_numbers_in(text: str, numbers: list[str]) -> None:
    assert list(numbers_in(text)) == [Decimal(n) for n in numbers]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", "42"),
        ("####42", "42"),
        ("so\n#### $1,000.", "1000"),
        ("#### $-7", "-7"),
        ("#### 1\n#### 2", "2"),
        ("#### 1\n#### Step 2", "1"),
        ("#### Step 2: 3 + 4 = 7", None),
        ("####\n42", None),
        ("42", None),
    ],
)
def test_marked_number(text: str, number: str | None) -> None:
    assert marked_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        ("\\boxed{4}", "4"),
        ("\\boxed{4} or \\boxed{5}.", "5"),
        ("\\boxed{\\frac{1}{2}} 9", "\\frac{1}{2}"),
        ("\\boxed{4} and \\boxed{5", "4"),
        ("\\boxed{a \\boxed{b}}", "b"),
        ("\\boxed 4", None),
    ],
)
def test_last_box(text: str, contents: str | None) -> None:
    assert last_box(text) == contents


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", "7"),
        ("( 290.0 / 2.0 )", "145"),
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("10 - 4 - 3", "3"),
        ("100 / 10 / 2", "5"),
        ("-2 * -3", "6"),
        ("2--3", "5"),
        ("-(2 + 3) * 4", "-20"),
        ("+5", "5"),
        ("1/3 + 1/6", "1/2"),
        ("0.1 + 0.2", "3/10"),
        ("2 × 3 ÷ 4 \N{MINUS SIGN} 1", "1/2"),
        ("1,000 + 1", "1001"),
        ("((((1))))", "1"),
    ],
)
def test_expression_value(text: str, value: str) -> None:
    assert expression_value(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x", "1 +", "* 2", "1 2", "(1", "1)", "()", "(1)(2)", "1 / 0", "1 / (2 - 2)"),
        *("2 ** 3", "1e5", "1..2", ".", "-", "__import__('os')", "1+" * 100 + "1", "٣ + 1", "1;2"),
    ],
)
def test_no_expression(text: str) -> None:
    assert expression_value(text) is None


def joined(sides: tuple[str, str]) -> str:
    left, right = sides
    return f"({left} {'+-*'[len(left) % 3]} {right})"


@given(st.recursive(st.integers(0, 99).map(str), lambda e: st.tuples(e, e).map(joined)))
def test_expressions_have_the_value_that_python_gives(text: str) -> None:
    # Only text made of digits, + - * and parentheses is evaluated here.
    wanted = eval(text) if len(text) <= 200 else None
    assert expression_value(text) == wanted


@given(
    st.integers(), st.sampled_from(["{}", "{}.", "{}.0", "{:,}", "$\\boxed{{{:,}}}$", "#### {}"])
)
def test_a_written_integer_is_read_back(number: int, form: str) -> None:
    assert final_number("It was 3. " + form.format(number)) == number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4))
def test_a_written_decimal_is_read_back(number: Decimal) -> None:
    assert last_number(f"x = {number:f}") == number
    assert last_number(f"x = {number:,f}%") == number


@given(st.text(st.sampled_from("0123456789.,-+eE$%#\\{}()*/= \nx٣") | st.characters()))
def test_no_text_raises(text: str) -> None:
    for read in READERS:
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        *("9" * 100_000, "1," * 50_000, "1,111" * 20_000, "," * 100_000, "-" * 100_000),
        *("1e999" * 20_000, "\\boxed{" * 15_000, "{" * 100_000, "(" * 100_000, "####" * 25_000),
        *(
            "#### " * 20_000,
            "####" + " " * 100_000,
            " " * 100_000 + "x",
            "1 " * 50_000 + "=",
            "\n" * 100_000,
        ),
    ],
    ids=lambda text: text[:8],
)
def test_long_texts_are_read_in_a_moment(text: str) -> None:
    start_s = time.perf_counter()
    for read in READERS:
        read(text)
    assert time.perf_counter() - start_s < 2.0
