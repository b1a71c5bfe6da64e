"""From two plans to the graph of operations that leads from one to the other.

For every model-stage the composed and the direct way are priced; the cheaper comes first. One
schedule joins the ways of all model-stages. Where memory blocks it, the model-stage that cannot go
on takes its next way: with one old copy only, then through host memory; then units that live on the
blocked device and do not change make room. Only then the transition is infeasible.

Source of the method: Nereus, arXiv 2609.34645. Ours: the direct way, Park, padding and degrees that
are no powers of two.
"""
# pyright: reportUnknownMemberType=false
# (numpy's own types of `unique`, `searchsorted` and `flatnonzero` are partly unknown.)

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.plan import Plan
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.core.transition import TransitionGraph
from nereus_jax.planning.transition_changes import Changes, TransitionTables
from nereus_jax.planning.transition_draft import Ground
from nereus_jax.planning.transition_inputs import StageState, TransitionBudget
from nereus_jax.planning.transition_ladder import Ladder, escalate
from nereus_jax.planning.transition_operations import make_graph
from nereus_jax.planning.transition_problem import make_problem
from nereus_jax.planning.transition_schedule import make_schedule
from nereus_jax.planning.unit_cuts import Ints

STAGE_ORDER = (Stage.GENERATE, Stage.SCORE, Stage.TRAIN)
UNBOUNDED_BYTES = 1 << 60
"""For devices that are gone: nothing is put there."""


def plan_transition(
    states: Mapping[ModelStage, StageState],
    source: Plan,
    target: Plan,
    *,
    hardware: Hardware,
    budget: TransitionBudget | None = None,
    nodes: Mapping[DeviceId, int] | None = None,
    lost: Iterable[DeviceId] = (),
    tables: TransitionTables | None = None,
) -> TransitionGraph:
    """The operations that lead from one plan to another, in order, with times and memory.

    Args:
      states: what the units of each model-stage are; all model-stages of both plans.
      source: the plan that holds.
      target: the plan wanted.
      hardware: links and memory.
      budget: memory and seconds beside them.
      nodes: the node of each device, where links are fast; default: its host.
      lost: devices that are gone; the target must not use them.
      tables: what transitions of the same job have in common; added to.

    Raises:
      InfeasiblePlanError: memory cannot be reached in any way, state is lost for good, or the plans
        do not fit the states; nothing has moved.
    """
    budget = budget or TransitionBudget()
    gone = frozenset(lost)
    _check(states, source, target, gone)
    pool = _Pool.of((source, target), nodes)
    ground = Ground(
        num_devices=len(pool.devices),
        node=pool.node,
        node_names=pool.node_names,
        alive=np.array([d not in gone for d in pool.devices] if gone else pool.node >= 0),
        capacity=_capacity(pool.devices, budget, hardware, gone),
        devices=pool.devices,
        hardware=hardware,
        budget=budget,
    )
    order = [s for s in states if s in source or s in target]
    order.sort(key=lambda s: (STAGE_ORDER.index(s.stage), s.role))
    changes = Changes(
        states=states, plans=(source, target), rows=pool.rows, ground=ground, tables=tables
    )
    ladders = [changes.ladder(s) for s in order]
    _check_target(ladders, ground)
    while True:
        drafts = [ladder.draft for ladder in ladders]
        problem = make_problem(drafts, ground.capacity, ground.alive)
        schedule = make_schedule(problem)
        if schedule.blocked is None:
            return make_graph(problem, schedule, ladders, ground, gone)
        escalate(ladders, problem, schedule.blocked, ground)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Pool:
    """The devices of two plans, ascending.

    Attributes:
      devices: what indices stand for.
      rows: for each plan and model-stage [dp, pp * tp] indices of the devices.
      node: [devices] numbers of nodes.
      node_names: what those stand for.
    """

    devices: tuple[DeviceId, ...]
    rows: tuple[Mapping[ModelStage, Ints], ...]
    node: Ints
    node_names: tuple[int, ...]

    @classmethod
    def of(cls, plans: Sequence[Plan], nodes: Mapping[DeviceId, int] | None) -> "_Pool":
        every = [d for plan in plans for p in plan.placements.values() for d in p.devices]
        codes = np.array([d.host << 32 | d.index for d in every], np.int64)  # order (host, index)
        _, first, index = np.unique(codes, return_index=True, return_inverse=True)
        places: list[int] = first.tolist()
        devices = tuple([every[i] for i in places])
        node = np.array([d.host if nodes is None else nodes[d] for d in devices], np.int64)
        names, numbered = np.unique(node, return_inverse=True)
        rows: list[dict[ModelStage, Ints]] = []
        begin = 0
        for plan in plans:
            rows.append({})
            for model_stage, placement in plan.placements.items():
                end = begin + placement.layout.num_devices
                rows[-1][model_stage] = index[begin:end].reshape(placement.layout.dp, -1)
                begin = end
        return cls(
            devices=devices,
            rows=tuple(rows),
            node=numbered.astype(np.int64),
            node_names=tuple(names.tolist()),
        )


def _capacity(
    devices: Sequence[DeviceId],
    budget: TransitionBudget,
    hardware: Hardware,
    gone: frozenset[DeviceId],
) -> Ints:
    """[devices] bytes that units may take."""
    taken = budget.buffer_bytes + budget.communicator_bytes
    capacity = np.full(len(devices), int(hardware.memory_bytes * (1 - budget.headroom)) - taken)
    if not budget.capacity_bytes and not budget.reserved_bytes and not gone:
        return capacity
    for i, device in enumerate(devices):
        if device in budget.capacity_bytes:
            own = budget.capacity_bytes[device]
            capacity[i] = int(own * (1 - budget.headroom)) - taken
        capacity[i] -= budget.reserved_bytes.get(device, 0)
        if device in gone:
            capacity[i] = UNBOUNDED_BYTES
    return capacity


def _check(
    states: Mapping[ModelStage, StageState], source: Plan, target: Plan, gone: frozenset[DeviceId]
) -> None:
    for name, plan in (("source", source), ("target", target)):
        unknown = [str(s) for s in plan.placements if s not in states]
        if unknown:
            raise InfeasiblePlanError(
                f"the {name} plan has {', '.join(unknown)}, of which no state was given; "
                f"there are {', '.join(str(s) for s in states)}"
            )
    for model_stage, placement in target.placements.items() if gone else ():
        missing = gone.intersection(placement.devices)
        if missing:
            raise InfeasiblePlanError(
                f"the target places {model_stage} on {', '.join(map(str, sorted(missing)))}, "
                f"which is lost; use devices that are alive"
            )


def _check_target(ladders: Sequence[Ladder], ground: Ground) -> None:
    """Raises InfeasiblePlanError if the target itself is too large for a device."""
    held = np.zeros(ground.num_devices, np.int64)
    for ladder in ladders:
        if not ladder.parked_after:
            held[ladder.change.new.rows] += ladder.change.new.device_bytes
    over = np.flatnonzero(held > ground.capacity)
    if not len(over):
        return
    i = int(over[0])
    here = [x for x in ladders if not x.parked_after and (x.change.new.rows == i).any()]
    worst = max(here, key=lambda x: x.change.new.device_bytes)
    raise InfeasiblePlanError(
        f"the target plan needs {held[i]} bytes for units on device {ground.devices[i]}, "
        f"{ground.capacity[i]} are available beside headroom and buffers; the largest is "
        f"{worst.model_stage} with {worst.change.new.device_bytes}: give it more tp or pp, or "
        f"other devices"
    )
