"""Programs on some devices in a row, and the arrays that they take without a copy.

An array on a flat mesh has one shard on every device, which is any block of that shape: blocks are
bound to the arguments of a program, and taken from its results, as they are.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.transfer import TransferSchedule
from nereus_jax.runtime.host import aligned_empty
from nereus_jax.runtime.transfer_bodies import AXIS
from nereus_jax.runtime.world import DeviceHandle

DeviceBlocks = dict[int, jax.Array]
"""Device index -> its block, for the devices of this process."""


class FlatMesh:
    """Some devices in a row, and the arrays whose shards are these devices' blocks."""

    def __init__(
        self, devices: Sequence[int], schedule: TransferSchedule, handles: Mapping[DeviceId, Any]
    ) -> None:
        self.devices = tuple(devices)
        self.rows: Mapping[int, int] = {d: i for i, d in enumerate(self.devices)}
        named = [handles[schedule.devices[d]] for d in self.devices]
        self.mesh = Mesh(np.array(named, dtype=object), (AXIS,), axis_types=(AxisType.Auto,))
        self._here = [
            (device, handle)
            for device, handle in zip(self.devices, named, strict=True)
            if handle.process_index == jax.process_index()
        ]

    @property
    def is_local(self) -> bool:
        """Whether this process takes part."""
        return bool(self._here)

    def sharding(self, local_shape: tuple[int, ...]) -> NamedSharding:
        """A scalar has no dim to cut: it is 'replicated', each device with a value of its own."""
        return NamedSharding(self.mesh, spec(local_shape))

    def abstract(self, local_shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        """The array of blocks of this shape, without the values."""
        sharding = self.sharding(local_shape)
        return jax.ShapeDtypeStruct(self._shape(local_shape), dtype, sharding=sharding)

    def bind(self, blocks: DeviceBlocks, local_shape: tuple[int, ...]) -> jax.Array:
        """The array whose shards are these blocks; blocks of other devices are ignored."""
        return jax.make_array_from_single_device_arrays(
            self._shape(local_shape),
            self.sharding(local_shape),
            [blocks[d] for d, _ in self._here],
        )

    def filled(
        self, blocks: DeviceBlocks, local_shape: tuple[int, ...], dtype: str
    ) -> DeviceBlocks:
        """The blocks, and on the devices that have none something of the same shape."""
        return {
            d: blocks[d] if d in blocks else unused(local_shape, dtype, handle)
            for d, handle in self._here
        }

    def blocks(self, array: jax.Array) -> DeviceBlocks:
        """The blocks of an array made by `bind` or by a program."""
        found = {s.device: s.data for s in array.addressable_shards}
        return {d: found[handle] for d, handle in self._here}

    def _shape(self, local_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.devices) * local_shape[0], *local_shape[1:]) if local_shape else ()


def spec(local_shape: tuple[int, ...]) -> PartitionSpec:
    """How a block of this shape lies on a flat mesh."""
    return PartitionSpec(AXIS) if local_shape else PartitionSpec()


class Executable:
    """A compiled program on a flat mesh, with the offsets of its devices.

    Attributes:
      name: what it does: fused, local, zeros, pack, permute, unpack, first.
      on: its devices.
      compiled: the program; its first argument is the table of offsets.
    """

    def __init__(
        self, name: str, on: FlatMesh, compiled: jax.stages.Compiled, offsets: np.ndarray
    ) -> None:
        self.name = name
        self.on = on
        self.compiled = compiled
        self._offsets = offsets

    def __call__(self, *arguments: Any) -> Any:
        return self.compiled(self._table, *arguments)

    @functools.cached_property
    def _table(self) -> jax.Array:
        # Made on the first run: a program can be compiled for devices that are not there.
        rows = self._offsets
        sharding = self.on.sharding((1, rows.shape[1]))
        return jax.make_array_from_callback(
            rows.shape, sharding, rows.__getitem__, dtype=rows.dtype
        )


def unused(shape: tuple[int, ...], dtype: str, handle: DeviceHandle) -> jax.Array:
    """A buffer that nobody reads. On a CPU device it takes no time: memory that is not touched."""
    if handle.platform == "cpu":
        return jax.device_put(aligned_empty(shape, jnp.dtype(dtype)), handle)
    return jnp.zeros(shape, dtype, device=handle)
