"""What a given plan takes is what the search chose it for."""

import dataclasses

import numpy as np
import pytest

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_SCORE, ACTOR_TRAIN, ModelStage, Role
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.plan_price import price_plan
from nereus_jax.planning.predict import (
    candidates_of,
    predict_memory,
    predict_stage_seconds,
)
from nereus_jax.planning.search_plans import find_plans
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload

WORK = Workload(
    prompts=96,
    prompt_lengths=LengthHistogram(lengths=(64, 256), weights=(0.5, 0.5)),
    response_lengths=LengthHistogram(lengths=(128, 1024), weights=(0.8, 0.2)),
    max_response_tokens=1024,
    minibatch_size=48,
)


def problem(model: str, devices: int, algorithm: str = "ppo", park: bool = True) -> PlanProblem:
    return PlanProblem(
        workflow=policy_gradient(
            algorithm, reward_model=True, reference=True, recompute_old_logprobs=True
        ),
        models=dict.fromkeys(Role, preset(model)),
        workload=dataclasses.replace(WORK, samples_per_prompt=4 if algorithm == "grpo" else 1),
        hardware=load_hardware("a100-80gb"),
        num_devices=devices,
        park=park,
    )


@pytest.mark.parametrize(
    ("model", "devices", "algorithm", "park"),
    [
        ("llama3-8b", 16, "ppo", True),
        ("llama3-8b", 24, "ppo", False),
        ("llama3-8b", 12, "grpo", True),
        ("llama3.2-1b", 7, "remax", True),
        ("llama3-70b", 64, "ppo", True),
    ],
)
def test_plans_of_a_search_have_the_seconds_and_bytes_that_they_were_chosen_for(
    model: str, devices: int, algorithm: str, park: bool
):
    job = problem(model, devices, algorithm, park)
    found = find_plans(job, top=4)
    assert found.plans
    for planned in found.plans:
        execution = planned.plan()
        seconds = predict_stage_seconds(job, execution)
        memory = predict_memory(job, execution)
        for stage in planned.stages:
            name = stage.model_stage
            by_class = {c.value: s for c, s in seconds[name].items()}
            assert by_class == pytest.approx(dict(stage.seconds_by_class), rel=1e-12)
            assert memory[name].at(0) == pytest.approx(dict(stage.memory), rel=1e-12)


def test_the_seconds_of_many_lengths_agree_but_for_the_table_of_largest_draws():
    """A search of many candidates interpolates how long the last row takes."""
    draw = np.random.default_rng(0)
    lengths = LengthHistogram.from_samples(np.minimum(draw.lognormal(5, 1, 500), 1024).astype(int))
    job = problem("llama3-8b", 16)
    job = dataclasses.replace(job, workload=dataclasses.replace(WORK, response_lengths=lengths))
    for planned in find_plans(job, top=3).plans:
        assert price_plan(job, planned.plan()).step_s == pytest.approx(planned.step_s, rel=1e-4)


def on(first: int, layout: ParallelLayout) -> Placement:
    numbers = range(first, first + layout.num_devices)
    return Placement(layout=layout, devices=tuple(DeviceId(i // 8, i % 8) for i in numbers))


def test_rows_as_the_engines_cut_them():
    layouts = {
        ACTOR_TRAIN: ParallelLayout(2, 2, 1),
        ACTOR_SCORE: ParallelLayout(1, 2, 1),
        ACTOR_GENERATE: ParallelLayout(1, 5, 1),
    }
    choices = {
        ACTOR_TRAIN: StageChoice(microbatch_size=5, microbatches=3),
        ACTOR_SCORE: StageChoice(microbatch_size=4),
        ACTOR_GENERATE: StageChoice(microbatch_size=0),
    }
    execution = ExecutionPlan(
        plan=Plan(placements={s: on(0, x) for s, x in layouts.items()}), choices=choices
    )

    def cut(stage: ModelStage) -> tuple[int, int, int]:
        c = candidates_of(WORK, [stage], execution)
        return int(c.microbatch_size[0]), int(c.microbatches[0]), int(c.accumulation[0])

    assert cut(ACTOR_TRAIN) == (5, 3, 2)  # 24 rows of a replica: 5 microbatches, 2 flushes
    assert cut(ACTOR_SCORE) == (4, 8, 3)  # 96 rows: 24 microbatches, 4 a rank in a flush
    assert cut(ACTOR_GENERATE) == (100, 1, 1)  # 96 rows in five equal groups
