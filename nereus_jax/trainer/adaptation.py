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

from nereus_jax.config import RunConfig
from nereus_jax.control.controller import Controller
from nereus_jax.control.costs import Beliefs
from nereus_jax.control.expectation import forecast_of
from nereus_jax.control.offsets import first_offsets
from nereus_jax.control.planner_costs import PlannerCosts
from nereus_jax.control.policies import parse_policy
from nereus_jax.control.pool_trace import PoolChange, PoolReader, TraceEvent, read_pool_trace
from nereus_jax.control.settings import ControllerSettings, thresholds_of
from nereus_jax.control.state import (
    ControllerState,
    initial_state,
    plan_devices,
    resumed,
    went_back,
)
from nereus_jax.core.devices import DevicePool
from nereus_jax.core.errors import (
    ConfigError,
    InfeasiblePlanError,
    PlanTooLargeError,
    WorldError,
)
from nereus_jax.core.events import (
    Decision,
    DevicesLost,
    Event,
    Keep,
    LengthSummary,
    StepFinished,
    StepRecord,
    Transition,
    TransitionEnded,
    event_from_json,
    event_to_json,
)
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.hardware import Hardware
from nereus_jax.planning.calibration import Efficiencies
from nereus_jax.planning.calibration_record import load_efficiencies, software_versions
from nereus_jax.planning.hardware import CPU_EMULATED
from nereus_jax.planning.transition_inputs import TransitionBudget
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime import host
from nereus_jax.trainer.decided import Decided
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.plan_change import WAYS
from nereus_jax.trainer.pool_events import PoolSources, PoolStatus
from nereus_jax.trainer.problem import longest_workload, plan_problem
from nereus_jax.trainer.room import next_rooms
from nereus_jax.trainer.step import StepResult


