"""A draft of how one model-stage comes from its old units to its new ones, with its price.

A `Draft` has families of disjoint units, and phases of operations on them in local order.
Which drafts of all model-stages fit into memory together is decided by the schedule.
"""
# pyright: reportUnknownMemberType=false
# (numpy's own types of `unique`, `searchsorted` and `reduceat` are partly unknown.)

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.transition import LinkBytes, OperationKind, Price, RecoverySource, Way
from nereus_jax.planning.transition_inputs import TransitionBudget
from nereus_jax.planning.unit_bytes import (
    Bools,
    Cut,
    Entries,
    Floats,
    Ints,
    LeafClass,
    Moved,
    block_bytes,
    moved_bytes,
)

Pairs = list[tuple[int, int]]
"""(operation of the phase, unit), in the order of the operations."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Units of one layout that share no device.

    Attributes:
      rows: [units, pp * tp] indices of devices.
      tp, pp: their degrees.
      cut: the mesh of all units together (ZeRO-1) or of one.
      device_bytes: what a unit holds on each of its devices; 0 if parked.
      parked: in host memory.
    """

    rows: Ints
    tp: int
    pp: int
    cut: Cut
    device_bytes: int
    parked: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """Operations of one kind of a model-stage, which may run side by side.

    Attributes:
      kind: of all of them.
      reads, consumes, produces: units by number in the draft.
      source: where the values come from.
      seconds: of each operation.
      links: [O, 5] bytes: local, intra_node, inter_node, host, storage.
      after_all: it starts when the whole other transition is done (an evicted unit comes back).
    """

    kind: OperationKind
    reads: Pairs
    consumes: Pairs
    produces: Pairs
    source: RecoverySource | None
    seconds: Floats
    links: Ints
    after_all: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """One way of one model-stage.

    Attributes:
      way: its name.
      families: all units; those of the first are numbered first.
      phases: in local order.
      initial: numbers of the units that exist at the start.
      final: numbers of the units that exist at the end.
      price: with all devices to itself.
      reason: why it is considered.
    """

    way: Way
    families: tuple[Family, ...]
    phases: tuple[Phase, ...]
    initial: tuple[int, ...]
    final: tuple[int, ...]
    price: Price
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ground:
    """What all model-stages of a transition share.

    Attributes:
      num_devices: of both plans together.
      node: [devices] where links are fast.
      node_names: what the numbers of nodes stand for.
      alive: [devices] whether a device can be read.
      capacity: [devices] bytes that units may take.
      devices: what the indices stand for.
      hardware: its links.
      budget: set-up time, storage.
    """

    num_devices: int
    node: Ints
    node_names: tuple[int, ...]
    alive: Bools
    capacity: Ints
    devices: tuple[DeviceId, ...]
    hardware: Hardware
    budget: TransitionBudget


