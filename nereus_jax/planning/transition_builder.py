"""Puts drafts together: units, phases, what they move, and what that costs."""
# pyright: reportUnknownMemberType=false
# (numpy's own types of `searchsorted` and `reduceat` are partly unknown.)

import bisect
from collections.abc import Sequence

import numpy as np

from nereus_jax.core.transition import OperationKind, Price, RecoverySource, Way
from nereus_jax.planning.transition_draft import (
    NO_UNITS,
    NONE,
    Draft,
    Family,
    Ground,
    Phase,
    Some,
    link_bytes,
)
from nereus_jax.planning.unit_bytes import Entries, Moved, Recut, recut
from nereus_jax.planning.unit_cuts import Floats, Ints, LeafClass


class DraftBuilder:
    """Collects the families and phases of a draft, and prices it.

    Args:
      ground: what all model-stages share.
      classes: the leaves of this one.
    """

    def __init__(self, ground: Ground, classes: tuple[LeafClass, ...]) -> None:
        self._ground = ground
        self._classes = classes
        self._families: list[Family] = []
        self._base: list[int] = [0]
        self._phases: list[Phase] = []
        self._known: dict[int, tuple[Ints, Ints]] = {}
        self._load_s = 0.0
        self._held = np.zeros(ground.num_devices, np.int64)
        self._peak_bytes = 0

    def add(self, family: Family) -> Ints:
        """Numbers of the units of a family."""
        base = self._base[-1]
        self._families.append(family)
        self._base.append(base + len(family.rows))
        return np.arange(base, base + len(family.rows))

    def hold(self, units: Ints) -> None:
        """These units exist at the start."""
        self._change_held(units, 1)

    def family(self, unit: int) -> Family:
        """The family of a unit."""
        return self._families[self._place(unit)]

    def rows(self, units: Ints) -> Ints:
        """[N, ranks] devices of units of one size; looked up once for an array of units."""
        known = self._known.get(id(units))
        if known is None:  # the array is kept, so that its id stays its own
            known = self._known[id(units)] = units, self._look_up(units)
        return known[1]

    def _look_up(self, units: Ints) -> Ints:
        first, last = self._place(int(units.min())), self._place(int(units.max()))
        if first == last:
            return self._families[first].rows[units - self._base[first]]
        rows = np.zeros((len(units), self._families[first].rows.shape[1]), np.int64)
        for number in range(first, last + 1):
            base, end = self._base[number], self._base[number + 1]
            here = (base <= units) & (units < end)
            if here.any():
                rows[here] = self._families[number].rows[units[here] - base]
        return rows

    def nodes(self, units: Ints) -> Ints:
        """The node of each unit's first device."""
        return self._ground.node[self.rows(units)[:, 0]] if len(units) else NO_UNITS

    def destroy(self, units: Ints) -> None:
        """A phase that gives units up, one operation each."""
        if len(units):
            self._append(OperationKind.DESTROY, NONE, Some.each(units), NONE, None)

    def refresh(self, units: Ints) -> None:
        """A phase that makes memory for units, one operation each."""
        if len(units):
            self._append(OperationKind.REFRESH, NONE, NONE, Some.each(units), None)

    def move(self, kind: OperationKind, reads: Some, consumes: Some, produces: Some) -> None:
        """A phase of transfers between devices, from units read or units consumed."""
        if not len(produces):
            return
        given = reads if len(reads) else consumes
        moved, givers, takers = self._moved(given, produces)
        seconds = _transfer_seconds(moved, givers, takers, self._ground)
        links = np.zeros((len(seconds), 5), np.int64)
        links[:, 0], links[:, 1], links[:, 2] = moved.local, moved.intra_node, moved.inter_node
        source = RecoverySource.REPLICA
        self._append(kind, reads, consumes, produces, source, seconds, links)

    def park(self, consumes: Some, produces: Some) -> None:
        """A phase that copies units to host memory."""
        mesh = self.family(int(consumes.unit[0])).mesh
        blocks = recut(self._classes, mesh, mesh).source_block
        seconds, links = self._host_cost(self._entries(consumes), blocks)
        source = RecoverySource.REPLICA
        self._append(OperationKind.PARK, NONE, consumes, produces, source, seconds, links)

    def unpark(self, consumes: Some, produces: Some, *, after_all: bool) -> None:
        """A phase that copies parked units to devices; hosts send what another one holds."""
        sources, targets = self._entries(consumes), self._entries(produces)
        table = self._recut(consumes, produces)
        seconds, links = self._host_cost(targets, table.block)
        ground = self._ground
        moved = table.moved(sources, targets, ground.node, len(seconds))
        links[:, 2] = moved.inter_node
        seconds = seconds + moved.receive_inter_node / ground.hardware.inter_node.bytes_per_s
        kind, source = OperationKind.UNPARK, RecoverySource.REPLICA
        self._append(kind, NONE, consumes, produces, source, seconds, links, after_all)

    def restore(self, produces: Some, source: RecoverySource) -> None:
        """A phase that reads units from a host snapshot or a checkpoint."""
        mesh = self.family(int(produces.unit[0])).mesh
        blocks = recut(self._classes, mesh, mesh).block
        seconds, links = self._host_cost(self._entries(produces), blocks)
        if source is RecoverySource.CHECKPOINT:
            total, largest = _by_operation(self._entries(produces), blocks)
            links[:, 4] = total
            seconds = seconds + largest / self._ground.budget.storage_bytes_per_s
        self._append(OperationKind.RESTORE, NONE, NONE, produces, source, seconds, links)

    def draft(self, way: Way, initial: Ints, final: Ints, reason: str) -> Draft:
        """What was collected."""
        links = np.zeros(5, np.int64)
        for phase in self._phases:
            links += phase.links.sum(axis=0)
        return Draft(
            way=way,
            families=tuple(self._families),
            phases=tuple(self._phases),
            initial=initial,
            final=final,
            price=Price(
                seconds=self._load_s,
                link_bytes=link_bytes(links.tolist()),
                peak_bytes=self._peak_bytes,
            ),
            reason=reason,
        )

    def _moved(self, given: Some, produces: Some) -> tuple[Moved, Ints, Ints]:
        """What a phase moves, and how many devices of each operation give and take."""
        number = int(produces.operation[-1]) + 1
        table, ground = self._recut(given, produces), self._ground
        if self._alike(given, number) and self._alike(produces, number):
            giving, taking = self.rows(given.unit), self.rows(produces.unit)
            moved = table.moved_alike(giving, taking, ground.node, number)
            ends = [np.full(number, rows.size // number) for rows in (giving, taking)]
            return moved, ends[0], ends[1]
        sources, targets = self._entries(given, alive_only=True), self._entries(produces)
        moved = table.moved(sources, targets, ground.node, number)
        ends = [np.bincount(e.operation, minlength=number) for e in (sources, targets)]
        return moved, ends[0], ends[1]

    def _alike(self, some: Some, operations: int) -> bool:
        """Whether all operations have as many units, each a mesh of its own, and all are alive."""
        count = np.bincount(some.operation, minlength=operations)
        single = self.family(int(some.unit[0])).mesh[0] == 1
        alive = self._ground.alive
        return single and bool((count == count[0]).all()) and bool(alive.all())

    def _recut(self, given: Some, produces: Some) -> Recut:
        first, last = (self.family(int(some.unit[0])).mesh for some in (given, produces))
        return recut(self._classes, first, last)

    def _host_cost(self, entries: Entries, blocks: Ints) -> tuple[Floats, Ints]:
        total, largest = _by_operation(entries, blocks)
        links = np.zeros((len(total), 5), np.int64)
        links[:, 3] = total
        host = self._ground.hardware.host
        seconds = host.latency_s + largest / host.bytes_per_s + self._ground.budget.setup_s
        return seconds, links

    def _append(
        self,
        kind: OperationKind,
        reads: Some,
        consumes: Some,
        produces: Some,
        source: RecoverySource | None,
        seconds: Floats | None = None,
        links: Ints | None = None,
        after_all: bool = False,
    ) -> None:
        if seconds is None or links is None:
            number = len(consumes) + len(produces)
            seconds, links = np.zeros(number), np.zeros((number, 5), np.int64)
        self._change_held(produces.unit, 1)
        self._peak_bytes = max(self._peak_bytes, int(self._held.max(initial=0)))
        self._change_held(consumes.unit, -1)
        if kind is not OperationKind.DESTROY and seconds.any():
            self._load_s += self._busiest_s(seconds, (reads, consumes, produces))
        phase = Phase(
            kind=kind,
            reads=reads,
            consumes=consumes,
            produces=produces,
            source=source,
            seconds=seconds,
            links=links,
            after_all=after_all,
        )
        self._phases.append(phase)

    def _busiest_s(self, seconds: Floats, parts: Sequence[Some]) -> float:
        """How long the busiest device of a phase works."""
        number = self._ground.num_devices
        if len(seconds) == 1:
            return float(seconds[0])
        loads = [np.zeros(number)] * 3
        for i, some in enumerate(parts):
            if len(some):
                rows = self.rows(some.unit)
                each = np.repeat(seconds[some.operation], rows.shape[1])
                loads[i] = np.bincount(rows.ravel(), each, number)
        # What is consumed is turned into what is produced on the spot; a copy is another's work.
        return float((loads[0] + np.maximum(loads[1], loads[2])).max())

    def _change_held(self, units: Ints, sign: int) -> None:
        if not len(units):
            return
        # Units that are made or given up in a phase have one layout, and hold the same.
        family = self.family(int(units[0]))
        if family.device_bytes and not family.parked:
            self._held[self.rows(units)] += sign * family.device_bytes

    def _place(self, unit: int) -> int:
        return bisect.bisect_right(self._base, unit) - 1

    def _entries(self, some: Some, alive_only: bool = False) -> Entries:
        """The devices of units; under ZeRO-1 ranks are those of the whole group."""
        rows = self.rows(some.unit)
        size = rows.shape[1]
        operation, device = np.repeat(some.operation, size), rows.ravel()
        place = self._place(int(some.unit[0]))
        within = some.unit - self._base[place]
        grouped = self._families[place].mesh[0] > 1
        base = within * size if grouped else np.zeros(len(within), np.int64)
        rank = np.repeat(base, size) + np.arange(len(device)) % size
        if alive_only and not self._ground.alive.all():
            alive = self._ground.alive[device]
            operation, device, rank = operation[alive], device[alive], rank[alive]
        return Entries(operation=operation, device=device, rank=rank)


def _by_operation(entries: Entries, blocks: Ints) -> tuple[Floats, Floats]:
    """Sum and largest of the blocks of each operation; `blocks` is by rank."""
    blocks = blocks[entries.rank]
    number = int(entries.operation[-1]) + 1
    first = np.searchsorted(entries.operation, np.arange(number))
    total = np.bincount(entries.operation, blocks, number)
    return total, np.maximum.reduceat(blocks, first).astype(np.float64)


def _transfer_seconds(moved: Moved, givers: Ints, takers: Ints, ground: Ground) -> Floats:
    """Modelled seconds: the busiest receiver, or the senders if they are fewer, on each link.

    Copies inside a device read and write its memory; what crosses nodes is there before it is
    passed on, so the times add up.
    """
    hardware = ground.hardware
    seconds = np.full(len(givers), ground.budget.setup_s)
    for link, total, received, senders in (
        (hardware.inter_node, moved.inter_node, moved.receive_inter_node, givers),
        (
            hardware.intra_node,
            moved.intra_node,
            moved.receive_intra_node,
            givers + np.where(moved.inter_node > 0, takers, 0),
        ),
    ):
        busiest = np.maximum(received, total / np.maximum(senders, 1))
        seconds += np.where(total > 0, link.latency_s + busiest / link.bytes_per_s, 0.0)
    return seconds + 2 * moved.local_max / hardware.memory_bytes_per_s
