"""The planner as a cost function: plans on real pools, and transitions between them."""

import dataclasses

import pytest

from nereus_jax.control.controller import Controller
from nereus_jax.control.costs import Beliefs
from nereus_jax.control.planner_costs import PlannerCosts
from nereus_jax.control.settings import ControllerSettings
from nereus_jax.control.state import initial_state, plan_devices
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.events import (
    DevicesLost,
    LengthSummary,
    StepFinished,
    StepRecord,
    Transition,
    TransitionEnded,
)
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import ACTOR_TRAIN, CRITIC_TRAIN, REFERENCE_SCORE, Role, Stage
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.calibration import Efficiencies, OperationClass
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.plan_price import price_plan
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload

WORK = Workload(
    prompts=256,
    prompt_lengths=LengthHistogram.constant(512),
    response_lengths=LengthHistogram(lengths=(256, 512, 1024), weights=(0.5, 0.3, 0.2)),
    max_response_tokens=4096,
    minibatch_size=128,
)
PROBLEM = PlanProblem(
    workflow=policy_gradient(
        "ppo", reward_model=False, reference=True, recompute_old_logprobs=True
    ),
    models=dict.fromkeys(Role, preset("llama3-8b")),
    workload=WORK,
    hardware=load_hardware("h100"),
    num_devices=16,
)
COSTS = PlannerCosts(problem=PROBLEM)
POOL = DevicePool.uniform(2, 8)
KNOWN = Beliefs()


def start_plan(pool: DevicePool = POOL, costs: PlannerCosts = COSTS) -> ExecutionPlan:
    """The best plan of a pool; there is no plan that it should be near."""
    from nereus_jax.planning.search_plans import find_plans

    problem = dataclasses.replace(costs.problem, num_devices=len(pool))
    step = find_plans(problem, 1).plans[0]
    nothing = ExecutionPlan(plan=dataclasses.replace(step.plan().plan, placements={}), choices={})
    return costs._placed(step, pool, nothing)  # pyright: ignore[reportPrivateUsage]


PLAN = start_plan()


def found(pool: DevicePool, current: ExecutionPlan = PLAN, **changes):
    wanted = {"current": current, "count": 4} | changes
    return COSTS.candidates(WORK, pool, KNOWN, **wanted)


def test_candidates_are_on_the_pool_fit_and_are_sorted():
    for pool in (POOL, POOL.without([DeviceId(0, 3)]), DevicePool.uniform(1, 7)):
        plans = found(pool).plans
        assert len(plans) > 1
        seconds = [c.price.step_s for c in plans]
        assert seconds == sorted(seconds)
        for c in plans:
            c.plan.plan.check_pool(pool)
            assert c.price.fits and set(c.plan.choices) == set(PROBLEM.workflow.model_stages)
        assert len({str(c.plan.to_json()) for c in plans}) == len(plans)


def test_some_candidates_keep_the_degrees_of_what_is_trained():
    fewer = POOL.without([DeviceId(1, i) for i in range(8)])
    kept = [c for c in found(fewer).plans if c.origin == "search, pp and tp kept"]
    for c in kept:
        for stage in (ACTOR_TRAIN, CRITIC_TRAIN):
            old, new = PLAN.plan[stage].layout, c.plan.plan[stage].layout
            assert (old.pp, old.tp) == (new.pp, new.tp)
    same = found(fewer, same_degrees=True).plans
    for c in same:
        for stage, placement in c.plan.plan.placements.items():
            old = PLAN.plan[stage].layout
            assert (old.pp, old.tp) == (placement.layout.pp, placement.layout.tp)


def test_groups_of_ranks_stay_in_a_node_where_they_can():
    """6 and 7 devices of two nodes: no group of ranks is torn that need not be."""
    pool = POOL.without([DeviceId(0, 1), DeviceId(1, 2), DeviceId(1, 7)])
    for c in found(pool).plans:
        if c.origin != "search":  # degrees that are kept may not fit
            continue
        for placement in c.plan.plan.placements.values():
            tp = placement.layout.tp
            groups = [
                {d.host for d in placement.devices[i : i + tp]}
                for i in range(0, len(placement.devices), tp)
            ]
            torn = sum(len(g) > 1 for g in groups)
            most_whole = 6 // tp + 7 // tp
            assert torn == max(len(groups) - most_whole, 0)


