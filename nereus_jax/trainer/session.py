"""One process's part in a run: its job, its checkpoints and files, how its state comes to be."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nereus_jax.config import RunConfig, fingerprint
from nereus_jax.core.errors import (
    ConfigError,
    DevicesLostError,
    InfeasiblePlanError,
    StorageError,
)
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import ACTOR_TRAIN, CRITIC_TRAIN, ModelStage
from nereus_jax.runtime import host
from nereus_jax.runtime.checkpoint_files import CHECKPOINTS
from nereus_jax.runtime.checkpoints import CheckpointStore
from nereus_jax.runtime.emu import ElasticModelUnit, group_site, units_of
from nereus_jax.runtime.engines.train import TrainState
from nereus_jax.runtime.parking import Tree, parked_abstract
from nereus_jax.runtime.transitions import Batch
from nereus_jax.trainer.adaptation import Adaptation
from nereus_jax.trainer.calibration import Calibration
from nereus_jax.trainer.decided import Decided
from nereus_jax.trainer.footprint import job_under
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.outputs import Outputs
from nereus_jax.trainer.parked import is_parked
from nereus_jax.trainer.plan_schedule import PlanSchedule, first_job
from nereus_jax.trainer.state import (
    Counters,
    JobState,
    as_planned,
    frozen_models,
    initial_actor_params,
    initial_critic,
)
from nereus_jax.trainer.verification import state_stages, unit_spec
from nereus_jax.trainer.warmup import run_warmup

ROLLOUTS = "rollouts"


@dataclasses.dataclass(kw_only=True)
class Session:
    """One process's part in a run, from its start or resume to its end.

    Attributes:
      job: under the plan that holds now.
      schedule: the plans to come.
      workdir: where results go.
      store: checkpoints.
      outputs: files and progress.
      evaluated_step: of the last evaluation.
      observe: called before each batch of operations of a transition.
      calibration: what has been learned of the hardware; None: nothing is, or another process does.
      adaptation: the controller; None: there is none.
      configured: the plan that the configuration has at the step of the start; None: not known.
    """

    job: Job
    schedule: PlanSchedule
    workdir: Path
    store: CheckpointStore
    outputs: Outputs
    evaluated_step: int = -1
    observe: Callable[[Batch], None] | None = None
    calibration: Calibration | None = None
    adaptation: Adaptation | None = None
    configured: ExecutionPlan | None = None


@contextmanager
def open_session(
    job: Job, schedule: PlanSchedule, workdir: Path
) -> Iterator[tuple[Session, int | None]]:
    """Opens checkpoints and logs; gives the step to resume from, or None.

    The session's job is under the plan that holds at that step.
    """
    config = job.config
    store = CheckpointStore(
        workdir / CHECKPOINTS, keep=config.checkpoint.keep, fingerprint=fingerprint(config)
    )
    try:
        step, meta = store.latest_step(), None
        if step is not None:  # before the outputs cut off what comes after the checkpoint
            meta = store.read_meta(step)
            _check_same_data(job, meta, workdir)
            most = config.rollout.max_response_length
            job = job.with_room(min(max(meta.get("room", 0), job.room), most))
        job = first_job(job, step or 0, schedule.jobs).with_room(job.room)
        configured = job.execution
        if meta is not None and config.control.policy:
            job = _under_saved_plan(job, meta)
        session = Session(
            job=job,
            configured=configured,
            schedule=schedule,
            workdir=workdir,
            store=store,
            outputs=_open_outputs(job, workdir, step),
        )
        try:
            yield session, step
        finally:
            session.outputs.close()
            schedule.queue.close()
    finally:
        store.close()


def _under_saved_plan(job: Job, meta: Mapping[str, Any]) -> Job:
    """The run under the plan that its controller had moved to when the checkpoint was written.

    A configuration that has another plan than then means that one, and a plan that cannot be any
    more is done without.
    """
    if meta.get("configured") != job.execution.to_json():
        return job
    execution = ExecutionPlan.from_json(meta["plan"])
    there = set(job.world.pool.devices)
    if not all(there.issuperset(p.devices) for p in execution.plan.placements.values()):
        return job
    try:
        return job_under(job, execution)
    except InfeasiblePlanError:
        return job


def _open_outputs(
    job: Job, workdir: Path, step: int | None, *, keep_decisions: bool = False
) -> Outputs:
    """The files of a run from a step on; what they hold of it and later ones is cut off."""
    with host.together():
        return Outputs(
            workdir,
            job.config,
            job.execution,
            device_kind=job.world.pool.kind,
            keep_through=None if step is None else step - 1,
            keep_decisions=keep_decisions,
            enabled=job.world.is_main,
        )


def _go_back(session: Session) -> JobState:
    """The state of the last checkpoint, on the session's plan; rows of later steps are cut off, but
    not decisions: they have been made, and the controller goes on from what it knows.

    Raises:
      DevicesLostError: there is no checkpoint.
    """
    session.store.wait()
    step = session.store.latest_step()
    if step is None:
        raise DevicesLostError(
            "what is left of the state cannot go on, and no checkpoint has been written; set "
            "checkpoint.every to have one to go back to"
        )
    session.outputs.close()
    session.outputs = _open_outputs(session.job, session.workdir, step, keep_decisions=True)
    session.outputs.start(step)
    session.evaluated_step = -1
    if session.adaptation is not None:
        session.adaptation.went_back(session.job, step)
    return resume_state(session, step)


def start_from_checkpoint(
    session: Session, state: JobState, job: Job, reason: Exception | str
) -> None:
    """Goes on from the last checkpoint, under the plan of this job.

    Raises:
      DevicesLostError: there is no checkpoint.
    """
    session.outputs.message(f"going back to the last checkpoint: {reason}")
    state.trained, state.frozen, state.edges, state.at_work = {}, {}, {}, {}  # room for the rest
    session.job = job
    state.take_over(_go_back(session))


def restore_frozen_units(session: Session, batch: Batch) -> list[ElasticModelUnit]:
    """The units of a frozen model-stage that a transition reads from the checkpoint."""
    job, stage = session.job, batch.model_stage
    site = group_site(job.world, batch.targets, job.decoder(stage).num_kv_heads)
    abstract = {str(stage): site.abstract(unit_spec(job, stage))}
    params = session.store.restore_frozen(abstract)[str(stage)]
    return list(units_of(job.world, site, params))


def start_state(session: Session) -> JobState:
    """The state before step 0: loaded or random models, the warm-up, the frozen copies."""
    job = session.job
    params, position = initial_actor_params(job), 0
    if job.config.warmup.num_steps:
        params, position = run_warmup(job, params, session.outputs.message)
    # What is made of the actor's weights comes before its optimizer, which needs room, too.
    frozen = frozen_models(job, params)
    critic = initial_critic(job, params) if CRITIC_TRAIN in job.trains else None
    actor = as_planned(job, ACTOR_TRAIN, job.trains[ACTOR_TRAIN].init(params))
    trained = {ACTOR_TRAIN: actor} | ({} if critic is None else {CRITIC_TRAIN: critic})
    state = JobState(
        counters=Counters(data_position=position, kl_coef=job.config.algorithm.kl.coef),
        trained=trained,
        frozen=frozen,
    )
    if state.frozen:
        session.store.save_frozen({str(stage): p for stage, p in state.frozen.items()})
    if job.config.checkpoint.every:
        save(session, state)
    return state


def resume_state(session: Session, step: int) -> JobState:
    """The state of a checkpoint, on this run's plan."""
    job, store = session.job, session.store
    meta = store.read_meta(step)
    counters = _restored_counters(job.config, meta)
    abstract = {
        stage.role.value: _where_planned(
            job, stage, TrainState(engine.site.abstract(engine.spec), engine.abstract_opt_state())
        )
        for stage, engine in job.trains.items()
    }
    restored = store.restore(step, abstract)
    frozen_stages = [s for s in state_stages(job) if s not in job.trains]
    frozen = {}
    if frozen_stages:
        abstract_frozen = {
            str(s): _where_planned(job, s, job.sites[s].abstract(job.model_spec(s)))
            for s in frozen_stages
        }
        frozen = {
            ModelStage.parse(name): params
            for name, params in store.restore_frozen(abstract_frozen).items()
        }
    session.outputs.message(f"resumed from the checkpoint of step {step}")
    return JobState(
        counters=counters,
        trained={stage: restored[stage.role.value] for stage in job.trains},
        frozen=frozen,
    )


