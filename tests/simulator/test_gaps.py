"""Where a policy's seconds go beyond the oracle's: by hand."""

import dataclasses

import pytest

from nereus_jax.core.devices import DevicePool
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.plan import Plan
from nereus_jax.simulator.gaps import gap_parts
from nereus_jax.simulator.ledger import Interval, RunResult, Spent, StepRow
from nereus_jax.simulator.setup import first_plan
from tests.simulator.scenarios import small_scenario

POOL = DevicePool.uniform(1, 1)
FIRST = ExecutionPlan(plan=Plan(placements={}), choices={})


def second() -> ExecutionPlan:
    return first_plan(small_scenario())


def run(plans: list[ExecutionPlan], seconds: list[float], **spent: float) -> RunResult:
    """Steps under plans, and other seconds after them."""
    rows, intervals, clock = [], [], 0.0
    for step, (plan, step_s) in enumerate(zip(plans, seconds, strict=True)):
        rows.append(
            StepRow(
                step=step,
                start_s=clock,
                step_s=step_s,
                mean_tokens=1.0,
                p95_tokens=1.0,
                longest_tokens=1,
                peak_bytes=0,
                samples=step + 1,
                pool=POOL,
                plan=plan,
                stage_s={},
            )
        )
        clock += step_s
    start_s = 0.0
    for kind, took_s in {"steps": clock, **spent}.items():
        intervals.append(
            Interval(
                kind=Spent(kind),
                start_s=start_s,
                end_s=start_s + took_s,
                devices=1,
                step=0,
                plan=plans[0],
            )
        )
        start_s += took_s
    return RunResult(
        policy="any", seed=0, steps=rows, intervals=intervals, decisions=(), transitions=0
    )


def test_parts_by_hand() -> None:
    """10 s are best at first and 20 s later. The first plan was 10 % too slow when it came, and the
    same share of later steps is its doing; it was refused to leave it in step 2."""
    other = second()
    plans = [FIRST, FIRST, FIRST, other]
    bound = run(plans, [10.0, 20.0, 20.0, 20.0], waiting=3.0)
    own = run(plans, [11.0, 25.0, 26.0, 21.0], transitions=5.0, compiling=1.0, repeating=11.0)
    own = dataclasses.replace(own, decisions=({"step": 2, "verdict": "reject"},))
    parts = gap_parts(own, bound)
    assert parts is not None
    assert parts.transitions_s == 6.0
    assert parts.losses_s == 11.0 - 3.0
    assert parts.mispredicted_s == pytest.approx(1.0 + 2.0 + 1.0)
    assert parts.late_s == pytest.approx(3.0)
    assert parts.refused_s == pytest.approx(6.0)
    assert parts.total_s == pytest.approx(own.total_s - bound.total_s)


def test_a_run_that_failed_has_no_parts() -> None:
    bound = run([FIRST], [1.0])
    assert gap_parts(dataclasses.replace(bound, failure="no devices"), bound) is None
    assert gap_parts(run([FIRST, FIRST], [1.0, 1.0]), bound) is None