@dataclasses.dataclass(kw_only=True)
class Adaptation:
    """A run's controller.

    Attributes:
      controller: decides.
      state: what it knows; None in every process but 0.
      config: of the run. Devices that are emulated go when their time is over.
      every: the devices that the job was formed with.
      trace: changes of the pool to come, by step.
      held: others that have come, and wait behind the loss of devices.
      sources: where others tell of changes of the pool.
      waiting: what it is to be told at the next boundary.
      last: plan and number of programs of each model-stage in the step before.
      last_step_s: seconds of the step before.
      urgent: whether the plan cannot go on for which a move was decided last.
      full: times that the step which comes next had no memory.
      behind_s: of the run's clock, what passed before this process started.
      cpu_s: CPU seconds that the controller took in this process.
    """

    controller: Controller
    state: ControllerState | None
    config: RunConfig
    every: DevicePool
    sources: PoolSources
    trace: Sequence[TraceEvent] = ()
    held: Sequence[TraceEvent] = ()
    waiting: list[Event] = dataclasses.field(default_factory=list[Event])
    last: tuple[ExecutionPlan, Mapping[str, int]] | None = None
    last_step_s: float = 0.0
    urgent: bool = False
    full: int = 0
    behind_s: float = 0.0
    cpu_s: float = 0.0
    _started_s: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._publish()

    @property
    def time_s(self) -> float:
        """The run's clock."""
        return self.behind_s + time.monotonic() - self._started_s

    def tell(self, *events: Event) -> None:
        """Puts events before the controller at the next decision.

        It is for the trainer, which calls it on every process alike; others have `PoolInbox`.
        """
        self.waiting.extend(events)

    def decide(self, step: int | None = None) -> Decided:
        """What the events since the last decision call for, the same on every process.

        Args:
          step: the next one, at a boundary: changes of the pool are looked for; None: they are not.

        Raises:
          WorldError: another process read something else.
        """
        found = Decided(decision=Keep())
        said: tuple[str, ...] = ()
        if self.state is not None:
            pool: tuple[TraceEvent, ...] = ()
            if step is not None:
                pool, said = self._news(self.state, step)
            self.waiting += [
                event.event(self.time_s) for event in pool if event.change is not PoolChange.LOST
            ]
            found = Decided(decision=Keep(), pool=pool)
            if not found.lost:
                self.cpu_s -= time.thread_time()
                found = self._ask(pool)
                self.cpu_s += time.thread_time()
        if not found.lost:
            self.waiting.clear()
        self._publish()
        read = Decided.from_json(json.loads(host.broadcast_text(json.dumps(found.to_json()))))
        digests = host.gather(np.frombuffer(read.digest(), np.uint8))
        if (digests != digests[0]).any():
            raise WorldError(
                "the processes of the job do not read the same decision; start all of them again "
                "with the same version: the job goes on from its last checkpoint"
            )
        if isinstance(read.decision, Transition):
            self.urgent = read.decision.urgent
        return dataclasses.replace(read, said=said)

    def _ask(self, pool: tuple[TraceEvent, ...]) -> Decided:
        """Tells the controller all that waits."""
        assert self.state is not None
        decision: Decision = Keep()
        records: list[Mapping[str, Any]] = []
        for event in self.waiting:
            if isinstance(event, DevicesLost):  # a loss that comes on top of one is told with it
                there = tuple(d for d in event.devices if d in self.state.pool.devices)
                event = dataclasses.replace(event, devices=there)
            self.state, found = self.controller.on_event(self.state, event)
            if found.record is not None:
                records.append(found.record)
            if not isinstance(found, Keep):
                decision = found
        if isinstance(decision, Transition) and decision.target != self.state.pending:
            decision = Keep()  # a later event has overtaken it
        urgent = decision.urgent if isinstance(decision, Transition) else self.urgent
        return Decided(
            decision=decision,
            records=records,
            pool=pool,
            pending=self.state.pending is not None,
            hurry=urgent and self._cannot_wait(self.state),
        )

    def _cannot_wait(self, state: ControllerState) -> bool:
        """Whether the next step may be one too many under the plan that an urgent move leaves."""
        if state.pending is None:
            return False
        if state.missing(state.pool.devices):
            return True
        settings = self.controller.settings
        going = state.missing(state.usable.devices)
        if going:
            deadline_s = min(state.leaving[d] for d in going)
            move_s = settings.deadline_margin * state.pending_s
            return self.time_s + self.last_step_s + move_s > deadline_s
        forecast = forecast_of(settings, state)
        if forecast is None or state.facts is None:
            return True
        # A longer response takes the next room, not its own length alone.
        if next_rooms(self.config, state.room_tokens)[-1] > state.facts.limit_tokens:
            return True
        coming = forecast.crossing_step(state.facts.limit_tokens)
        return coming is None or coming <= 1

    def _news(
        self, state: ControllerState, step: int
    ) -> tuple[tuple[TraceEvent, ...], tuple[str, ...]]:
        """What has become of the pool since the last boundary, and what to tell of it.

        A loss is the last: the job takes note of it before it hears of more.
        """
        due = [change for change in self.trace if change.at <= step]
        self.trace = self.trace[len(due) :]
        sent, said = self.sources.take()
        events: list[TraceEvent] = []
        reader = PoolReader(self.every, state.pool, state.leaving)
        coming = [*self._expired(state), *self.held, *due, *sent]
        while coming and not any(event.change is PoolChange.LOST for event in events):
            change = coming.pop(0)
            names = [str(d) for d in change.devices]
            message: dict[str, Any] = {"change": change.change.value, "devices": names}
            if change.change is PoolChange.REVOKE:
                message["deadline_s"] = change.deadline_s
            try:
                events.append(reader.message(message))
            except ValueError as error:  # it was possible when it was said
                said.append(f"a change of the pool is passed over: {error}")
        self.held = coming
        return tuple(events), tuple(said)

    def _expired(self, state: ControllerState) -> list[TraceEvent]:
        """Devices whose time is over: emulated ones go, others are done without."""
        over = {d for d, gone_at_s in state.leaving.items() if gone_at_s <= self.time_s}
        if not self.config.emulated_devices:
            over -= plan_devices(state.plan)  # while they answer, the job may get away
        if not over:
            return []
        return [TraceEvent(at=0.0, change=PoolChange.LOST, devices=tuple(sorted(over)))]

    def _publish(self) -> None:
        """Shows the pool and the plan to who asks."""
        state = self.state
        if state is None:
            return
        now_s = self.time_s
        self.sources.inbox.publish(
            PoolStatus(
                every=self.every,
                pool=state.pool,
                leaving={d: s - now_s for d, s in state.leaving.items()},
                plan=state.plan,
                step=state.step,
            )
        )

    def step_finished(self, job: Job, result: StepResult, row: Mapping[str, Any]) -> None:
        """Tells of a step."""
        self.full = 0
        programs = job.num_programs
        same = self.last is not None and self.last[0] == job.execution
        self.last_step_s = row["step_s"]
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
        why: InfeasiblePlanError | None = None,
        room_tokens: int = 0,
    ) -> str:
        """Tells what became of a transition.

        Args:
          plan: that runs now.
          wanted: that was to be reached.
          row: of the transition's metrics; None: state did not move, or not to its end.
          why: it failed, where that is known.
          room_tokens: the longest response that the run's programs have room for.

        Returns:
          Why it failed; empty: it did not.
        """
        error = "" if why is None else str(why)
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
                working_bytes=why.working_bytes if isinstance(why, PlanTooLargeError) else {},
                room_tokens=room_tokens,
            )
        )
        return error

    def to_json(self) -> dict[str, Any] | None:
        """For the checkpoint; process 0 has something to write."""
        if self.state is None:
            return None
        # The step that has just ended is told at the next boundary, which may be another process's.
        told = [event_to_json(e) for e in self.waiting if isinstance(e, StepFinished)]
        return {**self.state.to_json(), "waiting": told}

    def resume(self, saved: Mapping[str, Any] | None, job: Job, step: int) -> str:
        """Goes on from what a checkpoint has, when the process starts.

        Returns:
          Why it does not; empty: it does.
        """
        self.trace = [change for change in self.trace if change.at >= step]
        if self.state is None or saved is None:
            return ""
        try:
            state = ControllerState.from_json(saved)
            waiting = [event_from_json(event) for event in saved.get("waiting", ())]
        except (ValueError, KeyError, TypeError) as error:
            return f"the controller starts anew: the checkpoint has another one's state ({error})"
        self.behind_s, self._started_s = state.time_s, time.monotonic()
        offsets = dataclasses.replace(
            state.beliefs.offsets, first_std=self.state.beliefs.offsets.first_std
        )
        beliefs = dataclasses.replace(state.beliefs, offsets=offsets)
        state = dataclasses.replace(state, beliefs=beliefs)
        self.state = resumed(state, job.execution, job.world.pool)
        if state.plan == job.execution:  # else its seconds are of another plan
            self.waiting += waiting
        self._publish()
        return ""

    def went_back(self, job: Job, step: int) -> None:
        """The run goes on from a checkpoint of this step, in the same process."""
        if self.state is not None:
            self.state = went_back(self.state, step, job.execution, job.world.pool)


