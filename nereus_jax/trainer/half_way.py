"""What a transition that stopped half way has left: units, and a job that is made of them."""

import dataclasses
from collections.abc import Mapping, Sequence

from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ModelStage
from nereus_jax.core.transition import Unit, placed_units
from nereus_jax.runtime.emu import ElasticModelUnit, group_arrays
from nereus_jax.runtime.train_state import OptimizerCounters, unflatten
from nereus_jax.runtime.transitions import UnitsByStage, unit_in_memory
from nereus_jax.trainer.job import Job, make_job
from nereus_jax.trainer.plan_change import PlanChange
from nereus_jax.trainer.state import JobState
from nereus_jax.trainer.verification import unit_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How the units of a model-stage are made after some operations of a change.

    Attributes:
      job: old or new, of which they are.
      choice: how the model-stage runs on them.
    """

    job: Job
    choice: StageChoice


def form_of(change: PlanChange, operations: int, stage: ModelStage) -> Form:
    """Of a model-stage, when so many operations of a change have been carried out.

    Where one of the plans cuts the optimizer over dp, all units go to the new plan in one
    operation; else they are whole in between, whatever the plans are.
    """
    moved = {
        operation.model_stage
        for operation in change.graph.operations[:operations]
        if any(not unit.parked for unit in operation.produces)
    }
    job = change.new if stage in moved else change.old
    cut = stage in job.trains and job.trains[stage].zero1 and job.plan[stage].layout.dp > 1
    choice = dataclasses.replace(change.new.execution.choices[stage], zero1=cut)
    return Form(job=job, choice=choice)


def has_whole(form: Form, units: UnitsByStage, stage: ModelStage) -> bool:
    """Whether the units that are left of a model-stage hold its state.

    Under ZeRO-1 each holds a part of the optimizer's tensors.
    """
    held = units.get(stage, {})
    if not form.choice.zero1:
        return bool(held)
    where = {(u.pp, u.tp, u.devices) for u in placed_units(stage, form.job.plan[stage])}
    return {(u.pp, u.tp, u.devices) for u in held} == where


def job_of_units(
    job: Job,
    choices: Mapping[ModelStage, StageChoice],
    units: UnitsByStage,
    before: JobState,
    numbers: Mapping[ModelStage, OptimizerCounters],
) -> tuple[Job, JobState]:
    """A job as intact units make it, after a transition that stopped half way, with what has been
    waiting in host memory meanwhile.

    Args:
      job: under the plan that was to be left or to be reached.
      choices: how its model-stages run meanwhile.
      units: what is intact; at least one of every model-stage that holds state.
      before: what the transition left of the state that it began with: the run's counters, and
        what it did not touch.
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
    execution = ExecutionPlan(plan=Plan(placements=placements), choices=choices)
    between = make_job(job.config, job.inputs, job.world, execution, job.programs)
    between = between.with_room(job.room)
    state = JobState(counters=before.counters, trained=dict(before.trained), frozen={})
    frozen = dict(before.frozen)
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
        largest = [unit_in_memory(x, parked=False) for x in largest]
    return largest
