"""State that waits in host memory while other model-stages run: each block beside its own device.

Blocks are copied one by one, so that it works for arrays of several processes, and nothing is
compiled. What is where it shall be already is handed on as it is.
"""

from typing import TypeVar

import jax
from jax.sharding import Sharding, SingleDeviceSharding

HOST_MEMORY = "pinned_host"
"""The kind of memory that devices read without a copy by the operating system."""

Tree = TypeVar("Tree")
"""A pytree of arrays, or of `jax.ShapeDtypeStruct`s with shardings."""


def is_parked(sharding: Sharding | None) -> bool:
    """Whether blocks lie in host memory that is not the device's own."""
    if sharding is None or sharding.memory_kind is None:
        return False
    return sharding.memory_kind != _own_memory(sharding)


def unparked(sharding: Sharding) -> Sharding:
    """The same sharding in the memory of the devices."""
    return sharding.with_memory_kind(_own_memory(sharding))


def in_host_memory(tree: Tree) -> Tree:
    """The same arrays in the memory of the hosts of their devices; it does not wait for them."""
    return jax.tree.map(lambda x: _in_memory(x, HOST_MEMORY), tree)


def on_devices(tree: Tree) -> Tree:
    """The same arrays in the memory of their devices; it does not wait for them."""
    return jax.tree.map(lambda x: _in_memory(x, _own_memory(x.sharding)), tree)


def parked_abstract(tree: Tree) -> Tree:
    """The same shapes, to be read into host memory."""

    def parked(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert x.sharding is not None
        sharding = x.sharding.with_memory_kind(HOST_MEMORY)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(parked, tree)


def block_in_memory(block: jax.Array, *, parked: bool) -> jax.Array:
    """A block on one device, in host memory or in the device's own."""
    (device,) = block.devices()
    kind = HOST_MEMORY if parked else device.default_memory().kind
    return jax.device_put(block, SingleDeviceSharding(device, memory_kind=kind))


def _own_memory(sharding: Sharding) -> str:
    """The kind of the devices' memory; those of other processes are not asked for theirs."""
    platform = next(iter(sharding.device_set)).platform
    return jax.local_devices(backend=platform)[0].default_memory().kind


def _in_memory(array: jax.Array, kind: str) -> jax.Array:
    own = _own_memory(array.sharding)
    if (array.sharding.memory_kind or own) == kind:
        return array
    blocks = [block_in_memory(shard.data, parked=kind != own) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        array.shape, array.sharding.with_memory_kind(kind), blocks, dtype=array.dtype
    )
