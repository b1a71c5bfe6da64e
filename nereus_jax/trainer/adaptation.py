"""The controller in a running job: what it is told, and its decisions as every process takes them.

Process 0 alone decides, since seconds differ between processes. Its decision goes to all as text,
and what each of them read is compared before anything is dispatched.
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nereus_jax.control.controller import Controller
from nereus_jax.control.costs import Beliefs
from nereus_jax.control.decisions import decision_digest
from nereus_jax.control.planner_costs import PlannerCosts
from nereus_jax.control.policies import parse_policy
from nereus_jax.control.pool_trace import TraceEvent, read_pool_trace
from nereus_jax.control.settings import ControllerSettings
from nereus_jax.control.state import ControllerState, initial_state, resumed
from nereus_jax.core.errors import ConfigError, WorldError
from nereus_jax.core.events import (
    Decision,
    Event,
    Keep,
    LengthSummary,
    StepFinished,
    StepRecord,
    TransitionEnded,
    decision_from_json,
    decision_to_json,
)
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.hardware import Hardware
from nereus_jax.planning.calibration import Efficiencies
from nereus_jax.planning.calibration_record import load_efficiencies, software_versions
from nereus_jax.planning.transition_inputs import TransitionBudget
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime import host
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.plan_change import WAYS
from nereus_jax.trainer.problem import longest_workload, plan_problem
from nereus_jax.trainer.step import StepResult


@dataclasses.dataclass(kw_only=True)
class Adaptation:
    """A run's controller.

    Attributes:
      controller: decides.
      state: what it knows; None in every process but 0.
      trace: changes of the pool to come, by step.
      waiting: what it is to be told at the next boundary.
      last: plan and number of programs of each model-stage in the step before.
      behind_s: of the run's clock, what passed before this process started.
    """

    controller: Controller
    state: ControllerState | None
    trace: Sequence[TraceEvent] = ()
    waiting: list[Event] = dataclasses.field(default_factory=list[Event])
    last: tuple[ExecutionPlan, Mapping[str, int]] | None = None
    behind_s: float = 0.0
    _started_s: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def time_s(self) -> float:
        """The run's clock."""
        return self.behind_s + time.monotonic() - self._started_s

    def tell(self, *events: Event) -> None:
        """Puts events before the controller at the next decision."""
        self.waiting.extend(events)

    def due(self, step: int) -> list[TraceEvent]:
        """The changes of the pool that come before a step; each is given once."""
        now = [change for change in self.trace if change.at <= step]
        self.trace = self.trace[len(now) :]
        return now

    def decide(self) -> tuple[Decision, list[Mapping[str, Any]]]:
        """What the events since the last decision call for, the same on every process.

        Returns:
          The decision, and the records of all replans.

        Raises:
          WorldError: another process read another decision.
        """
        decision: Decision = Keep()
        records: list[Mapping[str, Any]] = []
        if self.state is not None:
            for event in self.waiting:
                self.state, found = self.controller.on_event(self.state, event)
                if found.record is not None:
                    records.append(found.record)
                if not isinstance(found, Keep):
                    decision = found
        self.waiting.clear()
        said = {"decision": decision_to_json(decision), "records": records}
        read = json.loads(host.broadcast_text(json.dumps(said)))
        decision = decision_from_json(read["decision"])
        digests = host.gather(np.frombuffer(bytes.fromhex(decision_digest(decision)), np.uint8))
        if (digests != digests[0]).any():
            raise WorldError(
                "the processes of the job do not read the same decision; start all of them again "
                "with the same version: the job goes on from its last checkpoint"
            )
        return decision, read["records"]

    def step_finished(self, job: Job, result: StepResult, row: Mapping[str, Any]) -> None:
        """Tells of a step."""
        programs = job.num_programs
        same = self.last is not None and self.last[0] == job.execution
        before = self.last[1] if same and self.last is not None else {}
        self.last = job.execution, programs
        stages = {str(stage): stage for stage in job.plan.placements}
        stage_s: dict[Any, float] = {}
        for span in result.spans:  # ReMax calls some twice
            name = span.name.partition(" ")[0]
            if name in stages:
                stage_s[stages[name]] = stage_s.get(stages[name], 0.0) + span.duration_s
        rollout: Rollout = result.values["rollout"]
        record = StepRecord(
            step=row["step"],
            time_s=self.time_s,
            step_s=row["step_s"],
            stage_s=stage_s,
            responses=LengthSummary.of(rollout.response_lengths_B.tolist()),
            prompts=LengthSummary.of(rollout.prompt_lengths_B.tolist()),
            peak_memory_bytes=int(row["peak_memory_bytes"]),
            room_tokens=job.room,
            tokens=rollout.num_tokens,
            first_after_compile=frozenset(
                stage for name, stage in stages.items() if programs.get(name) != before.get(name)
            ),
        )
        self.tell(StepFinished(record=record))

    def transition_ended(
        self,
        plan: ExecutionPlan,
        wanted: ExecutionPlan,
        row: Mapping[str, Any] | None,
        why: str = "",
    ) -> None:
        """Tells what became of a transition.

        Args:
          plan: that runs now.
          wanted: that was to be reached.
          row: of the transition's metrics; None: state did not move, or not to its end.
          why: it failed, where that is known.
        """
        error = why
        if not error and plan != wanted:
            error = "it stopped half way"
        elif not error and row is None:
            error = "it was reached through a checkpoint"
        self.tell(
            TransitionEnded(
                time_s=self.time_s,
                plan=plan,
                seconds=row["transition_s"] if row else 0.0,
                compile_s=row["transition_compile_s"] if row else 0.0,
                error=error,
            )
        )

    def to_json(self) -> dict[str, Any] | None:
        """For the checkpoint; process 0 has something to write."""
        return None if self.state is None else self.state.to_json()

    def resume(self, saved: Mapping[str, Any] | None, job: Job, step: int) -> None:
        """Goes on from what a checkpoint has, if it has anything."""
        self.trace = [change for change in self.trace if change.at >= step]
        if self.state is None or saved is None:
            return
        state = ControllerState.from_json(saved)
        self.behind_s = state.time_s
        self.state = resumed(state, job.execution, job.world.pool)


