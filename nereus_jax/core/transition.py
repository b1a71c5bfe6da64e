"""A transition of a whole plan as a value: planning makes it, the runtime executes it.

A transition is a graph of operations on units. An operation reads units that stay, consumes units
that cease to exist when it ends, and produces units. It is carried out as a transfer from the
tilings of what it reads and consumes to the tilings of what it produces.

The dispatch order is one for all processes, and a device carries out the operations that touch it
in that order. Operations on other devices run at the same time, as far as edges allow.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast, overload

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ModelStage

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """An Elastic Model Unit as a value: the state of one replica of a model-stage on its devices.

    Attributes:
      model_stage: whose state.
      tp: degree of tensor parallelism.
      pp: degree of pipeline parallelism.
      devices: pp * tp of them; rank (p, t) is on `devices[p * tp + t]`.
      parked: the blocks are in the memory of the devices' hosts, not of the devices.
    """

    model_stage: ModelStage
    tp: int
    pp: int
    devices: tuple[DeviceId, ...]
    parked: bool = False

    def __str__(self) -> str:
        where = ",".join(str(d) for d in self.devices)
        return f"{self.model_stage}[pp={self.pp},tp={self.tp} on {where}]" + (
            " parked" if self.parked else ""
        )


def placed_units(model_stage: ModelStage, placement: Placement) -> tuple[Unit, ...]:
    """The units of a model-stage under a placement, one a replica."""
    layout = placement.layout
    return tuple(
        Unit(
            model_stage=model_stage,
            tp=layout.tp,
            pp=layout.pp,
            devices=placement.replica_devices(rank),
        )
        for rank in range(layout.dp)
    )


class OperationKind(enum.StrEnum):
    """What an operation does.

    SPLIT: one unit into several of a smaller layout, on the same devices.
    MERGE: several units into one of a larger layout.
    EXTEND: a copy of a unit on other devices, every rank's block to the same rank.
    DESTROY: a unit is given up; the first of the kinds that only release.
    RESHARD: units into units of any layout on any devices; only what they lack moves.
    PARK: a unit to the memory of its hosts.
    UNPARK: a parked unit back to devices.
    RESTORE: units from a host snapshot or a checkpoint.
    REFRESH: memory is made for units that the next step's weight edge fills; nothing moves.
    """

    SPLIT = "split"
    MERGE = "merge"
    EXTEND = "extend"
    DESTROY = "destroy"
    RESHARD = "reshard"
    PARK = "park"
    UNPARK = "unpark"
    RESTORE = "restore"
    REFRESH = "refresh"


class RecoverySource(enum.StrEnum):
    """Where the values of an operation's units come from."""

    REPLICA = "replica"  # units on devices, or parked ones
    HOST = "host"  # a snapshot in host memory
    CHECKPOINT = "checkpoint"


