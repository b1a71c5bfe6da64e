# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What is simulated, whatever the policy, and how a policy goes about changes of plan."""

import dataclasses

import numpy as np

from nereus_jax.control.costs import Beliefs
from nereus_jax.control.monitor import Thresholds
from nereus_jax.control.planner_costs import PlannerCosts
from nereus_jax.control.settings import ControllerSettings
from nereus_jax.control.state import ControllerState
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.planning.length_traces import draw_lengths
from nereus_jax.simulator.cluster import SimulatedCluster
from nereus_jax.simulator.stage_run import StepRows
from nereus_jax.simulator.traces import LENGTH_TAG, DriftTrace

KEPT_STEPS = 128
"""Steps whose rows stay, with how they were packed, for the policies that come after."""
OOM_MARGIN = 1.25
"""Longest response that a job has room for after it ran out of memory, over the one that it had."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated, whatever the policy.

    Attributes:
      cluster: that the job runs on.
      trace: what it goes through.
      costs: what the controller's planner believes.
      checkpoint_every: steps from one checkpoint to the next.
      thresholds: of the controller's signals.
      doubt: as `ControllerSettings` has it.
      beliefs: what a controller knows at first; None: nothing but the prior.
      start: the plan that a run starts with; None: the planner's best for the first step.
    """

    cluster: SimulatedCluster
    trace: DriftTrace
    costs: PlannerCosts
    checkpoint_every: int = 10
    thresholds: Thresholds = dataclasses.field(default_factory=Thresholds)
    doubt: float = 1.0
    beliefs: Beliefs | None = None
    start: ExecutionPlan | None = None
    _drawn: dict[int, StepRows] = dataclasses.field(
        default_factory=dict[int, StepRows], init=False, repr=False, compare=False
    )

    def rows(self, step: int) -> StepRows:
        """The rows of a step, the same for every policy."""
        if step not in self._drawn:
            if len(self._drawn) >= KEPT_STEPS:
                self._drawn.clear()
            self._drawn[step] = self._draw(step)
        return self._drawn[step]

    def _draw(self, step: int) -> StepRows:
        cluster, workload = self.cluster, self.cluster.problem.workload
        rng = np.random.default_rng([cluster.seed, LENGTH_TAG, step])
        recorded = self.trace.recorded
        responses = (
            draw_lengths(
                self.trace.shape,
                float(self.trace.mean_tokens[step]),
                workload.max_response_tokens,
                workload.rows,
                rng,
            )
            if recorded is None
            else recorded.responses[step]
        )
        prompts = workload.prompt_lengths.quantile(rng.random(workload.prompts))
        repeated = np.repeat(prompts.astype(np.int64), workload.samples_per_prompt)
        return StepRows(prompts=repeated, responses=responses)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """How a run goes about changes of plan.

    Attributes:
      name: of the policy, or of the system that it stands for.
      settings: of the controller.
      by_checkpoint: every change of plan is a checkpoint and a restart.
    """

    name: str
    settings: ControllerSettings
    by_checkpoint: bool = False


def roomier_plan(
    scenario: Scenario, settings: ControllerSettings, state: ControllerState, rows: StepRows
) -> ExecutionPlan | None:
    """What an operator would start again with after a step did not fit: the planner's best for its
    rows, with a margin; with the same degrees if the policy keeps them and they can.

    Args:
      scenario: what is simulated.
      settings: of the policy's controller.
      state: the plan, the devices, and what was learned.
      rows: that did not fit.
    """
    workload = scenario.cluster.workload_of(rows, OOM_MARGIN)
    for same in (True, False) if settings.policy.same_degrees else (False,):
        found = scenario.costs.candidates(
            workload,
            state.usable,
            state.beliefs,
            current=state.plan,
            count=settings.candidates,
            same_degrees=same,
        )
        for candidate in found.plans:
            if candidate.plan != state.plan:
                return candidate.plan
    return None
