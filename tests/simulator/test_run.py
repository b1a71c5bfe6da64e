"""Runs on a virtual clock: what happens in them, step by step, and where their seconds went."""

import dataclasses

import numpy as np
import pytest

from nereus_jax.control.costs import Beliefs
from nereus_jax.control.policies import parse_policy
from nereus_jax.control.survival import survives
from nereus_jax.core.errors import ConfigError, InfeasiblePlanError
from nereus_jax.core.transition import TransitionGraph
from nereus_jax.planning.transition_replay import replay
from nereus_jax.simulator.ledger import RunResult, Spent
from nereus_jax.simulator.moves import checkpoint_s
from nereus_jax.simulator.run import simulate
from nereus_jax.simulator.scenario import Rules, Scenario
from nereus_jax.simulator.setup import first_plan, first_workload, settings_for
from tests.simulator.scenarios import make_trace, small_scenario

LARGE = {
    "model": "llama3-8b",
    "hardware": "a100-80gb",
    "devices_per_node": 8,
    "prompts": 128,
    "cut_tokens": 2048,
}
"""A job whose steps take longer than its programs need to be compiled."""
TOKENS = 800.0, 800.0


def run(scenario: Scenario, policy: str = "payback", **rules: object) -> RunResult:
    settings = settings_for(scenario, parse_policy(policy))
    made = Rules(name=policy, settings=settings, **rules)  # type: ignore[arg-type]
    return simulate(scenario, made, first_plan(scenario))


def kinds(result: RunResult) -> list[str]:
    return [i.kind.value for i in result.intervals]


def test_nothing_happens() -> None:
    """Steps one after the other, each with the truth's seconds; a checkpoint every 3."""
    scenario = dataclasses.replace(small_scenario(), checkpoint_every=3)
    result = run(scenario, "static")
    assert not result.failure and result.transitions == 0 and result.oom == 0
    assert [s.step for s in result.steps] == list(range(6))
    plan = first_plan(scenario)
    clock = 0.0
    for step, row in enumerate(result.steps):
        moment = scenario.cluster.moment(scenario.rows(step), step, clock)
        outcome = scenario.cluster.run_step(plan, moment, step)
        assert row.start_s == clock and row.step_s == pytest.approx(outcome.step_s)
        clock += row.step_s
        if step % 3 == 2:
            clock += checkpoint_s(scenario.cluster, plan)
    assert result.total_s == pytest.approx(clock)
    assert kinds(result) == (["steps"] * 3 + ["checkpoints"]) * 2
    assert result.gpu_hours == pytest.approx(clock * 8 / 3600.0)


def test_what_a_controller_sees_teaches_it() -> None:
    """Efficiencies that it believes in come nearer to what the cluster reaches."""
    scenario = small_scenario(make_trace(steps=8))
    result = run(scenario, "static")
    pool, plan = scenario.cluster.pool, first_plan(scenario)
    errors: list[float] = []
    for beliefs in (Beliefs(), result.beliefs):
        own: list[float] = []
        for row in result.steps[2:]:
            workload = scenario.cluster.workload_of(scenario.rows(row.step))
            price = scenario.costs.price(plan, workload, pool, beliefs)
            own.append(abs(price.step_s / row.step_s - 1.0))
        errors.append(float(np.mean(own)))
    assert errors[1] < 0.6 * errors[0]


def test_devices_are_lost_in_the_middle_of_a_step() -> None:
    """Its part is dropped, the job moves at once, and the same step runs again."""
    scenario = small_scenario(make_trace((2.5, 1)))
    result = run(scenario, "static")
    assert not result.failure
    at = kinds(result).index("dropped")
    dropped = result.intervals[at]
    assert dropped.step == 2
    assert kinds(result)[at + 1] in ("compiling", "transitions", "restarting")
    assert [s.step for s in result.steps] == list(range(6))
    before, after = result.steps[1], result.steps[2]
    assert len(before.pool) == 8 and len(after.pool) == 4
    assert after.start_s > dropped.end_s
    # Half of the step had run: the trace says 2.5.
    moment = scenario.cluster.moment(scenario.rows(2), 2, dropped.start_s)
    outcome = scenario.cluster.run_step(before.plan, moment, 2)
    assert dropped.end_s - dropped.start_s == pytest.approx(0.5 * outcome.step_s)


def test_a_loss_without_a_copy_costs_the_steps_since_the_checkpoint() -> None:
    """The plan's optimizer is cut over all replicas, so that a checkpoint is read."""
    scenario = dataclasses.replace(small_scenario(make_trace((4.5, 1))), checkpoint_every=3)
    result = run(scenario, "static")
    if Spent.RESTARTING.value in kinds(result):
        repeated = result.spent_s(Spent.REPEATING)
        assert repeated == pytest.approx(result.steps[3].step_s)
    else:
        assert result.spent_s(Spent.REPEATING) == 0.0


@pytest.mark.slow
def test_a_job_that_lost_devices_keeps_whole_replicas() -> None:
    """The first loss is a restart; the plan after it outlives the second one, which is a move."""
    trace = make_trace((2.1, 1), (3.0, 2), (13.1, 1), steps=15, tokens=TOKENS)
    result = run(small_scenario(trace, **LARGE))
    assert not result.failure
    restarts = [i.step for i in result.intervals if i.kind is Spent.RESTARTING]
    assert restarts == [2]
    moved = [i.step for i in result.intervals if i.kind is Spent.TRANSITIONS]
    assert 13 in moved
    first, then = result.steps[0].plan, result.steps[12].plan
    assert not survives(first, lambda d: d.host) and survives(then, lambda d: d.host)


