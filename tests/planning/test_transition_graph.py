"""A transition graph leads from plan to plan: every byte, every unit, every moment of memory."""

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_SCORE,
    ACTOR_TRAIN,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
    ModelStage,
)
from nereus_jax.core.tiling import LeafTiling, tile_leaf
from nereus_jax.core.transition import (
    Operation,
    OperationKind,
    RecoverySource,
    TransitionGraph,
    Unit,
    Way,
)
from nereus_jax.planning.transfers import plan_transfer
from nereus_jax.planning.transition_changes import TransitionTables
from nereus_jax.planning.transition_graph import plan_transition
from nereus_jax.planning.transition_inputs import StageState, TransitionBudget
from nereus_jax.planning.transition_replay import replay, uncoordinated_order

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
    assert {c.way for c in graph.choices.values()} <= {way, Way.KEPT}
    check_graph(graph, *plans)
    for order in (range(len(graph.operations)), some_order(graph, random.Random(0))):
        assert replay(graph, order).violation is None
        check_copies(graph, order, set(plans[0].placements))
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
    for a, b in itertools.pairwise(path):
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
    tables = TransitionTables()  # what a transition leaves in them changes no other
    for _ in range(2):
        again = plan_transition(STATES, *plans, hardware=HARDWARE, budget=budget, tables=tables)
        assert again == graph
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


# --- ways by hand ---


def plan_one(
    state: StageState, old: Placement | None, new: Placement | None, **arguments: Any
) -> TransitionGraph:
    plans = [Plan(placements={ACTOR_TRAIN: p} if p else {}) for p in (old, new)]
    arguments = {"budget": ROOMY} | arguments
    return plan_transition({ACTOR_TRAIN: state}, *plans, hardware=HARDWARE, **arguments)


def kinds(graph: TransitionGraph) -> list[str]:
    return [str(o.kind) for o in graph.operations]


def test_doubling_copies_across_nodes_once_and_then_inside() -> None:
    graph = plan_one(FROZEN, placement(2, 1, 2, POOL), placement(6, 1, 2, POOL))
    assert kinds(graph) == ["extend"] * 4
    state_bytes = LM.num_elements * 4
    replicated = sum(
        x.num_bytes
        for x in LM
        if not any(x.num_shards(LM.rules, (1, 1, 2, 1))[i] > 1 for i in range(len(x.shape)))
    )
    assert graph.link_bytes.inter_node == 2 * state_bytes  # once to each of two nodes
    inside = 4 * (state_bytes + replicated) - 2 * state_bytes
    assert graph.link_bytes.intra_node == inside
    first, second = (i for i in range(4) if graph.operations[i].link_bytes.inter_node)
    assert graph.start_s[first] == 0.0
    followers = [i for i in range(4) if i not in (first, second)]
    assert {graph.data_edges[i] for i in followers} == {(first,), (second,)}


def test_halving_only_destroys() -> None:
    graph = plan_one(TRAINED, placement(4, 1, 2, POOL), placement(2, 1, 2, POOL))
    assert kinds(graph) == ["destroy"] * 2
    assert graph.transition_s == 0.0 and graph.link_bytes.wire == 0


def test_composed_goes_through_t_sub() -> None:
    budget = dataclasses.replace(ROOMY, ways=frozenset({Way.COMPOSED}))
    old, new = placement(1, 2, 2, POOL), placement(1, 1, 4, POOL)
    even = dataclasses.replace(MODEL, num_layers=4, mlp_dim=12, vocab_size=40).spec(Head.LM)
    state = dataclasses.replace(FROZEN, parameters=even)
    graph = plan_one(state, old, new, budget=budget)
    # T_sub is pp=1, tp=2. The old unit splits into (0, 1) and (2, 3), the new one consists of
    # (0, 2) and (1, 3): none is there, so both are copied.
    assert kinds(graph)[0] == "split" and kinds(graph)[-1] == "merge"
    assert kinds(graph).count("extend") == 2
    split = graph.operations[0]
    assert [[d.index for d in u.devices] for u in split.produces] == [[0, 1], [2, 3]]
    merge = graph.operations[-1]
    assert [[d.index for d in u.devices] for u in merge.consumes] == [[0, 2], [1, 3]]
    assert merge.link_bytes.wire == 0
    prices = graph.choices[ACTOR_TRAIN].prices
    assert prices[Way.DIRECT].link_bytes.wire < prices[Way.COMPOSED].link_bytes.wire
    assert plan_one(state, old, new).choices[ACTOR_TRAIN].way is Way.DIRECT


