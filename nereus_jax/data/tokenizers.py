"""Text to token ids and back: one token a character for toy tasks, or a Hugging Face tokenizer.

The packages `tokenizers` and `jinja2` (extra `hf`) are imported only when a Hugging Face tokenizer
is built.
"""

import datetime
import importlib.util
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from nereus_jax.config import RunConfig
from nereus_jax.core.errors import ConfigError, DataError

Message = Mapping[str, str]

_INSTALL = "install it with: pip install 'nereus_jax[hf]'"
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer(Protocol):
    """What prompts, generation and reports need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def pad_id(self) -> int:
        """Id that fills the tail of a row; it may equal an end id, lengths say what counts."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a response; never empty."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
          text: what to encode.
          add_special_tokens: also add what the tokenizer puts around a whole text (a start
            token, if it has one). False for a rendered chat, which has its own, and for the text
            of a response.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens."""
        ...

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Text of a chat up to the assistant's answer; messages have role and content."""
        ...


def is_installed() -> bool:
    """Whether the packages that read Hugging Face tokenizers are there."""
    return all(importlib.util.find_spec(name) for name in ("tokenizers", "jinja2"))


def make_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of a run."""
    if config.tokenizer.kind == "huggingface":
        where = pathlib.Path(config.tokenizer.path or config.model.path).expanduser()
        return HuggingFaceTokenizer(where)
    return CharacterTokenizer(config.tokenizer.characters or "0123456789+-*/= ?.")


class CharacterTokenizer:
    """One token a character: 0 is padding, 1 begins, 2 ends, then `characters` in order.

    Args:
      characters: the alphabet, each character once.

    Raises:
      ConfigError: `characters` is empty or repeats a character.
    """

    pad_id = 0
    bos_id = 1
    eos_ids = (2,)

    def __init__(self, characters: str) -> None:
        if not characters:
            raise ConfigError(
                "tokenizer.characters is empty; list the characters, such as '0123456789+='"
            )
        repeated = sorted({c for c in characters if characters.count(c) > 1})
        if repeated:
            raise ConfigError(f"tokenizer.characters repeats {repeated}; list each character once")
        first = self.eos_ids[-1] + 1
        self._id_of = {c: first + i for i, c in enumerate(characters)}
        self._character_of = {i: c for c, i in self._id_of.items()}
        self.vocab_size = first + len(characters)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of the characters; nothing is ever added.

        Raises:
          DataError: a character is not in the alphabet.
        """
        del add_special_tokens
        try:
            return [self._id_of[c] for c in text]
        except KeyError as error:
            allowed = "".join(self._id_of)
            raise DataError(
                f"character {error.args[0]!r} of {_shorten(text)!r} is not in the tokenizer's "
                f"characters {allowed!r}; add it to tokenizer.characters"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Characters of `ids`; special and unused ids are skipped."""
        return "".join(self._character_of.get(int(i), "") for i in ids)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """A character tokenizer has no chat template.

        Raises:
          ConfigError: always.
        """
        raise ConfigError(
            f"the character tokenizer has no chat template for {len(messages)} message(s); set "
            "data.chat_template = False or use a Hugging Face tokenizer"
        )


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face directory, with its chat template.

    Read are tokenizer.json (required), tokenizer_config.json, special_tokens_map.json,
    chat_template.jinja, generation_config.json and config.json. The end ids are those of
    generation_config.json, else of config.json, else the tokenizer's eos_token, as in transformers'
    `generate`. The padding id is the tokenizer's pad_token, else that of the model's files, else
    the first end id.

    Args:
      directory: where the files lie.

    Raises:
      ConfigError: `tokenizers` or `jinja2` is not installed.
      DataError: a file is missing or malformed, an id is outside the vocabulary, or nothing says
        which token ends a text.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self._directory = pathlib.Path(directory)
        self._tokenizer = _load_tokenizer(self._directory / "tokenizer.json")
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        settings = _read_json(self._directory / "tokenizer_config.json")
        fallback = _read_json(self._directory / "special_tokens_map.json")
        self._specials = _special_tokens({**fallback, **settings})
        model_files = [
            (name, _read_json(self._directory / name))
            for name in ("generation_config.json", "config.json")
        ]
        self.eos_ids = self._find_eos_ids(model_files)
        self.pad_id = self._find_pad_id(model_files)
        self._template = _find_template(self._directory, settings)
        self._render = None if self._template is None else self._compile(self._template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in `text` become their ids."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens and ids beyond the vocabulary are skipped."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Text of a chat, with the marks that ask for the assistant's answer.

        A template that prints today's date makes prompts that differ from day to day.

        Raises:
          ConfigError: the directory has no chat template.
          DataError: the template refuses the messages or fails.
        """
        if self._render is None:
            raise ConfigError(
                f"{self._directory} has no chat template (neither chat_template.jinja nor "
                "chat_template in tokenizer_config.json); set data.chat_template = False"
            )
        return self._render([dict(m) for m in messages])

    def _find_eos_ids(
        self, model_files: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> tuple[int, ...]:
        for name, content in model_files:
            value = content.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if ids:
                return tuple(self._checked_id(i, "eos_token_id", name) for i in ids)
        if "eos_token" in self._specials:
            return (self._special_id("eos_token"),)
        raise DataError(
            f"{self._directory}: nothing says which token ends a text; add eos_token_id to "
            "generation_config.json or eos_token to tokenizer_config.json"
        )

    def _find_pad_id(self, model_files: Sequence[tuple[str, Mapping[str, Any]]]) -> int:
        if "pad_token" in self._specials:
            return self._special_id("pad_token")
        for name, content in model_files:
            value = content.get("pad_token_id")
            if value is not None and value != -1:  # -1: Llama's way of saying that there is none
                return self._checked_id(value, "pad_token_id", name)
        return self.eos_ids[0]

    def _special_id(self, name: str) -> int:
        token = self._specials[name]
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise DataError(
                f"{self._directory / 'tokenizer_config.json'}: {name} {token!r} is not a token of "
                "tokenizer.json; the two files do not belong together"
            )
        return number

    def _checked_id(self, value: object, field: str, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise DataError(f"{self._directory / name}: {field} must be an id, got {value!r}")
        if not 0 <= value < self.vocab_size:
            raise DataError(
                f"{self._directory / name}: {field} {value} is not in [0, {self.vocab_size}), the "
                "ids of tokenizer.json; the two files do not belong together"
            )
        return value

    def _compile(self, template: str) -> Callable[[list[dict[str, str]]], str]:
        return _compile_template(template, self._specials, self._directory)


def _shorten(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _load_tokenizer(path: pathlib.Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            f"a Hugging Face tokenizer needs the package tokenizers; {_INSTALL}"
        ) from None
    library: Any = tokenizers  # its type stubs do not name every method
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; tokenizer.path must be a directory with a tokenizer.json"
        )
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception for every malformed file
        raise DataError(f"{path} is not a tokenizer: {_one_line(error)}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in an optional JSON file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the named special tokens; a token is a text or an object with `content`."""
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _find_template(directory: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template; of several named ones the one called default."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise DataError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be text, "
            f"got {type(template).__name__}"
        )
    return template


def _compile_template(
    source: str, specials: Mapping[str, str], directory: pathlib.Path
) -> Callable[[list[dict[str, str]]], str]:
    """A function that renders messages as transformers' `apply_chat_template` does.

    The environment (sandbox, block trimming, loop controls, tojson without HTML escapes,
    raise_exception, strftime_now, the generation block) is that of
    transformers/utils/chat_template_utils.py.
    """
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError:
        raise ConfigError(f"a chat template needs the package jinja2; {_INSTALL}") from None

    class GenerationBlock(jinja2.ext.Extension):
        """{% generation %} only marks the assistant's text for training: it renders its body."""

        tags = {"generation"}  # noqa: RUF012 (the attribute that jinja2 reads)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(f"{directory}: malformed chat template: {_one_line(error)}") from error

    def render(messages: list[dict[str, str]]) -> str:
        try:
            return template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **specials,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            roles = [m.get("role") for m in messages]
            raise DataError(
                f"{directory}: the chat template failed for messages of roles {roles}: "
                f"{_one_line(error)}; change data.system_prompt or set data.chat_template = False"
            ) from error

    return render