@pytest.mark.slow
@pytest.mark.parametrize(("at", "restarts"), [(2.1, False), (2.97, True)])
def test_a_loss_in_an_update_costs_the_state_before_it(at: float, restarts: bool) -> None:
    """Replicas are whole in both cases, but an update that broke off has consumed them."""
    scenario = small_scenario(make_trace((at, 1), steps=4, tokens=TOKENS), **LARGE)
    found = scenario.costs.candidates(
        first_workload(scenario),
        scenario.cluster.pool,
        Beliefs(),
        current=first_plan(scenario),
        count=2,
        surviving=True,
    )
    plan = next(c.plan for c in found.plans if c.price.survives)
    settings = settings_for(scenario, parse_policy("payback"))
    result = simulate(scenario, Rules(name="payback", settings=settings), plan)
    assert not result.failure
    assert (Spent.RESTARTING.value in kinds(result)) == restarts
    assert (result.spent_s(Spent.REPEATING) > 0.0) == restarts


def test_devices_with_notice_are_left_in_time() -> None:
    trace = make_trace((1.5, 1), notice_s=300.0, steps=14, tokens=TOKENS)
    scenario = small_scenario(trace, **LARGE)
    graphs: list[TransitionGraph] = []
    rules = Rules(name="payback", settings=settings_for(scenario, parse_policy("payback")))
    result = simulate(scenario, rules, first_plan(scenario), watch=graphs.append)
    assert not result.failure
    assert len(result.steps[-1].pool) == 8
    assert result.spent_s(Spent.RESTARTING) == 0.0 and result.spent_s(Spent.REPEATING) == 0.0
    assert result.spent_s(Spent.DROPPED) == 0.0, "there was time to finish the step"
    assert len(graphs) == result.transitions >= 1
    for graph in graphs:
        assert replay(graph).violation is None


def test_the_pool_grows() -> None:
    """A policy that follows the pool is faster with twice the devices; a static one is not."""
    trace = make_trace((1.0, 2), nodes=1, steps=9, tokens=TOKENS)
    scenario = small_scenario(trace, **LARGE)
    grown, still = run(scenario, "any_gain"), run(scenario, "static")
    assert grown.transitions >= 1 and still.transitions == 0
    assert grown.steps[-1].step_s < 0.8 * still.steps[-1].step_s
    assert grown.spent_s(Spent.TRANSITIONS) > 0.0
    assert grown.spent_s(Spent.COMPILING) == 0.0, "programs are compiled beside steps"
    restarted = run(scenario, "any_gain", by_checkpoint=True)
    assert restarted.spent_s(Spent.TRANSITIONS) == 0.0
    assert restarted.spent_s(Spent.RESTARTING) > 60.0
    assert restarted.spent_s(Spent.REPEATING) == 0.0, "the state is whole and is written first"
    assert grown.spent_s(Spent.RESTARTING) == 0.0


def test_a_job_waits_for_devices() -> None:
    """All are gone, then some come back: it waits, and starts again from its last checkpoint."""
    trace = make_trace((2.0, 0), (5000.0, 2), by_step=False, steps=5)
    scenario = dataclasses.replace(small_scenario(trace), checkpoint_every=2)
    result = run(scenario, "payback")
    assert not result.failure
    assert result.spent_s(Spent.WAITING) > 1000.0
    assert result.spent_s(Spent.RESTARTING) > 0.0
    at = kinds(result).index("waiting")
    assert result.intervals[at].devices == 0
    assert [s.step for s in result.steps] == list(range(5))


def test_a_job_that_never_gets_devices_again_fails() -> None:
    scenario = small_scenario(make_trace((2.5, 0)))
    result = run(scenario, "payback")
    assert result.failure.startswith("step 2: no device is left")
    assert [s.step for s in result.steps] == [0, 1]


def test_out_of_memory() -> None:
    """Lengths outgrow the first plan: a static job ends, starts again with more room and pays."""
    trace = make_trace(steps=8, tokens=(100.0, 2000.0), sigma=0.3)
    scenario = small_scenario(trace, memory_share=0.3, cut_tokens=8192)
    result = run(scenario, "static")
    assert result.oom >= 1 and not result.failure
    assert result.spent_s(Spent.RESTARTING) > 0.0
    first = result.out_of_memory[0]
    assert first.used_bytes > scenario.cluster.problem.hardware.memory_bytes
    at = kinds(result).index("dropped")
    assert kinds(result)[at + 1 : at + 4] == ["compiling", "restarting", "repeating"]
    assert [s.step for s in result.steps] == list(range(8))


def test_a_controller_that_foresees_runs_out_of_memory_less() -> None:
    trace = make_trace(steps=24, tokens=(100.0, 1000.0), sigma=0.3)
    scenario = small_scenario(trace, memory_share=0.25, cut_tokens=8192)
    assert run(scenario, "payback").oom == 0 < run(scenario, "static").oom


def test_a_job_that_fits_nowhere() -> None:
    trace = make_trace(steps=8, tokens=(100.0, 12_000.0), sigma=0.0)
    scenario = small_scenario(trace, memory_share=0.06, cut_tokens=16_384)
    result = run(scenario, "static")
    assert "fit no plan" in result.failure and "GiB short" in result.failure
    assert result.failure.startswith(f"step {len(result.steps)}:")
    tight = small_scenario(trace, memory_share=0.02)
    with pytest.raises(InfeasiblePlanError, match=r"step 0: no plan fits 8 devices: .* GiB short"):
        first_plan(tight)


def test_a_trace_that_the_cluster_is_too_small_for() -> None:
    scenario = small_scenario(make_trace())
    larger = dataclasses.replace(scenario, trace=make_trace((1.5, 3)))
    with pytest.raises(ConfigError, match=r"3 nodes at step 1.5, but the cluster has 2"):
        run(larger)
