"""Slices of global arrays, on the first process: what an export writes, a tensor at a time.

A slice is put together on the host from the shards that it touches, so that neither a device nor
the host ever holds more than it and one shard's part of it.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils

WRITER = 0
"""The process that gets the values."""

_Range = tuple[int, int]


def read_slice(array: jax.Array, index: tuple[slice, ...]) -> np.ndarray:
    """The values of a slice of a global array, on any sharding.

    With several processes all call this in the same order, also one that holds nothing of the
    array.

    Args:
      array: on any mesh.
      index: a slice (step 1) for each dim.

    Returns:
      On process `WRITER` the values; elsewhere an array of that shape with undefined ones.
    """
    wanted = _ranges(index, array.shape)
    out = np.empty([stop - start for start, stop in wanted], array.dtype)
    here = {_ranges(s.index, array.shape): s.data for s in array.addressable_shards}
    for block, owner in sorted(_owners(array).items()):
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, wanted, strict=True)]
        if any(start >= stop for start, stop in both):
            continue
        inside = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, block, strict=True))
        target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, wanted, strict=True))
        if owner == jax.process_index():
            out[target] = _to_host(here[block], inside)
        if owner != WRITER:
            out[target] = _broadcast(out[target], owner)
    return out


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[_Range, ...]:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _owners(array: jax.Array) -> dict[tuple[_Range, ...], int]:
    """Every block of the array, and the first process that holds it."""
    owners: dict[tuple[_Range, ...], int] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        assert index is not None  # jax's type allows for more than it returns
        block = _ranges(index, array.shape)
        process = int(device.process_index)
        owners[block] = min(owners.get(block, process), process)
    return owners


def _to_host(data: jax.Array, inside: tuple[slice, ...]) -> np.ndarray:
    """A part of one shard: a view where the device's memory is the host's."""
    if next(iter(data.devices())).platform == "cpu":
        return np.asarray(data)[inside]
    return np.asarray(data[inside])


def _broadcast(values: np.ndarray, source: int) -> np.ndarray:
    # The broadcast is a sum with zeros: as bytes, so that -0.0 stays what it is.
    sent = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    got = multihost_utils.broadcast_one_to_all(sent, is_source=jax.process_index() == source)
    return np.asarray(got).view(values.dtype).reshape(values.shape)