def test_a_refreshed_copy_moves_nothing_and_may_share_arrays() -> None:
    states = {
        ACTOR_TRAIN: TRAINED,
        ACTOR_GENERATE: dataclasses.replace(FROZEN, refreshed_by=ACTOR_TRAIN),
    }
    train, wide = placement(1, 1, 2, POOL), placement(2, 1, 2, POOL)
    source = Plan(placements={ACTOR_TRAIN: train, ACTOR_GENERATE: train})
    target = Plan(placements={ACTOR_TRAIN: train, ACTOR_GENERATE: wide})
    graph = plan_transition(states, source, target, hardware=HARDWARE, budget=ROOMY)
    assert sorted(kinds(graph)) == ["destroy", "refresh", "refresh"]
    assert graph.link_bytes.wire == 0 and graph.transition_s == 0.0
    shared = graph.initial_units.index(
        next(u for u in graph.initial_units if u.model_stage == ACTOR_GENERATE)
    )
    assert graph.initial_bytes[shared] == 0  # the very arrays of TRAIN
    refresh = [o for o in graph.operations if o.kind is OperationKind.REFRESH]
    assert {o.produced_bytes for o in refresh} == {LM.local_bytes((1, 1, 2, 1))}
    assert replay(graph).violation is None


def test_lost_devices_leave_the_intact_copy() -> None:
    lost = frozenset({POOL[0]})
    new = placement(1, 1, 2, POOL[4:])
    graph = plan_one(TRAINED, placement(2, 1, 2, POOL), new, lost=lost)
    assert graph.choices[ACTOR_TRAIN].way in (Way.COMPOSED, Way.DIRECT)
    (copy,) = [o for o in graph.operations if o.kind is OperationKind.EXTEND]
    assert copy.reads[0].devices == POOL[2:4] and copy.source is RecoverySource.REPLICA
    assert POOL[0] not in graph.devices
    check_copies(graph, range(len(graph.operations)), {ACTOR_TRAIN})
    assert replay(graph).violation is None


def test_blocks_that_are_left_of_broken_copies_make_a_whole() -> None:
    lost = frozenset({POOL[0], POOL[3]})
    graph = plan_one(TRAINED, placement(2, 1, 2, POOL), placement(2, 1, 2, POOL[4:]), lost=lost)
    (operation,) = graph.operations
    assert operation.kind is OperationKind.RESHARD and len(operation.consumes) == 2
    spec = leaves(TRAINED)
    check_bytes(
        operation, tilings(spec, operation.consumes), tilings(spec, operation.produces), lost
    )


@pytest.mark.parametrize("source", list(RecoverySource)[1:])
def test_without_a_copy_state_is_restored(source: RecoverySource) -> None:
    state = dataclasses.replace(TRAINED, recovery=(source,))
    lost, new = frozenset(POOL[:1]), placement(3, 1, 2, POOL[2:])
    graph = plan_one(state, placement(1, 1, 2, POOL), new, lost=lost)
    assert kinds(graph) == ["destroy", "restore", "extend", "extend"]
    restore = graph.operations[1]
    assert restore.source is source and graph.choices[ACTOR_TRAIN].way is Way.RESTORED
    assert (restore.link_bytes.storage > 0) == (source is RecoverySource.CHECKPOINT)
    with pytest.raises(InfeasiblePlanError, match="neither a host snapshot nor a checkpoint"):
        plan_one(TRAINED, placement(1, 1, 2, POOL), new, lost=lost)
    with pytest.raises(InfeasiblePlanError, match="on 0:0, which is lost"):
        plan_one(TRAINED, new, placement(1, 1, 2, POOL), lost=lost)


