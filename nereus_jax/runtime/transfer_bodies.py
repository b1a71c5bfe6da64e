"""The device programs of a transfer: what runs on one device, written for all of them at once.

Every program is a `shard_map` over a flat mesh. Where a device reads and writes depends on the
device, so the offsets are an argument, one row of integers for each device, and the program is the
same for all. Offsets that all devices share are constants, which lets XLA copy whole rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nereus_jax.core.tiling import LeafTiling, same_blocks
from nereus_jax.core.transfer import Batch, Exchange, Part, TransferSchedule

AXIS = "d"
"""The one axis of the flat mesh."""

Blocks = dict[int, jax.Array]
"""Leaf -> this device's block."""
Payload = dict[str, jax.Array]
"""Dtype and shape of parts -> those that this device sends or has received, stacked."""


class OffsetTable:
    """Integers that differ from device to device, as the columns of one array [devices, K]."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.rows: Mapping[int, int] = {d: i for i, d in enumerate(devices)}
        self._columns: list[np.ndarray] = []

    def add(self, devices: Sequence[int], values: np.ndarray) -> "Column":
        """A value for some devices; the others do not care."""
        first = int(values[0]) if len(values) else 0
        if (values == first).all():
            return Column(constant=first)
        column = np.zeros(len(self.rows), np.int32)
        column[[self.rows[d] for d in devices]] = values
        self._columns.append(column)
        return Column(index=len(self._columns) - 1)

    def mask(self, devices: Sequence[int]) -> "Column":
        """1 for these devices, 0 for the others."""
        everyone = tuple(self.rows)
        return self.add(everyone, np.isin(everyone, devices).astype(np.int32))

    def array(self) -> np.ndarray:
        """All columns, [devices, K]; K is at least 1."""
        columns = self._columns or [np.zeros(len(self.rows), np.int32)]
        return np.stack(columns, axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A number of this device: a constant, or a column of the table."""

    index: int = -1
    constant: int = 0

    def read(self, row: jax.Array) -> jax.Array | int:
        """The number; `row` is this device's row of the table."""
        return self.constant if self.index < 0 else row[self.index]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoxAt:
    """A box of a fixed shape inside this device's block."""

    leaf: int
    extent: tuple[int, ...]
    offset: tuple[Column, ...]
    active: Column
    """Whether this device takes part."""

    def read(self, block: jax.Array, row: jax.Array) -> jax.Array:
        """The values in the box."""
        if self.extent == block.shape:
            return block
        return lax.dynamic_slice(block, [c.read(row) for c in self.offset], self.extent)

    def write(self, block: jax.Array, values: jax.Array, row: jax.Array) -> jax.Array:
        """The block with the values in the box, if this device is active."""
        if self.active.index >= 0:
            is_active = self.active.read(row) > 0
            values = jnp.where(is_active, values, self.read(block, row))
        if self.extent == block.shape:
            return values
        return lax.dynamic_update_slice(block, values, [c.read(row) for c in self.offset])


