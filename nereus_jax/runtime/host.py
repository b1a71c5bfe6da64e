"""The only place that moves values between the host and global arrays.

With several processes every process calls these functions in the same order, also one whose devices
hold nothing of the array. Host values are the same on every process.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from nereus_jax.core import errors

ALIGNMENT_BYTES = 64
"""Of numpy arrays that become arrays of a CPU device without a copy."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that `jax.device_put` hands to a CPU device as it is; its values are undefined."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[offset : offset + size].view(dtype).reshape(shape)


def cpu_device() -> Any:
    """A CPU device for small arithmetic of the host; None where JAX_PLATFORMS leaves no CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


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
        array = jax.device_put(array, NamedSharding(sharding.mesh, PartitionSpec()))
    owners = sorted({d.process_index for d in sharding.device_set})
    here = jax.process_index() in owners
    value = (
        np.asarray(array.addressable_shards[0].data) if here else np.zeros(array.shape, array.dtype)
    )
    if len(owners) == jax.process_count():
        return value
    # The broadcast is a sum with zeros: as bytes, so that -0.0 stays what it is.
    sent = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    is_source = jax.process_index() == owners[0]
    got = np.asarray(multihost_utils.broadcast_one_to_all(sent, is_source=is_source))
    return got.view(array.dtype).reshape(array.shape)


def gather(array: np.ndarray) -> np.ndarray:
    """The arrays of all processes, of one shape, as rows [processes, ...]. 64 bits become 32."""
    if jax.process_count() == 1:
        return array[None]
    return np.asarray(multihost_utils.process_allgather(array))


def agree_any(flag: bool) -> bool:
    """Whether the flag is set on any process; the same answer everywhere."""
    return bool(gather(np.array(flag)).any())


@contextmanager
def together() -> Iterator[None]:
    """Where one process raises a `NereusError`, all raise it: none is left waiting for the others.

    The body is a process's own work, such as writing a file; it calls nothing of this module.
    """
    raised: errors.NereusError | None = None
    try:
        yield
    except errors.NereusError as error:
        raised = error
    failed = gather(np.array(raised is not None))
    if not failed.any():
        return
    source = int(np.argmax(failed))
    kind, message = json.loads(
        broadcast_text(json.dumps([type(raised).__name__, str(raised)]), source)
    )
    if raised is not None:
        raise raised
    raise getattr(errors, kind)(message)


def broadcast_text(text: str, source: int = 0) -> str:
    """One process's text, on every process."""
    if jax.process_count() == 1:
        return text
    is_source = jax.process_index() == source
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.array(data.size, np.int32), is_source))
    padded = np.zeros(size, np.uint8)
    padded[: min(size, data.size)] = data[:size]
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded, is_source))).decode()
