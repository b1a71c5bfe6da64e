"""The only place that moves values between the host and global arrays.

With several processes every process calls these functions in the same order, also one whose devices
hold nothing of the array. Host values are the same on every process.
"""

from collections.abc import Mapping
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

Value = TypeVar("Value")


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array from the whole value, which every process has."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index], dtype=array.dtype
    )


def fetch(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Reads global arrays of one mesh to the host of every process."""
    if jax.process_count() == 1:
        return {name: np.asarray(value) for name, value in arrays.items()}
    return {name: _fetch_global(value) for name, value in arrays.items()}


def _fetch_global(array: jax.Array) -> np.ndarray:
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"expected an array on a mesh, got sharding {sharding}")
    if not array.is_fully_replicated:
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
        array = jax.jit(lambda x: x, out_shardings=replicated)(array)
    owners = sorted({d.process_index for d in sharding.device_set})
    here = jax.process_index() in owners
    value = (
        np.asarray(array.addressable_shards[0].data) if here else np.zeros(array.shape, array.dtype)
    )
    if len(owners) == jax.process_count():
        return value
    is_source = jax.process_index() == owners[0]
    return np.asarray(multihost_utils.broadcast_one_to_all(value, is_source=is_source))


def agree_any(flag: bool) -> bool:
    """Whether the flag is set on any process; the same answer everywhere."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def barrier(name: str) -> None:
    """Waits for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def broadcast_text(text: str) -> str:
    """Process 0's text, on every process."""
    if jax.process_count() == 1:
        return text
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(data.size, np.int64)))
    padded = np.zeros(size, np.uint8)
    padded[: min(size, data.size)] = data[:size]
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode()
