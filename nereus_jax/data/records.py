"""What a record of a data file (a line of JSONL, a row of Parquet) must hold to be a problem."""

import dataclasses
import decimal
import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from nereus_jax.data.tasks import Problem


class RecordError(ValueError):
    """A record is not a problem; the reader of the file adds which one it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordSchema:
    """Which fields of a record are the prompt and the answer.

    A field is named by its key, or by the keys on the way to it through nested objects:
    `reward_model.ground_truth`. Other fields are only metadata.

    Attributes:
      prompt_field: of the prompt. It is text; or a list of messages, objects with the texts `role`
        and `content` (their other keys are ignored), of which the last is not the assistant's.
        Several fields of text are joined by a space: `Body+Question`.
      answer_field: of the answer. Text stays as it is, a number becomes its shortest text
        (145.0 -> `145`), a list or an object its JSON. Empty: there are no answers.
    """

    prompt_field: str = "prompt"
    answer_field: str = "answer"

    @property
    def fields(self) -> tuple[tuple[str, str], ...]:
        """(setting, field) of every field that is read."""
        prompts = tuple(("prompt_field", f) for f in self._prompt_fields)
        return prompts + ((("answer_field", self.answer_field),) if self.answer_field else ())

    @property
    def _prompt_fields(self) -> tuple[str, ...]:
        return tuple(f.strip() for f in self.prompt_field.split("+"))

    def problem(self, record: Mapping[str, Any]) -> Problem:
        """The problem that a record states; its metadata is the whole record.

        Raises:
          RecordError: a field is missing, null or of a wrong type.
        """
        prompts = [_look_up(record, f, "prompt_field") for f in self._prompt_fields]
        messages: tuple[dict[str, str], ...] = ()
        if len(prompts) == 1 and _are_objects(prompts[0]):
            messages = self._messages(prompts[0])
            prompts = [messages[-1]["content"]]
        for field, value in zip(self._prompt_fields, prompts, strict=True):
            if not isinstance(value, str):
                wanted = "text" if len(prompts) > 1 else "text or a list of messages"
                raise RecordError(f"field {field!r} must be {wanted}, got {clip(value)}")
        answer = ""
        if self.answer_field:
            answer = self._answer(_look_up(record, self.answer_field, "answer_field"))
        return Problem(prompt=" ".join(prompts), answer=answer, metadata=record, messages=messages)

    def _messages(self, value: list[Mapping[str, Any]]) -> tuple[dict[str, str], ...]:
        where = f"field {self.prompt_field.strip()!r}"
        messages: list[dict[str, str]] = []
        for index, message in enumerate(value):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise RecordError(
                        f"{where}: message {index} needs the text {key!r}, got {clip(message)}"
                    )
            messages.append({"role": message["role"], "content": message["content"]})
        if messages[-1]["role"] == "assistant":
            raise RecordError(
                f"{where}: the last message is the assistant's, {clip(messages[-1]['content'])}; "
                "end with what is to be answered"
            )
        return tuple(messages)

    def _answer(self, value: object) -> str:
        text = answer_text(value)
        if text is None:
            raise RecordError(
                f"field {self.answer_field!r} must be text, a number, a list or an object, got "
                f"{clip(value)}"
            )
        return text


def answer_text(value: object) -> str | None:
    """An answer as text; None for what has no such form (a date, bytes)."""
    if isinstance(value, str):
        return value
    if isinstance(value, decimal.Decimal) and value.is_finite():
        return str(int(value)) if value == value.to_integral_value() else f"{value.normalize():f}"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return None


def missing_field(field: str, known: Iterable[str], setting: str, noun: str = "field") -> NoReturn:
    """Raises the error of a record that has the fields `known`, but not the one of a setting.

    Raises:
      RecordError: always.
    """
    known = [str(k) for k in known]
    by_case = [k for k in known if k.lower() == field.lower()]
    close = by_case or difflib.get_close_matches(field, known, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise RecordError(
        f"no {noun} {field!r}{hint}; its {noun}s: {', '.join(known) or 'none'}; set data.{setting}"
    )


def clip(value: object, limit: int = 60) -> str:
    """A value on one short line."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _look_up(record: Mapping[str, Any], field: str, setting: str) -> Any:
    value = record.get(field)
    if value is not None:
        return value
    if field in record:
        raise RecordError(f"field {field!r} is null")
    head, dot, rest = field.partition(".")
    inner = record.get(head) if dot else None
    if isinstance(inner, Mapping):
        try:
            return _look_up(inner, rest, setting)
        except RecordError as error:
            raise RecordError(f"in {head!r}: {error}") from None
    if dot and head in record:
        raise RecordError(
            f"field {head!r} must be an object with the field {rest!r}, got {clip(inner)}"
        )
    missing_field(field, record, setting)


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) for m in value)
