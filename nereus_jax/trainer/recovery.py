"""Changes of plan in the run of a session: planned ones, and those that lost devices force.

State comes from what is intact first: replicas, the blocks that broken replicas have left, the
checkpoint's copy of a frozen model. Where a part of what is trained is gone, or an update of the
step had begun, the whole job goes back to the last checkpoint.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from nereus_jax.config.plan_entry import PlanEntry, largest_layout
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import (
    DevicesLostError,
    DigestError,
    InfeasiblePlanError,
    LostStateError,
    WorldError,
)
from nereus_jax.core.events import DevicesLost, Halt, Transition
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ModelStage
from nereus_jax.core.transition import Unit, placed_units
from nereus_jax.runtime import host
from nereus_jax.runtime.emu import ElasticModelUnit, group_arrays
from nereus_jax.runtime.faults import check_devices, lost_error, probe
from nereus_jax.runtime.train_state import OptimizerCounters, read_counters, unflatten
from nereus_jax.runtime.transitions import TransitionStopped, UnitsByStage, in_memory_of
from nereus_jax.trainer.job import Job, make_job
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
    go_back,
    restore_frozen_units,
    writing,
)
from nereus_jax.trainer.state import JobState, missing_devices
from nereus_jax.trainer.verification import state_stages, unit_spec

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
    if schedule.waits and host.agree_any(not change.is_ready()):
        return  # the old plan goes on; the next boundary asks again
    check_devices(session.job.world, state.arrays(), state.views)
    row = _change(session, state, change)
    _tell(session, change, row)
    prepare_next(session, schedule.prepared_step + 1)


def _tell(session: Session, change: PlanChange, row: Mapping[str, Any] | None) -> None:
    """Tells the controller what became of a change."""
    if session.adaptation is not None:
        session.adaptation.transition_ended(session.job.execution, change.new.execution, row)


def prepare_next(session: Session, step: int) -> None:
    """Plans the first change from a step on, and tells of those that cannot be."""
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
        except DigestError as error:
            if state.trained:
                session.outputs.message(f"the change of plan was undone: {error}")
                return None
            _go_back(session, state, change.new if change.graph.lost else change.old, error)
            return None
        except TransitionStopped as error:
            if change.old.world.num_processes > 1:  # others may wait for this one in a collective
                raise WorldError(
                    f"{error}; with several processes a job goes on from its last checkpoint then: "
                    f"run the same command again for each process, or with --elastic, which does "
                    f"so by itself"
                ) from error
            if state.trained:
                session.outputs.message(f"the old plan goes on: {error}")
                check_devices(session.job.world, state.arrays(), state.views)
                return None
            rest = _again(session, state, change, error, numbers)
            if rest is None:
                return None
            change = rest
            continue
        _commit(session, state, change, changed)
        return changed.row
    session.outputs.message(
        f"the change of plan stopped {MAX_ATTEMPTS} times and is given up; the job goes on where "
        f"its state is now"
    )
    return None


def _commit(session: Session, state: JobState, change: PlanChange, changed: Changed) -> None:
    _take_over(state, changed.state)
    state.views.look(change.new.world, state.arrays())
    session.job = change.new
    with writing(session):
        session.outputs.transition(changed.row, changed.spans, change.new.execution)


def _take_over(state: JobState, other: JobState) -> None:
    state.counters, state.trained, state.frozen = other.counters, other.trained, other.frozen
    state.edges = {}
    state.updating = False


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
    missing = [s for s in state_stages(change.new) if not _has_whole(change, error.units, s)]
    if missing:
        raise DevicesLostError(f"{error}; nothing is intact of {missing[0]}", lost) from error
    session.outputs.message(f"{error}; going on from the units that are intact")
    between, left = job_of_units(change.new, error.units, state, numbers)
    _take_over(state, left)
    session.job = between
    if lost:
        raise lost_error(lost) from error
    hardware = session.schedule.hardware or live_hardware(between)
    try:
        return plan_change(between, change.new, hardware)
    except InfeasiblePlanError as reason:
        session.outputs.message(f"the change of plan is given up: {reason}")
        return None


def _has_whole(change: PlanChange, units: UnitsByStage, stage: ModelStage) -> bool:
    """Whether the units that are left of a model-stage hold its state.

    Under ZeRO-1 each holds a part of the optimizer's tensors.
    """
    held = units.get(stage, {})
    jobs = change.old, change.new
    if not any(stage in job.trains and job.trains[stage].zero1 for job in jobs):
        return bool(held)
    return any(held.keys() == set(placed_units(stage, job.plan[stage])) for job in jobs)


def _go_back(session: Session, state: JobState, job: Job, reason: Exception) -> None:
    """The last checkpoint, under the plan of this job."""
    session.outputs.message(f"going back to the last checkpoint: {reason}")
    state.trained, state.frozen, state.edges = {}, {}, {}  # room for what is read
    session.job = job
    _take_over(state, go_back(session))


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
    job = session.job
    lost = error.devices | missing_devices(job, state)
    world = job.world.without(lost)
    session.outputs.message(
        f"{error}; going on with {len(world.pool)} of {len(job.world.pool)} devices"
    )
    execution = _plan_without(session, world.pool, lost)
    new = make_job(job.config, job.inputs, world, execution, job.programs).with_room(job.room)
    first_open = session.schedule.first_open(state.counters.step)
    for step in session.schedule.drop(lost):
        session.outputs.message(f"plan_changes.{step} is dropped: it needs devices that are lost")
    hardware = session.schedule.hardware or live_hardware(job)
    row: Mapping[str, Any] | None = None
    try:
        if state.updating:
            raise LostStateError("an update of the step had begun")
        if not state.trained:
            raise LostStateError("a transition had given up the old state")
        change = plan_change(job, new, hardware, lost=lost)
        row = _change(session, state, change)
    except (LostStateError, InfeasiblePlanError) as reason:
        _go_back(session, state, new, reason)
    if session.adaptation is not None and execution != job.execution:
        session.adaptation.transition_ended(session.job.execution, execution, row)
    prepare_next(session, min(first_open, state.counters.step))


def _plan_without(session: Session, pool: DevicePool, lost: frozenset[DeviceId]) -> ExecutionPlan:
    """The plan for the devices that are left: the controller's, where there is one.

    Raises:
      InfeasiblePlanError: no device is left.
      DevicesLostError: the controller has no plan for those that are.
    """
    job, adaptation = session.job, session.adaptation
    if adaptation is None:
        return dataclasses.replace(job.execution, plan=surviving_plan(job, pool))
    gone = tuple(sorted(lost & set(job.world.pool.devices)))
    adaptation.tell(DevicesLost(time_s=adaptation.time_s, devices=gone))
    decision = ask_controller(session, adaptation)
    if isinstance(decision, Halt):
        raise DevicesLostError(decision.reason)
    return decision.target if isinstance(decision, Transition) else job.execution


def surviving_plan(job: Job, pool: DevicePool) -> Plan:
    """A plan for the devices that are left, near to the one that was.

    A model-stage keeps its intact replicas. One that has none gets one replica, as it was if the
    pool has devices enough, else of the largest degrees that divide the old ones.

    Raises:
      InfeasiblePlanError: no device is left.
    """
    if not len(pool):
        raise InfeasiblePlanError("all devices are lost; start again with others")
    alive = set(pool.devices)
    return Plan(
        placements={stage: _survivor(p, pool, alive) for stage, p in job.plan.placements.items()}
    )


def _survivor(placement: Placement, pool: DevicePool, alive: set[DeviceId]) -> Placement:
    layout = placement.layout
    replicas = [placement.replica_devices(rank) for rank in range(layout.dp)]
    intact = [devices for devices in replicas if alive.issuperset(devices)]
    if intact:
        return Placement(
            layout=ParallelLayout(len(intact), layout.pp, layout.tp),
            devices=tuple(d for devices in intact for d in devices),
        )
    largest = largest_layout(PlanEntry(dp=1, pp=layout.pp, tp=layout.tp), len(pool))
    return Placement(
        layout=ParallelLayout(1, largest.pp, largest.tp),
        devices=pool.devices[: largest.num_devices],
    )


def job_of_units(
    job: Job,
    units: UnitsByStage,
    before: JobState,
    numbers: Mapping[ModelStage, OptimizerCounters],
) -> tuple[Job, JobState]:
    """A job as intact units make it, after a transition that stopped half way.

    Args:
      job: under the plan that was to be left or to be reached.
      units: what is intact; at least one of every model-stage that holds state.
      before: the state that the transition began with, for the run's counters.
      numbers: the optimizers' counters.

    Returns:
      The job under the plan that the units are, and its state, of the units' buffers.
    """
    placements = dict(job.plan.placements)
    chosen: dict[ModelStage, Sequence[ElasticModelUnit]] = {}
    for stage, held in units.items():
        chosen[stage] = _largest_group(held)
        first = chosen[stage][0].unit
        placements[stage] = Placement(
            layout=ParallelLayout(len(chosen[stage]), first.pp, first.tp),
            devices=tuple(d for u in chosen[stage] for d in u.unit.devices),
        )
    execution = dataclasses.replace(job.execution, plan=Plan(placements=placements))
    between = make_job(job.config, job.inputs, job.world, execution, job.programs)
    between = between.with_room(job.room)
    state = JobState(counters=before.counters, trained={}, frozen={})
    frozen = {}
    for stage, group in chosen.items():
        arrays = group_arrays(job.world, between.sites[stage], unit_spec(between, stage), group)
        if stage in between.trains:
            state.trained[stage] = unflatten(between.trains[stage], arrays, numbers[stage])
        else:
            frozen[stage] = arrays
    state.frozen = frozen
    return between, state


def _largest_group(held: Mapping[Unit, ElasticModelUnit]) -> list[ElasticModelUnit]:
    """The units of one layout on disjoint devices, of the layout that there are most of.

    Where all are parked, they come back to the devices that they were on.
    """
    groups: dict[tuple[int, int], list[ElasticModelUnit]] = {}
    parked = all(unit.parked for unit in held)
    for unit, x in held.items():
        if unit.parked != parked:
            continue
        group = groups.setdefault((unit.pp, unit.tp), [])
        taken = {d for other in group for d in other.unit.devices}
        if taken.isdisjoint(unit.devices):
            group.append(x)
    largest = max(groups.values(), key=len)
    if parked:
        largest = [in_memory_of(x, dataclasses.replace(x.unit, parked=False)) for x in largest]
    return largest