def make_adaptation(job: Job, hardware: Hardware) -> Adaptation:
    """The controller of a run that starts.

    Raises:
      ConfigError: the policy is not known, or the trace is not possible.
    """
    config = job.config
    policy = parse_policy(config.control.policy)
    prior = Efficiencies.prior()
    trace: Sequence[TraceEvent] = ()
    with host.together():
        if config.calibration.file:
            path = Path(config.calibration.file).expanduser()
            prior = load_efficiencies(path, hardware.name, software_versions())
        if config.control.pool_trace:
            path = Path(config.control.pool_trace).expanduser()
            found = read_pool_trace(path, job.world.pool)
            if found.events and found.clock != "step":
                raise ConfigError(
                    f"control.pool_trace: {path} is by {found.clock}; a run takes one by step"
                )
            trace = found.events
    capacity: dict[Any, int] = {}
    if config.device_memory_gib:
        limit = int(config.device_memory_gib * 2**30)
        capacity = dict.fromkeys(job.world.pool.devices, limit)
        hardware = dataclasses.replace(hardware, memory_bytes=limit)
    problem = plan_problem(job, hardware, prior)
    budget = TransitionBudget(
        capacity_bytes=capacity, ways=WAYS[config.transition.way], buffer_bytes=0
    )
    settings = ControllerSettings(
        workload=longest_workload(config), policy=policy, num_steps=config.num_steps, park=False
    )
    state = None
    if job.world.is_main:
        state = initial_state(job.execution, job.world.pool, Beliefs(efficiencies=prior))
    costs = PlannerCosts(problem=problem, budget=budget)
    return Adaptation(
        controller=Controller(settings=settings, costs=costs), state=state, trace=trace
    )
