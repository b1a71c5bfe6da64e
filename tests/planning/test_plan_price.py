"""The price of a plan as it runs: that of the search where it is the search's, honest elsewhere."""

import dataclasses

import pytest

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_TRAIN, REFERENCE_SCORE, Role
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.plan_price import as_candidates, plan_bytes, price_plan
from nereus_jax.planning.search_plans import PlannedStep, find_plans
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


def as_execution(step: PlannedStep, node: int = 8) -> ExecutionPlan:
    return ExecutionPlan(
        plan=Plan(
            placements={
                s.model_stage: Placement(
                    layout=s.layout,
                    devices=tuple(DeviceId(i // node, i % node) for i in s.positions),
                )
                for s in step.stages
            }
        ),
        choices={
            s.model_stage: StageChoice(
                microbatch_size=s.microbatch_size,
                microbatches=s.microbatches,
                remat=s.remat,
                zero1=s.zero1,
                parked=s.parked,
            )
            for s in step.stages
        },
    )


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
        price = price_plan(job, as_execution(step))
        assert price.step_s == pytest.approx(step.step_s, rel=1e-12)
        assert price.peak_bytes == pytest.approx(step.peak_memory_bytes, abs=1)
        assert price.fits
        for stage in step.stages:
            own = price.stages[stage.model_stage]
            assert own.seconds == pytest.approx(stage.seconds)
            assert own.resident_bytes == stage.resident_bytes
            assert own.working_bytes == stage.working_bytes
            calls = job.calls(stage.model_stage)
            for operation, seconds in own.seconds_by_class.items():
                assert seconds == pytest.approx(calls * stage.seconds_by_class[operation.value])
        assert plan_bytes(job, as_execution(step)) == pytest.approx(price.peak_bytes)


def test_groups_of_ranks_over_two_nodes_cost_more():
    job = problem(devices=8)
    plan = as_execution(find_plans(job, top=1).plans[0])
    near, torn = price_plan(job, plan), price_plan(job, plan, dict.fromkeys(plan.choices, 4))
    wide = [s for s in plan.choices if plan.plan[s].layout.tp == 8]
    for stage in plan.choices:
        more = torn.stages[stage].seconds > near.stages[stage].seconds * 1.0001
        assert more or stage not in wide


def test_a_longer_response_never_needs_less_memory():
    job = problem(devices=8)
    plan = as_execution(find_plans(job, top=1).plans[0])
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


def test_rows_are_dealt_to_replicas_as_the_choice_says():
    work = problem().workload  # 256 rows, 128 an update
    layout = ParallelLayout(3, 2, 1)
    train = as_candidates(work, ACTOR_TRAIN, layout, StageChoice(microbatch_size=8, zero1=True))
    # 43 rows of a replica: 6 microbatches, all in one flush.
    assert (train.microbatch_size[0], train.microbatches[0], train.accumulation[0]) == (8, 6, 1)
    assert train.zero1[0] and not train.remat[0]
    flushed = as_candidates(
        work, CRITIC_TRAIN, layout, StageChoice(microbatch_size=8, microbatches=4, remat=True)
    )
    assert (flushed.microbatches[0], flushed.accumulation[0]) == (4, 2) and flushed.remat[0]
    score = as_candidates(work, REFERENCE_SCORE, layout, StageChoice(microbatch_size=4))
    # 86 rows: 22 microbatches, 4 a rank in a flush.
    assert (score.microbatches[0], score.accumulation[0]) == (8, 3)
    slots = as_candidates(work, ACTOR_GENERATE, layout, StageChoice(microbatch_size=500))
    assert (slots.microbatch_size[0], slots.microbatches[0], slots.accumulation[0]) == (86, 1, 1)


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
