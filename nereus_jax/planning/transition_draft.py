"""A draft of how one model-stage comes from its old units to its new ones, with its price.

A `Draft` has families of disjoint units, and phases of operations on them in local order.
Which drafts of all model-stages fit into memory together is decided by the schedule.
"""
# pyright: reportUnknownMemberType=false
# (numpy's own type of `repeat` is partly unknown.)

import dataclasses
from collections.abc import Sequence

import numpy as np

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.transition import LinkBytes, OperationKind, Price, RecoverySource, Way
from nereus_jax.planning.transition_inputs import TransitionBudget
from nereus_jax.planning.unit_cuts import Bools, Floats, Ints, MeshShape

NO_UNITS = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Units of one layout that share no device.

    Attributes:
      rows: [units, pp * tp] indices of devices.
      tp, pp: their degrees.
      mesh: shape of that of all units together (ZeRO-1) or of one.
      device_bytes: what a unit holds on each of its devices; 0 if parked.
      parked: in host memory.
    """

    rows: Ints
    tp: int
    pp: int
    mesh: MeshShape
    device_bytes: int
    parked: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Some:
    """Units of operations of a phase, in the order of the operations.

    Attributes:
      operation: [N] which operation.
      unit: [N] number of the unit in the draft.
    """

    operation: Ints
    unit: Ints

    @classmethod
    def each(cls, units: Ints) -> "Some":
        """One for each operation."""
        return cls(operation=np.arange(len(units)), unit=units)

    @classmethod
    def together(cls, units: Ints) -> "Some":
        """All for one operation."""
        return cls(operation=np.zeros(len(units), np.int64), unit=units)

    @classmethod
    def shared(cls, units: Ints, operations: int) -> "Some":
        """As many for each of so many operations."""
        each = len(units) // max(operations, 1)
        return cls(operation=np.repeat(np.arange(operations), each), unit=units)

    def __len__(self) -> int:
        return len(self.unit)


NONE = Some(operation=NO_UNITS, unit=NO_UNITS)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """Operations of one kind of a model-stage, which may run side by side.

    Attributes:
      kind: of all of them.
      reads, consumes, produces: units.
      source: where the values come from.
      seconds: of each operation.
      links: [O, 5] bytes: local, intra_node, inter_node, host, storage.
      after_all: it starts when the whole other transition is done (an evicted unit comes back).
    """

    kind: OperationKind
    reads: Some
    consumes: Some
    produces: Some
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
      initial: numbers of the units that exist at the start: all of the first family.
      final: numbers of the units that exist at the end.
      price: with all devices to itself.
      reason: why it is considered.
    """

    way: Way
    families: tuple[Family, ...]
    phases: tuple[Phase, ...]
    initial: Ints
    final: Ints
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


def link_bytes(row: Sequence[int]) -> LinkBytes:
    """A row of `Phase.links` as a value."""
    local, intra_node, inter_node, host, storage = row
    return LinkBytes(
        local=local, intra_node=intra_node, inter_node=inter_node, host=host, storage=storage
    )
