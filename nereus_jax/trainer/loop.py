"""The training loop: set-up or resume, steps, evaluations, checkpoints, and a clean end."""

import functools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from nereus_jax.config import RunConfig, fingerprint
from nereus_jax.core.errors import (
    DataError,
    DeviceFullError,
    DevicesLostError,
    DivergenceError,
    OutOfMemoryError,
    RewardError,
)
from nereus_jax.rl.kl import KLControllerState, update_kl_controller
from nereus_jax.runtime import host
from nereus_jax.runtime.checkpoint_files import CHECKPOINTS, check_directory, finished_steps
from nereus_jax.runtime.faults import check_devices, watch
from nereus_jax.runtime.world import World
from nereus_jax.trainer.adaptation import Adaptation, make_adaptation
from nereus_jax.trainer.calibration import make_calibration, step_facts
from nereus_jax.trainer.compilation import compile_programs
from nereus_jax.trainer.evaluation import evaluate
from nereus_jax.trainer.footprint import check_memory, stage_bytes
from nereus_jax.trainer.full_alone import leave_note, listens, tell_of_notes
from nereus_jax.trainer.job import Inputs, Job, make_job
from nereus_jax.trainer.out_of_memory import make_memory
from nereus_jax.trainer.outputs import check_unused, check_writable
from nereus_jax.trainer.parked import break_off
from nereus_jax.trainer.plan_schedule import make_schedule, scheduled_jobs
from nereus_jax.trainer.pool_events import PoolInbox, open_pool_sources
from nereus_jax.trainer.recovery import change_as_scheduled, go_on_without, prepare_next
from nereus_jax.trainer.rollouts import check_recording, rollout_file, take_prompts
from nereus_jax.trainer.room import compile_more_room
from nereus_jax.trainer.rows import non_finite_update, sample_rows, step_row
from nereus_jax.trainer.session import (
    ROLLOUTS,
    Session,
    last_good,
    open_session,
    resume_state,
    save,
    start_state,
    writing,
)
from nereus_jax.trainer.state import Counters, JobState, missing_devices, refresh_edges
from nereus_jax.trainer.steering import steer
from nereus_jax.trainer.step import StepResult, run_step
from nereus_jax.trainer.train_batch import TrainBatch
from nereus_jax.trainer.verification import holds_state


def train(
    config: RunConfig,
    inputs: Inputs,
    world: World,
    workdir: Path,
    *,
    pool: PoolInbox | None = None,
) -> None:
    """Runs a job to its end, or to the step at which it is interrupted.

    Args:
      config: of the run.
      inputs: what it reads.
      world: its devices.
      workdir: where results go.
      pool: where whoever embeds the run tells of changes of the device pool, with
        `control.policy`; that of process 0 counts.

    Raises:
      ConfigError, DataError, InfeasiblePlanError, CheckpointError: before anything is allocated.
      RewardError, OutOfMemoryError, DivergenceError, StorageError, WorldError: while running; the
        message names the last good checkpoint.
    """
    job = make_job(config, inputs, world)
    with host.together():
        check_memory(job, stage_bytes(job))
        check_writable("--workdir", workdir)
        check_directory(workdir / CHECKPOINTS, fingerprint(config))
        steps = finished_steps(workdir / CHECKPOINTS)
        if config.checkpoint.resume == "never":
            check_unused(workdir, steps)
        check_recording(config, max(steps, default=0))
        jobs = scheduled_jobs(job)
    schedule = make_schedule(job, jobs)
    calibration, told = make_calibration(job, schedule.hardware)
    with (
        open_pool_sources(config, is_main=world.is_main, inbox=pool) as sources,
        open_session(job, schedule, workdir) as (session, resumed_from),
    ):
        job = session.job
        if calibration is not None and resumed_from is not None:
            calibration, told = calibration.resumed(workdir)
        session.calibration = calibration
        if told:
            session.outputs.message(told)
        if config.control.policy:
            assert schedule.hardware is not None
            session.adaptation = make_adaptation(session.job, schedule.hardware, sources)
            _resume_controller(session, session.adaptation, resumed_from)
            tell_of_notes(session, resumed_from or 0)
            if sources.address:
                session.outputs.message(f"pool hook: {sources.address}")
        start_s = time.perf_counter()
        compile_programs(job, warmup=resumed_from is None)
        with host.together():
            check_memory(job, stage_bytes(job))  # now with the temporaries that XLA counted
        session.outputs.message(
            f"compiled {len(job.programs.items())} programs in "
            f"{time.perf_counter() - start_s:.1f} s"
        )
        with _interrupts() as interrupted:  # until here there is nothing to save: Ctrl-C ends
            if resumed_from is None:
                state = start_state(session)
            else:
                state = resume_state(session, resumed_from)
            schedule.prepare_next(job, state.counters.step)
            _run(session, state, interrupted)


def _resume_controller(session: Session, adaptation: Adaptation, step: int | None) -> None:
    if step is None:
        return
    saved = session.store.read_meta(step).get("controller")
    said = adaptation.resume(saved, session.job, step)
    if said:
        session.outputs.message(said)
    if session.job.execution != session.configured:
        session.outputs.message("going on under the plan that the controller had moved to")


def _run(session: Session, state: JobState, interrupted: threading.Event) -> None:
    """Runs to the end or the interrupt; an error names the checkpoint to go on from."""
    session.outputs.start(state.counters.step)
    try:
        last_words = _run_steps(session, state, interrupted)
    except (RewardError, DataError, OutOfMemoryError) as error:
        session.outputs.failure(state.counters.step, error)
        whole = not state.updating and holds_state(session.job, state)
        if whole and not _alone(session, error):  # a save needs all processes
            save(session, state)
        raise type(error)(f"{error}; {last_good(session)}") from error
    except DivergenceError as error:
        session.outputs.failure(state.counters.step, error)
        raise DivergenceError(f"{error}; {last_good(session)}") from error
    save(session, state)
    session.store.wait()
    session.outputs.message(last_words)


