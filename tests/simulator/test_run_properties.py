"""What holds of every run, whatever the trace, the cluster, the model, the policy and the seed."""

import itertools

import numpy as np
import pytest

from nereus_jax.control.costs import Beliefs
from nereus_jax.control.policies import POLICIES, parse_policy
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import ModelStage
from nereus_jax.core.transition import TransitionGraph
from nereus_jax.core.workflow import ALGORITHMS
from nereus_jax.planning.transition_replay import replay
from nereus_jax.planning.workload import LengthHistogram
from nereus_jax.simulator.ledger import RunResult, Spent
from nereus_jax.simulator.run import simulate
from nereus_jax.simulator.scenario import Rules, Scenario
from nereus_jax.simulator.setup import first_plan, settings_for
from nereus_jax.simulator.traces import nodes_that_change
from tests.simulator.scenarios import MODELS, make_trace, small_scenario

QUICK, ALL = 6, 200


def random_nodes(rng: np.random.Generator, most: int) -> int:
    """Now and then none."""
    return int(rng.integers(0 if rng.random() < 0.3 else 1, most + 1))


def random_scenario(rng: np.random.Generator) -> Scenario:
    """A job, a cluster and a trace; the memory is now and then scarce."""
    nodes, steps = int(rng.integers(1, 5)), int(rng.integers(4, 9))
    by_step = bool(rng.random() < 0.7)
    changes: list[tuple[float, int]] = []
    at = 0.0
    for _ in range(int(rng.integers(0, 5))):
        at += float(rng.uniform(0.3, 3.0)) * (1.0 if by_step else 60.0)
        changes.append((at, random_nodes(rng, nodes)))
    start = int(rng.integers(1, nodes + 1))
    trace = make_trace(
        *changes,
        nodes=start,
        steps=steps,
        tokens=(float(rng.uniform(50, 500)), float(rng.uniform(100, 3000))),
        sigma=float(rng.uniform(0.0, 1.2)),
        by_step=by_step,
        notice_s=float(rng.choice([0.0, 0.0, 30.0, 600.0])),
    )
    model = str(rng.choice(list(MODELS)))
    large = model == "llama3-8b"
    return small_scenario(
        trace,
        seed=int(rng.integers(0, 1000)),
        algorithm=str(rng.choice(list(ALGORITHMS))),
        model=model,
        hardware=str(rng.choice(["h100", "a100-80gb"] if large else ["a100-40gb", "l40s"])),
        devices_per_node=int(rng.choice([8] if large else [1, 2, 3, 4])),
        memory_share=float(rng.choice([1.0, 1.0, 0.5, 0.3])),
        prompts=int(rng.choice([8, 16, 32])),
    )


def check_case(seed: int) -> set[Spent]:
    """One random run, twice; what happened in it. Nothing: nothing fits its first step."""
    rng = np.random.default_rng(seed)
    scenario = random_scenario(rng)
    name = str(rng.choice(POLICIES))
    by_checkpoint = bool(rng.random() < 0.1)
    try:
        plan = first_plan(scenario)
    except InfeasiblePlanError:
        return set()
    settings = settings_for(scenario, parse_policy(name))
    rules = Rules(name=name, settings=settings, by_checkpoint=by_checkpoint)
    result = simulate(scenario, rules, plan, watch=check_transition)
    again = simulate(scenario, rules, plan)
    assert result.to_json() == again.to_json(), "the same seed gave another run"
    check_time(result)
    check_samples(scenario, result)
    check_devices(scenario, result)
    check_memory(scenario, result)
    return {i.kind for i in result.intervals}


def check_transition(graph: TransitionGraph) -> None:
    """Carried out in its order no unit is missing when it is read, memory suffices, and all that is
    wanted is there in the end: so no last copy was destroyed."""
    done = replay(graph)
    assert done.violation is None
    assert set(graph.final_units) <= set(done.units)


