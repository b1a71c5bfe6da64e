"""Numbers in free text: all of them, the final answer, the value of an expression.

Whatever the text, nothing here raises, and nothing is evaluated as code.
"""

import re
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import TypeVar

_T = TypeVar("_T")

# A sign counts only where it cannot be a subtraction ("12-5" holds 12 and 5), commas only as
# thousands separators, an exponent only of up to three digits (1e999 is a number, and cheap).
_PATTERN = (
    r"(?P<sign>(?<![\w)\]])[-+])?\$?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_NUMBER = re.compile(_PATTERN)
_MARKED = re.compile(r"####[ \t]*(?:\$(?=[-+]))?" + _PATTERN)

_EXPRESSION_AT_END = re.compile(r"[-+*/().,0-9 \t×÷]*\Z")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+|[-+*/()])")
_LONGEST_EXPRESSION = 200  # characters: its value has at most as many digits
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}


def numbers_in(text: str) -> Iterator[Decimal]:
    """The numbers of a text in order, as in `-$1,234.50`, `.5`, `18%` or `2e3`."""
    return map(_decimal, _NUMBER.finditer(_plain(text)))


def last_number(text: str) -> Decimal | None:
    """The last number of a text; None without one."""
    return _last(numbers_in(text))


def marked_number(text: str) -> Decimal | None:
    """The number right after the last `####` that a number follows at once; None without one."""
    match = _last(_MARKED.finditer(_plain(text)))
    return None if match is None else _decimal(match)


def final_number(text: str) -> Decimal | None:
    """The final answer: `marked_number`, else the one in the last `\\boxed{}`, else `last_number`.

    A box that holds no number, or several, is no answer: None.
    """
    marked = marked_number(text)
    if marked is not None:
        return marked
    box = last_box(text)
    if box is None:
        return last_number(text)
    numbers = list(numbers_in(box))
    return numbers[0] if len(numbers) == 1 else None


def last_box(text: str) -> str | None:
    """The contents of the last `\\boxed{}` that is closed; None without one."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for position in range(start + len("\\boxed"), end):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : position]
        end = start  # it is not closed, unless by what belongs to a later one
    return None


def final_value(text: str) -> Fraction | Decimal | None:
    """The value of the expression that a text ends with, such as 42 for `It is 2 * 21.`

    Looked at is the last `\\boxed{}`, else the last line with text, and there what follows the last
    `=` or `#`. If it does not end with an expression, the value is `final_number`.
    """
    box = last_box(text)
    line = (text.strip() if box is None else box).rpartition("\n")[2]
    line = _plain(re.split("[=#]", line)[-1]).strip(" \t.$*`")
    match = _EXPRESSION_AT_END.search(line[-_LONGEST_EXPRESSION - 1 :])
    value = expression_value(match[0]) if match else None
    return final_number(text) if value is None else value


def expression_value(text: str) -> Fraction | None:
    """The exact value of an expression of numbers, + - * / and parentheses.

    Signs may be those of print (× ÷ −), numbers may have thousands separators. None for anything
    else, for a division by zero, and for more than 200 characters.
    """
    if len(text) > _LONGEST_EXPRESSION:
        return None
    text = _THOUSANDS.sub("", _plain(text)).replace("×", "*").replace("÷", "/").strip()
    values: list[Fraction] = []
    operators: list[str] = []
    position, after_value = 0, False
    try:
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                return None
            position, token = match.end(), match[1]
            if token[0] in "0123456789." or token == "(":
                if after_value:
                    return None
                if token == "(":
                    operators.append(token)
                else:
                    values.append(Fraction(token))
                    after_value = True
            elif token == ")":
                if not after_value:
                    return None
                while operators[-1] != "(":
                    _apply(values, operators.pop())
                operators.pop()
            elif after_value:
                while operators and _PRECEDENCE.get(operators[-1], 0) >= _PRECEDENCE[token]:
                    _apply(values, operators.pop())
                operators.append(token)
                after_value = False
            elif token == "-":
                operators.append("negate")
            elif token != "+":
                return None
        while after_value and operators:
            _apply(values, operators.pop())
    except (IndexError, KeyError, ZeroDivisionError):  # parentheses that do not match; x / 0
        return None
    return values[0] if after_value else None


def _last(items: Iterator[_T]) -> _T | None:
    return next(iter(deque(items, maxlen=1)), None)


def _apply(values: list[Fraction], operator: str) -> None:
    right = values.pop()
    if operator == "negate":
        values.append(-right)
        return
    left = values.pop()
    results = {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}
    values.append(results[operator](right))


def _plain(text: str) -> str:
    """The text with ASCII minus signs and without the marks that LaTeX puts into a number."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    return text.replace("\\$", "$").replace("\\!", "").replace("\\,", "").replace("\\%", "%")


def _decimal(match: re.Match[str]) -> Decimal:
    digits = match["digits"].replace(",", "")
    return Decimal((match["sign"] or "") + digits + (match["exponent"] or ""))
