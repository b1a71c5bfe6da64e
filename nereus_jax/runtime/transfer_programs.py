"""The compiled programs of a transfer.

Where the devices that hold the leaves of a batch are also those that get the new blocks, one
program does everything. Else the blocks of the two ends do not fit one program (each device of a
program needs blocks of all its arguments), and a batch takes three small ones per group of
exchanges: the senders pack, all devices permute the packed buffers, the receivers unpack. So
nothing larger than a packed buffer is ever allocated on a device for the sake of others.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.transfer import Batch, Exchange, TransferSchedule
from nereus_jax.runtime.flat_mesh import Executable, FlatMesh, spec
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

PayloadShapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Key of a payload's array -> its shape on a device and its dtype."""


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
      payloads: of each exchange, the packed parts that a device sends.
      sent: of each exchange, everything that a device sends: packed parts, and whole blocks.
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
    sent: tuple[PayloadShapes, ...]
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
      cut: leaves whose new blocks are put together from parts.
      begin: programs that make the new blocks, where the first group cannot.
      groups: in order.
    """

    batch: Batch
    cut: tuple[int, ...]
    begin: tuple[Executable, ...]
    groups: tuple[GroupPrograms, ...]


def whole_key(leaf: int) -> str:
    """The key, in what an exchange sends, of a block that travels as it is."""
    return f"leaf {leaf}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
    """A group of exchanges on its meshes, before compilation."""

    exchanges: tuple[ExchangeBoxes, ...]
    shapes: Mapping[int, LeafShape]
    payloads: tuple[PayloadShapes, ...]
    copies: LocalCopies | None
    """What the devices have of the new blocks; None where these are there already."""

    def pack(self, row: jax.Array, blocks: Blocks) -> list[Payload]:
        """What this device sends in each exchange."""
        return [e.pack(blocks, self.shapes, row) for e in self.exchanges]

    def unpack(self, row: jax.Array, arrived: list[Payload], blocks: Blocks) -> Blocks:
        """The new blocks with what this device received."""
        targets = blocks if self.copies is None else self.copies.run(blocks, self.shapes, row)
        for exchange, payload in zip(self.exchanges, arrived, strict=True):
            targets = exchange.unpack(payload, targets, self.shapes, row)
        return targets


class TransferCompiler:
    """Compiles the batches of a schedule."""

    def __init__(
        self,
        schedule: TransferSchedule,
        handles: Mapping[DeviceId, DeviceHandle],
        boxes: BoxMaker,
    ) -> None:
        self._schedule = schedule
        self._handles = handles
        self._boxes = boxes
        self.programs: list[Executable] = []

    def batches(self) -> tuple[FusedBatch | StagedBatch, ...]:
        """The batches that this process takes part in."""
        mine = [
            b for b in self._schedule.batches if self._flat({*b.holding, *b.receiving}).is_local
        ]
        return tuple(
            self._fused(b) if set(b.holding) == set(b.receiving) else self._staged(b) for b in mine
        )

    def first(self) -> Executable | None:
        """A program that makes every exchange of the schedule with one value."""
        used = {d for b in self._schedule.batches for d in (*b.holding, *b.receiving)}
        permutations = list(dict.fromkeys(e.pairs for e in self._schedule.exchanges))
        if not permutations or not (on := self._flat(used)).is_local:
            return None

        def body(row: jax.Array) -> jax.Array:
            value = row[:1]
            for pairs in permutations:
                value = send({"": value}, pairs, on.rows)[""]
            return value

        table = OffsetTable(on.devices)
        return self._program("first", on, table, body, [], on.abstract((1,), "int32"))

    def _flat(self, devices: Iterable[int]) -> FlatMesh:
        return FlatMesh(sorted(devices), self._schedule, self._handles)

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
        self.programs.append(executable)
        return executable

    def _fused(self, batch: Batch) -> FusedBatch:
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

        held = self._abstract(on, batch.leaves, is_new=False)
        new = self._abstract(on, batch.leaves, is_new=True)
        return FusedBatch(batch=batch, program=self._program("fused", on, table, body, [held], new))

    def _staged(self, batch: Batch) -> StagedBatch:
        """Programs for two ends on different devices.

        The first group's `unpack` makes the new blocks if it can: where no device has a part of
        its own, or all have; else programs of their own make them.
        """
        whole = self._boxes.whole_blocks(batch)
        cut = [leaf for leaf in batch.leaves if leaf not in whole]
        some = {d for leaf in cut for d in self._schedule.kept[leaf].copied}
        old = [d for d in batch.receiving if d in some]
        all_hold = set(batch.receiving) <= set(batch.holding)
        packed = bool(batch.groups) and any(
            p.leaf in set(cut) for e in batch.groups[0] for p in e.parts
        )
        begins = packed and (not old or all_hold)
        return StagedBatch(
            batch=batch,
            cut=tuple(cut),
            begin=() if begins or not cut else self._begin(batch, cut, old),
            groups=tuple(
                self._group(batch, group, whole, cut if begins and not i else None, bool(old))
                for i, group in enumerate(batch.groups)
            ),
        )

    def _begin(
        self, batch: Batch, cut: Sequence[int], old: Sequence[int]
    ) -> tuple[Executable, ...]:
        """What makes the new blocks: from the old ones where a device has a part, else zeros."""
        shapes = self._shapes(cut)
        programs: list[Executable] = []
        if old and (on := self._flat(old)).is_local:
            table = OffsetTable(old)
            copies = self._boxes.local_copies(cut, table)
            held, new = self._abstract(on, cut, is_new=False), self._abstract(on, cut, is_new=True)
            programs.append(
                self._program("local", on, table, _copying(copies, shapes), [held], new)
            )
        fresh = [d for d in batch.receiving if d not in set(old)]
        if fresh and (on := self._flat(fresh)).is_local:
            zeros = _copying(LocalCopies(reads=(), writes=()), shapes)
            new = self._abstract(on, cut, is_new=True)
            programs.append(self._program("zeros", on, OffsetTable(fresh), zeros, [{}], new))
        return tuple(programs)

    def _group(
        self,
        batch: Batch,
        group: Sequence[Exchange],
        whole: frozenset[int],
        begins: Sequence[int] | None,
        has_old: bool,
    ) -> GroupPrograms:
        """The three programs of a group.

        Args:
          batch: that it belongs to.
          group: its exchanges.
          whole: leaves whose blocks travel as they are.
          begins: the leaves whose new blocks it makes; None: they are there.
          has_old: whether it makes them from old blocks.
        """
        leaves = sorted({p.leaf for e in group for p in e.parts})
        packed = tuple(leaf for leaf in leaves if leaf not in whole)
        made = packed if begins is None else tuple(begins)
        senders = self._flat({s for e in group for s, _ in e.pairs})
        receiving = self._flat(batch.receiving)
        reading, writing = OffsetTable(senders.devices), OffsetTable(receiving.devices)
        shapes = self._shapes(made)
        exchanges = tuple(self._boxes.exchange(e, reading, writing, whole) for e in group)
        boxes = _Group(
            exchanges=exchanges,
            shapes=shapes,
            payloads=tuple(e.payload_shapes(shapes) for e in exchanges),
            copies=None if begins is None else self._boxes.local_copies(made, writing),
        )
        held = made if begins is not None and has_old else ()
        sent = [self._sent(e, p, whole) for e, p in zip(group, boxes.payloads, strict=True)]
        everyone = self._flat({*batch.holding, *batch.receiving})
        return GroupPrograms(
            exchanges=tuple(group),
            whole=whole & set(leaves),
            packed=packed,
            payloads=boxes.payloads,
            sent=tuple(sent),
            senders=senders,
            everyone=everyone,
            pack=self._pack(boxes, senders, reading, packed, group[0].forwards),
            permute=self._permute(group, sent, everyone),
            unpack=self._unpack(boxes, receiving, writing, packed, made, held),
            begins=begins is not None,
            held=held,
        )

    def _pack(
        self,
        group: _Group,
        on: FlatMesh,
        table: OffsetTable,
        packed: Sequence[int],
        forwards: bool,
    ) -> Executable | None:
        if not packed or not on.is_local:
            return None
        blocks = self._abstract(on, packed, is_new=forwards)
        return self._program("pack", on, table, group.pack, [blocks], _buffers(on, group.payloads))

    def _permute(
        self, group: Sequence[Exchange], sent: Sequence[PayloadShapes], on: FlatMesh
    ) -> Executable | None:
        if not on.is_local:
            return None

        def body(row: jax.Array, payloads: list[Payload]) -> list[Payload]:
            del row
            return [send(p, e.pairs, on.rows) for e, p in zip(group, payloads, strict=True)]

        buffers = _buffers(on, sent)
        return self._program("permute", on, OffsetTable(on.devices), body, [buffers], buffers)

    def _unpack(
        self,
        group: _Group,
        on: FlatMesh,
        table: OffsetTable,
        packed: Sequence[int],
        made: Sequence[int],
        held: Sequence[int],
    ) -> Executable | None:
        if not packed or not on.is_local:
            return None
        new = self._abstract(on, made, is_new=True)
        begins = group.copies is not None
        blocks = self._abstract(on, held, is_new=False) if begins else new
        arguments = [_buffers(on, group.payloads), blocks]
        donate = () if begins else (2,)
        return self._program("unpack", on, table, group.unpack, arguments, new, donate)

    def _sent(
        self, exchange: Exchange, payload: PayloadShapes, whole: frozenset[int]
    ) -> PayloadShapes:
        """Packed parts and whole blocks of an exchange."""
        leaves = sorted(whole & {p.leaf for p in exchange.parts})
        shapes = {leaf: self._boxes.shape(leaf) for leaf in leaves}
        blocks = {whole_key(leaf): (s.source, s.source_held) for leaf, s in shapes.items()}
        return {**payload, **blocks}

    def _shapes(self, leaves: Sequence[int]) -> dict[int, LeafShape]:
        return {leaf: self._boxes.shape(leaf) for leaf in leaves}

    def _abstract(
        self, on: FlatMesh, leaves: Sequence[int], *, is_new: bool
    ) -> dict[int, jax.ShapeDtypeStruct]:
        return {
            leaf: on.abstract(s.target, s.target_held)
            if is_new
            else on.abstract(s.source, s.source_held)
            for leaf, s in self._shapes(leaves).items()
        }


def _copying(copies: LocalCopies, shapes: Mapping[int, LeafShape]) -> Callable[..., Blocks]:
    return lambda row, sources: copies.run(sources, shapes, row)


def _buffers(
    on: FlatMesh, payloads: Sequence[PayloadShapes]
) -> list[dict[str, jax.ShapeDtypeStruct]]:
    return [{key: on.abstract(*shape) for key, shape in p.items()} for p in payloads]


def _spec_of(value: jax.ShapeDtypeStruct) -> PartitionSpec:
    return spec(value.shape)
