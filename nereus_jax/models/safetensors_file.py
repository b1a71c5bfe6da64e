"""Reading slices of, and writing, files in the safetensors format, bfloat16 included.

A file is the length of the header (8 bytes, little endian), the header (JSON: name -> dtype, shape,
data_offsets), and the tensors, C-contiguous and little endian (section Format of
https://huggingface.co/docs/safetensors). The package `safetensors` writes only what is in memory as
a whole, and copies what it reads; here a file is written one tensor at a time, and a tensor that is
read is a view of a memory map.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping

import ml_dtypes
import numpy as np

from nereus_jax.core.errors import DataError

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ALIGNMENT_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """Where one tensor lies.

    Attributes:
      path: the file.
      offset_bytes: from the start of the file.
      shape: as stored.
      dtype: the format's name, such as `BF16`.
    """

    path: pathlib.Path
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str

    def view(self) -> np.ndarray:
        """The tensor as a read-only memory map: only what is then read is fetched."""
        if 0 in self.shape:
            return np.empty(self.shape, DTYPES[self.dtype])
        return np.memmap(
            self.path, DTYPES[self.dtype], "r", offset=self.offset_bytes, shape=self.shape
        )


def read_header(path: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of a file; no tensor is read.

    Raises:
      DataError: the file is missing, malformed, or shorter than its header says.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist; the checkpoint is incomplete, copy it again")
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + header_bytes
        if size_bytes < _LENGTH_BYTES or header_bytes > _MAX_HEADER_BYTES or start > size_bytes:
            raise DataError(f"{path} is truncated or not a safetensors file ({size_bytes} bytes)")
        try:
            header = json.loads(file.read(header_bytes))
            tensors = {
                name: _tensor(path, start, entry)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} has a malformed safetensors header: {error}") from error
    for name, (_, end) in tensors.items():
        if end > size_bytes:
            raise DataError(
                f"{path} is truncated: {name} ends at byte {end}, the file has {size_bytes}; "
                "copy it again"
            )
    return {name: tensor for name, (tensor, _) in tensors.items()}


def _tensor(path: pathlib.Path, start: int, entry: Mapping[str, object]) -> tuple[Tensor, int]:
    """A tensor from its header entry, and the byte of the file at which it ends."""
    shape, dtype, offsets = entry["shape"], entry["dtype"], entry["data_offsets"]
    if not (isinstance(shape, list) and isinstance(offsets, list) and isinstance(dtype, str)):
        raise TypeError(f"entry {entry}")
    begin, end = (int(o) for o in offsets)
    shape = tuple(int(d) for d in shape)
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{end - begin} bytes for shape {shape} of {dtype}")
    tensor = Tensor(path=path, offset_bytes=start + begin, shape=shape, dtype=dtype)
    return tensor, start + end


def write(
    path: pathlib.Path,
    tensors: Mapping[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]],
    dtype: str,
) -> None:
    """Writes a file, one tensor in memory at a time, and waits until it is on the disk.

    Args:
      path: the file.
      tensors: name -> shape and a function that makes the tensor, in any dtype; it is rounded to
        `dtype`.
      dtype: the format's name, such as `BF16`.
    """
    kind, entries, end = DTYPES[dtype], {}, 0
    for name, (shape, _) in tensors.items():
        begin, end = end, end + math.prod(shape) * kind.itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")
    ).encode()
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)

    def chunks() -> Iterable[bytes | memoryview]:
        yield len(header).to_bytes(_LENGTH_BYTES, "little")
        yield header
        for name, (shape, make) in tensors.items():
            made = make()
            if made.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {made.shape}")
            tensor = np.ascontiguousarray(made, dtype=kind)
            del made  # the next tensor is made while this frame is still there
            yield tensor.reshape(-1).view(np.uint8).data
            del tensor

    with path.open("wb") as file:
        for chunk in chunks():
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
