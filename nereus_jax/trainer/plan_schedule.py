"""The plans that a run's configuration asks for, prepared before their step has come."""

import dataclasses

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.events import Transition
from nereus_jax.core.hardware import Hardware
from nereus_jax.runtime.compile_queue import CompileQueue
from nereus_jax.trainer.compilation import compile_ahead
from nereus_jax.trainer.footprint import check_memory, stage_bytes
from nereus_jax.trainer.job import Job, make_job, plan_maker
from nereus_jax.trainer.plan_change import PlanChange, live_hardware, plan_change


@dataclasses.dataclass(kw_only=True)
class PlanSchedule:
    """What comes when, and what of it is ready.

    Attributes:
      jobs: the run under each plan, by the step before which it changes to it.
      hardware: what transitions are priced with; None where no plan ever changes.
      queue: compiles in the background.
      prepared: the change that comes next.
      prepared_step: its step.
      waits: whether it waits for its programs while steps go on.
      hurries: whether it does not, after all.
      decided: what the controller decided, if it comes from there.
    """

    jobs: dict[int, Job]
    hardware: Hardware | None
    queue: CompileQueue
    prepared: PlanChange | None = None
    prepared_step: int = 0
    waits: bool = False
    hurries: bool = False
    decided: Transition | None = None

    def prepare_next(self, job: Job, step: int) -> tuple[str, ...]:
        """Plans the first change from `step` on and begins to compile for it.

        Returns:
          What to tell of changes that were dropped: from this plan, which is not the one that the
          configuration has before them, they cannot be reached.
        """
        self.prepared = None
        dropped: list[str] = []
        for coming in sorted(self.jobs):
            new = self.jobs[coming].with_room(job.room)
            if coming < step or new.execution == job.execution or self.hardware is None:
                continue
            try:
                self.prepared = plan_change(job, new, self.hardware)
            except InfeasiblePlanError as error:
                del self.jobs[coming]
                dropped.append(f"plan_changes.{coming} is dropped: {error}")
                continue
            self.take(self.prepared, coming, waits=job.config.transition.switch == "when_ready")
            break
        return tuple(dropped)

    def take(self, change: PlanChange, step: int, *, waits: bool) -> None:
        """Takes up a change, and begins to compile for it.

        Args:
          change: comes next.
          step: before which it comes.
          waits: for its programs, while steps go on.
        """
        self.prepared, self.prepared_step, self.waits = change, step, waits
        self.hurries = False
        change.compile_in(self.queue)
        compile_ahead(change.old, change.new, self.queue)

    def forget(self) -> None:
        """What the controller had decided is not to come, or has been."""
        if self.decided is not None:
            self.decided = self.prepared = None

    def drop(self, lost: frozenset[DeviceId]) -> tuple[int, ...]:
        """Forgets the plans that need devices which are gone, and these devices; their steps."""
        kept = {
            step: dataclasses.replace(job, world=job.world.without(lost))
            for step, job in self.jobs.items()
            if all(lost.isdisjoint(p.devices) for p in job.plan.placements.values())
        }
        dropped = tuple(sorted(self.jobs.keys() - kept.keys()))
        self.jobs, self.prepared = kept, None
        return dropped

    def due(self, step: int) -> PlanChange | None:
        """The change that comes before this step, or has waited for its programs since an earlier
        one."""
        return self.prepared if self.prepared_step <= step else None

    def first_open(self, step: int) -> int:
        """The first step, up to this one, whose change has not been made."""
        return step if self.prepared is None else min(step, self.prepared_step)


def first_job(job: Job, step: int, jobs: dict[int, Job]) -> Job:
    """The run under the plan that holds at a step, changes before it included.

    A change at the very step is still to come: it is carried out and recorded like any other.
    """
    before = [s for s in sorted(jobs) if s < step]
    return jobs[before[-1]] if before else job


def scheduled_jobs(job: Job) -> dict[int, Job]:
    """The run under each plan that its configuration names, checked as the first one is.

    Raises:
      ConfigError, InfeasiblePlanError: a plan that the devices or the model cannot take.
    """
    config, world = job.config, job.world
    jobs: dict[int, Job] = {}
    for step, execution in plan_maker(config, job.inputs, world).later().items():
        try:
            jobs[step] = make_job(config, job.inputs, world, execution, job.programs)
            check_memory(jobs[step], stage_bytes(jobs[step]))
        except InfeasiblePlanError as error:
            raise InfeasiblePlanError(f"plan_changes.{step}: {error}") from None
    return jobs


def make_schedule(job: Job, jobs: dict[int, Job]) -> PlanSchedule:
    """The schedule of a run; whether every plan is reachable from the one before is checked now.

    Raises:
      InfeasiblePlanError: a plan cannot be reached; the message names step and reason.
    """
    hardware = live_hardware(job) if jobs or job.config.control.policy else None
    before = job
    for step in sorted(jobs):
        assert hardware is not None
        try:
            plan_change(before, jobs[step], hardware)
        except InfeasiblePlanError as error:
            raise InfeasiblePlanError(f"plan_changes.{step}: {error}") from None
        before = jobs[step]
    return PlanSchedule(jobs=jobs, hardware=hardware, queue=CompileQueue())
