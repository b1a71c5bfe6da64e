"""Carrying out a transition on paper: memory by device, and which units exist.

The same rules as on devices: an operation takes the memory of what it produces, then gives back
what it consumed. A unit must be there to be read or consumed.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.roles import ModelStage
from nereus_jax.core.transition import Operation, TransitionGraph, Unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Violation:
    """Why an order of operations cannot be carried out.

    Attributes:
      operation: the one that fails, by its number in the graph.
      device: that lacks memory; None: a unit is missing.
      needed_bytes: what the operation takes there.
      available_bytes: what is free there.
      unit: that is missing; None: memory is.
    """

    operation: int
    device: DeviceId | None = None
    needed_bytes: int = 0
    available_bytes: int = 0
    unit: Unit | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """What came of an order of operations.

    Attributes:
      violation: the first one, after which nothing was done; None: there is none.
      peak_bytes: by device, the most that units took.
      units: what exists at the end.
    """

    violation: Violation | None
    peak_bytes: Mapping[DeviceId, int]
    units: tuple[Unit, ...]


def replay(
    graph: TransitionGraph,
    order: Sequence[int] | None = None,
    capacities: Mapping[DeviceId, int] | None = None,
) -> Replay:
    """Carries out operations one after the other.

    Args:
      graph: the operations.
      order: their numbers; default: the dispatch order.
      capacities: bytes that units may take, by device; default: those that were planned with.
    """
    limits = dict(zip(graph.devices, graph.capacity_bytes, strict=True))
    limits |= capacities or {}
    held = dict.fromkeys(graph.devices, 0)
    units = dict(zip(graph.initial_units, graph.initial_bytes, strict=True))
    for unit, num_bytes in units.items():
        for device in unit.devices:
            if device in held:
                held[device] += num_bytes
    peak = dict(held)
    violation: Violation | None = None
    for i in range(len(graph.operations)) if order is None else order:
        operation = graph.operations[i]
        violation = _missing(i, operation, units) or _too_large(i, operation, held, limits)
        if violation is not None:
            break
        _take(operation, held, peak)
        for unit in operation.consumes:
            num_bytes = units.pop(unit)
            for device in unit.devices:
                if device in held:
                    held[device] -= num_bytes
        for unit in operation.produces:
            units[unit] = 0 if unit.parked else operation.produced_bytes
    return Replay(violation=violation, peak_bytes=peak, units=tuple(units))


def _missing(i: int, operation: Operation, units: Mapping[Unit, int]) -> Violation | None:
    for unit in (*operation.reads, *operation.consumes):
        if unit not in units:
            return Violation(operation=i, unit=unit)
    return None


def _too_large(
    i: int,
    operation: Operation,
    held: Mapping[DeviceId, int],
    limits: Mapping[DeviceId, int],
) -> Violation | None:
    needed = operation.produced_bytes
    for unit in operation.produces:
        for device in () if unit.parked or not needed else unit.devices:
            available = limits[device] - held[device]
            if needed > available:
                return Violation(
                    operation=i, device=device, needed_bytes=needed, available_bytes=available
                )
    return None


def _take(operation: Operation, held: dict[DeviceId, int], peak: dict[DeviceId, int]) -> None:
    for unit in operation.produces:
        for device in () if unit.parked else unit.devices:
            held[device] += operation.produced_bytes
            peak[device] = max(peak[device], held[device])


def uncoordinated_order(graph: TransitionGraph, seed: int) -> tuple[int, ...]:
    """An order that every model-stage's own operations allow, without regard for the others.

    Each model-stage goes through its operations in its local order (Split, Destroy, Extend, Merge;
    only what its own units need comes first); whose turn it is, is drawn. It stands for
    model-stages that are moved at the same time without a common graph.

    Args:
      graph: the operations; its edges between model-stages are ignored.
      seed: of the draws.
    """
    queues: dict[ModelStage, list[int]] = {}
    for i in sorted(range(len(graph.operations)), key=lambda i: graph.local_order[i]):
        queues.setdefault(graph.operations[i].model_stage, []).append(i)
    turns = [stage for stage, queue in queues.items() for _ in queue]
    random.Random(seed).shuffle(turns)
    left = {stage: iter(queue) for stage, queue in queues.items()}
    return tuple(next(left[stage]) for stage in turns)
