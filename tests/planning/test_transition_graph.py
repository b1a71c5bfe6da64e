"""A transition graph leads from plan to plan: every byte, every unit, every moment of memory."""

import dataclasses
import math
import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
    ModelStage,
)
from nereus_jax.core.tiling import LeafTiling, tile_leaf
from nereus_jax.core.transition import (
    Operation,
    OperationKind,
    TransitionGraph,
    Unit,
    Way,
)
from nereus_jax.planning.transfers import plan_transfer
from nereus_jax.planning.transition_graph import plan_transition
from nereus_jax.planning.transition_inputs import StageState, TransitionBudget
from nereus_jax.planning.transition_replay import replay

# Odd sizes: layers, vocabulary and feed-forward are padded by most layouts.
MODEL = DecoderConfig(
    num_layers=5,
    embed_dim=8,
    num_heads=12,
    num_kv_heads=6,
    head_dim=2,
    mlp_dim=10,
    vocab_size=37,
)
HARDWARE = Hardware(
    name="test",
    devices_per_node=4,
    peak_flops_per_s={},
    memory_bytes=10**9,
    memory_bytes_per_s=1e9,
    intra_node=Link(bytes_per_s=1e8, latency_s=1e-6),
    inter_node=Link(bytes_per_s=1e7, latency_s=1e-5),
    host=Link(bytes_per_s=1e7, latency_s=1e-5),
)
ROOMY = TransitionBudget(headroom=0.0, buffer_bytes=0)
LM = MODEL.spec(Head.LM)
MOMENTS = EmuSpec(
    leaves=tuple(
        dataclasses.replace(leaf, name=f"{m}.{leaf.name}") for m in ("mu", "nu") for leaf in LM
    )
)
FROZEN = StageState(parameters=LM, num_kv_heads=6)
TRAINED = StageState(parameters=LM, optimizer=MOMENTS, num_kv_heads=6)
STATES = {
    ACTOR_GENERATE: FROZEN,
    REFERENCE_SCORE: FROZEN,
    ACTOR_TRAIN: TRAINED,
    CRITIC_TRAIN: TRAINED,
}
POOL = DevicePool.uniform(3, 4).devices


def placement(dp: int, pp: int, tp: int, devices: Sequence[DeviceId]) -> Placement:
    return Placement(layout=ParallelLayout(dp, pp, tp), devices=tuple(devices[: dp * pp * tp]))


def only(model_stage: ModelStage, where: Placement) -> Plan:
    return Plan(placements={model_stage: where})