def _where_planned(job: Job, stage: ModelStage, abstract: Tree) -> Tree:
    """State of a model-stage that is to be read: into host memory if the plan parks it."""
    return parked_abstract(abstract) if is_parked(job, stage) else abstract


def _data_identity(job: Job) -> dict[str, object]:
    """What gives a position in the data and a sample's number their meaning."""
    return {
        "seed": job.config.seed,
        "data.train": job.config.data.train,
        # A directory may have got another file: with it comes another order.
        "problems in data.train": len(job.inputs.train_prompts),
    }


def _check_same_data(job: Job, meta: Mapping[str, Any], workdir: Path) -> None:
    """Raises ConfigError if a checkpoint's counters would mean other samples in this run."""
    saved = meta["data"]
    for key, value in _data_identity(job).items():
        if saved[key] != value:
            raise ConfigError(
                f"{workdir} was trained with {key}={saved[key]!r}, got {value!r}: its position in "
                f"the data would name other samples; resume with the old value, or choose another "
                f"--workdir"
            )


def _restored_counters(config: RunConfig, meta: Mapping[str, Any]) -> Counters:
    """The counters of a checkpoint."""
    counters = Counters(**meta["counters"])
    if config.algorithm.kl.controller == "fixed":  # then the configuration rules, also a new one
        counters = dataclasses.replace(counters, kl_coef=config.algorithm.kl.coef)
    return counters


