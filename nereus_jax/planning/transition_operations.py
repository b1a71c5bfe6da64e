"""From a schedule to the values that are executed: units, operations, the graph."""
# pyright: reportUnknownMemberType=false
# (numpy's own type of `flatnonzero` is partly unknown.)

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.roles import ModelStage
from nereus_jax.core.transition import (
    Later,
    LinkBytes,
    Operation,
    OperationKind,
    TransitionGraph,
    Unit,
)
from nereus_jax.planning.transition_draft import Draft, Ground, link_bytes
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
    model_stages = [ladder.model_stage for ladder in ladders]
    # Values are made when they are looked at; whoever asks for a price needs none of them.
    units = Later(lambda: _units(drafts, model_stages, ground.devices))
    _check_hosts(problem, ladders, ground)
    place = {task: n for n, task in enumerate(schedule.order)}
    waits = resource_edges(problem, schedule)
    edges = [
        [tuple(sorted([place[j] for j in before[i]])) if before[i] else () for i in schedule.order]
        for before in (problem.before, waits)
    ]
    based = list(zip(problem.base, drafts, strict=True))
    initial: list[int] = [u for base, d in based for u in (d.initial + base).tolist()]
    final: list[int] = [u for base, d in based for u in (d.final + base).tolist()]
    lowest = np.array(lowest_free_bytes(problem, schedule.order))[problem.cell_of]
    alive = np.flatnonzero(ground.alive)
    budget = ground.budget
    return TransitionGraph(
        operations=Later(lambda: _operations(problem, schedule, drafts, model_stages, units)),
        data_edges=tuple(edges[0]),
        resource_edges=tuple(edges[1]),
        local_order=schedule.order,
        start_s=tuple([schedule.start_s[i] for i in schedule.order]),
        end_s=tuple([schedule.end_s[i] for i in schedule.order]),
        transition_s=schedule.seconds + budget.compile_s,
        exposed_compile_s=budget.compile_s,
        critical_path=_critical_path(problem, schedule, edges),
        initial_units=Later(lambda: [units[u] for u in initial]),
        final_units=Later(lambda: [units[u] for u in final]),
        initial_bytes=tuple([problem.family_of[u].device_bytes for u in initial]),
        devices=tuple([ground.devices[i] for i in alive.tolist()]) if lost else ground.devices,
        capacity_bytes=tuple(ground.capacity[alive].tolist()),
        peak_bytes=tuple((ground.capacity - lowest)[alive].tolist()),
        choices={ladder.model_stage: ladder.choice() for ladder in ladders},
        lost=lost,
    )


def _units(
    drafts: Sequence[Draft], model_stages: Sequence[ModelStage], devices: Sequence[DeviceId]
) -> list[Unit]:
    """All units of a problem as values, by number."""
    units: list[Unit] = []
    for model_stage, draft in zip(model_stages, drafts, strict=True):
        for family in draft.families:
            tp, pp, parked = family.tp, family.pp, family.parked
            rows: list[list[int]] = family.rows.tolist()
            for row in rows:
                # itemgetter makes the tuple in C, but gives a single device bare.
                placed: tuple[DeviceId, ...] = (
                    itemgetter(*row)(devices) if len(row) > 1 else (devices[row[0]],)
                )
                units.append(
                    Unit(
                        model_stage=model_stage,
                        tp=tp,
                        pp=pp,
                        devices=placed,
                        parked=parked,
                    )
                )
    return units


def _operations(
    problem: Problem,
    schedule: Schedule,
    drafts: Sequence[Draft],
    model_stages: Sequence[ModelStage],
    units: Sequence[Unit],
) -> list[Operation]:
    units = tuple(units)
    shared: dict[tuple[int, ...], LinkBytes] = {}
    links: dict[int, list[LinkBytes]] = {}
    for draft in drafts:
        for phase in draft.phases:
            rows = [tuple(row) for row in phase.links.tolist()]
            for row in rows:
                if row not in shared:
                    shared[row] = link_bytes(row)
            links[id(phase)] = [shared[row] for row in rows]
    family_of = problem.family_of
    operations: list[Operation] = []
    for i in schedule.order:
        task = problem.tasks[i]
        phase, consumes, produces = task.phase, task.consumes, task.produces
        operations.append(
            Operation(
                kind=phase.kind,
                model_stage=model_stages[task.draft],
                reads=tuple([units[u] for u in task.reads]),
                consumes=tuple([units[u] for u in consumes]),
                produces=tuple([units[u] for u in produces]),
                source=phase.source,
                link_bytes=links[id(phase)][task.number],
                seconds=task.seconds,
                produced_bytes=family_of[produces[0]].device_bytes if produces else 0,
                consumed_bytes=family_of[consumes[0]].device_bytes if consumes else 0,
            )
        )
    return operations


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