def test_two_that_change_places_meet_in_host_memory() -> None:
    """Each fits only where the other is: neither can move first without a third place."""
    one, other = placement(1, 1, 2, POOL), placement(1, 1, 2, POOL[2:])
    source = Plan(placements={ACTOR_TRAIN: one, CRITIC_TRAIN: other})
    target = Plan(placements={ACTOR_TRAIN: other, CRITIC_TRAIN: one})
    budget = tightest(source, target, 0.5)
    graph = plan_transition(STATES, source, target, hardware=HARDWARE, budget=budget)
    assert Way.PARKED in {c.way for c in graph.choices.values()}
    assert {"park", "unpark"} <= set(kinds(graph))
    assert any("blocked" in c.reason for c in graph.choices.values())
    check_graph(graph, source, target)
    assert replay(graph).violation is None
    # Where the other goes there is room: with the same tables no way is left from before.
    tables = TransitionTables()
    for end in (target, only(ACTOR_TRAIN, other), only(CRITIC_TRAIN, one), target):
        first, again = (
            plan_transition(STATES, source, end, hardware=HARDWARE, budget=budget, tables=t)
            for t in (None, tables)
        )
        assert first == again
        assert (Way.PARKED in {c.way for c in first.choices.values()}) == (end == target)
    strict = dataclasses.replace(budget, ways=frozenset({Way.COMPOSED, Way.DIRECT, Way.LEAN}))
    with pytest.raises(
        InfeasiblePlanError,
        match=r"TRAIN cannot reach its target: the operation \w+ needs \d+ bytes on device 0:\d, ",
    ):
        plan_transition(STATES, source, target, hardware=HARDWARE, budget=strict)
    small = dataclasses.replace(budget, host_bytes={0: 10})
    with pytest.raises(InfeasiblePlanError, match="must wait in host memory, but node 0 needs"):
        plan_transition(STATES, source, target, hardware=HARDWARE, budget=small)


def test_a_target_that_is_too_large_is_refused() -> None:
    small = dataclasses.replace(ROOMY, capacity_bytes={POOL[1]: 1000})
    with pytest.raises(
        InfeasiblePlanError, match=r"on device 0:1, 1000 are available .*actor-TRAIN"
    ):
        plan_one(TRAINED, placement(1, 1, 1, POOL), placement(2, 1, 1, POOL), budget=small)


def test_parking_by_hand() -> None:
    """Host bytes and seconds: every device copies its own block over its own link."""
    where = placement(1, 1, 2, POOL)
    graph = plan_one(dataclasses.replace(FROZEN, parked_after=True), where, where)
    (park,) = graph.operations
    cut = sum(x.num_bytes for x in LM if max(x.num_shards(LM.rules, (1, 1, 2, 1))) > 1)
    whole = LM.num_elements * 4 - cut
    assert park.link_bytes.host == cut + 2 * whole
    padded = (37 + 1) // 2 * 8 * 4  # the larger half of the vocabulary
    largest = (cut - 37 * 8 * 4) / 2 + padded + whole
    assert math.isclose(park.seconds, 1e-5 + largest / 1e7)


def test_parked_stages_come_back_and_go() -> None:
    old, new = placement(2, 1, 2, POOL), placement(2, 2, 1, POOL)
    waiting = dataclasses.replace(TRAINED, parked_before=True)
    graph = plan_one(waiting, old, new)
    assert kinds(graph) == ["destroy", "unpark", "extend"]
    assert all(u.parked for u in graph.initial_units) and set(graph.initial_bytes) == {0}
    going = dataclasses.replace(TRAINED, parked_after=True)
    graph = plan_one(going, old, old)
    assert kinds(graph) == ["park", "park"] and all(u.parked for u in graph.final_units)
    with pytest.raises(InfeasiblePlanError, match="park it where it is"):
        plan_one(going, old, new)


def test_a_stage_that_goes_and_one_that_comes() -> None:
    where = placement(2, 1, 2, POOL)
    gone = plan_one(TRAINED, where, None)
    assert kinds(gone) == ["destroy", "destroy"] and gone.choices[ACTOR_TRAIN].way is Way.RELEASED
    state = dataclasses.replace(TRAINED, recovery=(RecoverySource.CHECKPOINT,))
    assert kinds(plan_one(state, None, where)) == ["restore", "extend"]


def test_states_must_cover_both_plans() -> None:
    plan = only(ACTOR_SCORE, placement(1, 1, 1, POOL))
    with pytest.raises(InfeasiblePlanError, match="the source plan has actor-SCORE"):
        plan_transition(STATES, plan, plan, hardware=HARDWARE)


