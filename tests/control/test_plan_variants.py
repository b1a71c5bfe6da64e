"""The same plan with less memory, rung by rung."""

import dataclasses

from nereus_jax.control.costs import Beliefs
from nereus_jax.control.plan_variants import (
    parked,
    recomputed,
    smaller_microbatch,
    sparing,
    with_choice,
)
from nereus_jax.core.execution_plan import StageChoice
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN
from tests.control.toy_job import ToyCosts, pool, toy_plan, workload

PLAN = toy_plan(pool().devices, 2)  # dp 4: 16 rows of a replica in 64


def sizes(plan):
    return {str(s): c.microbatch_size for s, c in plan.choices.items()}


def test_a_microbatch_of_train_divides_the_rows_of_a_replica():
    work = dataclasses.replace(workload(), minibatch_size=48)  # 12 rows a replica
    plan = with_choice(PLAN, ACTOR_TRAIN, StageChoice(microbatch_size=12))
    seen = []
    while plan is not None:
        seen.append(plan.choices[ACTOR_TRAIN].microbatch_size)
        plan = smaller_microbatch(plan, ACTOR_TRAIN, work)
    assert seen == [12, 6, 3, 1]


def test_generation_keeps_a_slot_for_each_pipeline_rank():
    plan = with_choice(PLAN, ACTOR_GENERATE, StageChoice(microbatch_size=0))
    fewer = smaller_microbatch(plan, ACTOR_GENERATE, workload())
    assert fewer is not None and fewer.choices[ACTOR_GENERATE].microbatch_size == 8  # of all 16
    one = with_choice(PLAN, ACTOR_GENERATE, StageChoice(microbatch_size=1))
    assert smaller_microbatch(one, ACTOR_GENERATE, workload()) is None


def test_what_is_done_already_is_no_rung():
    again = recomputed(PLAN, ACTOR_TRAIN)
    assert again is not None and again.choices[ACTOR_TRAIN].remat
    assert recomputed(again, ACTOR_TRAIN) is None and recomputed(PLAN, ACTOR_GENERATE) is None
    away = parked(PLAN, ACTOR_GENERATE)
    assert away is not None and away.choices[ACTOR_GENERATE].parked
    assert parked(away, ACTOR_GENERATE) is None


def variants(tokens: int, limit_bytes: float = 1000.0):
    costs, work = ToyCosts(limit_bytes=limit_bytes), workload(1)
    work = dataclasses.replace(work, max_response_tokens=tokens)
    return list(sparing(PLAN, work, lambda plan: costs.price(plan, work, pool(), Beliefs())))


def test_a_plan_that_fits_has_no_variant():
    assert variants(1000) == []


def test_the_ladder_goes_down_until_the_plan_fits():
    """200 bytes of state and 0.5 a token at a microbatch of 8: 3,000 tokens want 1,700."""
    ((plan, price, how),) = variants(3000)
    assert price.fits and sizes(plan) == {"actor-GENERATE": 4, "actor-TRAIN": 4}
    assert how.count("smaller microbatch") == 2
    assert plan.plan == PLAN.plan


def test_recomputation_and_parking_come_last():
    ((plan, _, how),) = variants(4000, limit_bytes=440.0)
    # At a microbatch of 1 a rollout needs 250 bytes beside 200 of state, and an update needs 450.
    assert plan.choices[ACTOR_TRAIN].remat and plan.choices[ACTOR_TRAIN].parked
    assert max(how.rfind("microbatch"), 0) < min(how.find("recomputation"), how.find("parked"))


def test_where_nothing_helps_there_is_none():
    assert variants(4000, limit_bytes=100.0) == []
