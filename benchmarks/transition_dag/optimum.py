"""The shortest schedule of a transition's operations, proven by OR-Tools CP-SAT.

The same operations, durations, data edges, devices and memory as in the graph; order and start
times are the solver's. An operation has its devices to itself while it runs, takes the memory of
what it produces when it starts, and gives back what it consumed when it ends.
"""

from ortools.sat.python import cp_model

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.transition import TransitionGraph

TICKS_PER_S = 10**6


def optimal_seconds(graph: TransitionGraph, limit_s: float, workers: int) -> float | None:
    """Completion time of the best schedule; None: not proven within the limit."""
    model = cp_model.CpModel()
    ticks = [round(o.seconds * TICKS_PER_S) for o in graph.operations]
    horizon = sum(ticks)
    starts = [model.new_int_var(0, horizon, f"s{i}") for i in range(len(ticks))]
    ends = [s + t for s, t in zip(starts, ticks, strict=True)]
    for i, edges in enumerate(graph.data_edges):
        for j in edges:
            model.add(starts[i] >= ends[j])
    on_device: dict[DeviceId, list[int]] = {}
    for i, operation in enumerate(graph.operations):
        for device in operation.devices if ticks[i] else ():
            on_device.setdefault(device, []).append(i)
    for members in {tuple(m) for m in on_device.values()}:
        intervals = [
            model.new_fixed_size_interval_var(starts[i], ticks[i], f"i{i}") for i in members
        ]
        model.add_no_overlap(intervals)
    _add_memory(model, graph, starts, ends)
    span = model.new_int_var(0, horizon, "span")
    for end in ends:
        model.add(span >= end)
    model.minimize(span)
    for i, start in enumerate(starts):
        model.add_hint(start, round(graph.start_s[i] * TICKS_PER_S))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    if solver.solve(model) != cp_model.OPTIMAL:
        return None
    return solver.objective_value / TICKS_PER_S


def _add_memory(
    model: cp_model.CpModel,
    graph: TransitionGraph,
    starts: list[cp_model.IntVar],
    ends: list[cp_model.LinearExpr],
) -> None:
    """Memory of each device at every moment, in units of the greatest common divisor."""
    free = dict(zip(graph.devices, graph.capacity_bytes, strict=True))
    for unit, num_bytes in zip(graph.initial_units, graph.initial_bytes, strict=True):
        for device in () if unit.parked else unit.devices:
            free[device] -= num_bytes
    changes: dict[DeviceId, list[tuple[int, bool, int]]] = {}
    for i, operation in enumerate(graph.operations):
        for units, size, at_end in (
            (operation.produces, operation.produced_bytes, False),
            (operation.consumes, -operation.consumed_bytes, True),
        ):
            for unit in units:
                for device in () if unit.parked else unit.devices:
                    changes.setdefault(device, []).append((i, at_end, size))
    seen: set[object] = set()
    for device, events in changes.items():
        key = tuple(events), free[device]
        if key in seen or sum(max(size, 0) for _, _, size in events) <= free[device]:
            continue
        seen.add(key)
        model.add_reservoir_constraint(
            [ends[i] if at_end else starts[i] for i, at_end, _ in events],
            [size for _, _, size in events],
            -(1 << 60),
            free[device],
        )
