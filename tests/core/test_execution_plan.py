"""A plan with its choices: what is written is what is read, and what is wrong is named."""

import json
from typing import Any

import pytest

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN

PLAN = Plan(
    placements={
        ACTOR_TRAIN: Placement(
            layout=ParallelLayout(1, 3, 1), devices=tuple(DeviceId(0, i) for i in range(3))
        ),
        ACTOR_GENERATE: Placement(layout=ParallelLayout(1, 1, 1), devices=(DeviceId(1, 0),)),
    }
)
RUNS = ExecutionPlan(
    plan=PLAN,
    choices={
        ACTOR_TRAIN: StageChoice(microbatch_size=2, microbatches=6, remat=True, zero1=True),
        ACTOR_GENERATE: StageChoice(microbatch_size=64, parked=True),
    },
)


def test_what_is_written_is_read() -> None:
    data = json.loads(json.dumps(RUNS.to_json()))
    assert ExecutionPlan.from_json(data) == RUNS
    assert Plan.from_json(data) == PLAN  # a plan file serves whoever wants the placements alone


def test_choices_may_be_left_out_but_for_the_microbatch() -> None:
    data: dict[str, Any] = RUNS.to_json()
    for key in ("microbatches", "remat", "zero1", "parked"):
        del data["actor-TRAIN"][key]
    read = ExecutionPlan.from_json(data)
    assert read.choices[ACTOR_TRAIN] == StageChoice(microbatch_size=2)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("microbatch_size", 0, "must not be 0"),
        ("microbatch_size", True, "whole number"),
        ("microbatches", -1, "must not be -1"),
        ("remat", "yes", "true or false"),
        ("zero1", 1, "true or false"),
    ],
)
def test_what_is_wrong_is_named(key: str, value: object, said: str) -> None:
    data: dict[str, Any] = RUNS.to_json()
    data["actor-TRAIN"][key] = value
    with pytest.raises(InfeasiblePlanError, match=f"actor-TRAIN.*{key}.*{said}"):
        ExecutionPlan.from_json(data)


def test_a_missing_microbatch_or_choice_is_named() -> None:
    data: dict[str, Any] = RUNS.to_json()
    del data["actor-TRAIN"]["microbatch_size"]
    with pytest.raises(InfeasiblePlanError, match="microbatch_size is missing"):
        ExecutionPlan.from_json(data)
    with pytest.raises(InfeasiblePlanError, match="actor-TRAIN"):
        ExecutionPlan(plan=PLAN, choices={ACTOR_GENERATE: StageChoice(microbatch_size=1)})
