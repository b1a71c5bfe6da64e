"""A step that had no memory: the job moves to a plan that has it, and takes the step up again."""

from nereus_jax.core.errors import OutOfMemoryError
from nereus_jax.core.events import OutOfMemory, Transition
from nereus_jax.trainer.moves import begin_move, move_through_checkpoint
from nereus_jax.trainer.recovery import change_as_scheduled
from nereus_jax.trainer.session import Session, ask_controller
from nereus_jax.trainer.state import JobState

MAX_ATTEMPTS = 3
"""Times that the controller is told of the same step: each time it knows more of what it needs."""


def make_memory(session: Session, state: JobState, error: OutOfMemoryError) -> bool:
    """Moves the job to a plan that has the memory for the step that was to be made: the one that
    waits for its programs, or one that the controller decides on now.

    Returns:
      Whether there was one. If it could not be reached, the step fails again, and another one is
      looked for.
    """
    schedule = session.schedule
    decision = schedule.decided or _decide(session, error)
    if decision is None:
        return False
    if not state.updating and not decision.by_checkpoint:
        if schedule.decided is None:
            begin_move(session, state.counters.step, decision)
        if schedule.decided is not None:
            schedule.hurries = True  # the step cannot be made while programs are compiled
            change_as_scheduled(session, state)
            return True
        # There is no way to it with what the devices hold: the state goes through a checkpoint.
    session.store.wait()
    if state.updating and session.store.latest_step() is None:
        return False
    schedule.forget()
    move_through_checkpoint(session, state, decision, error)
    return True


def _decide(session: Session, error: OutOfMemoryError) -> Transition | None:
    """What the controller decides when it is told of the step; None: the plan stays."""
    adaptation = session.adaptation
    if adaptation is None or adaptation.full >= MAX_ATTEMPTS:
        return None
    adaptation.full += 1
    room = error.room_tokens or session.job.room
    adaptation.tell(OutOfMemory(time_s=adaptation.time_s, room_tokens=room))
    decision = ask_controller(session, adaptation).decision
    return decision if isinstance(decision, Transition) else None
