"""Rows of simulated steps: plans where they begin, and what was spent between steps."""

from typing import Any

from nereus_jax.core.devices import DevicePool
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.simulator.ledger import Interval, OutOfMemory, RunResult, Spent, StepRow
from nereus_jax.simulator.run_files import step_rows

POOL = DevicePool.uniform(1, 2)


def plan(dp: int) -> ExecutionPlan:
    placement = Placement(layout=ParallelLayout(dp, 1, 1), devices=POOL.devices[:dp])
    return ExecutionPlan(
        plan=Plan(placements={ACTOR_TRAIN: placement}),
        choices={ACTOR_TRAIN: StageChoice(microbatch_size=1)},
    )


def step(number: int, dp: int) -> StepRow:
    return StepRow(
        step=number,
        start_s=10.0 * number,
        step_s=4.0,
        mean_tokens=5.0,
        p95_tokens=8.0,
        longest_tokens=9,
        peak_bytes=100,
        samples=2 * number + 2,
        pool=POOL,
        plan=plan(dp),
        stage_s={"actor-TRAIN": 3.0},
    )


def interval(kind: Spent, number: int, start_s: float, end_s: float) -> Interval:
    return Interval(kind=kind, start_s=start_s, end_s=end_s, devices=2, step=number, plan=plan(1))


def test_what_is_told_of_each_step() -> None:
    oom = OutOfMemory(step=2, plan=plan(1), room_tokens=9, prompt_tokens=1, used_bytes=200)
    run = RunResult(
        policy="payback",
        seed=0,
        steps=[step(0, 1), step(1, 1), step(2, 2)],
        intervals=[
            interval(Spent.STEPS, 0, 0.0, 4.0),
            interval(Spent.STEPS, 1, 10.0, 14.0),
            interval(Spent.DROPPED, 2, 14.0, 15.5),
            interval(Spent.COMPILING, 2, 15.5, 16.0),
            interval(Spent.TRANSITIONS, 2, 16.0, 18.0),
            interval(Spent.TRANSITIONS, 2, 18.0, 18.25),
            interval(Spent.STEPS, 2, 20.0, 24.0),
        ],
        decisions=(),
        transitions=1,
        out_of_memory=[oom],
    )
    rows: list[dict[str, Any]] = step_rows(run)
    assert [row["simulated"] for row in rows] == [True] * 3
    assert [row.get("plan", {}).get("actor-TRAIN", {}).get("dp") for row in rows] == [1, None, 2]
    assert [row.get("before_s") for row in rows] == [
        None,
        None,
        {"dropped": 1.5, "compiling": 0.5, "transitions": 2.25},
    ]
    assert [row.get("out_of_memory") for row in rows] == [None, None, 1]
    assert rows[1]["response_tokens_p95"] == 8.0 and rows[1]["devices"] == 2
