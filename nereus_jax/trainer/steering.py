"""The step boundary of a run with a controller: changes of the pool, decisions, their beginning."""

import dataclasses

from nereus_jax.core.events import Halt, Transition
from nereus_jax.runtime.faults import lost_error, take_away
from nereus_jax.trainer.decided import Decided
from nereus_jax.trainer.moves import begin_again, begin_move, move_through_checkpoint
from nereus_jax.trainer.session import Session, ask_controller, save
from nereus_jax.trainer.state import JobState

MOST_ASKED = 4
"""Times that the controller is asked at one boundary, while what it decides cannot be begun."""


def steer(session: Session, state: JobState) -> str:
    """Asks the controller before a step, and begins what it decides.

    Returns:
      Why the run ends here; empty: it goes on.

    Raises:
      DevicesLostError: devices are gone, by what the job was told.
    """
    adaptation, step = session.adaptation, state.counters.step
    if adaptation is None:
        return ""
    for _ in range(MOST_ASKED):
        found = ask_controller(session, adaptation, step)
        _take_note(session, state, found)
        decision = found.decision
        if isinstance(decision, Halt):
            if decision.checkpoint:
                save(session, state)
            return decision.reason
        if isinstance(decision, Transition):
            session.schedule.forget()
            if decision.by_checkpoint:
                reason = "the controller moves the job through it"
                move_through_checkpoint(session, state, decision, reason)
            else:
                begin_move(session, step, decision)
        elif not found.pending:
            session.schedule.forget()
        session.schedule.hurries = found.hurry
        if not adaptation.waiting:
            break
    return ""


def _take_note(session: Session, state: JobState, found: Decided) -> None:
    """Changes of the pool: what has come may be used, what is lost is gone.

    Raises:
      DevicesLostError: devices are.
    """
    if found.joined:
        world = session.job.world.joined(found.joined)
        session.job = dataclasses.replace(session.job, world=world)
        if not isinstance(found.decision, Transition):
            begin_again(session, state.counters.step)
    if found.lost:
        take_away(session.job.world, state.arrays(), found.lost)
        raise lost_error(found.lost)
