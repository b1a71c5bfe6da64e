"""Executes transfer schedules with collectives: programs compiled once, run as often as needed.

Where the devices that hold the leaves of a batch are also those that get the new blocks, one
program does everything. Else the blocks of the two ends do not fit one program (each device of a
program needs blocks of all its arguments), and a batch takes three small ones per group of
exchanges: the senders pack, all devices permute the packed buffers, the receivers unpack. So
nothing larger than a packed buffer is ever allocated on a device for the sake of others.

Blocks are bound to the programs' arguments without a copy: an array on a flat mesh whose shard on
every device is that device's block.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.transfer import Batch, Exchange, TransferSchedule
from nereus_jax.runtime.transfer_bodies import (
    AXIS,
    Blocks,
    BoxMaker,
    ExchangeBoxes,
    LeafShape,
    LocalCopies,
    OffsetTable,
    Payload,
    send,
)
from nereus_jax.runtime.world import DeviceHandle

MAX_IN_FLIGHT = 8
"""Programs that may be unfinished: more than 32 collective ones deadlock emulated CPU devices."""

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

    def filled(self, blocks: DeviceBlocks, local_shape: tuple[int, ...], dtype: str) -> DeviceBlocks:
        """The blocks, with zeros on the devices that have none."""
        return {
            d: blocks[d] if d in blocks else jnp.zeros(local_shape, dtype, device=handle)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executable:
    """A compiled program on a flat mesh, with the offsets of its devices."""

    name: str
    on: FlatMesh
    run: jax.stages.Compiled
    table: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedBatch:
    """A batch in one program."""

    batch: Batch
    program: Executable


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPrograms:
    """The three programs of a group of exchanges; None where this process takes no part."""

    leaves_read: tuple[int, ...]
    leaves_written: tuple[int, ...]
    forwards: bool
    payloads: tuple[Mapping[str, int], ...]
    senders: FlatMesh
    everyone: FlatMesh
    pack: Executable | None
    permute: Executable | None
    unpack: Executable | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedBatch:
    """A batch whose two ends lie on different devices."""

    batch: Batch
    receiving: FlatMesh
    begin: tuple[Executable, ...]
    groups: tuple[GroupPrograms, ...]


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
        self._handles = handles
        self._boxes = BoxMaker(schedule)
        self._programs: list[Executable] = []
        start_s = time.perf_counter()
        self._batches = tuple(self._compile(batch) for batch in schedule.batches)
        self._first = self._compile_first()
        self.compile_s = time.perf_counter() - start_s

    @property
    def programs(self) -> tuple[Executable, ...]:
        """Everything that was compiled, in order of dispatch."""
        return tuple(self._programs)

    @property
    def temp_bytes(self) -> int:
        """The largest temporary of a program on a device, as XLA counts it."""
        sizes = [p.run.memory_analysis().temp_size_in_bytes for p in self._programs]
        return max(sizes, default=0)

    def set_up(self) -> float:
        """Seconds of a first exchange between the devices, one value each.

        Backends set up communicators and connections on first use; here that is done, and timed,
        apart from the state that will move.
        """
        if self._first is None:
            return 0.0
        program = self._first
        start_s = time.perf_counter()
        jax.block_until_ready(program.run(program.table))
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
            if isinstance(compiled, FusedBatch):
                self._run_fused(compiled, sources, found)
            else:
                self._run_staged(compiled, sources, found)
            if release is not None:
                jax.block_until_ready([found[i] for i in compiled.batch.leaves])
                for leaf in compiled.batch.leaves:
                    release(leaf)
        return found

    def _run_fused(
        self, fused: FusedBatch, sources: Sequence[DeviceBlocks], found: list[DeviceBlocks]
    ) -> None:
        program, shapes = fused.program, self._shapes(fused.batch.leaves)
        arguments = self._bind(program.on, sources, {i: s.source for i, s in shapes.items()})
        for leaf, array in program.run(program.table, arguments).items():
            found[leaf] = program.on.blocks(array)

    def _run_staged(
        self, staged: StagedBatch, sources: Sequence[DeviceBlocks], found: list[DeviceBlocks]
    ) -> None:
        shapes = self._shapes(staged.batch.leaves)
        held = {i: s.source for i, s in shapes.items()}
        for program in staged.begin:
            if program.name == "local":
                outputs = program.run(program.table, self._bind(program.on, sources, held))
            else:
                outputs = program.run(program.table)
            for leaf, array in outputs.items():
                found[leaf] |= program.on.blocks(array)
        new = {i: s.target for i, s in shapes.items()}
        for number, group in enumerate(staged.groups):
            sent: list[dict[str, DeviceBlocks]] = [
                {kind: {} for kind in payload} for payload in group.payloads
            ]
            if group.pack is not None:
                wanted = new if group.forwards else held
                wanted = {i: wanted[i] for i in group.leaves_read}
                blocks = found if group.forwards else sources
                bound = self._bind(group.senders, blocks, wanted)
                packed = group.pack.run(group.pack.table, bound)
                sent = [
                    {kind: group.senders.blocks(array) for kind, array in payload.items()}
                    for payload in packed
                ]
            if group.permute is None:
                continue
            on = group.everyone
            buffers = [
                {
                    kind: on.bind(on.filled(blocks, (group.payloads[i][kind],), kind), (group.payloads[i][kind],))
                    for kind, blocks in p.items()
                }
                for i, p in enumerate(sent)
            ]
            received = group.permute.run(group.permute.table, buffers)
            del sent, buffers
            if number % MAX_IN_FLIGHT == MAX_IN_FLIGHT - 1:
                jax.block_until_ready(received)
            if group.unpack is not None:
                at = group.unpack.on
                wanted = {i: new[i] for i in group.leaves_written}
                arrived = [
                    {
                        kind: at.bind(on.blocks(array), (group.payloads[i][kind],))
                        for kind, array in payload.items()
                    }
                    for i, payload in enumerate(received)
                ]
                targets = self._bind(at, found, wanted)
                outputs = group.unpack.run(group.unpack.table, arrived, targets)
                for leaf, array in outputs.items():
                    found[leaf] |= at.blocks(array)

    def _bind(
        self,
        on: FlatMesh,
        blocks: Sequence[DeviceBlocks],
        wanted: Mapping[int, tuple[int, ...]],
    ) -> Blocks:
        return {
            leaf: on.bind(blocks[leaf], shape) for leaf, shape in wanted.items()
        }

    def _shapes(self, leaves: Sequence[int]) -> dict[int, LeafShape]:
        return {leaf: self._boxes.shape(leaf) for leaf in leaves}

    def _compile(self, batch: Batch) -> FusedBatch | StagedBatch:
        if set(batch.holding) == set(batch.receiving):
            return self._compile_fused(batch)
        return self._compile_staged(batch)

    def _flat(self, devices: Sequence[int]) -> FlatMesh:
        return FlatMesh(devices, self.schedule, self._handles)

    def _program(
        self,
        name: str,
        on: FlatMesh,
        table: OffsetTable,
        body: Callable[..., Any],
        arguments: Sequence[Any],
        outputs: Any,
        donate: tuple[int, ...] = (),
    ) -> Executable:
        """Compiles a body of (row of the table, *arguments), all of them trees of blocks."""
        offsets = table.array()
        sharding = on.sharding((1, offsets.shape[1]))
        abstract = jax.ShapeDtypeStruct(offsets.shape, offsets.dtype, sharding=sharding)

        def on_device(offsets: jax.Array, *values: Any) -> Any:
            return body(offsets[0], *values)

        mapped = jax.shard_map(
            on_device,
            mesh=on.mesh,
            in_specs=(PartitionSpec(AXIS), *jax.tree.map(_spec_of, tuple(arguments))),
            out_specs=jax.tree.map(_spec_of, outputs),
            check_vma=False,
        )
        compiled = jax.jit(mapped, donate_argnums=donate).lower(abstract, *arguments).compile()
        rows = jax.make_array_from_callback(
            offsets.shape, sharding, lambda index: offsets[index], dtype=offsets.dtype
        )
        executable = Executable(name=name, on=on, run=compiled, table=rows)
        self._programs.append(executable)
        return executable

    def _compile_first(self) -> Executable | None:
        """A program that makes every exchange of the schedule with one value."""
        used = sorted({d for b in self.schedule.batches for d in (*b.holding, *b.receiving)})
        permutations = list(dict.fromkeys(e.pairs for e in self.schedule.exchanges))
        on = self._flat(used)
        if not permutations or not on.is_local:
            return None

        def body(row: jax.Array) -> jax.Array:
            value = row[:1]
            for pairs in permutations:
                value = send({"": value}, pairs, on.rows)[""]
            return value

        table = OffsetTable(used)
        return self._program("first", on, table, body, [], on.abstract((1,), "int32"))

    def _compile_fused(self, batch: Batch) -> FusedBatch:
        on, table = self._flat(batch.receiving), OffsetTable(batch.receiving)
        shapes = self._shapes(batch.leaves)
        copies = self._boxes.local_copies(batch.leaves, table)
        groups = [[self._exchange(e, table, table) for e in group] for group in batch.groups]

        def body(row: jax.Array, sources: Blocks) -> Blocks:
            targets = copies.run(sources, shapes, row)
            for group in groups:
                received = [
                    send(e.pack(targets if e.forwards else sources, shapes, row), e.pairs, on.rows)
                    for e in group
                ]
                for exchange, payload in zip(group, received, strict=True):
                    targets = exchange.unpack(payload, targets, shapes, row)
                # The next group waits, so that its buffers can take the place of these.
                sources, targets = lax.optimization_barrier((sources, targets))
            return targets

        held = {i: on.abstract(s.source, s.source_dtype) for i, s in shapes.items()}
        new = {i: on.abstract(s.target, s.target_dtype) for i, s in shapes.items()}
        return FusedBatch(batch=batch, program=self._program("fused", on, table, body, [held], new))

    def _compile_staged(self, batch: Batch) -> StagedBatch:
        receiving = self._flat(batch.receiving)
        return StagedBatch(
            batch=batch,
            receiving=receiving,
            begin=self._compile_begin(batch),
            groups=tuple(self._compile_group(batch, group, receiving) for group in batch.groups),
        )

    def _compile_begin(self, batch: Batch) -> tuple[Executable, ...]:
        """What makes the new blocks: from the old ones where a device has a part, else zeros."""
        shapes = self._shapes(batch.leaves)
        some = {d for leaf in batch.leaves for d in self.schedule.kept[leaf].copied}
        old = [d for d in batch.receiving if d in some]
        fresh = [d for d in batch.receiving if d not in some]
        programs: list[Executable] = []
        if old and (on := self._flat(old)).is_local:
            table = OffsetTable(old)
            copies = self._boxes.local_copies(batch.leaves, table)
            held = {i: on.abstract(s.source, s.source_dtype) for i, s in shapes.items()}
            new = {i: on.abstract(s.target, s.target_dtype) for i, s in shapes.items()}
            programs.append(self._program("local", on, table, _local(copies, shapes), [held], new))
        if fresh and (on := self._flat(fresh)).is_local:
            new = {i: on.abstract(s.target, s.target_dtype) for i, s in shapes.items()}
            none = LocalCopies(reads=(), writes=())
            body = _zeros(none, shapes)
            programs.append(self._program("zeros", on, OffsetTable(fresh), body, [], new))
        return tuple(programs)

    def _compile_group(
        self, batch: Batch, group: Sequence[Exchange], receiving: FlatMesh
    ) -> GroupPrograms:
        leaves = tuple(sorted({p.leaf for e in group for p in e.parts}))
        shapes = self._shapes(leaves)
        forwards = group[0].forwards
        senders = self._flat(sorted({s for e in group for s, _ in e.pairs}))
        everyone = self._flat(sorted({*batch.holding, *batch.receiving}))
        reading, writing = OffsetTable(senders.devices), OffsetTable(receiving.devices)
        exchanges = [self._exchange(e, reading, writing) for e in group]
        payloads = tuple(e.payload_shapes(shapes) for e in exchanges)

        def pack(row: jax.Array, blocks: Blocks) -> list[Payload]:
            return [e.pack(blocks, shapes, row) for e in exchanges]

        def permute(row: jax.Array, sent: list[Payload]) -> list[Payload]:
            del row
            return [
                send(p, e.pairs, everyone.rows) for e, p in zip(exchanges, sent, strict=True)
            ]

        def unpack(row: jax.Array, arrived: list[Payload], targets: Blocks) -> Blocks:
            for exchange, payload in zip(exchanges, arrived, strict=True):
                targets = exchange.unpack(payload, targets, shapes, row)
            return targets

        def buffers(on: FlatMesh) -> list[dict[str, jax.ShapeDtypeStruct]]:
            return [{k: on.abstract((n,), k) for k, n in p.items()} for p in payloads]

        read_from = {
            i: senders.abstract(s.target, s.target_dtype)
            if forwards
            else senders.abstract(s.source, s.source_dtype)
            for i, s in shapes.items()
        }
        new = {i: receiving.abstract(s.target, s.target_dtype) for i, s in shapes.items()}
        program = self._program
        none = OffsetTable(everyone.devices)
        return GroupPrograms(
            leaves_read=leaves,
            leaves_written=leaves,
            forwards=forwards,
            payloads=payloads,
            senders=senders,
            everyone=everyone,
            pack=program("pack", senders, reading, pack, [read_from], buffers(senders))
            if senders.is_local
            else None,
            permute=program(
                "permute", everyone, none, permute, [buffers(everyone)], buffers(everyone)
            )
            if everyone.is_local
            else None,
            unpack=program(
                "unpack", receiving, writing, unpack, [buffers(receiving), new], new, (2,)
            )
            if receiving.is_local
            else None,
        )

    def _exchange(
        self, exchange: Exchange, reading: OffsetTable, writing: OffsetTable
    ) -> ExchangeBoxes:
        return ExchangeBoxes(
            pairs=exchange.pairs,
            reads=self._boxes.reads(exchange, reading),
            writes=self._boxes.writes(exchange, writing),
            forwards=exchange.forwards,
        )


def _local(copies: LocalCopies, shapes: Mapping[int, LeafShape]) -> Callable[..., Blocks]:
    return lambda row, sources: copies.run(sources, shapes, row)


def _zeros(none: LocalCopies, shapes: Mapping[int, LeafShape]) -> Callable[..., Blocks]:
    return lambda row: none.run({}, shapes, row)


def _spec_of(value: jax.ShapeDtypeStruct) -> PartitionSpec:
    return spec(value.shape)

