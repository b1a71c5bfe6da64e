"""Transfers through host memory: every new block is put together from the old blocks it meets.

Only what a block lacks is read, into memory that the new array then owns: at no time is there more
than the old and the new blocks. This is the way of parked state (blocks in host memory), and of
emulated devices, whose memory the host can read and hand over without a copy.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import ReshardError
from nereus_jax.core.tiling import LeafTiling, Position, overlaps_1d, same_blocks
from nereus_jax.core.transfer import TransferSchedule
from nereus_jax.runtime.flat_mesh import DeviceBlocks
from nereus_jax.runtime.host import aligned_empty
from nereus_jax.runtime.world import DeviceHandle

Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockRecipe:
    """How one new block is made.

    Attributes:
      devices: those that get it.
      copies: (device that holds it, part of its block, part of the new block).
      is_whole: the new block is that one old block, as it is.
      has_padding: some of it is covered by no copy.
    """

    devices: tuple[int, ...]
    copies: tuple[tuple[int, Slices, Slices], ...]
    is_whole: bool
    has_padding: bool


class HostTransfer:
    """A schedule, carried out by the host of each process for its own devices."""

    def __init__(
        self, schedule: TransferSchedule, handles: Mapping[DeviceId, DeviceHandle]
    ) -> None:
        """Works out who reads what; allocates nothing.

        Raises:
          ReshardError: a block that is needed here is on devices of other processes only.
        """
        self.schedule = schedule
        here = jax.process_index()
        self._handles = [handles[d] for d in schedule.devices]
        self._is_here = [handle.process_index == here for handle in self._handles]
        self._recipes = {
            leaf: self._recipes_of(leaf)
            for leaf in sorted(i for batch in schedule.batches for i in batch.leaves)
        }

    def run(
        self,
        sources: Sequence[DeviceBlocks],
        memory_kinds: Sequence[str | None],
        release: Callable[[int], None] | None = None,
    ) -> list[DeviceBlocks]:
        """Moves.

        Args:
          sources: the blocks of each leaf on this process's devices.
          memory_kinds: where the new blocks of each leaf go: `device`, `pinned_host`, ...
          release: called with a leaf whose source blocks have been read.

        Returns:
          The new blocks of each leaf; what is shared is not among them.
        """
        found: list[DeviceBlocks] = [{} for _ in self.schedule.sources]
        for leaf, recipes in self._recipes.items():
            values: list[Any] = []
            devices: list[int] = []
            for recipe in recipes:
                values += [self._make(leaf, recipe, sources[leaf])] * len(recipe.devices)
                devices += recipe.devices
            kind = memory_kinds[leaf]
            places = [SingleDeviceSharding(self._handles[d], memory_kind=kind) for d in devices]
            # One call for all devices; on CPU devices numpy's memory is taken over as it is.
            found[leaf] = dict(zip(devices, jax.device_put(values, places), strict=True))
            if release is not None:
                jax.block_until_ready(found[leaf])
                release(leaf)
        return found

    def _make(self, leaf: int, recipe: BlockRecipe, sources: DeviceBlocks) -> Any:
        if recipe.is_whole:
            return sources[recipe.copies[0][0]]
        target = self.schedule.targets[leaf]
        block = aligned_empty(target.local_shape, jnp.dtype(target.dtype))
        if recipe.has_padding:
            block[...] = 0
        for holder, part, place in recipe.copies:
            block[place] = np.asarray(sources[holder])[part]
        return block

    def _recipes_of(self, leaf: int) -> list[BlockRecipe]:
        schedule = self.schedule
        source, target = schedule.sources[leaf], schedule.targets[leaf]
        index = {device: i for i, device in enumerate(schedule.devices)}
        holders: dict[Position, int] = {}
        for device, position in zip(source.devices, source.positions, strict=True):
            if self._is_here[index[device]] and device not in schedule.lost:
                holders.setdefault(position, index[device])
        receiving = set(schedule.kept[leaf].receiving)
        wanted: dict[Position, list[int]] = {}
        for device, position in zip(target.devices, target.positions, strict=True):
            if index[device] in receiving and self._is_here[index[device]]:
                wanted.setdefault(position, []).append(index[device])
        return [
            _recipe(source, target, position, devices, holders)
            for position, devices in wanted.items()
        ]


def _recipe(
    source: LeafTiling,
    target: LeafTiling,
    position: Position,
    devices: Sequence[int],
    holders: Mapping[Position, int],
) -> BlockRecipe:
    meets = [
        overlaps_1d(extent, source.local_shape[dim], target.local_shape[dim], position[dim])
        for dim, extent in enumerate(source.shape)
    ]
    copies: list[tuple[int, Slices, Slices]] = []
    origins: list[Position] = []
    for cell in itertools.product(*meets):
        origin = tuple(p for p, _, _ in cell)
        if origin not in holders:
            raise ReshardError(
                f"block {origin} of {source.name!r} is on devices of other processes, which the "
                f"host path does not reach; use path='collective'"
            )
        origins.append(origin)
        copies.append(
            (holders[origin], _slices(cell, origin, source), _slices(cell, position, target))
        )
    covered = math.prod(sum(stop - start for _, start, stop in dim) for dim in meets)
    return BlockRecipe(
        devices=tuple(devices),
        copies=tuple(copies),
        is_whole=same_blocks(source, target)
        and origins == [position]
        and holders[position] not in devices,  # jax would hand the block on instead of copying it
        has_padding=covered < math.prod(target.local_shape),
    )


def _slices(cell: Sequence[tuple[int, int, int]], position: Position, tiling: LeafTiling) -> Slices:
    offsets = [p * n for p, n in zip(position, tiling.local_shape, strict=True)]
    return tuple(slice(a - o, b - o) for (_, a, b), o in zip(cell, offsets, strict=True))
