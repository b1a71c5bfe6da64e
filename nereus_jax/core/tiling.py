"""How one leaf lies on devices: every shard is a box in the leaf's logical coordinates.

A leaf is cut evenly: every device holds a block of the same `local_shape`, and its position says
which block. What a block reaches beyond the logical shape is padding, which belongs to nobody and
is never moved.
"""

import dataclasses
from collections.abc import Sequence

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import DTYPE_BYTES, Box, LeafSpec, ShardingRules

Position = tuple[int, ...]
"""The index of a block in each dim."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafTiling:
    """A leaf on devices.

    Attributes:
      name: of the leaf, for messages.
      shape: logical, without padding.
      dtype: of the blocks.
      local_shape: of one device's block, padding included.
      devices: each once, in the order of the mesh.
      positions: which block each of them holds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    local_shape: tuple[int, ...]
    devices: tuple[DeviceId, ...]
    positions: tuple[Position, ...]

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def box(self, position: Position) -> Box:
        """The logical index ranges of the block at a position; empty ranges where it is padding."""
        return tuple(
            (min(p * local, n), min((p + 1) * local, n))
            for p, local, n in zip(position, self.local_shape, self.shape, strict=True)
        )


def tile_leaf(
    leaf: LeafSpec,
    rules: ShardingRules,
    mesh_shape: tuple[int, ...],
    devices: tuple[DeviceId, ...],
) -> LeafTiling:
    """A leaf of a spec on the devices of a mesh, given in row-major order of the mesh."""
    return LeafTiling(
        name=leaf.name,
        shape=leaf.shape,
        dtype=leaf.dtype,
        local_shape=leaf.local_shape(rules, mesh_shape),
        devices=devices,
        positions=leaf.positions(rules, mesh_shape),
    )


def overlaps_1d(
    extent: int, source_local: int, target_local: int, target_position: int
) -> tuple[tuple[int, int, int], ...]:
    """The source blocks along one dim that a target block meets: (source position, start, stop).

    Args:
      extent: logical length of the dim.
      source_local: length of a source block.
      target_local: length of a target block.
      target_position: of the target block.
    """
    start = target_position * target_local
    stop = min(start + target_local, extent)
    if start >= stop:
        return ()
    return tuple(
        (p, max(start, p * source_local), min(stop, (p + 1) * source_local))
        for p in range(start // source_local, (stop - 1) // source_local + 1)
    )


def same_blocks(source: LeafTiling, target: LeafTiling) -> bool:
    """Whether equal positions mean equal blocks, bit for bit: the same cut and the same dtype."""
    return source.local_shape == target.local_shape and source.dtype == target.dtype


def device_order(tilings: Sequence[LeafTiling]) -> tuple[DeviceId, ...]:
    """All devices of some tilings, each once, in the order (host, index)."""
    return tuple(sorted({d for devices in {t.devices for t in tilings} for d in devices}))
