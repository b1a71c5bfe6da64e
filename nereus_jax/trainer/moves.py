"""Moves that the controller has decided: planned, compiled for, and planned again where the job
changes under them. Until one has been made or has failed, the controller waits for it."""

import time
from collections.abc import Mapping
from typing import Any

from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.events import Transition
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.transition import Way
from nereus_jax.trainer.compilation import compile_programs
from nereus_jax.trainer.footprint import job_under
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.plan_change import plan_change
from nereus_jax.trainer.session import Session, save, start_from_checkpoint, writing
from nereus_jax.trainer.state import JobState
from nereus_jax.trainer.verification import state_stages


def begin_move(session: Session, step: int, decision: Transition) -> None:
    """Plans the way to a decision's target, and has everything compiled for it.

    The controller is told if there is no way.

    Args:
      session: of the run.
      step: the next one.
      decision: the move, which is not by checkpoint.
    """
    job, schedule = session.job, session.schedule
    assert schedule.hardware is not None
    try:
        change = plan_change(job, job_under(job, decision.target), schedule.hardware)
    except InfeasiblePlanError as error:
        session.outputs.message(f"the controller's plan cannot be reached: {error}")
        end_move(session, decision.target, None, error)
        return
    schedule.decided = decision
    # Steps go on until its programs are there, or until the controller says that it is time.
    schedule.take(change, step, waits=not decision.at_once)


def begin_again(session: Session, step: int) -> bool:
    """Plans a move that has been begun once more, since the job is another one: it has more room
    for responses, or other devices.

    Returns:
      Whether there is one.
    """
    decision = session.schedule.decided
    if decision is None:
        return False
    session.schedule.forget()
    begin_move(session, step, decision)
    return True


def end_move(
    session: Session,
    wanted: ExecutionPlan,
    row: Mapping[str, Any] | None,
    why: InfeasiblePlanError | None = None,
) -> None:
    """Tells the controller what became of a move.

    Args:
      session: of the run, under the plan that holds now.
      wanted: the plan that was to be reached.
      row: of the transition's metrics; None: state did not move, or not to its end.
      why: it failed, where that is known.
    """
    session.schedule.forget()
    if session.adaptation is None:
        return
    error = session.adaptation.transition_ended(
        session.job.execution, wanted, row, why, session.job.room
    )
    if error:
        with writing(session):
            session.outputs.move_failed(error)


def move_through_checkpoint(
    session: Session, state: JobState, decision: Transition, reason: Exception | str
) -> None:
    """The state to a checkpoint, where it is whole, and from the last one to the target plan.

    Args:
      session: of the run.
      state: an update of which may have begun.
      decision: the move.
      reason: what to say of it.
    """
    start_s = time.perf_counter()
    try:
        new = job_under(session.job, decision.target)
    except InfeasiblePlanError as error:
        session.outputs.message(f"the controller's plan cannot be reached: {error}")
        end_move(session, decision.target, None, error)
        return
    if not state.updating:
        save(session, state)
    compile_s = -time.perf_counter()
    compile_programs(new, warmup=False)
    compile_s += time.perf_counter()
    start_from_checkpoint(session, state, new, reason)
    step, seconds = state.counters.step, time.perf_counter() - start_s
    row = by_checkpoint_row(new, step, seconds, compile_s)
    with writing(session):
        session.outputs.transition(row, (), new.execution)
    end_move(session, decision.target, row)


def by_checkpoint_row(job: Job, step: int, seconds: float, compile_s: float) -> dict[str, Any]:
    """The metrics of a change of plan that went through a checkpoint.

    Args:
      job: under the new plan.
      step: the next one.
      seconds: that it took.
      compile_s: of these, waiting for a compiler.
    """
    return {
        "step": step,
        "transition_s": seconds,
        "transition_compile_s": compile_s,
        "transition_wire_bytes": 0,
        "transition_operations": 0,
        "transition_ways": {str(stage): str(Way.RESTORED) for stage in state_stages(job)},
    }
