"""The step boundary of a run with a controller: changes of the pool, decisions, their beginning."""

import dataclasses

from nereus_jax.control.pool_trace import PoolChange, TraceEvent
from nereus_jax.core.errors import ConfigError, InfeasiblePlanError
from nereus_jax.core.events import Halt, Transition
from nereus_jax.runtime.faults import lost_error, take_away
from nereus_jax.trainer.adaptation import Adaptation
from nereus_jax.trainer.footprint import check_memory, stage_bytes
from nereus_jax.trainer.job import make_job
from nereus_jax.trainer.plan_change import plan_change
from nereus_jax.trainer.session import Session, ask_controller, save
from nereus_jax.trainer.state import JobState


def steer(session: Session, state: JobState) -> str:
    """Asks the controller before a step, and begins what it decides.

    Returns:
      Why the run ends here; empty: it goes on.

    Raises:
      DevicesLostError: the pool's trace took devices away.
    """
    adaptation = session.adaptation
    if adaptation is None:
        return ""
    for change in adaptation.due(state.counters.step):
        _play(session, state, adaptation, change)
    decision = ask_controller(session, adaptation)
    if isinstance(decision, Halt):
        if decision.checkpoint:
            save(session, state)
        return decision.reason
    if isinstance(decision, Transition):
        _begin(session, state, adaptation, decision)
    return ""


def _play(session: Session, state: JobState, adaptation: Adaptation, change: TraceEvent) -> None:
    """A change of the pool as the trace has it."""
    world, time_s = session.job.world, adaptation.time_s
    if change.change is PoolChange.LOST:
        if not session.job.config.emulated_devices:
            raise ConfigError(
                "control.pool_trace: devices can only be lost by a trace where they are emulated; "
                "write revoke"
            )
        take_away(world, state.arrays(), change.devices)
        raise lost_error(frozenset(change.devices))
    if change.change is PoolChange.JOINED:
        world = world.joined(change.devices)
        session.job = dataclasses.replace(session.job, world=world)
    adaptation.tell(change.event(time_s))


def _begin(session: Session, state: JobState, adaptation: Adaptation, decision: Transition) -> None:
    """Plans the way to the target, and has everything compiled for it in the background."""
    job, schedule = session.job, session.schedule
    assert schedule.hardware is not None
    try:
        new = make_job(job.config, job.inputs, job.world, decision.target, job.programs)
        new = new.with_room(job.room)
        check_memory(new, stage_bytes(new))
        change = plan_change(job, new, schedule.hardware)
    except InfeasiblePlanError as error:
        session.outputs.message(f"the controller's plan cannot be reached: {error}")
        adaptation.transition_ended(job.execution, decision.target, None, str(error))
        return
    schedule.take(change, state.counters.step, waits=not decision.urgent)