def check_time(result: RunResult) -> None:
    clock = 0.0
    for interval in result.intervals:
        assert interval.start_s == clock and interval.end_s > interval.start_s
        clock = interval.end_s
    assert sum(result.spent_s(kind) for kind in Spent) == pytest.approx(result.total_s)
    assert sum(s.step_s for s in result.steps) == pytest.approx(result.spent_s(Spent.STEPS))


def check_samples(scenario: Scenario, result: RunResult) -> None:
    """Every step counts once, in order; all of them unless the run has failed."""
    rows = scenario.cluster.problem.workload.rows
    assert [s.step for s in result.steps] == list(range(len(result.steps)))
    assert [s.samples for s in result.steps] == [rows * (i + 1) for i in range(len(result.steps))]
    assert bool(result.failure) == (len(result.steps) < scenario.trace.steps)


def check_devices(scenario: Scenario, result: RunResult) -> None:
    """A step uses devices that are there, and none of them for two things at once."""
    exact = scenario.trace.by_step and not scenario.trace.notice_s
    exact = exact and not result.spent_s(Spent.WAITING)
    known: list[ExecutionPlan] = []
    for row in result.steps:
        row.plan.plan.check_pool(row.pool)
        if exact:
            assert {d.host for d in row.pool.devices} in possible_nodes(scenario, row.step)
        if all(row.plan is not p for p in known):
            known.append(row.plan)
            check_spans(scenario, row.plan, row.step)


def possible_nodes(scenario: Scenario, step: int) -> list[set[int]]:
    """The nodes at the start of a step, and after each change that may have broken it off."""
    cluster = scenario.cluster
    first, changes = nodes_that_change(scenario.trace, cluster.nodes, cluster.seed)
    there = set(first)
    found: list[set[int]] = [there]
    for at, going, coming in changes:
        there = there.difference(going).union(coming)
        found = [there] if at <= step else [*found, there] if at < step + 1 else found
    return found


def check_spans(scenario: Scenario, plan: ExecutionPlan, step: int) -> None:
    moment = scenario.cluster.moment(scenario.rows(step), step, 0.0)
    outcome = scenario.cluster.run_step(plan, moment, 0)
    busy: dict[DeviceId, list[tuple[float, float]]] = {}
    for span in outcome.spans:
        stage = ModelStage.parse(span.name.split(" ")[0])
        for device in plan.plan[stage].devices:
            busy.setdefault(device, []).append((span.start_s, span.end_s))
    for times in busy.values():
        ordered = sorted(times)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ordered))


def check_memory(scenario: Scenario, result: RunResult) -> None:
    """No step ran out of memory for which the memory model had allowed its plan: of the response
    and prompt lengths that the step really had."""
    problem = scenario.cluster.problem
    for event in result.out_of_memory:
        workload = scenario.cluster.workload_of(scenario.rows(event.step))
        exact = type(workload)(
            prompts=workload.prompts,
            samples_per_prompt=workload.samples_per_prompt,
            prompt_lengths=LengthHistogram.constant(event.prompt_tokens),
            response_lengths=workload.response_lengths,
            max_response_tokens=event.room_tokens,
            minibatch_size=workload.minibatch_size,
            epochs=workload.epochs,
        )
        price = scenario.costs.price(event.plan, exact, scenario.cluster.pool, Beliefs())
        assert not price.fits
        assert event.used_bytes > problem.hardware.memory_bytes


def test_random_runs() -> None:
    ran = [check_case(seed) for seed in range(QUICK)]
    assert sum(map(bool, ran)) >= QUICK // 2, "too few of the random jobs fit their devices"


@pytest.mark.slow
def test_many_random_runs() -> None:
    """Among them is everything that can happen in a run."""
    ran = [check_case(1000 + seed) for seed in range(ALL)]
    assert sum(map(bool, ran)) >= ALL // 2
    assert set[Spent]().union(*ran) == set(Spent)
