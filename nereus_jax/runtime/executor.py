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
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.transfer import Batch, Exchange, TransferSchedule
from nereus_jax.runtime.host import aligned_empty
from nereus_jax.runtime.transfer_bodies import (
    AXIS,
    Blocks,
    BoxMaker,
    LeafShape,
    LocalCopies,
    OffsetTable,
    Payload,
    send,
)
from nereus_jax.runtime.world import DeviceHandle

MAX_IN_FLIGHT = 8
"""Programs that may be unfinished: more than 32 collective ones deadlock emulated CPU devices."""

PayloadShapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Key of a payload's array -> its shape on a device and its dtype."""

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
            d: blocks[d] if d in blocks else _unused(local_shape, dtype, handle)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedBatch:
    """A batch in one program."""

    batch: Batch
    program: Executable


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPrograms:
    """The programs of a group of exchanges; None where this process takes no part.

    Attributes:
      exchanges: the group.
      whole: leaves whose blocks travel as they are, without packing.
      packed: leaves with parts that are packed.
      payloads: of each exchange, what a device sends beside whole blocks.
      senders: devices that pack.
      everyone: devices of the permutation.
      unpack: on the devices that get new blocks; `None` if nothing is packed.
      begins: `unpack` makes the new blocks of the whole batch, out of nothing or from `held`.
      held: leaves whose old blocks `unpack` takes for that.
    """

    exchanges: tuple[Exchange, ...]
    whole: frozenset[int]
    packed: tuple[int, ...]
    payloads: tuple[PayloadShapes, ...]
    senders: FlatMesh
    everyone: FlatMesh
    pack: Executable | None
    permute: Executable | None
    unpack: Executable | None
    begins: bool
    held: tuple[int, ...]

    @property
    def forwards(self) -> bool:
        return self.exchanges[0].forwards


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedBatch:
    """A batch whose two ends lie on different devices.

    Attributes:
      batch: what moves.
      begin: programs that make the new blocks, where the first group cannot.
      groups: in order.
    """

    batch: Batch
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
        mine = [b for b in schedule.batches if self._flat({*b.holding, *b.receiving}).is_local]
        self._batches = tuple(self._compile(batch) for batch in mine)
        self._first = self._compile_first()
        self.compile_s = time.perf_counter() - start_s

    @property
    def programs(self) -> tuple[Executable, ...]:
        """Everything that was compiled, in order of dispatch."""
        return tuple(self._programs)

    @property
    def temp_bytes(self) -> int:
        """The largest temporary of a program on a device, as XLA counts it."""
        found = [p.compiled.memory_analysis() for p in self._programs]
        return max((m.temp_size_in_bytes for m in found if m is not None), default=0)

    def set_up(self) -> float:
        """Seconds of a first exchange between the devices, one value each.

        Backends set up communicators and connections on first use; here that is done, and timed,
        apart from the state that will move.
        """
        if self._first is None:
            return 0.0
        program = self._first
        start_s = time.perf_counter()
        jax.block_until_ready(program())
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
        for leaf, array in program(arguments).items():
            found[leaf] = program.on.blocks(array)

    def _run_staged(
        self, staged: StagedBatch, sources: Sequence[DeviceBlocks], found: list[DeviceBlocks]
    ) -> None:
        for program in staged.begin:
            arguments = []
            if program.name == "local":
                held = self._held(self._cut(staged.batch))
                arguments.append(self._bind(program.on, sources, held))
            outputs = program(*arguments)
            for leaf, array in outputs.items():
                found[leaf] |= program.on.blocks(array)
        for number, group in enumerate(staged.groups):
            sent = self._pack(group, sources, found)
            if group.permute is None:
                continue
            on = group.everyone
            received = group.permute(self._buffers(group, sent))
            del sent
            if number % MAX_IN_FLIGHT == MAX_IN_FLIGHT - 1:
                jax.block_until_ready(received)
            arrived: list[dict[str, DeviceBlocks]] = [
                {key: on.blocks(array) for key, array in payload.items()} for payload in received
            ]
            for exchange, payload in zip(group.exchanges, arrived, strict=True):
                receivers = {receiver for _, receiver in exchange.pairs}
                for leaf in group.whole:
                    block = payload.pop(_whole_key(leaf), {})
                    found[leaf] |= {d: x for d, x in block.items() if d in receivers}
            if group.unpack is not None:
                self._unpack(group, group.unpack, arrived, sources, found)

    def _pack(
        self, group: GroupPrograms, sources: Sequence[DeviceBlocks], found: list[DeviceBlocks]
    ) -> list[dict[str, DeviceBlocks]]:
        """What each exchange sends, by key and device: whole blocks, and packed parts."""
        blocks = found if group.forwards else sources
        sent: list[dict[str, DeviceBlocks]] = []
        for exchange in group.exchanges:
            leaves = {p.leaf for p in exchange.parts}
            sent.append({_whole_key(leaf): blocks[leaf] for leaf in group.whole & leaves})
        if group.pack is not None:
            shapes = self._new(group.packed) if group.forwards else self._held(group.packed)
            packed = group.pack(self._bind(group.senders, blocks, shapes))
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
            for shapes, blocks in zip(self._payloads(group), sent, strict=True)
        ]

    def _unpack(
        self,
        group: GroupPrograms,
        unpack: Executable,
        arrived: Sequence[Mapping[str, DeviceBlocks]],
        sources: Sequence[DeviceBlocks],
        found: list[DeviceBlocks],
    ) -> None:
        payloads = [
            {key: unpack.on.bind(blocks, shapes[key][0]) for key, blocks in payload.items()}
            for shapes, payload in zip(group.payloads, arrived, strict=True)
        ]
        if group.begins:
            blocks = self._bind(unpack.on, sources, self._held(group.held))
        else:
            blocks = self._bind(unpack.on, found, self._new(group.packed))
        for leaf, array in unpack(payloads, blocks).items():
            found[leaf] = unpack.on.blocks(array)

    def _payloads(self, group: GroupPrograms) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        """Everything that each exchange sends: packed parts, and whole blocks."""
        found: list[dict[str, tuple[tuple[int, ...], str]]] = []
        for exchange, payload in zip(group.exchanges, group.payloads, strict=True):
            whole = sorted(group.whole & {p.leaf for p in exchange.parts})
            blocks = {_whole_key(i): self._boxes.shape(i) for i in whole}
            found.append(dict(payload) | {k: (s.source, s.source_dtype) for k, s in blocks.items()})
        return found

    def _held(self, leaves: Sequence[int]) -> dict[int, tuple[int, ...]]:
        return {leaf: self.schedule.sources[leaf].local_shape for leaf in leaves}

    def _new(self, leaves: Sequence[int]) -> dict[int, tuple[int, ...]]:
        return {leaf: self.schedule.targets[leaf].local_shape for leaf in leaves}

    def _cut(self, batch: Batch) -> list[int]:
        """The leaves of a batch whose new blocks are put together from parts."""
        whole = self._boxes.whole_blocks(batch)
        return [leaf for leaf in batch.leaves if leaf not in whole]

    def _bind(
        self,
        on: FlatMesh,
        blocks: Sequence[DeviceBlocks],
        wanted: Mapping[int, tuple[int, ...]],
    ) -> Blocks:
        return {leaf: on.bind(blocks[leaf], shape) for leaf, shape in wanted.items()}

    def _shapes(self, leaves: Sequence[int]) -> dict[int, LeafShape]:
        return {leaf: self._boxes.shape(leaf) for leaf in leaves}

    def _compile(self, batch: Batch) -> FusedBatch | StagedBatch:
        if set(batch.holding) == set(batch.receiving):
            return self._compile_fused(batch)
        return self._compile_staged(batch)

    def _flat(self, devices: Iterable[int]) -> FlatMesh:
        return FlatMesh(sorted(devices), self.schedule, self._handles)

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
        executable = Executable(name, on, compiled, offsets)
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
        groups = [[self._boxes.exchange(e, table, table) for e in g] for g in batch.groups]

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
        """Programs for two ends on different devices.

        The first group's `unpack` makes the new blocks if it can: where no device has a part of
        its own, or all have; else programs of their own make them.
        """
        cut = self._cut(batch)
        some = {d for leaf in cut for d in self.schedule.kept[leaf].copied}
        old = [d for d in batch.receiving if d in some]
        all_hold = set(batch.receiving) <= set(batch.holding)
        packed = bool(batch.groups) and any(
            p.leaf in set(cut) for e in batch.groups[0] for p in e.parts
        )
        begins = packed and (not old or all_hold)
        return StagedBatch(
            batch=batch,
            begin=() if begins or not cut else self._compile_begin(batch, cut, old),
            groups=tuple(
                self._compile_group(batch, group, cut if begins and not i else None, bool(old))
                for i, group in enumerate(batch.groups)
            ),
        )

    def _compile_begin(
        self, batch: Batch, cut: Sequence[int], old: Sequence[int]
    ) -> tuple[Executable, ...]:
        """What makes the new blocks: from the old ones where a device has a part, else zeros."""
        shapes = self._shapes(cut)
        programs: list[Executable] = []
        if old and (on := self._flat(old)).is_local:
            table = OffsetTable(old)
            copies = self._boxes.local_copies(cut, table)
            body = _local(copies, shapes)
            held, new = self._abstract(on, cut, is_new=False), self._abstract(on, cut, is_new=True)
            programs.append(self._program("local", on, table, body, [held], new))
        fresh = [d for d in batch.receiving if d not in set(old)]
        if fresh and (on := self._flat(fresh)).is_local:
            body = _zeros(shapes)
            new = self._abstract(on, cut, is_new=True)
            programs.append(self._program("zeros", on, OffsetTable(fresh), body, [], new))
        return tuple(programs)

    def _compile_group(
        self,
        batch: Batch,
        group: Sequence[Exchange],
        begins: Sequence[int] | None,
        has_old: bool,
    ) -> GroupPrograms:
        """The three programs of a group.

        Args:
          batch: that it belongs to.
          group: its exchanges.
          begins: the leaves whose new blocks it makes; None: they are there.
          has_old: whether it makes them from old blocks.
        """
        whole = self._boxes.whole_blocks(batch)
        leaves = sorted({p.leaf for e in group for p in e.parts})
        packed = tuple(leaf for leaf in leaves if leaf not in whole)
        made = packed if begins is None else tuple(begins)
        shapes = self._shapes(made)
        receiving = self._flat(batch.receiving)
        senders = self._flat({s for e in group for s, _ in e.pairs})
        everyone = self._flat({*batch.holding, *batch.receiving})
        reading, writing = OffsetTable(senders.devices), OffsetTable(receiving.devices)
        exchanges = [self._boxes.exchange(e, reading, writing, whole) for e in group]
        copies = self._boxes.local_copies(made if begins is not None else (), writing)
        held = made if begins is not None and has_old else ()
        programs = GroupPrograms(
            exchanges=tuple(group),
            whole=whole & set(leaves),
            packed=packed,
            payloads=tuple(e.payload_shapes(shapes) for e in exchanges),
            senders=senders,
            everyone=everyone,
            pack=None,
            permute=None,
            unpack=None,
            begins=begins is not None,
            held=held,
        )

        def pack(row: jax.Array, blocks: Blocks) -> list[Payload]:
            return [e.pack(blocks, shapes, row) for e in exchanges]

        def permute(row: jax.Array, sent: list[Payload]) -> list[Payload]:
            del row
            return [send(p, e.pairs, everyone.rows) for e, p in zip(exchanges, sent, strict=True)]

        def unpack(row: jax.Array, arrived: list[Payload], blocks: Blocks) -> Blocks:
            targets = blocks if begins is None else copies.run(blocks, shapes, row)
            for exchange, payload in zip(exchanges, arrived, strict=True):
                targets = exchange.unpack(payload, targets, shapes, row)
            return targets

        def buffers(on: FlatMesh, payloads: Sequence[PayloadShapes]) -> list[Any]:
            return [{k: on.abstract(*shape) for k, shape in p.items()} for p in payloads]

        program, payloads = self._program, programs.payloads
        new = self._abstract(receiving, made, is_new=True)
        if packed and senders.is_local:
            blocks = self._abstract(senders, packed, is_new=programs.forwards)
            out = buffers(senders, payloads)
            compiled = program("pack", senders, reading, pack, [blocks], out)
            programs = dataclasses.replace(programs, pack=compiled)
        if everyone.is_local:
            sent = buffers(everyone, self._payloads(programs))
            none = OffsetTable(everyone.devices)
            compiled = program("permute", everyone, none, permute, [sent], sent)
            programs = dataclasses.replace(programs, permute=compiled)
        if packed and receiving.is_local:
            old = self._abstract(receiving, held, is_new=False) if begins is not None else new
            arguments = [buffers(receiving, payloads), old]
            donate = () if begins is not None else (2,)
            compiled = program("unpack", receiving, writing, unpack, arguments, new, donate)
            programs = dataclasses.replace(programs, unpack=compiled)
        return programs

    def _abstract(
        self, on: FlatMesh, leaves: Sequence[int], *, is_new: bool
    ) -> dict[int, jax.ShapeDtypeStruct]:
        tilings = self.schedule.targets if is_new else self.schedule.sources
        return {i: on.abstract(tilings[i].local_shape, tilings[i].dtype) for i in leaves}


def _local(copies: LocalCopies, shapes: Mapping[int, LeafShape]) -> Callable[..., Blocks]:
    return lambda row, sources: copies.run(sources, shapes, row)


def _zeros(shapes: Mapping[int, LeafShape]) -> Callable[..., Blocks]:
    return lambda row: LocalCopies(reads=(), writes=()).run({}, shapes, row)


def _whole_key(leaf: int) -> str:
    return f"leaf {leaf}"


def _unused(shape: tuple[int, ...], dtype: str, handle: DeviceHandle) -> jax.Array:
    """A buffer that nobody reads. On a CPU device it takes no time: memory that is not touched."""
    if handle.platform == "cpu":
        return jax.device_put(aligned_empty(shape, jnp.dtype(dtype)), handle)
    return jnp.zeros(shape, dtype, device=handle)


def _spec_of(value: jax.ShapeDtypeStruct) -> PartitionSpec:
    return spec(value.shape)