def box_at(
    table: OffsetTable,
    leaf: int,
    extent: tuple[int, ...],
    devices: Sequence[int],
    starts: np.ndarray,
    tiling: LeafTiling,
    position_of: Mapping[int, tuple[int, ...]],
) -> BoxAt:
    """A box given by its logical start [devices, D] in the blocks of these devices."""
    positions = np.array([position_of[d] for d in devices], np.int64).reshape(starts.shape)
    local = starts - positions * np.array(tiling.local_shape, np.int64)
    return BoxAt(
        leaf=leaf,
        extent=extent,
        offset=tuple(table.add(devices, local[:, d]) for d in range(local.shape[1])),
        active=table.mask(devices),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafShape:
    """What a program has to know of a leaf's blocks.

    Attributes:
      source, target: shapes of the blocks.
      source_dtype, target_dtype: of the values.
      source_held, target_held: of the programs' arguments and results: those, or their bits.
    """

    source: tuple[int, ...]
    source_dtype: str
    source_held: str
    target: tuple[int, ...]
    target_dtype: str
    target_held: str

    @property
    def wire_dtype(self) -> str:
        """The dtype that travels: the smaller of the two."""
        source, target = jnp.dtype(self.source_dtype), jnp.dtype(self.target_dtype)
        return self.source_dtype if source.itemsize < target.itemsize else self.target_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalCopies:
    """Boxes that stay on their device."""

    reads: tuple[BoxAt, ...]
    writes: tuple[BoxAt, ...]

    def run(self, sources: Blocks, shapes: Mapping[int, LeafShape], row: jax.Array) -> Blocks:
        """The new blocks of all leaves: zeros, and what the devices have of them."""
        targets = {i: jnp.zeros(shape.target, shape.target_held) for i, shape in shapes.items()}
        for read, write in zip(self.reads, self.writes, strict=True):
            shape = shapes[read.leaf]
            values = read.read(sources[read.leaf], row)
            values = recast(values, shape.source_dtype, shape.target_dtype, shape.target_held)
            targets[write.leaf] = write.write(targets[write.leaf], values, row)
        return targets


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeBoxes:
    """One permutation: where its packed parts are read and written."""

    pairs: tuple[tuple[int, int], ...]
    reads: tuple[BoxAt, ...]
    writes: tuple[BoxAt, ...]
    forwards: bool
    """Whether the senders read their new blocks."""

    def pack(self, sources: Blocks, shapes: Mapping[int, LeafShape], row: jax.Array) -> Payload:
        """What this device sends."""
        payload = {key: jnp.zeros(*shape) for key, shape in self.payload_shapes(shapes).items()}
        used = dict.fromkeys(payload, 0)
        for read in self.reads:
            shape = shapes[read.leaf]
            wire, kind = shape.wire_dtype, wire_kind(shape.wire_dtype)
            dtype = shape.target_dtype if self.forwards else shape.source_dtype
            values = recast(read.read(sources[read.leaf], row), dtype, wire, kind)
            key = payload_key(kind, read.extent)
            at = (used[key], *[0] * len(read.extent))
            payload[key] = lax.dynamic_update_slice(payload[key], values[None], at)
            used[key] += 1
        return payload

    def unpack(
        self,
        payload: Payload,
        targets: Blocks,
        shapes: Mapping[int, LeafShape],
        row: jax.Array,
    ) -> Blocks:
        """The blocks with what this device received."""
        targets = dict(targets)
        used = dict.fromkeys(payload, 0)
        for write in self.writes:
            shape = shapes[write.leaf]
            key = payload_key(wire_kind(shape.wire_dtype), write.extent)
            values = payload[key][used[key]]
            used[key] += 1
            values = recast(values, shape.wire_dtype, shape.target_dtype, shape.target_held)
            targets[write.leaf] = write.write(targets[write.leaf], values, row)
        return targets

    def payload_shapes(
        self, shapes: Mapping[int, LeafShape]
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape [parts, *extent] and dtype of everything that a device sends."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for read in self.reads:
            kind = wire_kind(shapes[read.leaf].wire_dtype)
            key = payload_key(kind, read.extent)
            count = found[key][0][0] if key in found else 0
            found[key] = ((count + 1, *read.extent), kind)
        return found


def payload_key(kind: str, extent: tuple[int, ...]) -> str:
    """Parts of one dtype and shape are stacked: copying them needs no index arithmetic."""
    return f"{kind}[{','.join(map(str, extent))}]"


def send(payload: Payload, pairs: Sequence[tuple[int, int]], rows: Mapping[int, int]) -> Payload:
    """The permutation itself; devices without a sender get zeros."""
    permutation = [(rows[sender], rows[receiver]) for sender, receiver in pairs]

    def permuted(values: jax.Array) -> jax.Array:
        # Whole blocks come as they are, and XLA sends no float8_e4m3 with NCCL. On GPUs the casts
        # to bits and back cost nothing.
        bits = to_bits(values) if is_small_float(str(values.dtype)) else values
        return from_bits(lax.ppermute(bits, AXIS, permutation), str(values.dtype))

    return {k: permuted(v) for k, v in payload.items()}


def wire_kind(dtype: str) -> str:
    """The dtype whose bits travel. Small ones go as integers: no backend widens or rounds those."""
    kind = jnp.dtype(dtype)
    return str(kind) if kind.itemsize >= 4 else f"uint{8 * kind.itemsize}"


def is_small_float(dtype: str) -> bool:
    """Whether backends may compute with a wider dtype, which changes NaNs and tiny values."""
    kind = jnp.dtype(dtype)
    return kind.itemsize <= 2 and jnp.issubdtype(kind, jnp.floating)


def recast(values: jax.Array, source: str, target: str, held: str) -> jax.Array:
    """Values of dtype `source`, or their bits, as dtype `target`, held as that or as its bits."""
    if source != target:
        values = from_bits(values, source).astype(target)
    return from_bits(values, target) if held == target else to_bits(values)


def to_bits(values: jax.Array) -> jax.Array:
    """The values as unsigned integers of the same size."""
    kind = wire_kind(str(values.dtype))
    if values.dtype == jnp.bool_:
        return values.astype(kind)
    return values if str(values.dtype) == kind else lax.bitcast_convert_type(values, kind)


def from_bits(values: jax.Array, dtype: str) -> jax.Array:
    """The inverse of `to_bits`."""
    if dtype == "bool":
        return values.astype(dtype)
    return values if str(values.dtype) == dtype else lax.bitcast_convert_type(values, dtype)


class BoxMaker:
    """Turns a schedule's boxes into boxes inside the blocks of devices."""

    def __init__(self, schedule: TransferSchedule, *, as_bits: bool) -> None:
        """Takes a schedule.

        Args:
          schedule: what moves.
          as_bits: whether programs hold small floats as integers of the same bits.
        """
        self._schedule = schedule
        self._as_bits = as_bits
        self._index = {d: i for i, d in enumerate(schedule.devices)}
        self._positions: dict[tuple[int, int], Mapping[int, tuple[int, ...]]] = {}

    def shape(self, leaf: int) -> LeafShape:
        """Blocks of a leaf at both ends."""
        source, target = self._schedule.sources[leaf], self._schedule.targets[leaf]
        return LeafShape(
            source=source.local_shape,
            source_dtype=source.dtype,
            source_held=self.held_dtype(source.dtype),
            target=target.local_shape,
            target_dtype=target.dtype,
            target_held=self.held_dtype(target.dtype),
        )

    def held_dtype(self, dtype: str) -> str:
        """The dtype in which programs hold blocks of this one."""
        return wire_kind(dtype) if self._as_bits and is_small_float(dtype) else dtype

    def local_copies(self, leaves: Sequence[int], table: OffsetTable) -> LocalCopies:
        """What the devices of the table have of these leaves already."""
        reads: list[BoxAt] = []
        writes: list[BoxAt] = []
        for leaf in leaves:
            kept = self._schedule.kept[leaf]
            by_extent: dict[tuple[int, ...], list[int]] = {}
            for row, device in enumerate(kept.copied):
                if device in table.rows:
                    extent = tuple(int(n) for n in kept.extents[row])
                    by_extent.setdefault(extent, []).append(row)
            for extent, rows in by_extent.items():
                devices, starts = [kept.copied[r] for r in rows], kept.starts[rows]
                reads.append(self._box(table, leaf, extent, devices, starts, is_source=True))
                writes.append(self._box(table, leaf, extent, devices, starts, is_source=False))
        return LocalCopies(reads=tuple(reads), writes=tuple(writes))

    def exchange(
        self,
        exchange: Exchange,
        reading: OffsetTable,
        writing: OffsetTable,
        whole: frozenset[int] = frozenset(),
    ) -> ExchangeBoxes:
        """Where senders read and receivers write; leaves that go as whole blocks are left out."""
        senders, receivers = zip(*exchange.pairs, strict=True)
        parts = [p for p in exchange.parts if p.leaf not in whole]
        from_source = not exchange.forwards
        return ExchangeBoxes(
            pairs=exchange.pairs,
            reads=tuple(self._part(reading, p, senders, is_source=from_source) for p in parts),
            writes=tuple(self._part(writing, p, receivers, is_source=False) for p in parts),
            forwards=exchange.forwards,
        )

    def whole_blocks(self, batch: Batch) -> frozenset[int]:
        """Leaves of which every device gets a block that another device has, as it is."""
        schedule = self._schedule
        cut = {
            part.leaf
            for group in batch.groups
            for exchange in group
            for part in exchange.parts
            if part.extent != schedule.targets[part.leaf].local_shape
        }
        arriving: dict[int, set[int]] = {}
        for exchange in (e for group in batch.groups for e in group):
            for part in exchange.parts:
                receivers = (receiver for _, receiver in exchange.pairs)
                arriving.setdefault(part.leaf, set()).update(receivers)
        # Where a block is padding alone, nothing arrives, and it has to be made.
        return frozenset(
            leaf
            for leaf in set(arriving) - cut
            if same_blocks(schedule.sources[leaf], schedule.targets[leaf])
            and not schedule.kept[leaf].copied
            and arriving[leaf] == set(schedule.kept[leaf].receiving)
        )

    def _part(
        self, table: OffsetTable, part: Part, devices: Sequence[int], *, is_source: bool
    ) -> BoxAt:
        return self._box(table, part.leaf, part.extent, devices, part.starts, is_source=is_source)

    def _box(
        self,
        table: OffsetTable,
        leaf: int,
        extent: tuple[int, ...],
        devices: Sequence[int],
        starts: np.ndarray,
        *,
        is_source: bool,
    ) -> BoxAt:
        tilings = self._schedule.sources if is_source else self._schedule.targets
        tiling = tilings[leaf]
        return box_at(table, leaf, extent, devices, starts, tiling, self._where(tiling))

    def _where(self, tiling: LeafTiling) -> Mapping[int, tuple[int, ...]]:
        # Leaves that lie alike share their tuples, which the schedule keeps alive.
        key = id(tiling.devices), id(tiling.positions)
        if key not in self._positions:
            self._positions[key] = {
                self._index[d]: p for d, p in zip(tiling.devices, tiling.positions, strict=True)
            }
        return self._positions[key]