class Way(enum.StrEnum):
    """How a model-stage comes from its old units to its new ones.

    KEPT: nothing of it changes.
    REFRESHED: the old units go, the weight edge of the next step fills the new ones.
    COMPOSED: Split, Destroy, Extend, Merge through the largest common layout.
    DIRECT: Reshard, and Extend where a device had nothing.
    LEAN: as DIRECT from a single old unit; the others are destroyed first.
    PARKED: through host memory.
    RESTORED: from a host snapshot or a checkpoint: no copy was intact.
    RELEASED: the model-stage is not in the new plan.
    """

    KEPT = "kept"
    REFRESHED = "refreshed"
    COMPOSED = "composed"
    DIRECT = "direct"
    LEAN = "lean"
    PARKED = "parked"
    RESTORED = "restored"
    RELEASED = "released"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinkBytes:
    """Bytes by the kind of way that they take.

    Attributes:
      local: copied inside a device.
      intra_node: between devices of a node.
      inter_node: between nodes.
      host: between devices and the memory of their hosts.
      storage: read from a checkpoint.
    """

    local: int = 0
    intra_node: int = 0
    inter_node: int = 0
    host: int = 0
    storage: int = 0

    @property
    def wire(self) -> int:
        """Bytes that leave a device for another one."""
        return self.intra_node + self.inter_node

    def __add__(self, other: "LinkBytes") -> "LinkBytes":
        return LinkBytes(
            local=self.local + other.local,
            intra_node=self.intra_node + other.intra_node,
            inter_node=self.inter_node + other.inter_node,
            host=self.host + other.host,
            storage=self.storage + other.storage,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One node of a transition graph.

    Attributes:
      kind: what it does.
      model_stage: whose units.
      reads: units that stay.
      consumes: units whose memory is given back when it ends.
      produces: units that exist when it has ended; their memory is taken when it starts.
      source: where the values come from; None: no values are needed.
      link_bytes: what it moves, modelled exactly for the transfer of its units.
      seconds: modelled duration.
      produced_bytes: memory that it takes on every device of a produced unit (none if parked).
      consumed_bytes: memory that it gives back on every device of a consumed unit.
    """

    kind: OperationKind
    model_stage: ModelStage
    reads: tuple[Unit, ...]
    consumes: tuple[Unit, ...]
    produces: tuple[Unit, ...]
    source: RecoverySource | None
    link_bytes: LinkBytes
    seconds: float
    produced_bytes: int
    consumed_bytes: int

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """All that its units are on, ascending."""
        units = (*self.reads, *self.consumes, *self.produces)
        return tuple(sorted({d for u in units for d in u.devices}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """What a way of one model-stage costs with all devices to itself; modelled.

    Attributes:
      seconds: of its operations, those of a phase side by side.
      link_bytes: of all its operations.
      peak_bytes: the most that it holds on a device at a time.
    """

    seconds: float
    link_bytes: LinkBytes
    peak_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The way chosen for a model-stage, and why.

    Attributes:
      way: the one taken.
      prices: of every way that was considered.
      reason: one line.
    """

    way: Way
    prices: Mapping[Way, Price]
    reason: str


class Later(Sequence[T]):
    """A tuple that is made when somebody first looks into it.

    Whoever only asks what a transition costs needs none of its thousands of operations.

    Args:
      make: gives the elements; called at most once.
    """

    def __init__(self, make: Callable[[], Iterable[T]]) -> None:
        self._make: Callable[[], Iterable[T]] | None = make
        self._values: tuple[T, ...] = ()

    def made(self) -> tuple[T, ...]:
        """The elements."""
        if self._make is not None:
            self._values = tuple(self._make())
            self._make = None
        return self._values

    def __len__(self) -> int:
        return len(self.made())

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self.made()[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self.made())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Later):
            return self.made() == cast("Later[object]", other).made()
        return self.made() == other

    def __hash__(self) -> int:
        return hash(self.made())

    def __repr__(self) -> str:
        return repr(self.made())

    def __reduce__(self) -> tuple[object, ...]:
        return tuple, (self.made(),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransitionGraph:
    """All operations of a transition, in dispatch order, which is a topological order.

    Attributes:
      operations: in dispatch order.
      data_edges: for each operation the earlier ones whose units it needs, or whose reading of a
        unit must have ended before it consumes it.
      resource_edges: for each operation the earlier ones whose memory it takes over. With them
        memory suffices in every order that the edges allow.
      local_order: place of each operation in the order of its own model-stage.
      start_s, end_s: modelled, from the start of the transition.
      transition_s: L_tran: the modelled end of the last operation, and the exposed compile time.
      exposed_compile_s: what of that is compile time.
      critical_path: operations, each of which starts when the one before it ends.
      initial_units: what exists at the start, with broken units and parked ones.
      final_units: what exists at the end.
      initial_bytes: memory on each device of each initial unit; 0 if it is parked, or if its
        arrays are another model-stage's.
      devices: all of both plans but the lost ones, ascending.
      capacity_bytes: of each device: what units may take, beside headroom, buffers, communicators.
      peak_bytes: of each device: the most that units take, in dispatch order.
      choices: for each model-stage.
      lost: devices that are gone; nothing can be read from them.
    """

    operations: Sequence[Operation]
    data_edges: tuple[tuple[int, ...], ...]
    resource_edges: tuple[tuple[int, ...], ...]
    local_order: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    transition_s: float
    exposed_compile_s: float
    critical_path: tuple[int, ...]
    initial_units: Sequence[Unit]
    final_units: Sequence[Unit]
    initial_bytes: tuple[int, ...]
    devices: tuple[DeviceId, ...]
    capacity_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    choices: Mapping[ModelStage, Choice]
    lost: frozenset[DeviceId] = frozenset()

    def predecessors(self, operation: int) -> tuple[int, ...]:
        """Operations that must have ended before this one starts, ascending."""
        return tuple(sorted({*self.data_edges[operation], *self.resource_edges[operation]}))

    @property
    def link_bytes(self) -> LinkBytes:
        """Of all operations."""
        return sum((o.link_bytes for o in self.operations), LinkBytes())

    @property
    def old_state_fits(self) -> bool:
        """Whether all old and all new units fit side by side, so that the old can be kept until
        the new is verified."""
        held = dict.fromkeys(self.devices, 0)
        taken = [(u, n) for u, n in zip(self.initial_units, self.initial_bytes, strict=True)]
        taken += [(u, o.produced_bytes) for o in self.operations for u in o.produces]
        for unit, num_bytes in taken:
            for device in () if unit.parked else unit.devices:
                if device in held:
                    held[device] += num_bytes
        return all(n <= c for n, c in zip(held.values(), self.capacity_bytes, strict=True))
