"""The training loop: set-up or resume, steps, evaluations, checkpoints, and a clean end."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from nereus_jax.config import RunConfig, fingerprint
from nereus_jax.core.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    RewardError,
    StorageError,
)
from nereus_jax.core.roles import ACTOR_TRAIN, CRITIC_TRAIN, ModelStage
from nereus_jax.rl.kl import KLControllerState, update_kl_controller
from nereus_jax.runtime import host
from nereus_jax.runtime.checkpoints import CheckpointStore, check_directory, finished_steps
from nereus_jax.runtime.engines.train import TrainState
from nereus_jax.runtime.world import World
from nereus_jax.trainer.compilation import compile_programs
from nereus_jax.trainer.evaluation import evaluate
from nereus_jax.trainer.footprint import check_memory, stage_bytes
from nereus_jax.trainer.job import Inputs, Job, make_job
from nereus_jax.trainer.outputs import Outputs, check_unused, check_writable
from nereus_jax.trainer.rollouts import check_recording, rollout_file, take_prompts
from nereus_jax.trainer.rows import non_finite_update, sample_rows, step_row
from nereus_jax.trainer.state import (
    Counters,
    JobState,
    frozen_models,
    initial_actor_params,
    initial_critic,
    refresh_edges,
)
from nereus_jax.trainer.step import StepResult, run_step
from nereus_jax.trainer.train_batch import TrainBatch
from nereus_jax.trainer.warmup import run_warmup

CHECKPOINTS = "checkpoints"
ROLLOUTS = "rollouts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """One process's part in a run, from its start or resume to its end."""

    job: Job
    workdir: Path
    store: CheckpointStore
    outputs: Outputs


def train(config: RunConfig, inputs: Inputs, world: World, workdir: Path) -> None:
    """Runs a job to its end, or to the step at which it is interrupted.

    Raises:
      ConfigError, DataError, InfeasiblePlanError, CheckpointError: before anything is allocated.
      RewardError, DivergenceError, StorageError: while running; the message names the last good
        checkpoint.
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
    with _open_session(job, workdir) as (session, resumed_from):
        start_s = time.perf_counter()
        compile_programs(job, warmup=resumed_from is None)
        with host.together():
            check_memory(job, stage_bytes(job))  # now with the temporaries that XLA counted
        session.outputs.message(
            f"compiled {len(job.programs.items())} programs in "
            f"{time.perf_counter() - start_s:.1f} s"
        )
        with _interrupts() as interrupted:  # until here there is nothing to save: Ctrl-C ends
            state = _start(session) if resumed_from is None else _resume(session, resumed_from)
            _run(session, state, interrupted)


@contextmanager
def _open_session(job: Job, workdir: Path) -> Iterator[tuple[Session, int | None]]:
    """Opens checkpoints and logs; gives the step to resume from, or None."""
    config = job.config
    store = CheckpointStore(
        workdir / CHECKPOINTS, keep=config.checkpoint.keep, fingerprint=fingerprint(config)
    )
    try:
        step = store.latest_step()
        if step is not None:  # before the outputs cut off what comes after the checkpoint
            _check_same_data(job, store.read_meta(step), workdir)
        with host.together():
            outputs = Outputs(
                workdir,
                config,
                job.plan,
                keep_through=None if step is None else step - 1,
                enabled=job.world.is_main,
            )
        try:
            session = Session(job=job, workdir=workdir, store=store, outputs=outputs)
            yield session, step
        finally:
            outputs.close()
    finally:
        store.close()


def _start(session: Session) -> JobState:
    """The state before step 0: loaded or random models, the warm-up, the frozen copies."""
    job = session.job
    params, position = initial_actor_params(job), 0
    if job.config.warmup.num_steps:
        params, position = run_warmup(job, params, session.outputs.message)
    actor = job.trains[ACTOR_TRAIN].init(params)
    trained = {ACTOR_TRAIN: actor}
    if CRITIC_TRAIN in job.trains:
        trained[CRITIC_TRAIN] = initial_critic(job, actor.params)
    state = JobState(
        counters=Counters(data_position=position, kl_coef=job.config.algorithm.kl.coef),
        trained=trained,
        frozen=frozen_models(job, actor.params),
    )
    if state.frozen:
        session.store.save_frozen({str(stage): p for stage, p in state.frozen.items()})
    if job.config.checkpoint.every:
        _save(session, state)
    return state


def _resume(session: Session, step: int) -> JobState:
    """The state of a checkpoint, on this run's plan."""
    job, store = session.job, session.store
    meta = store.read_meta(step)
    counters = _restored_counters(job.config, meta)
    abstract = {
        stage.role.value: TrainState(engine.site.abstract(engine.spec), engine.abstract_opt_state())
        for stage, engine in job.trains.items()
    }
    restored = store.restore(step, abstract)
    frozen_stages = [s for s in job.sites if _is_frozen(job, s)]
    frozen = {}
    if frozen_stages:
        abstract_frozen = {str(s): job.sites[s].abstract(job.model_spec(s)) for s in frozen_stages}
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


