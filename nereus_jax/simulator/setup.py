"""How a simulated run begins: the first plan, and what a controller is told before any step."""

import dataclasses

from nereus_jax.control.planner_costs import PlannerCosts
from nereus_jax.control.policies import Policy
from nereus_jax.control.settings import ControllerSettings
from nereus_jax.core.devices import DevicePool
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.planning.calibration import Efficiencies
from nereus_jax.planning.search_plans import find_plans
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.simulator.cluster import SimulatedCluster
from nereus_jax.simulator.player import Player
from nereus_jax.simulator.scenario import Scenario
from nereus_jax.simulator.traces import DriftTrace

FIRST_MARGIN = 1.25
"""Longest response that the first plan has room for, over that of the first step."""


def make_scenario(
    problem: PlanProblem, trace: DriftTrace, nodes: int, seed: int, *, checkpoint_every: int = 10
) -> Scenario:
    """A job on a cluster of whole nodes, and its trace.

    Args:
      problem: the job; its devices are those of the cluster.
      trace: what it goes through.
      nodes: of the cluster.
      seed: of all that is drawn.
      checkpoint_every: steps.

    Raises:
      ConfigError: the trace has more nodes than the cluster.
    """
    trace.check_nodes(nodes)
    devices = nodes * problem.hardware.devices_per_node
    job = dataclasses.replace(problem, num_devices=devices)
    cluster = SimulatedCluster(problem=job, nodes=nodes, seed=seed)
    costs = PlannerCosts(problem=job, node_of=lambda device: device.host)
    return Scenario(cluster=cluster, trace=trace, costs=costs, checkpoint_every=checkpoint_every)


def first_pool(scenario: Scenario) -> DevicePool:
    """The devices that the trace starts with."""
    cluster = scenario.cluster
    first = set(Player(scenario.trace, cluster, cluster.seed).first)
    return cluster.pool.without(set(cluster.pool.devices) - first)


def first_workload(scenario: Scenario) -> Workload:
    """The work that the first plan is made for: that of the first step, with room for longer
    responses."""
    return scenario.cluster.workload_of(scenario.rows(0), FIRST_MARGIN)


def settings_for(scenario: Scenario, policy: Policy) -> ControllerSettings:
    """What a controller is told: sizes, and where responses are cut; of their lengths nothing."""
    template = scenario.cluster.problem.workload
    cut = template.max_response_tokens
    workload = dataclasses.replace(
        template, response_lengths=LengthHistogram.constant(max(cut // 2, 1))
    )
    return ControllerSettings(
        workload=workload,
        policy=policy,
        num_steps=scenario.trace.steps,
        thresholds=scenario.thresholds,
        doubt=scenario.doubt,
        park=scenario.cluster.problem.park,
        checkpoint_every=scenario.checkpoint_every,
    )


def first_plan(
    scenario: Scenario,
    problem: PlanProblem | None = None,
    efficiencies: Efficiencies | None = None,
) -> ExecutionPlan:
    """The plan that the scenario starts with; else the planner's best for the first step on the
    first devices.

    Args:
      scenario: job, cluster and trace.
      problem: with other bounds on plans than the scenario's.
      efficiencies: what is known; by default what is assumed before anything is measured.

    Raises:
      InfeasiblePlanError: nothing fits; the message has the bytes that are missing.
    """
    if scenario.start is not None:
        return scenario.start
    pool, base = first_pool(scenario), problem or scenario.cluster.problem
    asked = dataclasses.replace(
        base,
        workload=first_workload(scenario),
        num_devices=len(pool),
        efficiencies=efficiencies or base.efficiencies,
    )
    search = find_plans(asked, 1)
    if not search.plans:
        short = search.shortage
        assert short is not None
        missing = (short.needed_bytes - short.limit_bytes) / 2**30
        raise InfeasiblePlanError(
            f"step 0: no plan fits {len(pool)} devices: {missing:.1f} GiB short of a device; use "
            f"{short.advice}"
        )
    placements = {
        s.model_stage: Placement(
            layout=s.layout, devices=tuple(pool.devices[i] for i in s.positions)
        )
        for s in search.plans[0].stages
    }
    choices = {s.model_stage: s.choice for s in search.plans[0].stages}
    return ExecutionPlan(plan=Plan(placements=placements), choices=choices)
