"""Executes transfer schedules with collectives: programs compiled once, run as often as needed."""

import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.tiling import LeafTiling
from nereus_jax.core.transfer import TransferSchedule
from nereus_jax.runtime.dispatch import MAX_IN_FLIGHT
from nereus_jax.runtime.flat_mesh import DeviceBlocks, Executable, FlatMesh
from nereus_jax.runtime.transfer_bodies import Blocks, BoxMaker
from nereus_jax.runtime.transfer_programs import (
    FusedBatch,
    GroupPrograms,
    StagedBatch,
    TransferCompiler,
    whole_key,
)
from nereus_jax.runtime.world import DeviceHandle


class CollectiveTransfer:
    """A schedule, compiled for the devices of this process and its peers.

    Every process of the devices builds it and runs it, in the same order.
    """

    def __init__(
        self, schedule: TransferSchedule, handles: Mapping[DeviceId, DeviceHandle]
    ) -> None:
        """Compiles.

        Args:
          schedule: what moves.
          handles: the backend's handle of each of its devices.
        """
        self.schedule = schedule
        self._handles = [handles[d] for d in schedule.devices]
        # XLA's CPU backend takes bfloat16 apart as float32, which changes NaNs and subnormals.
        on_cpu = all(handle.platform == "cpu" for handle in self._handles)
        self._boxes = BoxMaker(schedule, as_bits=on_cpu)
        compiler = TransferCompiler(schedule, handles, self._boxes)
        self._batches = compiler.batches()
        self._first = compiler.first()
        self.programs: tuple[Executable, ...] = tuple(compiler.programs)
        """Everything that was compiled, in order of dispatch."""

    @property
    def temp_bytes(self) -> int:
        """The largest temporary of a program on a device, as XLA counts it."""
        found = [p.compiled.memory_analysis() for p in self.programs]
        return max((m.temp_size_in_bytes for m in found if m is not None), default=0)

    def set_up(self) -> float:
        """Seconds of a first exchange between the devices, one value each.

        Backends set up communicators and connections on first use; here that is done, and timed,
        apart from the state that will move.
        """
        if self._first is None:
            return 0.0
        start_s = time.perf_counter()
        jax.block_until_ready(self._first())
        return time.perf_counter() - start_s

    def run(
        self, sources: Sequence[DeviceBlocks], release: Callable[[int], None] | None = None
    ) -> list[DeviceBlocks]:
        """Moves.

        Args:
          sources: the blocks of each leaf.
          release: called with a leaf whose source blocks are needed no more, once they have been
            read.

        Returns:
          The new blocks of each leaf; what is shared is not among them.
        """
        found: list[DeviceBlocks] = [{} for _ in self.schedule.sources]
        for compiled in self._batches:
            leaves = compiled.batch.leaves
            old = {leaf: self._held(sources[leaf], self.schedule.sources[leaf]) for leaf in leaves}
            if isinstance(compiled, FusedBatch):
                new = self._run_fused(compiled, old)
            else:
                new = self._run_staged(compiled, old)
            for leaf in leaves:
                found[leaf] = self._given(new[leaf], self.schedule.targets[leaf])
            if release is not None:
                jax.block_until_ready([found[leaf] for leaf in leaves])
                for leaf in leaves:
                    release(leaf)
        return found

    def _held(self, blocks: DeviceBlocks, tiling: LeafTiling) -> DeviceBlocks:
        """Blocks as programs take them: where that is their bits, another view of the memory."""
        return self._viewed(blocks, self._boxes.held_dtype(tiling.dtype), tiling.dtype)

    def _given(self, blocks: DeviceBlocks, tiling: LeafTiling) -> DeviceBlocks:
        """The inverse of `_held`."""
        return self._viewed(blocks, tiling.dtype, self._boxes.held_dtype(tiling.dtype))

    def _viewed(self, blocks: DeviceBlocks, dtype: str, now: str) -> DeviceBlocks:
        if dtype == now:
            return blocks
        return {
            d: jax.device_put(np.asarray(block).view(jnp.dtype(dtype)), self._handles[d])
            for d, block in blocks.items()
        }

    def _run_fused(
        self, fused: FusedBatch, old: Mapping[int, DeviceBlocks]
    ) -> dict[int, DeviceBlocks]:
        on = fused.program.on
        outputs = fused.program(self._bind(on, old, self.schedule.sources, fused.batch.leaves))
        return {leaf: on.blocks(array) for leaf, array in outputs.items()}

    def _run_staged(
        self, staged: StagedBatch, old: Mapping[int, DeviceBlocks]
    ) -> dict[int, DeviceBlocks]:
        new: dict[int, DeviceBlocks] = {leaf: {} for leaf in staged.batch.leaves}
        for program in staged.begin:
            leaves = staged.cut if program.name == "local" else ()
            blocks = self._bind(program.on, old, self.schedule.sources, leaves)
            for leaf, array in program(blocks).items():
                new[leaf] |= program.on.blocks(array)
        for number, group in enumerate(staged.groups):
            sent = self._pack(group, old, new)
            if group.permute is None:
                continue
            received = group.permute(self._buffers(group, sent))
            del sent
            if number % MAX_IN_FLIGHT == MAX_IN_FLIGHT - 1:
                jax.block_until_ready(received)
            on = group.everyone
            arrived: list[dict[str, DeviceBlocks]] = [
                {key: on.blocks(array) for key, array in payload.items()} for payload in received
            ]
            for exchange, payload in zip(group.exchanges, arrived, strict=True):
                receivers = {receiver for _, receiver in exchange.pairs}
                for leaf in group.whole:
                    block = payload.pop(whole_key(leaf), {})
                    new[leaf] |= {d: x for d, x in block.items() if d in receivers}
            if group.unpack is not None:
                self._unpack(group, group.unpack, arrived, old, new)
        return new

    def _pack(
        self,
        group: GroupPrograms,
        old: Mapping[int, DeviceBlocks],
        new: Mapping[int, DeviceBlocks],
    ) -> list[dict[str, DeviceBlocks]]:
        """What each exchange sends, by key and device: whole blocks, and packed parts."""
        blocks, tilings = (
            (new, self.schedule.targets) if group.forwards else (old, self.schedule.sources)
        )
        sent: list[dict[str, DeviceBlocks]] = []
        for exchange in group.exchanges:
            leaves = group.whole & {p.leaf for p in exchange.parts}
            sent.append({whole_key(leaf): blocks[leaf] for leaf in leaves})
        if group.pack is not None:
            packed = group.pack(self._bind(group.senders, blocks, tilings, group.packed))
            for exchange, payload in zip(sent, packed, strict=True):
                exchange |= {key: group.senders.blocks(x) for key, x in payload.items()}
        return sent

    def _buffers(
        self, group: GroupPrograms, sent: Sequence[Mapping[str, DeviceBlocks]]
    ) -> list[dict[str, jax.Array]]:
        on = group.everyone
        return [
            {
                key: on.bind(on.filled(blocks.get(key, {}), *shape), shape[0])
                for key, shape in shapes.items()
            }
            for shapes, blocks in zip(group.sent, sent, strict=True)
        ]

    def _unpack(
        self,
        group: GroupPrograms,
        unpack: Executable,
        arrived: Sequence[Mapping[str, DeviceBlocks]],
        old: Mapping[int, DeviceBlocks],
        new: dict[int, DeviceBlocks],
    ) -> None:
        payloads = [
            {key: unpack.on.bind(blocks, shapes[key][0]) for key, blocks in payload.items()}
            for shapes, payload in zip(group.payloads, arrived, strict=True)
        ]
        if group.begins:
            blocks = self._bind(unpack.on, old, self.schedule.sources, group.held)
        else:
            blocks = self._bind(unpack.on, new, self.schedule.targets, group.packed)
        for leaf, array in unpack(payloads, blocks).items():
            new[leaf] = unpack.on.blocks(array)

    def _bind(
        self,
        on: FlatMesh,
        blocks: Mapping[int, DeviceBlocks],
        tilings: Sequence[LeafTiling],
        leaves: Sequence[int],
    ) -> Blocks:
        return {leaf: on.bind(blocks[leaf], tilings[leaf].local_shape) for leaf in leaves}
