"""What the dataclasses of the schema say about their fields, read from the annotations."""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from nereus_jax.config.constraints import Range


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldType:
    """The type of one field.

    Attributes:
      base: bool, int, float, str, tuple, Mapping or the dataclass of a section.
      choices: the allowed strings, or () for any.
      allowed: the allowed numbers, or None for any.
      required: whether the field has no default.
    """

    base: type
    choices: tuple[str, ...] = ()
    allowed: Range | None = None
    required: bool = False

    @property
    def is_section(self) -> bool:
        """Whether the field holds keys of its own that the schema knows."""
        return dataclasses.is_dataclass(self.base)

    @property
    def is_free(self) -> bool:
        """Whether the field holds keys that the schema does not know."""
        return self.base is Mapping

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            return f"one of {listing(self.choices)}"
        if self.is_section or self.is_free:
            return "a section (a ConfigDict)"
        words = {int: "an int", float: "a float", bool: "a bool", str: "a string"}
        word = words.get(self.base, "a tuple of strings")
        return word if self.allowed is None else f"{word} {self.allowed}"


def listing(names: typing.Iterable[str]) -> str:
    """Names, quoted and separated by commas."""
    return ", ".join(repr(name) for name in names)


def shown(value: object, limit: int = 80) -> str:
    """A value and its type on one line, cut to about `limit` characters."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return f"{text} ({type(value).__name__})"


def _field_type(hint: Any, required: bool) -> FieldType:
    allowed = None
    if get_origin(hint) is Annotated:
        hint, allowed = get_args(hint)[0], get_args(hint)[1]
    origin = get_origin(hint)
    if origin is Literal:
        return FieldType(base=str, choices=get_args(hint), required=required)
    base = origin if origin is not None else hint
    assert isinstance(base, type), hint
    return FieldType(base=base, allowed=allowed, required=required)


@functools.cache
def field_types(section: type) -> Mapping[str, FieldType]:
    """Field name -> its type, in the order of the dataclass `section`."""
    hints = typing.get_type_hints(section, include_extras=True)
    return types.MappingProxyType(
        {
            field.name: _field_type(
                hints[field.name],
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING,
            )
            for field in dataclasses.fields(section)
        }
    )


def default_of(section: type, name: str) -> Any:
    """The default of a field that is not required."""
    (field,) = (f for f in dataclasses.fields(section) if f.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def walk(section: type, prefix: str = "") -> Iterator[tuple[str, FieldType]]:
    """Yields (dotted key, type) of every key below `section` that is not a section itself."""
    for name, kind in field_types(section).items():
        if kind.is_section:
            yield from walk(kind.base, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def unknown_key(root: type, section: type, prefix: str, name: str) -> str:
    """The message for a key that `section` (at the dotted `prefix`, '' or 'model.') does not have.

    It names the nearest key of the section, or else the keys of other sections with that last name.
    """
    known = list(field_types(section))
    close = difflib.get_close_matches(name, known, 1)
    found = [prefix + close[0]] if close else []
    if not found:
        last = {key: key.rpartition(".")[2] for key, _ in walk(root)}
        near = difflib.get_close_matches(name, sorted(set(last.values())), 1, 0.8)
        found = [key for key, tail in last.items() if near and tail == near[0]]
    hint = f"; did you mean {' or '.join(map(repr, found[:3]))}?" if found else "."
    place = f"of {prefix.rstrip('.')!r}" if prefix else "at the top"
    return f"unknown key {prefix + name!r}{hint} Known keys {place}: {', '.join(known)}"
