"""Changes of plan in the run of a session: planned ones, and those that lost devices force.

State comes from what is intact first: replicas, the blocks that broken replicas have left, the
checkpoint's copy of a frozen model. Where a part of what is trained is gone, or an update of the
step had begun, the whole job goes back to the last checkpoint.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from nereus_jax.control.state import plan_devices
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import (
    DeviceFullError,
    DevicesLostError,
    DigestError,
    InfeasiblePlanError,
    LostStateError,
    WorldError,
)
from nereus_jax.core.events import DevicesLost, Halt, Transition
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import ModelStage
from nereus_jax.runtime import host
from nereus_jax.runtime.faults import check_devices, lost_error, probe
from nereus_jax.runtime.train_state import OptimizerCounters, read_counters
from nereus_jax.runtime.transitions import TransitionStopped
from nereus_jax.trainer.half_way import form_of, has_whole, job_of_units
from nereus_jax.trainer.job import Job, make_job
from nereus_jax.trainer.moves import begin_again, by_checkpoint_row, end_move
from nereus_jax.trainer.parked import put_all_away
from nereus_jax.trainer.plan_change import (
    Changed,
    PlanChange,
    carry_out,
    live_hardware,
    plan_change,
)
from nereus_jax.trainer.session import (
    Session,
    ask_controller,
    restore_frozen_units,
    start_from_checkpoint,
    writing,
)
from nereus_jax.trainer.state import JobState, missing_devices
from nereus_jax.trainer.surviving_plan import surviving_plan
from nereus_jax.trainer.verification import holds_state, state_stages

MAX_ATTEMPTS = 3
"""Times that a transition which stopped half way is taken up again from what is intact."""


def change_as_scheduled(session: Session, state: JobState) -> None:
    """Carries out the change of plan that comes before the next step, if there is one.

    An error leaves the old plan running where the old state is still there; else the change is
    taken up again from what is intact.

    Raises:
      DevicesLostError: devices are gone.
    """
    schedule = session.schedule
    change = schedule.due(state.counters.step)
    if change is None:
        return
    if schedule.waits and not schedule.hurries and host.agree_any(not change.is_ready()):
        return  # the old plan goes on; the next boundary asks again
    check_devices(session.job.world, state.arrays(), state.views)
    row = _change(session, state, change)
    end_move(session, change.new.execution, row)
    prepare_next(session, schedule.prepared_step + 1)


def prepare_next(session: Session, step: int) -> None:
    """Plans the change that comes next, from the job as it is now.

    That is one that the controller has decided, else the first that is configured from a step on.
    Those that cannot be are told of.
    """
    if begin_again(session, step):
        return
    for line in session.schedule.prepare_next(session.job, step):
        session.outputs.message(line)


def _change(session: Session, state: JobState, change: PlanChange) -> Mapping[str, Any] | None:
    """Carries out a change, again and again from what a stopped one left.

    Returns:
      Its row of metrics; None: it was undone, or given up.

    Raises:
      WorldError: it stopped, and there are other processes.
      DevicesLostError: devices are gone.
    """
    session.outputs.message(f"changing the plan before step {state.counters.step + 1}")
    for _ in range(MAX_ATTEMPTS):
        numbers = {
            stage: read_counters(change.old.trains[stage], x, change.old.world, state.views)
            for stage, x in state.trained.items()
        }
        restore = functools.partial(restore_frozen_units, session)
        try:
            changed = carry_out(change, state, restore=restore, observe=session.observe)
        except (DigestError, DeviceFullError) as error:
            if isinstance(error, DeviceFullError) and change.old.world.num_processes > 1:
                raise  # other processes may not know of it
            if holds_state(change.old, state):
                session.outputs.message(f"the change of plan was undone: {error}")
                return None
            back = change.new if change.graph.lost else change.old
            start_from_checkpoint(session, state, back, error)
            return None
        except TransitionStopped as error:
            if change.old.world.num_processes > 1:  # others may wait for this one in a collective
                raise WorldError(
                    f"{error}; with several processes a job goes on from its last checkpoint then: "
                    f"run the same command again for each process, or with --elastic, which does "
                    f"so by itself"
                ) from error
            if holds_state(change.old, state):
                session.outputs.message(f"the old plan goes on: {error}")
                check_devices(session.job.world, state.arrays(), state.views)
                return None
            rest = _again(session, state, change, error, numbers)
            if rest is None:
                put_all_away(session.job, state)
                return None
            change = rest
            continue
        _commit(session, state, change, changed)
        return changed.row
    put_all_away(session.job, state)
    session.outputs.message(
        f"the change of plan stopped {MAX_ATTEMPTS} times and is given up; the job goes on where "
        f"its state is now"
    )
    return None


def _commit(session: Session, state: JobState, change: PlanChange, changed: Changed) -> None:
    state.take_over(changed.state)
    session.job = change.new
    put_all_away(session.job, state)
    state.views.look(session.job.world, state.arrays())
    with writing(session):
        session.outputs.transition(changed.row, changed.spans, change.new.execution)


def _again(
    session: Session,
    state: JobState,
    change: PlanChange,
    error: TransitionStopped,
    numbers: Mapping[ModelStage, OptimizerCounters],
) -> PlanChange | None:
    """The rest of a change, from the units that a stopped one left; None: there is no way on from
    them, and the job stays where they are.

    Raises:
      DevicesLostError: devices are gone, or a model-stage has no intact unit.
    """
    lost = error.lost | probe(change.old.world)
    moving = [s for s in state_stages(change.new) if s not in change.waiting]
    forms = {s: form_of(change, error.operations, s) for s in moving}
    missing = [s for s, form in forms.items() if not has_whole(form, error.units, s)]
    if missing:
        raise DevicesLostError(f"{error}; nothing is intact of {missing[0]}", lost) from error
    session.outputs.message(f"{error}; going on from the units that are intact")
    choices = {**change.new.execution.choices, **{s: form.choice for s, form in forms.items()}}
    between, left = job_of_units(change.new, choices, error.units, state, numbers)
    state.take_over(left)
    session.job = between
    if lost:
        raise lost_error(lost) from error
    hardware = session.schedule.hardware or live_hardware(between)
    try:
        return plan_change(between, change.new, hardware)
    except InfeasiblePlanError as reason:
        session.outputs.message(f"the change of plan is given up: {reason}")
        return None


def go_on_without(session: Session, state: JobState, error: DevicesLostError) -> None:
    """Brings a job that has lost devices to a step boundary, on those that are left.

    The step that was running is dropped. Changes of plan that need lost devices are not made.

    Raises:
      DevicesLostError: the state is gone, and there is no checkpoint.
      InfeasiblePlanError: no device is left, or the state does not fit on those that are.
    """
    known: frozenset[DeviceId] = frozenset()
    while True:
        try:
            _without(session, state, error)
            return
        except DevicesLostError as another:  # while it went on without the first ones
            if not another.devices - known:
                raise
            known, error = known | another.devices, another


def _without(session: Session, state: JobState, error: DevicesLostError) -> None:
    start_s, job = time.perf_counter(), session.job
    lost = _everywhere(job, error.devices | missing_devices(job, state))
    world = job.world.without(lost)
    session.outputs.message(
        f"{error}; going on with {len(world.pool)} of {len(job.world.pool)} devices"
    )
    execution, by_checkpoint = _plan_without(session, world.pool, lost)
    whole = holds_state(job, state)
    stays = execution == job.execution and whole and not state.updating
    if session.adaptation is not None and stays:
        # The plan does without them, and what was under way is planned without them.
        session.job = dataclasses.replace(job, world=world)
        prepare_next(session, state.counters.step)
        return
    new = make_job(job.config, job.inputs, world, execution, job.programs).with_room(job.room)
    first_open = session.schedule.first_open(state.counters.step)
    for step in session.schedule.drop(lost):
        session.outputs.message(f"plan_changes.{step} is dropped: it needs devices that are lost")
    hardware = session.schedule.hardware or live_hardware(job)
    row: Mapping[str, Any] | None = None
    try:
        if state.updating:
            raise LostStateError("an update of the step had begun")
        if not whole:
            raise LostStateError("a transition had given up the old state")
        if by_checkpoint and session.store.latest_step() is not None:
            raise LostStateError("so the controller has decided")
        change = plan_change(job, new, hardware, lost=lost)
        row = _change(session, state, change)
    except (LostStateError, InfeasiblePlanError) as reason:
        start_from_checkpoint(session, state, new, reason)
    if session.adaptation is not None and execution != job.execution:
        if row is None and session.job.execution == execution:
            step, seconds = state.counters.step, time.perf_counter() - start_s
            made = by_checkpoint_row(session.job, step, seconds, 0.0)
            with writing(session):
                session.outputs.transition(made, (), execution)
            row = made if by_checkpoint else None
        end_move(session, execution, row)
    prepare_next(session, min(first_open, state.counters.step))


def _everywhere(job: Job, lost: frozenset[DeviceId]) -> frozenset[DeviceId]:
    """What any process has lost: each sees its own devices alone."""
    names = job.world.every.devices
    gone = host.gather(np.array([device in lost for device in names])).any(axis=0)
    return frozenset(itertools.compress(names, gone.tolist()))


def _plan_without(
    session: Session, pool: DevicePool, lost: frozenset[DeviceId]
) -> tuple[ExecutionPlan, bool]:
    """The plan for the devices that are left: the controller's, where there is one.

    Returns:
      The plan, and whether it is to be reached through a checkpoint.

    Raises:
      InfeasiblePlanError: no device is left.
      DevicesLostError: the controller has no plan for those that are.
    """
    job, adaptation, schedule = session.job, session.adaptation, session.schedule
    if adaptation is None:
        return dataclasses.replace(job.execution, plan=surviving_plan(job, pool)), False
    gone = tuple(sorted(lost & set(job.world.pool.devices)))
    adaptation.tell(DevicesLost(time_s=adaptation.time_s, devices=gone))
    found = ask_controller(session, adaptation)
    decision, under_way = found.decision, schedule.decided
    if isinstance(decision, Halt):
        raise DevicesLostError(decision.reason)
    if isinstance(decision, Transition):
        schedule.decided = decision  # until it has ended: more may be lost meanwhile
        return decision.target, decision.by_checkpoint
    if not found.pending:
        schedule.forget()
    if lost.isdisjoint(plan_devices(job.execution)):
        return job.execution, False
    if not found.pending or under_way is None:
        raise DevicesLostError("the controller has no plan for the devices that are left")
    return under_way.target, under_way.by_checkpoint  # away from them: now it cannot wait
