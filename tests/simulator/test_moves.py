"""What changes of plan take: contention, compiling, checkpoints."""

import dataclasses

import pytest

from nereus_jax.control.costs import Beliefs
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ACTOR_SCORE, ACTOR_TRAIN, CRITIC_TRAIN, Stage
from nereus_jax.core.transition import TransitionGraph
from nereus_jax.simulator.cluster import SimulatedCluster
from nereus_jax.simulator.curves import Truth, load_truth
from nereus_jax.simulator.moves import checkpoint_s, compilation, restart_s, transition_s
from nereus_jax.simulator.scenario import Scenario
from nereus_jax.simulator.setup import first_plan
from tests.simulator.scenarios import SMALL, make_trace, small_scenario

PRIOR = Beliefs().efficiencies


def on_devices(
    scenario: Scenario, plan: ExecutionPlan, first: int, dp: int, tp: int
) -> ExecutionPlan:
    """All model-stages with one layout on devices from a position on."""
    devices = scenario.cluster.pool.devices[first : first + dp * tp]
    placement = Placement(layout=ParallelLayout(dp, 1, tp), devices=devices)
    choices = {s: dataclasses.replace(c, zero1=False) for s, c in plan.choices.items()}
    return ExecutionPlan(plan=Plan(placements=dict.fromkeys(choices, placement)), choices=choices)


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    """4 nodes of 4 devices."""
    return small_scenario(make_trace(nodes=4))


def graph_of(scenario: Scenario, source: ExecutionPlan, target: ExecutionPlan) -> TransitionGraph:
    return scenario.costs.graph(source, target, Beliefs())[0]


def with_truth(scenario: Scenario, truth: Truth) -> SimulatedCluster:
    return dataclasses.replace(scenario.cluster, truth=truth)


def seconds(scenario: Scenario, graph: TransitionGraph, **overheads: float) -> float:
    truth = load_truth()
    own = dataclasses.replace(truth.overheads, setup_s=0.0, operation_s=0.0, **overheads)
    cluster = with_truth(scenario, dataclasses.replace(truth, overheads=own))
    return transition_s(cluster, graph, PRIOR, 0.0)


def test_transfers_between_nodes_share_their_links(scenario: Scenario) -> None:
    """A replica of four ranks is copied to another node, all ranks at once: with half of their
    links' sum it takes twice as long. One rank alone has a quarter of the sum, and is slowed by
    less than that only. Inside a node nothing is shared."""
    plan = first_plan(scenario)
    four = on_devices(scenario, plan, 0, 1, 4)
    across = graph_of(scenario, four, on_devices(scenario, plan, 0, 2, 4))
    whole = seconds(scenario, across, uplink_share=1.0)
    assert seconds(scenario, across, uplink_share=0.5) == pytest.approx(2.0 * whole)
    one = on_devices(scenario, plan, 0, 4, 1)
    across = graph_of(scenario, one, on_devices(scenario, plan, 0, 8, 1))
    whole = seconds(scenario, across, uplink_share=1.0)
    assert seconds(scenario, across, uplink_share=0.25) == pytest.approx(whole)
    assert seconds(scenario, across, uplink_share=0.125) > 1.8 * whole
    inside = graph_of(scenario, on_devices(scenario, plan, 0, 2, 1), one)
    assert seconds(scenario, inside, uplink_share=0.1) == seconds(scenario, inside)


def test_alone_it_takes_what_the_bytes_take(scenario: Scenario) -> None:
    """One replica on one device is copied to another one in its node: its bytes over the link's
    rate, at the size of the message."""
    plan = first_plan(scenario)
    graph = graph_of(
        scenario, on_devices(scenario, plan, 0, 1, 1), on_devices(scenario, plan, 0, 2, 1)
    )
    cluster = scenario.cluster
    link, curve = cluster.problem.hardware.intra_node, cluster.truth.links["intra_node"]
    moved = [o for o in graph.operations if o.link_bytes.intra_node]
    expected = 0.0
    for o in moved:
        message = o.link_bytes.intra_node / len(o.produces[0].devices)
        slow = 1.0 + (curve.half_bytes / message) ** curve.ramp
        expected += o.link_bytes.intra_node / (link.bytes_per_s * curve.share) * slow
    assert len(moved) >= 2
    # The planner's own latency of a message is scaled with it.
    assert seconds(scenario, graph) == pytest.approx(expected, rel=0.02)


def test_nothing_moves_when_nothing_changes(scenario: Scenario) -> None:
    plan = on_devices(scenario, first_plan(scenario), 0, 4, 1)
    assert seconds(scenario, graph_of(scenario, plan, plan)) == 0.0
    truth = load_truth()
    own = transition_s(scenario.cluster, graph_of(scenario, plan, plan), PRIOR, 0.0)
    assert own == truth.overheads.setup_s


def test_programs_are_compiled_once(scenario: Scenario) -> None:
    cluster, plan = scenario.cluster, first_plan(scenario)
    first = compilation(cluster, plan, frozenset())
    assert compilation(cluster, plan, frozenset()) == first
    median = cluster.truth.overheads.compile_s
    programs = {Stage.GENERATE: 2, Stage.SCORE: 1, Stage.TRAIN: 2}
    count = sum(programs[s.stage] for s in plan.choices)
    assert 0.4 * count * median < first.seconds < 2.5 * count * median
    assert compilation(cluster, plan, first.programs).seconds == 0.0
    choice = dataclasses.replace(plan.choices[ACTOR_SCORE], microbatch_size=7)
    other = dataclasses.replace(plan, choices={**plan.choices, ACTOR_SCORE: choice})
    again = compilation(cluster, other, first.programs)
    assert 0.2 * median < again.seconds < 5 * median
    assert again.programs > first.programs


def test_checkpoints_by_hand(scenario: Scenario) -> None:
    """Actor and critic with two moments in float32, and the frozen models in bfloat16; what weight
    edges fill is in no checkpoint."""
    plan = on_devices(scenario, first_plan(scenario), 0, 4, 2)
    problem = scenario.cluster.problem
    actor = 12 * SMALL.num_params(problem.head(ACTOR_TRAIN))
    critic = 12 * SMALL.num_params(problem.head(CRITIC_TRAIN))
    frozen = 2 * (actor + critic) / 12
    rate = scenario.cluster.truth.overheads.storage_bytes_per_s
    whole = (actor + critic + frozen) / rate
    assert checkpoint_s(scenario.cluster, plan) == pytest.approx(whole / 8)
    base = scenario.cluster.truth.overheads.restart_s
    read = restart_s(scenario.cluster, plan, plan, write=False)
    assert read - base == pytest.approx(whole / 2)
    both = restart_s(scenario.cluster, plan, plan, write=True)
    assert both - read == pytest.approx(whole / 8)