def test_prices_see_a_torn_group():
    stage = max(PLAN.choices, key=lambda s: PLAN.plan[s].layout.tp)
    tp = PLAN.plan[stage].layout.tp
    assert tp > 1
    placement = PLAN.plan[stage]
    mixed = tuple(sorted(placement.devices, key=lambda d: (d.index, d.host)))
    torn = dataclasses.replace(
        PLAN,
        plan=dataclasses.replace(
            PLAN.plan,
            placements={
                **PLAN.plan.placements,
                stage: dataclasses.replace(placement, devices=mixed),
            },
        ),
    )
    near, far = (COSTS.price(p, WORK, POOL, KNOWN).stages[stage] for p in (PLAN, torn))
    assert far.seconds > near.seconds


def test_the_price_is_that_of_the_planner():
    price = COSTS.price(PLAN, WORK, POOL, KNOWN)
    assert price.step_s == price_plan(PROBLEM, PLAN).step_s
    assert COSTS.peak_bytes(PLAN, WORK, POOL, KNOWN) == pytest.approx(price.peak_bytes)
    for stage, own in price.stages.items():
        assert COSTS.stage_seconds(PLAN, stage, WORK, KNOWN) == own.seconds_by_class


def test_a_candidate_has_the_price_of_its_plan_to_the_last_bit():
    """Whether a search has priced it already, or not: not GENERATE, and no torn groups."""
    small = dataclasses.replace(PROBLEM.hardware, memory_bytes=PROBLEM.hardware.memory_bytes // 2)
    scarce = PlannerCosts(problem=dataclasses.replace(PROBLEM, hardware=small))
    parked = 0
    for costs, pool in (
        (COSTS, POOL),
        (COSTS, DevicePool.uniform(1, 3)),
        (COSTS, POOL.without([DeviceId(0, 1), DeviceId(1, 2), DeviceId(1, 7)])),
        (scarce, POOL),
    ):
        plans = costs.candidates(WORK, pool, KNOWN, current=PLAN, count=6).plans
        assert plans
        for c in plans:
            assert costs.price(c.plan, WORK, pool, KNOWN) == c.price
            parked += any(choice.parked for choice in c.plan.choices.values())
    assert parked


def test_beliefs_count():
    slow = KNOWN.efficiencies.replace({OperationClass.GEMM: 0.1})
    doubled = Beliefs(efficiencies=slow, corrections=dict.fromkeys(Stage, 2.0))
    plain, worse = (COSTS.price(PLAN, WORK, POOL, b) for b in (KNOWN, doubled))
    assert worse.step_s > plain.step_s and worse.peak_bytes > plain.peak_bytes


def test_a_change_of_degrees_moves_bytes_and_takes_seconds():
    other = found(DevicePool.uniform(1, 8)).plans[0].plan
    same = COSTS.transition(PLAN, PLAN, KNOWN, hidden_s=1e9)
    move = COSTS.transition(PLAN, other, KNOWN, hidden_s=1e9)
    assert same.executable and same.parts_s["move"] == 0.0 and same.link_bytes.wire == 0
    assert move.executable and move.parts_s["move"] > 0 and move.link_bytes.wire > 0
    assert move.seconds == pytest.approx(sum(move.parts_s.values()))
    assert set(move.device_bytes) == plan_devices(PLAN) | plan_devices(other)
    # What nothing hides of compiling is in it; what was learned of links and transitions, too.
    at_once = COSTS.transition(PLAN, other, KNOWN)
    assert at_once.seconds == pytest.approx(move.seconds + at_once.parts_s["compile"])
    assert at_once.parts_s["compile"] > 0
    # Where the compiler has the devices' cores, beside steps it costs as much as waiting for it.
    shared = dataclasses.replace(COSTS, compiler_apart=False)
    assert shared.transition(PLAN, other, KNOWN, hidden_s=1e9).seconds == at_once.seconds
    links = (OperationClass.P2P_INTRA, OperationClass.P2P_INTER)
    half = KNOWN.efficiencies.replace({c: KNOWN.efficiencies[c] / 2 for c in links})
    slower = COSTS.transition(PLAN, other, Beliefs(efficiencies=half), hidden_s=1e9)
    assert 1.5 < slower.parts_s["move"] / move.parts_s["move"] <= 2.0  # the rest is in memory
    learned = Beliefs(transition_ratio=3.0)
    longer = COSTS.transition(PLAN, other, learned, hidden_s=1e9)
    parts = ("move", "setup")
    assert [longer.parts_s[k] for k in parts] == pytest.approx([3 * move.parts_s[k] for k in parts])


def test_a_surviving_copy_needs_no_checkpoint_and_a_lost_one_does():
    pool = POOL.without([DeviceId(0, 0)])
    target = found(pool).plans[0].plan
    lost = frozenset({DeviceId(0, 0)})
    estimate = COSTS.transition(PLAN, target, KNOWN, lost=lost)
    replicated = all(
        PLAN.plan[s].layout.dp > 1 and not PLAN.choices[s].zero1
        for s in (ACTOR_TRAIN, CRITIC_TRAIN)
    )
    assert estimate.executable == replicated
    assert replicated or "no copy that is whole" in estimate.reason
    restart = COSTS.transition(PLAN, target, KNOWN, by_checkpoint=True)
    assert restart.executable and restart.seconds > COSTS.restart_s
    assert restart.link_bytes.storage > 0 and restart.parts_s["read"] > 0


def test_parked_model_stages_move_when_they_come_back():
    """The reference waits on the host, and is to wait for other devices."""

    def with_reference(devices, parked) -> ExecutionPlan:
        placement = PLAN.plan[REFERENCE_SCORE]
        choice = dataclasses.replace(PLAN.choices[REFERENCE_SCORE], parked=parked)
        count = placement.layout.num_devices
        placements = {
            **PLAN.plan.placements,
            REFERENCE_SCORE: dataclasses.replace(placement, devices=devices[:count]),
        }
        return ExecutionPlan(
            plan=dataclasses.replace(PLAN.plan, placements=placements),
            choices={**PLAN.choices, REFERENCE_SCORE: choice},
        )

    order = PLAN.plan[REFERENCE_SCORE].devices
    turned = (*order[1:], order[0])
    here, there = with_reference(order, True), with_reference(turned, True)
    still = COSTS.transition(here, here, KNOWN, hidden_s=1e9)
    assert still.executable and "unpark" not in still.parts_s
    moved = COSTS.transition(here, there, KNOWN, hidden_s=1e9)
    assert moved.executable and moved.parts_s["unpark"] > 0 and moved.link_bytes.host > 0


def test_where_nothing_fits_the_shortage_is_told():
    small = PlannerCosts(
        problem=dataclasses.replace(PROBLEM, models=dict.fromkeys(Role, preset("llama3-70b")))
    )
    nothing = small.candidates(WORK, DevicePool.uniform(1, 1), KNOWN, current=PLAN, count=2)
    assert not nothing.plans and "GiB of a device" in nothing.shortage
    kept = small.candidates(
        WORK, DevicePool.uniform(1, 1), KNOWN, current=PLAN, count=2, same_degrees=True
    )
    assert kept.shortage == "the pp and tp that are to stay do not fit the devices"


def test_a_node_may_have_several_hosts():
    """One process a device, four of them in a node."""
    pool = DevicePool.uniform(8, 1)
    costs = PlannerCosts(
        problem=dataclasses.replace(
            PROBLEM,
            hardware=dataclasses.replace(PROBLEM.hardware, devices_per_node=4),
        ),
        node_of=lambda device: device.host // 4,
    )
    plans = costs.candidates(WORK, pool, KNOWN, current=PLAN, count=3).plans
    for c in plans:
        for placement in c.plan.plan.placements.values():
            tp = placement.layout.tp
            groups = [placement.devices[i : i + tp] for i in range(0, len(placement.devices), tp)]
            assert all(len({d.host // 4 for d in g}) == 1 for g in groups)


def step_of(state, step: int, mean: float, time_s: float, settings) -> StepFinished:
    responses = LengthSummary.of([int(mean * x / 8) for x in range(4, 13)])
    record = StepRecord(
        step=step,
        time_s=time_s,
        step_s=1.0,
        stage_s={},
        responses=responses,
        prompts=LengthSummary.of([512]),
    )
    return StepFinished(record=record)


def test_the_controller_runs_on_it():
    """Growing responses, then a lost node: plans follow, on devices that are there."""
    settings = ControllerSettings(workload=WORK)
    controller = Controller(settings=settings, costs=COSTS)
    state, decisions, time_s = initial_state(PLAN, POOL), [], 0.0
    for step in range(24):
        time_s += 30.0
        event = step_of(state, step, min(300.0 * 1.06**step, 2600.0), time_s, settings)
        if step == 18:
            gone = tuple(DeviceId(1, i) for i in range(4))
            event = DevicesLost(time_s=time_s, devices=gone)
        state, decision = controller.on_event(state, event)
        if decision.record is not None:
            decisions.append(decision)
        if isinstance(decision, Transition):
            assert plan_devices(decision.target) <= set(state.usable.devices)
            state, _ = controller.on_event(
                state, TransitionEnded(time_s=time_s, plan=decision.target, seconds=2.0)
            )
    assert decisions and any(isinstance(d, Transition) and d.urgent for d in decisions)
    assert state.beliefs.efficiencies.log_values == pytest.approx(Efficiencies.prior().log_values)
