"""Values out of rows of JSON that nobody vouches for: what is not of the type wanted is not there.

A page is made of whatever a run left, of this version or another, whole or not. A value that is
missing leaves a gap in the page; it never ends it. Rows come from `json`: objects are dicts.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

Row = Mapping[str, Any]


def as_row(value: Any) -> Row | None:
    """A value if it is an object."""
    return cast(Row, value) if isinstance(value, dict) else None


def _under(row: Row, path: tuple[str, ...]) -> Any:
    """What is under nested keys; None: nothing."""
    value: Any = row
    for key in path:
        own = as_row(value)
        if own is None:
            return None
        value = own.get(key)
    return value


def number(row: Row, *path: str) -> float | None:
    """The finite number under nested keys; None: there is none."""
    value = _under(row, path)
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:  # JSON's integers have no end
            return None
    return value if type(value) is float and math.isfinite(value) else None


def whole(row: Row, *path: str) -> int | None:
    """As `number`, as an integer."""
    value = number(row, *path)
    return None if value is None else int(value)


def text(row: Row, *path: str) -> str:
    """The text under nested keys; empty: there is none."""
    value = _under(row, path)
    return value if isinstance(value, str) else ""


def mapping(row: Row, *path: str) -> Row:
    """The object under nested keys; empty: there is none."""
    return as_row(_under(row, path)) or {}


def numbers(row: Row, *path: str) -> dict[str, float]:
    """The finite numbers of the object under nested keys."""
    found = mapping(row, *path)
    each = ((key, number(found, key)) for key in found)
    return {key: value for key, value in each if value is not None}


def objects(row: Row, *path: str) -> list[Row]:
    """The objects of the list under nested keys."""
    found = (as_row(value) for value in values(row, *path))
    return [value for value in found if value is not None]


def values(row: Row, *path: str) -> list[Any]:
    """The list under nested keys; empty: there is none."""
    value = _under(row, path)
    return cast(list[Any], value) if isinstance(value, list) else []


def latest_rows(rows: Iterable[Row]) -> list[Row]:
    """One row a step, in order; of several the last."""
    by_step = {whole(row, "step"): row for row in rows}
    return [by_step[step] for step in sorted(s for s in by_step if s is not None)]
