"""A transfer of leaves, compiled for its devices: from global arrays to global arrays.

Two paths carry out a schedule. `collective`: programs on the devices, in one process or several.
`host`: the host puts the new blocks together; for parked state, whose blocks are in host memory,
and for emulated devices of one process, where it is the faster one (`benchmarks/reshard`).
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import numpy as np

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import ReshardError
from nereus_jax.core.transfer import TransferSchedule
from nereus_jax.runtime.compile_queue import CompileCost, CompileQueue, Compiling, compile_now
from nereus_jax.runtime.executor import CollectiveTransfer
from nereus_jax.runtime.flat_mesh import DeviceBlocks
from nereus_jax.runtime.host_transfer import HostTransfer
from nereus_jax.runtime.parking import is_parked
from nereus_jax.runtime.world import DeviceHandle

Path = Literal["auto", "collective", "host"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferCost:
    """What a transfer cost beside its runs.

    Attributes:
      compile_s: compiling, all of it.
      exposed_compile_s: of that, seconds that someone waited.
      set_up_s: the first exchange between the devices, which sets up communicators; on one value.
      first_run_s: the first `run`, until its results were there.
    """

    compile_s: float
    exposed_compile_s: float
    set_up_s: float
    first_run_s: float


class Transfer:
    """Brings leaves from their tilings to others; compiled once, run as often as needed.

    Every process of the devices makes it, compiles it and runs it, in the same order.
    """

    def __init__(
        self,
        schedule: TransferSchedule,
        targets: Sequence[jax.ShapeDtypeStruct],
        handles: Mapping[DeviceId, DeviceHandle],
        *,
        path: Path = "auto",
        donate: bool = False,
        parked: bool = False,
    ) -> None:
        """Compiles nothing yet.

        Args:
          schedule: what moves.
          targets: shape (padding included), dtype and sharding of each resulting array.
          handles: the backend's handle of each device of the schedule.
          path: how; `auto` chooses.
          donate: the sources are given up; what is not shared is freed batch by batch.
          parked: the sources are in host memory.

        Raises:
          ReshardError: the path cannot be taken.
        """
        self.schedule = schedule
        self.targets = tuple(targets)
        self.donate = donate
        self._handles = handles
        self._index = {handles[d]: i for i, d in enumerate(schedule.devices)}
        self.path = self._choose(path, parked)
        self._host = HostTransfer(schedule, handles) if self.path == "host" else None
        self._compiling: Compiling[CollectiveTransfer] | None = None
        self._unchanged = {i for i in range(len(targets)) if self._keeps_everything(i)}
        self._set_up_s: float | None = None
        self._first_run_s: float | None = None

    @property
    def moves(self) -> bool:
        """Whether any device gets a new block; if not, nothing is compiled or dispatched."""
        return bool(self.schedule.batches)

    @property
    def inflight_bytes(self) -> int:
        """The most that send and receive buffers take on a device; 0 on the host path."""
        return self.schedule.inflight_bytes if self.path == "collective" else 0

    @property
    def is_compiled(self) -> bool:
        """Whether `run` can begin at once."""
        return not self._needs_programs or (self._compiling is not None and self._compiling.done)

    def compile(self) -> None:
        """Compiles in this thread what `run` needs; does nothing if it is or will be there."""
        if self._compiling is None and self._needs_programs:
            self._compiling = compile_now(self._collective)

    def compile_in(self, queue: CompileQueue) -> None:
        """Compiles in the background; `run` waits for it."""
        if self._compiling is None and self._needs_programs:
            self._compiling = queue.submit(self._collective)

    @property
    def collective(self) -> CollectiveTransfer | None:
        """The compiled programs; None where the path or the schedule needs none."""
        self.compile()
        return self._compiling.result() if self._compiling is not None else None

    @property
    def cost(self) -> TransferCost:
        """What compiling and setting up cost so far."""
        compiling = self._compiling
        none = CompileCost(compile_s=0.0, exposed_s=0.0)
        compiled = compiling.cost if compiling is not None else none
        return TransferCost(
            compile_s=compiled.compile_s,
            exposed_compile_s=compiled.exposed_s,
            set_up_s=self._set_up_s or 0.0,
            first_run_s=self._first_run_s or 0.0,
        )

    def set_up(self) -> None:
        """Waits until `run` needs nothing more: programs, and connections between the devices.

        The first exchange of the devices goes through them, so that it waits for what they do.
        """
        collective = self.collective
        if collective is not None and self._set_up_s is None:
            self._set_up_s = collective.set_up()

    def run(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Moves the leaves; the first time it waits for the result, to see how long that takes.

        Args:
          arrays: as the schedule's sources describe them; blocks of lost devices are not touched.

        Returns:
          The arrays of `targets`. Blocks that do not change are the sources' own: neither end may
          be deleted or donated while the other is in use.
        """
        sources = [
            {} if leaf in self._unchanged else self._blocks(array)
            for leaf, array in enumerate(arrays)
        ]
        start_s = time.perf_counter()
        blocks = self._move(sources)
        if self.moves and self._first_run_s is None:
            jax.block_until_ready(blocks)
            self._first_run_s = time.perf_counter() - start_s
        return [
            _rename(arrays[leaf], target)
            if leaf in self._unchanged
            else self._array(target, blocks[leaf])
            for leaf, target in enumerate(self.targets)
        ]

    def run_blocks(
        self, blocks: Sequence[Mapping[DeviceId, jax.Array]]
    ) -> list[dict[DeviceId, jax.Array]]:
        """As `run`, from the blocks of this process's devices to the new blocks; waits for nothing
        once it is set up.

        Args:
          blocks: for each leaf; those of lost devices may be missing.
        """
        named, lost = self.schedule.devices, self.schedule.lost
        index = {device: i for i, device in enumerate(named)}
        sources = [{index[d]: x for d, x in leaf.items() if d not in lost} for leaf in blocks]
        moved = self._move(sources)
        wanted = [set(target.devices) for target in self.schedule.targets]
        return [
            {named[i]: x for i, x in sorted(leaf.items()) if named[i] in wanted[number]}
            for number, leaf in enumerate(moved)
        ]

    def _move(self, sources: Sequence[DeviceBlocks]) -> list[DeviceBlocks]:
        """The new blocks of every leaf, with those that devices have already."""
        release = (lambda leaf: self._release(leaf, sources[leaf])) if self.donate else None
        found = self._run(sources, release)
        for leaf, target in enumerate(self.targets):
            for device in self.schedule.kept[leaf].shared:
                if device in sources[leaf]:
                    found[leaf][device] = _in_memory_of(target, sources[leaf][device])
        return found

    def _run(
        self, sources: Sequence[DeviceBlocks], release: Callable[[int], None] | None
    ) -> list[DeviceBlocks]:
        if not self.moves:
            return [{} for _ in sources]
        self.set_up()
        collective = self.collective
        if collective is not None:
            return collective.run(sources, release)
        assert self._host is not None
        kinds = [t.sharding.memory_kind for t in self.targets if t.sharding is not None]
        return self._host.run(sources, kinds, release)

    @property
    def _needs_programs(self) -> bool:
        return self.path == "collective" and self.moves

    def _collective(self) -> CollectiveTransfer:
        return CollectiveTransfer(self.schedule, self._handles)

    def _choose(self, path: Path, parked: bool) -> Literal["collective", "host"]:
        parked = parked or any(is_parked(t.sharding) for t in self.targets)
        one_process = jax.process_count() == 1
        on_cpu = all(self._handles[d].platform == "cpu" for d in self.schedule.devices)
        if path == "auto":
            return "host" if parked or (one_process and on_cpu) else "collective"
        if path == "collective" and parked:
            raise ReshardError(
                "path='collective' does not reach host memory, where an end of this transfer is; "
                "take path='host' or 'auto'"
            )
        return path

    def _keeps_everything(self, leaf: int) -> bool:
        """Whether all devices of a leaf keep their blocks, so that only its sharding is renamed.

        `device_put` does that without a copy within one process and for the same order of devices.
        """
        schedule = self.schedule
        devices = schedule.sources[leaf].devices
        return (
            jax.process_count() == 1
            and devices == schedule.targets[leaf].devices
            and not schedule.kept[leaf].receiving
        )

    def _blocks(self, array: jax.Array) -> DeviceBlocks:
        lost = self.schedule.lost
        named = self.schedule.devices
        index = self._index
        return {
            index[s.device]: s.data
            for s in array.addressable_shards
            if s.device in index and named[index[s.device]] not in lost
        }

    def _release(self, leaf: int, blocks: DeviceBlocks) -> None:
        shared = set(self.schedule.kept[leaf].shared)
        for device, block in blocks.items():
            if device not in shared:
                block.delete()

    def _array(self, target: jax.ShapeDtypeStruct, blocks: DeviceBlocks) -> jax.Array:
        assert target.sharding is not None
        if 0 in target.shape:
            local = np.zeros(target.sharding.shard_shape(target.shape), target.dtype)
            return jax.make_array_from_callback(
                target.shape, target.sharding, lambda _: local, dtype=target.dtype
            )
        buffers = [
            blocks[self._index[handle]]
            for handle in target.sharding.devices_indices_map(target.shape)
            if handle.process_index == jax.process_index()
        ]
        return jax.make_array_from_single_device_arrays(
            target.shape, target.sharding, buffers, dtype=target.dtype
        )


def _in_memory_of(target: jax.ShapeDtypeStruct, block: jax.Array) -> jax.Array:
    """A block that stays on its device, but may be parked there or come back."""
    assert target.sharding is not None
    kind = target.sharding.memory_kind
    if kind is None or block.sharding.memory_kind == kind:
        return block
    return jax.device_put(block, block.sharding.with_memory_kind(kind))


def _rename(array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    """The same blocks on the same devices, under another sharding; jax copies nothing for that."""
    if array.sharding == target.sharding:
        return array
    return jax.device_put(array, target.sharding)