def save(session: Session, state: JobState) -> None:
    """Begins to write a checkpoint of the state at a step boundary."""
    step = state.counters.step
    session.store.wait()  # the last save may be of this very step
    if session.store.latest_step() != step:
        meta = {
            "counters": state.counters.to_json(),
            "room": session.job.room,
            "controller": session.adaptation.to_json() if session.adaptation is not None else None,
            "plan": session.job.execution.to_json(),
            "configured": None if session.configured is None else session.configured.to_json(),
            "data": _data_identity(session.job),
        }
        session.store.save(step, state.checkpointed(), meta)
    with writing(session):
        if session.calibration is not None:
            session.calibration.save(session.workdir)


def last_good(session: Session) -> str:
    """What to go on from after an error, in words."""
    with contextlib.suppress(StorageError):  # that save failed too, and an older one is named
        session.store.wait()
    step = session.store.latest_step()
    if step is None:
        return "no checkpoint has been written yet (checkpoint.every)"
    return (
        f"the checkpoint of step {step} in {session.workdir / CHECKPOINTS} is whole: mend the "
        f"cause and run the same command again"
    )


@contextmanager
def writing(session: Session) -> Iterator[None]:
    """Every process raises what process 0 could not write, and names the last checkpoint."""
    try:
        with host.together():
            try:
                yield
            except StorageError:
                raise
            except OSError as error:
                raise StorageError(
                    f"cannot write {error.filename or session.workdir}: {error.strerror or error}"
                ) from error
    except StorageError as error:
        raise StorageError(f"{error}; {last_good(session)}") from error


def ask_controller(session: Session, adaptation: Adaptation, step: int | None = None) -> Decided:
    """What the controller decides, its records written; the same on every process.

    Args:
      session: of the run.
      adaptation: of the session.
      step: the next one, at a boundary; None: elsewhere, where the pool is not looked at.
    """
    found = adaptation.decide(step)
    with writing(session):
        for record in found.records:
            session.outputs.decision(record)
    for line in found.said:
        session.outputs.message(line)
    return found