class DraftBuilder:
    """Collects the families and phases of a draft, and prices it.

    Args:
      ground: what all model-stages share.
      classes: the leaves of this one.
    """

    def __init__(self, ground: Ground, classes: Sequence[LeafClass]) -> None:
        self._ground = ground
        self._classes = tuple(classes)
        self._families: list[Family] = []
        self._family_of: list[int] = []
        self._base: list[int] = []
        self._phases: list[Phase] = []
        self._load_s = 0.0
        self._held = np.zeros(ground.num_devices, np.int64)
        self._peak_bytes = 0

    def add(self, family: Family) -> range:
        """Numbers of the units of a family."""
        base = len(self._family_of)
        self._families.append(family)
        self._base.append(base)
        self._family_of += [len(self._families) - 1] * len(family.rows)
        return range(base, base + len(family.rows))

    def hold(self, units: Iterable[int]) -> None:
        """These units exist at the start."""
        self._change_held(list(units), 1)

    def node_of(self, unit: int) -> int:
        """The node of a unit's first device."""
        return int(self._ground.node[self._row(unit)[0]])

    def degrees(self, unit: int) -> tuple[int, int]:
        """(tp, pp) of a unit."""
        family = self._families[self._family_of[unit]]
        return family.tp, family.pp

    def destroy(self, units: Iterable[int]) -> None:
        """A phase that gives units up, one operation each."""
        consumes = list(enumerate(units))
        if consumes:
            self._append(OperationKind.DESTROY, [], consumes, [], None, *_nothing(len(consumes)))

    def refresh(self, units: Iterable[int]) -> None:
        """A phase that makes memory for units, one operation each."""
        produces = list(enumerate(units))
        if produces:
            self._append(OperationKind.REFRESH, [], [], produces, None, *_nothing(len(produces)))

    def move(self, kind: OperationKind, reads: Pairs, consumes: Pairs, produces: Pairs) -> None:
        """A phase of transfers between devices."""
        if not produces:
            return
        number = produces[-1][0] + 1
        sources = self._entries(sorted([*reads, *consumes]), alive_only=True)
        targets = self._entries(produces)
        cuts = self._cut((reads or consumes)[0][1]), self._cut(produces[0][1])
        ground = self._ground
        moved = moved_bytes(self._classes, *cuts, sources, targets, ground.node, number)
        givers = np.bincount(sources.operation, minlength=number)
        takers = np.bincount(targets.operation, minlength=number)
        seconds = _transfer_seconds(moved, givers, takers, ground)
        links = np.zeros((number, 5), np.int64)
        links[:, 0], links[:, 1], links[:, 2] = moved.local, moved.intra_node, moved.inter_node
        self._append(kind, reads, consumes, produces, RecoverySource.REPLICA, seconds, links)

    def park(self, consumes: Pairs, produces: Pairs) -> None:
        """A phase that copies units to host memory."""
        entries = self._entries(consumes)
        blocks = block_bytes(self._classes, self._cut(consumes[0][1]), 0)[entries.rank]
        seconds, links = self._host_cost(entries, blocks)
        self._append(
            OperationKind.PARK, [], consumes, produces, RecoverySource.REPLICA, seconds, links
        )

    def unpark(self, reads: Pairs, consumes: Pairs, produces: Pairs, after_all: bool) -> None:
        """A phase that copies parked units to devices; hosts send what another one holds."""
        sources, targets = self._entries(sorted([*reads, *consumes])), self._entries(produces)
        number = produces[-1][0] + 1
        cuts = self._cut((reads or consumes)[0][1]), self._cut(produces[0][1])
        blocks = block_bytes(self._classes, cuts[1], 1)[targets.rank]
        seconds, links = self._host_cost(targets, blocks)
        ground = self._ground
        moved = moved_bytes(self._classes, *cuts, sources, targets, ground.node, number)
        links[:, 2] = moved.inter_node
        seconds = seconds + moved.receive_inter_node / ground.hardware.inter_node.bytes_per_s
        self._append(
            OperationKind.UNPARK,
            reads,
            consumes,
            produces,
            RecoverySource.REPLICA,
            seconds,
            links,
            after_all,
        )

    def restore(self, produces: Pairs, source: RecoverySource) -> None:
        """A phase that reads units from a host snapshot or a checkpoint."""
        entries = self._entries(produces)
        blocks = block_bytes(self._classes, self._cut(produces[0][1]), 1)[entries.rank]
        seconds, links = self._host_cost(entries, blocks)
        if source is RecoverySource.CHECKPOINT:
            total, largest = _by_operation(entries, blocks)
            links[:, 4] = total
            seconds = seconds + largest / self._ground.budget.storage_bytes_per_s
        self._append(OperationKind.RESTORE, [], [], produces, source, seconds, links)

    def draft(self, way: Way, initial: Iterable[int], final: Iterable[int], reason: str) -> Draft:
        """What was collected."""
        links = np.sum([p.links.sum(axis=0) for p in self._phases], axis=0, initial=0)
        links = np.broadcast_to(links, (5,))
        return Draft(
            way=way,
            families=tuple(self._families),
            phases=tuple(self._phases),
            initial=tuple(initial),
            final=tuple(final),
            price=Price(
                seconds=self._load_s,
                link_bytes=link_bytes(links.tolist()),
                peak_bytes=self._peak_bytes,
            ),
            reason=reason,
        )

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
        reads: Pairs,
        consumes: Pairs,
        produces: Pairs,
        source: RecoverySource | None,
        seconds: Floats,
        links: Ints,
        after_all: bool = False,
    ) -> None:
        self._change_held([u for _, u in produces], 1)
        self._peak_bytes = max(self._peak_bytes, int(self._held.max(initial=0)))
        self._change_held([u for _, u in consumes], -1)
        self._load_s += self._busiest_s(seconds, [*reads, *consumes, *produces])
        self._phases.append(
            Phase(
                kind=kind,
                reads=reads,
                consumes=consumes,
                produces=produces,
                source=source,
                seconds=seconds,
                links=links,
                after_all=after_all,
            )
        )

    def _busiest_s(self, seconds: Floats, pairs: Pairs) -> float:
        """How long the busiest device of a phase works."""
        if not seconds.any():
            return 0.0
        number = self._ground.num_devices
        keys = np.concatenate([o * number + self._row(u) for o, u in pairs])
        keys = np.unique(keys)
        return float(np.bincount(keys % number, seconds[keys // number]).max())

    def _change_held(self, units: Sequence[int], sign: int) -> None:
        by_family: dict[int, list[int]] = {}
        for unit in units:
            by_family.setdefault(self._family_of[unit], []).append(unit)
        for number, members in by_family.items():
            family = self._families[number]
            if family.device_bytes and not family.parked:
                rows = family.rows[np.array(members) - self._base[number]]
                self._held[rows] += sign * family.device_bytes

    def _row(self, unit: int) -> Ints:
        number = self._family_of[unit]
        return self._families[number].rows[unit - self._base[number]]

    def _cut(self, unit: int) -> Cut:
        return self._families[self._family_of[unit]].cut

    def _entries(self, pairs: Pairs, alive_only: bool = False) -> Entries:
        """The devices of units; under ZeRO-1 ranks are those of the whole group."""
        rows = np.array([self._row(unit) for _, unit in pairs])
        size = rows.shape[1]
        operation = np.repeat(np.array([o for o, _ in pairs]), size)
        device = rows.ravel()
        units = np.array([u - self._base[self._family_of[u]] for _, u in pairs])
        grouped = self._cut(pairs[0][1]).mesh_shape[0] > 1
        base = units * size if grouped else np.zeros(len(pairs), np.int64)
        rank: Ints = (base[:, None] + np.arange(size)).ravel()
        if alive_only and not self._ground.alive.all():
            alive = self._ground.alive[device]
            operation, device, rank = operation[alive], device[alive], rank[alive]
        return Entries(operation=operation, device=device, rank=rank)


def link_bytes(row: Sequence[int]) -> LinkBytes:
    """A row of `Phase.links` as a value."""
    local, intra_node, inter_node, host, storage = row
    return LinkBytes(
        local=local, intra_node=intra_node, inter_node=inter_node, host=host, storage=storage
    )


def _nothing(number: int) -> tuple[Floats, Ints]:
    return np.zeros(number), np.zeros((number, 5), np.int64)


def _by_operation(entries: Entries, blocks: Ints) -> tuple[Floats, Floats]:
    """Sum and largest of the blocks of each operation."""
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
