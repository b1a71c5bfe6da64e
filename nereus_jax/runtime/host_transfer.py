"""Transfers through host memory: every new block is put together from the old blocks it meets.

Only what a block lacks is read, into memory that the new array then owns: at no time is there more
than the old and the new blocks. This is the way of parked state (blocks in host memory), and of
emulated devices, whose memory the host can read and hand over without a copy.
"""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import ReshardError
from nereus_jax.core.tiling import LeafTiling, Position, overlaps_1d
from nereus_jax.core.transfer import TransferSchedule
from nereus_jax.runtime.executor import DeviceBlocks
from nereus_jax.runtime.world import DeviceHandle

ALIGNMENT_BYTES = 64
"""A numpy array so aligned becomes a jax array on a CPU device without a copy."""

COPY_THREADS = min(8, os.cpu_count() or 1)


class HostTransfer:
    """A schedule, carried out by the host of each process for its own devices."""

    def __init__(
        self, schedule: TransferSchedule, handles: Mapping[DeviceId, DeviceHandle]
    ) -> None:
        self.schedule = schedule
        self._handles = handles
        self._index = {d: i for i, d in enumerate(schedule.devices)}
        self._leaves = sorted(leaf for batch in schedule.batches for leaf in batch.leaves)

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

        Raises:
          ReshardError: a block that is needed here is on devices of other processes.
        """
        found: list[DeviceBlocks] = [{} for _ in self.schedule.sources]
        with ThreadPoolExecutor(max_workers=COPY_THREADS) as pool:
            # Large leaves first: the last ones to end are small.
            order = sorted(self._leaves, key=lambda i: -math.prod(self.schedule.sources[i].shape))
            jobs = {leaf: self._start(leaf, sources[leaf], pool) for leaf in order}
            for leaf, blocks in jobs.items():
                for device, block in blocks.items():
                    handle = self._handles[self.schedule.devices[device]]
                    place = SingleDeviceSharding(handle, memory_kind=memory_kinds[leaf])
                    found[leaf][device] = jax.device_put(block.result(), place)
                if release is not None:
                    release(leaf)
        return found

    def _start(
        self, leaf: int, sources: DeviceBlocks, pool: ThreadPoolExecutor
    ) -> "dict[int, Future[np.ndarray]]":
        """The new blocks of a leaf by device; devices that hold the same block share it."""
        source, target = self.schedule.sources[leaf], self.schedule.targets[leaf]
        held: dict[Position, jax.Array] = {}
        for device, position in zip(source.devices, source.positions, strict=True):
            index = self._index[device]
            if index in sources and device not in self.schedule.lost:
                held.setdefault(position, sources[index])
        receiving = set(self.schedule.kept[leaf].receiving)
        jobs: dict[int, Future[np.ndarray]] = {}
        made: dict[Position, Future[np.ndarray]] = {}
        for device, position in zip(target.devices, target.positions, strict=True):
            index = self._index[device]
            if index not in receiving or self._handles[device].process_index != jax.process_index():
                continue
            if position not in made:
                made[position] = pool.submit(_assemble, source, target, position, held)
            jobs[index] = made[position]
        return jobs


def _assemble(
    source: LeafTiling,
    target: LeafTiling,
    position: Position,
    held: Mapping[Position, jax.Array],
) -> np.ndarray:
    """A target block from the source blocks that it meets."""
    meets = [
        overlaps_1d(extent, source.local_shape[dim], target.local_shape[dim], position[dim])
        for dim, extent in enumerate(source.shape)
    ]
    block = _aligned(target.local_shape, jnp.dtype(target.dtype))
    covered = math.prod(sum(stop - start for _, start, stop in dim) for dim in meets)
    if covered < block.size:
        block[...] = 0  # padding
    for cell in itertools.product(*meets):
        origin = tuple(p for p, _, _ in cell)
        if origin not in held:
            raise ReshardError(
                f"block {origin} of {source.name!r} is on devices of other processes, which the "
                f"host path does not reach; use path='collective'"
            )
        old = np.asarray(held[origin])
        to, of = _slices(cell, position, target), _slices(cell, origin, source)
        np.copyto(block[to], old[of], casting="unsafe")
    return block


def _slices(
    cell: Sequence[tuple[int, int, int]], position: Position, tiling: LeafTiling
) -> tuple[slice, ...]:
    offsets = [p * n for p, n in zip(position, tiling.local_shape, strict=True)]
    return tuple(slice(a - o, b - o) for (_, a, b), o in zip(cell, offsets, strict=True))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[offset : offset + size].view(dtype).reshape(shape)