@given(placements(), placements())
def test_the_way_through_host_memory(old: Placement, new: Placement) -> None:
    budget = dataclasses.replace(ROOMY, ways=frozenset({Way.PARKED}))
    plans = only(REFERENCE_SCORE, old), only(REFERENCE_SCORE, new)
    graph = plan_transition(STATES, *plans, hardware=HARDWARE, budget=budget)
    check_graph(graph, *plans)
    for order in (range(len(graph.operations)), some_order(graph, random.Random(1))):
        done = replay(graph, order)
        assert done.violation is None and set(done.units) == units_of(plans[1])
        check_copies(graph, order, {REFERENCE_SCORE})
    for operation in graph.operations:
        units = {OperationKind.PARK: operation.consumes, OperationKind.UNPARK: operation.produces}
        if operation.kind in units:
            parts = tilings(LM, units[operation.kind])
            boxes = [(t.item_bytes, t.box(p)) for t in parts for p in t.positions]
            block_bytes = sum(n * math.prod(b - a for a, b in box) for n, box in boxes)
            assert operation.link_bytes.host == block_bytes and operation.link_bytes.wire == (
                operation.link_bytes.inter_node
            )


@given(
    plan_pairs(),
    st.sets(st.sampled_from(POOL), min_size=1, max_size=3),
    st.tuples(st.booleans(), st.booleans()),
)
def test_whatever_is_lost_the_target_is_reached(
    plans: tuple[Plan, Plan], lost: set[DeviceId], zero1: tuple[bool, bool]
) -> None:
    """From intact copies if there are any, else from what is left together, else from outside."""
    where = plans[1].placements
    target = Plan(placements={s: p for s, p in where.items() if lost.isdisjoint(p.devices)})
    states = {
        s: dataclasses.replace(
            x,
            recovery=(RecoverySource.HOST,),
            zero1=zero1[0] and x.optimizer is not None,
            zero1_after=zero1[1] and x.optimizer is not None,
        )
        for s, x in STATES.items()
    }
    graph = plan_transition(states, plans[0], target, hardware=HARDWARE, budget=ROOMY, lost=lost)
    done = replay(graph)
    assert done.violation is None and set(done.units) == units_of(target)
    intact = {u for u in units_of(plans[0]) if lost.isdisjoint(u.devices)}
    for stage in target.placements:
        operations = [o for o in graph.operations if o.model_stage == stage]
        old = plans[0][stage]
        restored = graph.choices[stage].way is Way.RESTORED
        if states[stage].zero1 and old.layout.dp > 1:
            assert restored == (not lost.isdisjoint(old.devices))
            continue
        ranks = zip(*(old.replica_devices(i) for i in range(old.layout.dp)), strict=True)
        assert restored == (not all(set(rank) - lost for rank in ranks))
        if states[stage].zero1_after and target[stage].layout.dp > 1:
            if not restored and old != target[stage]:
                assert [o.kind for o in operations] == [OperationKind.RESHARD]
            continue
        if any(u.model_stage == stage for u in intact):
            check_copies(graph, range(len(graph.operations)), {stage})
            for operation in operations:
                if operation.kind is not OperationKind.DESTROY:
                    read = (*operation.reads, *operation.consumes)
                    assert all(lost.isdisjoint(u.devices) for u in read)


# --- without the common graph ---


@given(plan_pairs(), st.integers(0, 5))
def test_an_uncoordinated_order_keeps_to_each_model_stage(
    plans: tuple[Plan, Plan], seed: int
) -> None:
    graph = plan_transition(STATES, *plans, hardware=HARDWARE, budget=ROOMY)
    order = uncoordinated_order(graph, seed)
    assert sorted(order) == list(range(len(graph.operations)))
    done = replay(graph, order)
    assert done.violation is None and set(done.units) == units_of(plans[1])  # memory abounds
    assert order == uncoordinated_order(graph, seed)


def test_an_uncoordinated_order_runs_out_of_memory() -> None:
    """Two that shrink and grow on the same devices: only one of the two may move first."""
    small, large = placement(1, 1, 1, POOL), placement(2, 1, 1, POOL)
    source = Plan(placements={ACTOR_GENERATE: large, REFERENCE_SCORE: small})
    target = Plan(placements={ACTOR_GENERATE: small, REFERENCE_SCORE: large})
    budget = tightest(source, target, 0.0)
    graph = plan_transition(STATES, source, target, hardware=HARDWARE, budget=budget)
    assert replay(graph).violation is None
    assert graph.resource_edges != ((),) * len(graph.operations)
    found = [replay(graph, uncoordinated_order(graph, seed)).violation for seed in range(20)]
    assert 0 < sum(v is not None for v in found) < 20
    violation = next(v for v in found if v is not None)
    assert violation.device == POOL[1] and violation.needed_bytes > violation.available_bytes
    less = replay(graph, capacities={POOL[1]: 0}).violation
    assert less is not None and less.device == POOL[1] and less.available_bytes == 0
