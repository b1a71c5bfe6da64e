"""Export of a model to a Hugging Face directory, tensor by tensor from wherever its leaves are."""

import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from nereus_jax.core.architectures import LAYER_PREFIX, DecoderConfig, Head
from nereus_jax.core.emu_spec import LeafSpec
from nereus_jax.core.errors import ConfigError, DataError, StorageError
from nereus_jax.models import safetensors_file
from nereus_jax.models.gather import WRITER, read_slice
from nereus_jax.models.huggingface_config import config_json, read_json
from nereus_jax.models.huggingface_names import (
    NAMES,
    WEIGHTS,
    WEIGHTS_INDEX,
    Index,
    copy,
    stored,
)

LeafSource = jax.Array | np.ndarray | Callable[[Index], np.ndarray]
"""A whole leaf on the host, a global array on any sharding, or a function that returns a slice."""

EXPORT_DTYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
MAX_FILE_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PARTIAL = ".partial"
_OLD_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor to write: its name and shape in the file, and how to make it."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def export_model(
    directory: str | pathlib.Path,
    config: DecoderConfig,
    leaves: Mapping[str, LeafSource],
    dtype: str = "float32",
    *,
    head: Head = Head.LM,
    tokenizer_directory: str | pathlib.Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a directory that transformers and `TensorSource` load.

    At most a few copies of one tensor are on the host at a time. With several processes all call
    this with the same arguments; the first one writes, and where that fails all raise. Files appear
    under their names only when all weights are written; older weights in the directory are removed
    then.

    Args:
      directory: made if need be; files in it are replaced.
      config: sizes of the model.
      leaves: every leaf of `config.spec(head)`: a global array on any sharding, with its padding;
        an array without padding; or a function of an index that returns that slice (asked for one
        layer at a time).
      dtype: "float32", "bfloat16" or "float16"; the leaves are rounded to it.
      head: of the model.
      tokenizer_directory: where tokenizer files, generation_config.json and the ids of special
        tokens in config.json are copied from.
      max_file_bytes: of tensors in one file; a larger tensor has a file of its own.

    Raises:
      ConfigError: the dtype is none of these, or no architecture has such leaves.
      DataError: the config.json of the tokenizer's directory is malformed.
      StorageError: a file cannot be written.
      ValueError: a leaf is missing or has another shape.
    """
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(f"export dtype must be one of {', '.join(EXPORT_DTYPES)}, got {dtype!r}")
    specs = list(config.spec(head))
    missing = [spec.name for spec in specs if spec.name not in leaves]
    if missing:
        raise ValueError(f"cannot export without the leaves {', '.join(missing)}")
    for spec in specs:
        _check_shape(spec, leaves[spec.name])
    content = config_json(config, head, dtype)
    files = _split(_tensors(specs, leaves), dtype, max_file_bytes)
    pending = iter([tensor.make for tensors in files.values() for tensor in tensors])
    target = pathlib.Path(directory)
    failure: Exception | None = None
    if jax.process_index() == WRITER:
        try:
            target.mkdir(parents=True, exist_ok=True)
            if tokenizer_directory is not None:
                content |= _copy_tokenizer(pathlib.Path(tokenizer_directory), target)
            _write_weights(target, files, pending, dtype)
            text = json.dumps(content, indent=2) + "\n"
            (target / "config.json").write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            failure = error
    if jax.process_count() > 1:
        for make in pending:  # the other processes take part in putting every tensor together
            make()
    _raise_together(failure, target)


def _raise_together(failure: Exception | None, target: pathlib.Path) -> None:
    """Raises on every process if the writer failed."""
    failed = failure is not None
    if jax.process_count() > 1:
        failed = bool(multihost_utils.process_allgather(np.array(failed)).any())
    if isinstance(failure, OSError):
        raise StorageError(
            f"{target} cannot be written: {failure.strerror or failure}; free space or give "
            "another directory"
        ) from failure
    if failure is not None:
        raise failure
    if failed:
        raise StorageError(f"{target} was not written: process {WRITER} failed, see its error")


def _check_shape(spec: LeafSpec, source: LeafSource) -> None:
    """Whether a leaf has its logical shape; a global array may have padding at the ends."""
    if isinstance(source, jax.Array):
        held = len(source.shape) == len(spec.shape) and all(
            n >= m for n, m in zip(source.shape, spec.shape, strict=True)
        )
    else:
        held = callable(source) or source.shape == spec.shape
    if not held:
        shape = getattr(source, "shape", None)
        raise ValueError(f"{spec.name} must have shape {spec.shape}, got {shape}")


def _tensors(specs: list[LeafSpec], leaves: Mapping[str, LeafSource]) -> Iterator[_Tensor]:
    """All tensors in the order in which a forward pass needs them: layer by layer."""

    def of(spec: LeafSpec) -> list[_Tensor]:
        return [
            _Tensor(name=name, shape=shape, make=_maker(spec, leaves[spec.name], layer))
            for layer, (name, shape) in enumerate(stored(spec).items())
        ]

    stacked = [spec for spec in specs if spec.name.startswith(LAYER_PREFIX)]
    first = specs.index(stacked[0])
    for spec in specs[:first]:
        yield from of(spec)
    for layer in zip(*map(of, stacked), strict=True):
        yield from layer
    for spec in specs[first + len(stacked) :]:
        yield from of(spec)


def _maker(spec: LeafSpec, source: LeafSource, layer: int) -> Callable[[], np.ndarray]:
    """A function that makes the `layer`-th stored tensor of a leaf."""
    _, transposed = NAMES[spec.name]
    stacked = spec.name.startswith(LAYER_PREFIX)
    whole = tuple(slice(0, d) for d in spec.shape)
    index = (slice(layer, layer + 1), *whole[1:]) if stacked else whole

    def make() -> np.ndarray:
        if isinstance(source, jax.Array):
            part = read_slice(source, index)
        else:
            part = source(index) if callable(source) else source[index]
        part = part[0] if stacked else part
        return copy(part.T, np.empty(part.shape[::-1], part.dtype)) if transposed else part

    return make


def _split(tensors: Iterator[_Tensor], dtype: str, max_file_bytes: int) -> dict[str, list[_Tensor]]:
    """File name -> its tensors, in order, each file filled up to the limit."""
    if max_file_bytes < 1:
        raise ConfigError(f"max_file_bytes must be positive, got {max_file_bytes}")
    width = safetensors_file.DTYPES[EXPORT_DTYPES[dtype]].itemsize
    files: list[list[_Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        num_bytes = math.prod(tensor.shape) * width
        if files[-1] and filled + num_bytes > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += num_bytes
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {
        f"model-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, 1)
    }


def _write_weights(
    target: pathlib.Path,
    files: Mapping[str, list[_Tensor]],
    pending: Iterator[Callable[[], np.ndarray]],
    dtype: str,
) -> None:
    """Writes all weights under other names, and then gives them their own.

    The leaves may be read from the very files that are replaced. Every tensor made is taken off
    `pending`.
    """
    try:
        for name, tensors in files.items():
            made = {t.name: (t.shape, lambda: next(pending)()) for t in tensors}
            safetensors_file.write(target / (name + _PARTIAL), made, EXPORT_DTYPES[dtype])
        for path in target.iterdir():
            if _OLD_WEIGHTS.fullmatch(path.name):
                path.unlink()
        for name in files:
            os.replace(target / (name + _PARTIAL), target / name)
    finally:
        for name in files:
            (target / (name + _PARTIAL)).unlink(missing_ok=True)
    if len(files) == 1:
        return
    elements = sum(math.prod(t.shape) for tensors in files.values() for t in tensors)
    width = safetensors_file.DTYPES[EXPORT_DTYPES[dtype]].itemsize
    index = {
        "metadata": {"total_parameters": elements, "total_size": elements * width},
        "weight_map": {t.name: name for name, tensors in files.items() for t in tensors},
    }
    text = json.dumps(index, indent=2) + "\n"
    (target / WEIGHTS_INDEX).write_text(text, encoding="utf-8")


def _copy_tokenizer(source: pathlib.Path, target: pathlib.Path) -> dict[str, Any]:
    """Copies the tokenizer's files; returns the ids of special tokens in its config.json."""
    if not source.is_dir():
        raise DataError(f"{source} is no directory; give the one that the tokenizer's files are in")
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
    path = source / "config.json"
    content = read_json(path) if path.is_file() else {}
    return {field: content[field] for field in _TOKEN_IDS if content.get(field) is not None}