@st.composite
def placements(draw: st.DrawFn, devices: Sequence[DeviceId] = POOL) -> Placement:
    """Any layout on any devices, often in order, sometimes shuffled."""
    tp = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if n <= len(devices)]))
    pp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if n * tp <= len(devices)]))
    dp = draw(st.integers(1, len(devices) // (tp * pp)))
    start = draw(st.integers(0, len(devices) - dp * pp * tp))
    chosen = list(devices[start : start + dp * pp * tp])
    if draw(st.integers(0, 3)) == 0:
        random.Random(draw(st.integers(0, 99))).shuffle(chosen)
    return placement(dp, pp, tp, chosen)


@st.composite
def plan_pairs(draw: st.DrawFn) -> tuple[Plan, Plan]:
    stages = draw(st.lists(st.sampled_from(sorted(STATES)), min_size=1, unique=True))
    pairs = []
    for _ in range(2):
        pairs.append(Plan(placements={s: draw(placements()) for s in stages}))
    return pairs[0], pairs[1]


# --- what an operation moves, against the exact schedule of its transfer ---


def leaves(state: StageState) -> EmuSpec:
    specs = [state.parameters] + ([state.optimizer] if state.optimizer is not None else [])
    return EmuSpec(leaves=tuple(leaf for spec in specs for leaf in spec))


def tilings(spec: EmuSpec, units: Sequence[Unit]) -> list[LeafTiling]:
    """The leaves of some units of one layout as one tiling: replicas of the blocks of a unit."""
    mesh = ParallelLayout(1, units[0].pp, units[0].tp).mesh_shape(MODEL.num_kv_heads)
    found = []
    for leaf in spec:
        one = tile_leaf(leaf, spec.rules, mesh, units[0].devices)
        devices = tuple(d for u in units for d in u.devices)
        found.append(
            dataclasses.replace(one, devices=devices, positions=one.positions * len(units))
        )
    return found


def group_tilings(state: StageState, where: Placement) -> list[LeafTiling]:
    """The leaves of all units together, the optimizer's split over dp."""
    mesh = where.layout.mesh_shape(MODEL.num_kv_heads)
    assert state.optimizer is not None
    spec = EmuSpec(leaves=(*state.parameters.leaves, *state.optimizer.with_zero(mesh).leaves))
    return [tile_leaf(leaf, spec.rules, mesh, where.devices) for leaf in spec]


def check_bytes(
    operation: Operation,
    sources: Sequence[LeafTiling],
    targets: Sequence[LeafTiling],
    lost: frozenset[DeviceId] = frozenset(),
) -> None:
    schedule = plan_transfer(sources, targets, lost=lost)
    by_link = [0, 0]
    for (sender, receiver), num_bytes in schedule.bytes_by_pair().items():
        by_link[sender.host != receiver.host] += num_bytes
    assert operation.link_bytes.intra_node == by_link[0]
    assert operation.link_bytes.inter_node == by_link[1]
    local = sum(
        int(np.prod(kept.extents, axis=1).sum()) * source.item_bytes
        for kept, source in zip(schedule.kept, schedule.sources, strict=True)
        if len(kept.extents)
    )
    assert operation.link_bytes.local == local


TRANSFERS = {
    OperationKind.SPLIT,
    OperationKind.MERGE,
    OperationKind.EXTEND,
    OperationKind.RESHARD,
}


@given(plan_pairs(), st.sampled_from([Way.COMPOSED, Way.DIRECT, Way.LEAN]))
def test_an_operation_moves_what_its_transfer_moves(plans: tuple[Plan, Plan], way: Way) -> None:
    graph = plan_transition(
        STATES, *plans, hardware=HARDWARE, budget=dataclasses.replace(ROOMY, ways=frozenset({way}))
    )
    for operation in graph.operations:
        if operation.kind in TRANSFERS:
            spec = leaves(STATES[operation.model_stage])
            check_bytes(
                operation,
                tilings(spec, (*operation.reads, *operation.consumes)),
                tilings(spec, operation.produces),
            )
        else:
            assert operation.kind is OperationKind.DESTROY and operation.seconds == 0


@given(placements(), placements())
def test_zero_moves_in_one_reshard(old: Placement, new: Placement) -> None:
    state = dataclasses.replace(TRAINED, zero1=True)
    plans = only(ACTOR_TRAIN, old), only(ACTOR_TRAIN, new)
    graph = plan_transition({ACTOR_TRAIN: state}, *plans, hardware=HARDWARE, budget=ROOMY)
    if old == new:
        assert not graph.operations
    elif old.layout.dp == new.layout.dp == 1:
        assert graph.choices[ACTOR_TRAIN].way in (Way.COMPOSED, Way.DIRECT)
    else:
        (operation,) = graph.operations
        check_bytes(operation, group_tilings(state, old), group_tilings(state, new))
        for units, where, num_bytes in (
            (operation.consumes, old, operation.consumed_bytes),
            (operation.produces, new, operation.produced_bytes),
        ):
            mesh = where.layout.mesh_shape(6)
            zero = MOMENTS.with_zero(mesh)
            assert num_bytes == LM.local_bytes(mesh) + zero.local_bytes(mesh)
            assert [u.devices for u in units] == [
                where.replica_devices(i) for i in range(where.layout.dp)
            ]


@given(placements(), placements())
def test_the_direct_way_moves_what_one_transfer_of_everything_moves(
    old: Placement, new: Placement
) -> None:
    plans = only(REFERENCE_SCORE, old), only(REFERENCE_SCORE, new)
    budget = dataclasses.replace(ROOMY, ways=frozenset({Way.DIRECT}))
    graph = plan_transition(STATES, *plans, hardware=HARDWARE, budget=budget)
    ends = [
        [tile_leaf(x, LM.rules, p.layout.mesh_shape(6), p.devices) for x in LM] for p in (old, new)
    ]
    assert graph.link_bytes.wire == plan_transfer(*ends).wire_bytes


# --- order, units and memory ---


def units_of(plan: Plan) -> set[Unit]:
    return {
        Unit(model_stage=s, tp=p.layout.tp, pp=p.layout.pp, devices=p.replica_devices(i))
        for s, p in plan.placements.items()
        for i in range(p.layout.dp)
    }


def some_order(graph: TransitionGraph, rng: random.Random) -> list[int]:
    """Any order that the edges allow."""
    done: set[int] = set()
    order: list[int] = []
    left = list(range(len(graph.operations)))
    while left:
        ready = [i for i in left if done.issuperset(graph.predecessors(i))]
        chosen = rng.choice(ready)
        left.remove(chosen)
        order.append(chosen)
        done.add(chosen)
    return order


def check_copies(graph: TransitionGraph, order: Sequence[int], stages: set[ModelStage]) -> None:
    """Every model-stage has an intact copy at every moment: a whole old, new, or parked unit, or
    pieces on the way, each of which is whole."""
    units = {u for u in graph.initial_units if graph.lost.isdisjoint(u.devices)}
    for i in order:
        operation = graph.operations[i]
        units.difference_update(operation.consumes)
        units.update(operation.produces)
        alive = {u.model_stage for u in units}
        assert stages <= alive, f"after {operation.kind} of {operation.model_stage}"


def check_graph(graph: TransitionGraph, source: Plan, target: Plan) -> None:
    count = len(graph.operations)
    assert len(graph.data_edges) == len(graph.resource_edges) == count
    for i in range(count):
        assert all(j < i and graph.end_s[j] <= graph.start_s[i] for j in graph.predecessors(i))
        duration_s = graph.end_s[i] - graph.start_s[i]
        assert math.isclose(duration_s, graph.operations[i].seconds, abs_tol=1e-12)
    assert set(graph.initial_units) == units_of(source)
    assert set(graph.final_units) == units_of(target)
    produced = [u for o in graph.operations for u in o.produces]
    for unit in graph.final_units:
        gone = any(unit in o.consumes for o in graph.operations)
        kept = unit in graph.initial_units and not gone
        assert produced.count(unit) == (0 if kept else 1)
    path = graph.critical_path
    for a, b in zip(path, path[1:], strict=False):
        assert graph.end_s[a] == graph.start_s[b]
    if path:
        assert graph.start_s[path[0]] == 0.0
        assert graph.end_s[path[-1]] == max(graph.end_s) == graph.transition_s
    busy: dict[DeviceId, float] = {}
    for i in range(count):
        if graph.operations[i].seconds:
            for device in graph.operations[i].devices:
                assert busy.get(device, 0.0) <= graph.start_s[i]
                busy[device] = graph.end_s[i]


def tightest(source: Plan, target: Plan, slack: float) -> TransitionBudget:
    """Memory that holds the larger of the two plans, and a part of what the transition needs."""
    capacity = {}
    for device in POOL:
        held = []
        for plan in (source, target):
            held.append(
                sum(
                    leaves(STATES[s]).local_bytes(
                        ParallelLayout(1, p.layout.pp, p.layout.tp).mesh_shape(6)
                    )
                    for s, p in plan.placements.items()
                    if device in p.devices
                )
            )
        capacity[device] = int(max(held) + slack * min(held))
    return dataclasses.replace(ROOMY, capacity_bytes=capacity)


@given(plan_pairs(), st.sampled_from([0.0, 0.3, 0.7, 2.0]), st.integers(0, 9))
def test_every_order_that_the_edges_allow_reaches_the_target(
    plans: tuple[Plan, Plan], slack: float, seed: int
) -> None:
    budget = tightest(*plans, slack)
    graph = plan_transition(STATES, *plans, hardware=HARDWARE, budget=budget)
    check_graph(graph, *plans)
    again = plan_transition(STATES, *plans, hardware=HARDWARE, budget=budget)
    assert graph == again
    done = replay(graph)
    assert done.violation is None
    assert set(done.units) == units_of(plans[1])
    assert tuple(done.peak_bytes.values()) == graph.peak_bytes
    stages = set(plans[0].placements)
    check_copies(graph, range(len(graph.operations)), stages)
    rng = random.Random(seed)
    for _ in range(3):
        order = some_order(graph, rng)
        done = replay(graph, order)
        assert done.violation is None
        assert set(done.units) == units_of(plans[1])
        check_copies(graph, order, stages)