def _run_steps(session: Session, state: JobState, interrupted: threading.Event) -> str:
    """All steps and evaluations that are left, up to an interrupt; returns how it ended."""
    config = session.job.config
    every = config.checkpoint.every
    while state.counters.step < config.num_steps:
        if host.agree_any(interrupted.is_set()):
            return (
                f"interrupted: step {state.counters.step} of {config.num_steps} is saved in "
                f"{session.workdir}; the same command goes on from there"
            )
        try:
            ending = steer(session, state)
            if ending:
                return f"the run ends before step {state.counters.step + 1}: {ending}"
            change_as_scheduled(session, state)
            step_or_move(session, state)
        except DevicesLostError as error:
            go_on_without(session, state, error)
            continue
        if every and state.counters.step % every == 0:
            save(session, state)
    _maybe_evaluate(session, state)
    return f"done: {config.num_steps} steps; results are in {session.workdir}"


def _maybe_evaluate(session: Session, state: JobState) -> None:
    """Evaluates before step 0, before every N-th step, and after the last one."""
    config, step = session.job.config, state.counters.step
    due = config.eval.every and (step % config.eval.every == 0 or step == config.num_steps)
    if due and session.evaluated_step != step:
        check_devices(session.job.world, state.arrays(), state.views)
        before = session.job
        with watch(before.world, functools.partial(missing_devices, before, state)):
            session.job, row = evaluate(before, state)
        if session.job is not before:
            prepare_next(session, step)  # what comes needs as much room
        session.evaluated_step = step
        with writing(session):
            session.outputs.evaluation(row)


def step_or_move(session: Session, state: JobState) -> None:
    """A step, and the evaluation before it; or, if there is no memory for them, a move to a plan
    that has it: the step is then taken up again."""
    try:
        _maybe_evaluate(session, state)
        _one_step(session, state)
    except OutOfMemoryError as error:
        if _alone(session, error):
            if not listens(session):
                raise
            raise leave_note(session, state.counters.step, error) from error
        if not state.updating:
            break_off(session.job, state)
        if not make_memory(session, state, error):
            raise


def _alone(session: Session, error: Exception) -> bool:
    """Whether other processes may not know of an error."""
    return isinstance(error, DeviceFullError) and session.job.world.num_processes > 1


def _one_step(session: Session, state: JobState) -> None:
    """One RL step: the state moves on by one, and its row is written."""
    job, counters = session.job, state.counters
    state.updating = False
    check_devices(job.world, state.arrays(), state.views)
    start_s = time.perf_counter()
    prompts = take_prompts(job, counters.data_position, counters.samples)
    with watch(job.world, functools.partial(missing_devices, job, state)):
        edge_spans = refresh_edges(job, state)
    job.programs.ledger.start_step(state.live_bytes(job.world))
    result = run_step(job, state, prompts)
    if result.job is not job:
        session.job = job = result.job
        prepare_next(session, counters.step + 1)  # what comes needs as much room
    compile_more_room(job, result.values["rollout"], session.schedule.queue)
    wrong = non_finite_update(result)
    if wrong is not None:
        raise DivergenceError(
            f"the loss or its gradient is not finite in {wrong} of step {counters.step}; lower "
            f"the learning rate or algorithm.clip, or look at the rewards of this step"
        )
    row = step_row(
        job,
        result,
        step=counters.step,
        step_s=time.perf_counter() - start_s,
        edge_spans=edge_spans,
    )
    if session.calibration is not None:
        session.calibration, predicted = session.calibration.after(step_facts(job, result))
        row |= predicted
    if session.adaptation is not None:
        row["controller_cpu_s"] = session.adaptation.cpu_s
    with writing(session):
        if job.config.rollout.record and job.world.is_main:
            result.values["rollout"].save(rollout_file(session.workdir / ROLLOUTS, counters.step))
        spans = edge_spans + result.spans + result.parking
        session.outputs.step(row, spans, sample_rows(job, result, counters.step))
    if session.adaptation is not None:
        session.adaptation.step_finished(job, result, row)
    state.counters = _advance(job, counters, result, row["kl"])
    state.updating = False
    state.views.look(job.world, state.arrays())


def _advance(job: Job, counters: Counters, result: StepResult, kl: float) -> Counters:
    algorithm = job.config.algorithm
    batch: TrainBatch = result.values["batch"]
    rows = batch.rollout.num_rows
    controller = update_kl_controller(
        KLControllerState(coef=counters.kl_coef),
        kl,
        rows,
        kind=algorithm.kl.controller,
        target=algorithm.kl.target,
        horizon_samples=algorithm.kl.horizon_samples,
    )
    return Counters(
        step=counters.step + 1,
        data_position=result.values["prompts"].taken.position,
        samples=counters.samples + rows,
        policy_version=counters.policy_version + len(batch.minibatches),
        critic_version=counters.critic_version + len(result.values.get("critic_metrics", ())),
        kl_coef=controller.coef,
    )


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl-C, SIGTERM and SIGUSR1 ask for an end at the step boundary, with a checkpoint; a second
    Ctrl-C ends at once.

    Schedulers announce with SIGUSR1 that all devices will be revoked (`sbatch --signal=USR1@120`).
    """
    event = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        event.set()

    if threading.current_thread() is not threading.main_thread():
        yield event  # signals belong to the main thread; an embedder has its own way to stop
        return
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {n: signal.signal(n, ask) for n in asking}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