def _is_frozen(job: Job, stage: ModelStage) -> bool:
    """Whether a model-stage's weights come neither from training nor over an edge."""
    fed = {edge.target for edge in job.workflow.weight_edges}
    return stage in job.scores and stage not in fed


def _save(session: Session, state: JobState) -> None:
    step = state.counters.step
    session.store.wait()  # the last save may be of this very step
    if session.store.latest_step() != step:
        meta = {
            "counters": state.counters.to_json(),
            "plan": session.job.plan.to_json(),
            "data": _data_identity(session.job),
        }
        session.store.save(step, state.checkpointed(), meta)


def _run(session: Session, state: JobState, interrupted: threading.Event) -> None:
    """Runs to the end or the interrupt; an error names the checkpoint to go on from."""
    session.outputs.start(state.counters.step)
    try:
        last_words = _run_steps(session, state, interrupted)
    except (RewardError, DataError) as error:
        _save(session, state)  # prompts and rewards come before any update: a step boundary
        raise type(error)(f"{error}; {_last_good(session)}") from error
    except DivergenceError as error:
        raise DivergenceError(f"{error}; {_last_good(session)}") from error
    _save(session, state)
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
        _maybe_evaluate(session, state)
        _one_step(session, state)
        if every and state.counters.step % every == 0:
            _save(session, state)
    _maybe_evaluate(session, state)
    return f"done: {config.num_steps} steps; results are in {session.workdir}"


@contextmanager
def _writing(session: Session) -> Iterator[None]:
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
        raise StorageError(f"{error}; {_last_good(session)}") from error


def _last_good(session: Session) -> str:
    with contextlib.suppress(StorageError):  # that save failed too, and an older one is named
        session.store.wait()
    step = session.store.latest_step()
    if step is None:
        return "no checkpoint has been written yet (checkpoint.every)"
    return (
        f"the checkpoint of step {step} in {session.workdir / CHECKPOINTS} is whole: mend the "
        f"cause and run the same command again"
    )


def _maybe_evaluate(session: Session, state: JobState) -> None:
    """Evaluates before step 0, before every N-th step, and after the last one."""
    config, step = session.job.config, state.counters.step
    if config.eval.every and (step % config.eval.every == 0 or step == config.num_steps):
        row = evaluate(session.job, state)
        with _writing(session):
            session.outputs.evaluation(row)


def _one_step(session: Session, state: JobState) -> None:
    """One RL step: the state moves on by one, and its row is written."""
    job, counters = session.job, state.counters
    start_s = time.perf_counter()
    prompts = take_prompts(job, counters.data_position, counters.samples)
    edge_spans = refresh_edges(job, state)
    live_bytes = state.live_bytes()
    result = run_step(job, state, prompts)
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
        live_bytes=live_bytes,
        edge_spans=edge_spans,
    )
    with _writing(session):
        if job.config.rollout.record and job.world.is_main:
            result.values["rollout"].save(rollout_file(session.workdir / ROLLOUTS, counters.step))
        session.outputs.step(
            row, edge_spans + result.spans, sample_rows(job, result, counters.step)
        )
    state.counters = _advance(job, counters, result, row["kl"])


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
    """Ctrl-C and SIGTERM ask for an end at the step boundary; a second Ctrl-C ends at once."""
    event = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        event.set()

    if threading.current_thread() is not threading.main_thread():
        yield event  # signals belong to the main thread; an embedder has its own way to stop
        return
    before = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
