"""From a schedule to the values that are executed: units, operations, the graph."""

from collections.abc import Mapping, Sequence

import numpy as np

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.transition import LinkBytes, Operation, OperationKind, TransitionGraph, Unit
from nereus_jax.planning.transition_draft import Ground, link_bytes
from nereus_jax.planning.transition_ladder import Ladder
from nereus_jax.planning.transition_problem import Problem
from nereus_jax.planning.transition_schedule import Schedule, lowest_free_bytes, resource_edges


def make_graph(
    problem: Problem,
    schedule: Schedule,
    ladders: Sequence[Ladder],
    ground: Ground,
    lost: frozenset[DeviceId],
) -> TransitionGraph:
    """The graph of a schedule that holds all tasks.

    Raises:
      InfeasiblePlanError: parked units do not fit into the memory of a host.
    """
    drafts = [ladder.draft for ladder in ladders]
    units = _units(problem, ladders, ground.devices)
    _check_hosts(problem, ladders, ground)
    place = {task: n for n, task in enumerate(schedule.order)}
    waits = resource_edges(problem, schedule)
    edges = [
        [tuple(sorted([place[j] for j in before[i]])) for i in schedule.order]
        for before in (problem.before, waits)
    ]
    based = list(zip(problem.base, drafts, strict=True))
    initial: list[int] = [u for base, d in based for u in (d.initial + base).tolist()]
    final: list[int] = [u for base, d in based for u in (d.final + base).tolist()]
    alive = ground.alive.tolist()
    lowest = np.array(lowest_free_bytes(problem, schedule.order))[problem.cell_of]
    by_device = (ground.capacity.tolist(), (ground.capacity - lowest).tolist())
    capacity, peak = (tuple([n for n, up in zip(x, alive, strict=True) if up]) for x in by_device)
    budget = ground.budget
    return TransitionGraph(
        operations=tuple(_operations(problem, schedule, ladders, units)),
        data_edges=tuple(edges[0]),
        resource_edges=tuple(edges[1]),
        local_order=schedule.order,
        start_s=tuple([schedule.start_s[i] for i in schedule.order]),
        end_s=tuple([schedule.end_s[i] for i in schedule.order]),
        transition_s=schedule.seconds + budget.compile_s,
        exposed_compile_s=budget.compile_s,
        critical_path=_critical_path(problem, schedule, edges),
        initial_units=tuple([units[u] for u in initial]),
        final_units=tuple([units[u] for u in final]),
        initial_bytes=tuple([problem.family_of[u].device_bytes for u in initial]),
        devices=tuple([d for d, up in zip(ground.devices, alive, strict=True) if up]),
        capacity_bytes=capacity,
        peak_bytes=peak,
        choices={ladder.model_stage: ladder.choice() for ladder in ladders},
        lost=lost,
    )


def _units(problem: Problem, ladders: Sequence[Ladder], devices: Sequence[DeviceId]) -> list[Unit]:
    """All units of a problem as values, by number."""
    units: list[Unit] = []
    for ladder in ladders:
        for family in ladder.draft.families:
            for row in family.rows.tolist():
                unit = Unit(
                    model_stage=ladder.model_stage,
                    tp=family.tp,
                    pp=family.pp,
                    devices=tuple([devices[i] for i in row]),
                    parked=family.parked,
                )
                units.append(unit)
    return units


def _operations(
    problem: Problem, schedule: Schedule, ladders: Sequence[Ladder], units: Sequence[Unit]
) -> list[Operation]:
    operations: list[Operation] = []
    known: dict[tuple[int, ...], LinkBytes] = {}
    rows = {id(p): p.links.tolist() for ladder in ladders for p in ladder.draft.phases}
    for i in schedule.order:
        task = problem.tasks[i]
        row = tuple(rows[id(task.phase)][task.number])
        if row not in known:
            known[row] = link_bytes(row)
        operations.append(
            Operation(
                kind=task.phase.kind,
                model_stage=ladders[task.draft].model_stage,
                reads=tuple([units[u] for u in task.reads]),
                consumes=tuple([units[u] for u in task.consumes]),
                produces=tuple([units[u] for u in task.produces]),
                source=task.phase.source,
                link_bytes=known[row],
                seconds=task.seconds,
                produced_bytes=_device_bytes(problem, task.produces),
                consumed_bytes=_device_bytes(problem, task.consumes),
            )
        )
    return operations


def _device_bytes(problem: Problem, units: Sequence[int]) -> int:
    return problem.family_of[units[0]].device_bytes if units else 0


def _critical_path(
    problem: Problem, schedule: Schedule, edges: Sequence[Sequence[tuple[int, ...]]]
) -> tuple[int, ...]:
    """Operations that end the transition, each started by the end of the one before."""
    order = schedule.order
    if not order:
        return ()
    ending: dict[float, list[int]] = {}
    for n, i in enumerate(order):
        ending.setdefault(schedule.end_s[i], []).append(n)
    at: int | None = ending[max(ending)][0]
    path: list[int] = []
    while at is not None:
        path.append(at)
        started, cells = schedule.start_s[order[at]], set(problem.tasks[order[at]].cells)
        waited = {*edges[0][at], *edges[1][at]}
        causes = [
            n
            for n in ending.get(started, ())
            if n < at and (n in waited or not cells.isdisjoint(problem.tasks[order[n]].cells))
        ]
        at = max(causes, default=None)
    return tuple(reversed(path))


def _check_hosts(problem: Problem, ladders: Sequence[Ladder], ground: Ground) -> None:
    """Raises InfeasiblePlanError if what is parked does not fit into the memory of a host."""
    limits: Mapping[int, int] | None = ground.budget.host_bytes
    if limits is None:
        return
    held: dict[int, int] = {}
    for task in problem.tasks:
        if task.phase.kind is OperationKind.PARK:
            for unit in task.consumes:
                family = problem.family_of[unit]
                for device in family.rows[problem.row_of[unit]].tolist():
                    node = ground.node_names[ground.node[device]]
                    held[node] = held.get(node, 0) + family.device_bytes
                    if held[node] > limits.get(node, 0):
                        raise InfeasiblePlanError(
                            f"{ladders[task.draft].model_stage} must wait in host memory, but node "
                            f"{node} needs {held[node]} bytes for it and has {limits.get(node, 0)}"
                        )
