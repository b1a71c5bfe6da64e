"""The price of a plan as it runs: that of the search where it is the search's, honest elsewhere."""

import dataclasses

import pytest

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN, Role
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.plan_price import plan_bytes, price_plan
from nereus_jax.planning.search_plans import find_plans
from nereus_jax.planning.search_problem import PlanProblem, stage_candidates
from nereus_jax.planning.workload import LengthHistogram, Workload


def problem(
    name: str = "llama3-8b", devices: int = 32, algorithm: str = "ppo", **changes
) -> PlanProblem:
    base = PlanProblem(
        workflow=policy_gradient(
            algorithm, reward_model=True, reference=True, recompute_old_logprobs=True
        ),
        models=dict.fromkeys(Role, preset(name)),
        workload=Workload(
            prompts=256,
            prompt_lengths=LengthHistogram.constant(512),
            response_lengths=LengthHistogram(lengths=(256, 512, 1024), weights=(0.5, 0.3, 0.2)),
            max_response_tokens=1024,
            minibatch_size=128,
        ),
        hardware=load_hardware("h100"),
        num_devices=devices,
    )
    return dataclasses.replace(base, **changes)


CASES = {
    "a node": problem(devices=8),
    "7 of 8": problem(devices=7),
    "60": problem(devices=60),
    "70b": problem("llama3-70b", 64),
    "no parking": problem(park=False),
    "remax": problem(algorithm="remax"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_of_the_search_has_the_price_of_the_search(name):
    job = CASES[name]
    for step in find_plans(job, top=3).plans:
        price = price_plan(job, step.plan())
        assert price.step_s == pytest.approx(step.step_s, rel=1e-12)
        assert price.peak_bytes == pytest.approx(step.peak_memory_bytes, abs=1)
        assert price.fits
        for stage in step.stages:
            own = price.stages[stage.model_stage]
            assert own.seconds == pytest.approx(stage.seconds)
            assert own.resident_bytes == stage.resident_bytes
            assert own.working_bytes == stage.working_bytes
            calls = job.calls(stage.model_stage)
            assert own.memory == pytest.approx(dict(stage.memory))
            for operation, seconds in own.seconds_by_class.items():
                assert seconds == pytest.approx(calls * stage.seconds_by_class[operation.value])
        for device, peak in price.device_bytes.items():
            place = device.host * step.devices_per_node + device.index
            assert peak == pytest.approx(step.device_bytes[place])
        assert plan_bytes(job, step.plan()) == pytest.approx(price.peak_bytes)


def test_groups_of_ranks_over_two_nodes_cost_more():
    job = problem(devices=8)
    plan = find_plans(job, top=1).plans[0].plan()
    near, torn = price_plan(job, plan), price_plan(job, plan, dict.fromkeys(plan.choices, 4))
    wide = [s for s in plan.choices if plan.plan[s].layout.tp == 8]
    for stage in plan.choices:
        more = torn.stages[stage].seconds > near.stages[stage].seconds * 1.0001
        assert more or stage not in wide


def test_a_longer_response_never_needs_less_memory():
    job = problem(devices=8)
    plan = find_plans(job, top=1).plans[0].plan()
    sizes = [
        plan_bytes(
            dataclasses.replace(
                job, workload=dataclasses.replace(job.workload, max_response_tokens=tokens)
            ),
            plan,
        )
        for tokens in (1024, 1025, 1500, 2048, 4096)
    ]
    assert sizes == sorted(sizes) and sizes[-1] > sizes[0]


def test_degrees_can_be_held():
    job = problem(devices=24)
    held = dataclasses.replace(job, degrees={ACTOR_TRAIN: (3, 4), ACTOR_GENERATE: (1, 2)})
    layouts = {s.model_stage: s.layout for s in find_plans(held, top=1).plans[0].stages}
    assert (layouts[ACTOR_TRAIN].pp, layouts[ACTOR_TRAIN].tp) == (3, 4)
    assert (layouts[ACTOR_GENERATE].pp, layouts[ACTOR_GENERATE].tp) == (1, 2)
    free = find_plans(job, top=1).plans[0]
    assert find_plans(held, top=1).plans[0].step_s >= free.step_s
    # Also what no search would look at, and what no pool has room for.
    odd = stage_candidates(dataclasses.replace(job, degrees={ACTOR_TRAIN: (5, 3)}), ACTOR_TRAIN)
    assert len(odd) and set(odd.pp) == {5} and set(odd.tp) == {3}
    too_wide = dataclasses.replace(job, degrees={ACTOR_TRAIN: (8, 8)})
    nothing = find_plans(too_wide, top=1, explain=False)
    assert not nothing.plans and nothing.shortage is None


def on(first: int, layout: ParallelLayout) -> Placement:
    numbers = range(first, first + layout.num_devices)
    return Placement(layout=layout, devices=tuple(DeviceId(i // 8, i % 8) for i in numbers))


def test_model_stages_on_other_devices_run_at_the_same_time():
    job = problem("llama3.2-1b", 16)
    second = next(wave for wave in job.waves() if len(wave) > 1)[1]

    def step_s(apart: bool) -> float:
        layout = ParallelLayout(1, 1, 8)
        placements = {s: on(0, layout) for s in job.workflow.model_stages}
        if apart:
            placements[second] = on(8, layout)
        choices = dict.fromkeys(placements, StageChoice(microbatch_size=4))
        plan = ExecutionPlan(plan=Plan(placements=placements), choices=choices)
        price = price_plan(job, plan)
        assert price.device_bytes.keys() == {d for p in placements.values() for d in p.devices}
        return price.step_s

    assert step_s(apart=False) - step_s(apart=True) > 0