def make_adaptation(job: Job, hardware: Hardware, sources: PoolSources) -> Adaptation:
    """The controller of a run that starts.

    Args:
      job: the run.
      hardware: of its devices.
      sources: where others tell of changes of the pool.

    Raises:
      ConfigError: the policy is not known, the trace is not possible, or the calibration is one of
        other hardware.
    """
    config = job.config
    policy = parse_policy(config.control.policy)
    # Emulated devices may be priced as others (`transition.hardware`): then they stand for those.
    prior, emulated = Efficiencies.prior(), hardware.name == CPU_EMULATED
    trace: Sequence[TraceEvent] = ()
    with host.together():
        if config.calibration.file:
            path = Path(config.calibration.file).expanduser()
            prior = load_efficiencies(path, hardware.name, software_versions())
        if config.control.pool_trace and job.world.is_main:
            trace = _read_trace(job)
    capacity: dict[Any, int] = {}
    if limit := config.device_memory_bytes:
        capacity = dict.fromkeys(job.world.pool.devices, limit)
        hardware = dataclasses.replace(hardware, memory_bytes=limit)
    problem = plan_problem(job, hardware, prior)
    budget = TransitionBudget(
        capacity_bytes=capacity, ways=WAYS[config.transition.way], buffer_bytes=0
    )
    settings = ControllerSettings(
        workload=longest_workload(config),
        policy=policy,
        num_steps=config.num_steps,
        thresholds=thresholds_of(config.control),
        doubt=config.control.doubt,
        park=config.control.park,
        checkpoint_every=config.checkpoint.every,
    )
    state = None
    if job.world.is_main:
        beliefs = Beliefs(efficiencies=prior, offsets=first_offsets(emulated=emulated))
        state = initial_state(job.execution, job.world.pool, beliefs)
    # Emulated devices and the compiler have the same cores: steps beside it take so much longer
    # that it might as well be waited for.
    costs = PlannerCosts(problem=problem, budget=budget, compiler_apart=not emulated)
    return Adaptation(
        controller=Controller(settings=settings, costs=costs),
        state=state,
        config=config,
        every=job.world.every,
        sources=sources,
        trace=trace,
    )


def _read_trace(job: Job) -> Sequence[TraceEvent]:
    path = Path(job.config.control.pool_trace).expanduser()
    found = read_pool_trace(path, job.world.pool)
    if found.events and found.clock != "step":
        raise ConfigError(
            f"control.pool_trace: {path} is by {found.clock}; a run takes one by step"
        )
    lost = [e for e in found.events if e.change is PoolChange.LOST]
    if lost and not job.config.emulated_devices:
        raise ConfigError(
            f"control.pool_trace: {path} has devices lost at step {lost[0].at:.0f}; a file can "
            f"take away emulated devices alone: write revoke"
        )
    return found.events
