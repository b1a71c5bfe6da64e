"""What a change of plan has to know of each model-stage's state: its leaves, and in which memory it
waits before and after."""

from collections.abc import Iterable

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.roles import ModelStage
from nereus_jax.core.transition import RecoverySource
from nereus_jax.planning.transition_inputs import StageState
from nereus_jax.runtime.train_state import optimizer_leaves, parameter_leaves
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.verification import state_stages


def stage_states(
    job: Job, new: Job | None = None, *, lost: Iterable[DeviceId] = ()
) -> dict[ModelStage, StageState]:
    """What the units of every model-stage consist of.

    Args:
      job: as it is.
      new: as it is to be; None: the same.
      lost: devices that are gone.
    """
    resting = frozenset[ModelStage]() if new is None else waiting(job, new)
    arriving = frozenset[ModelStage]() if new is None else coming(job, lost) - resting
    origins = {edge.target: edge.source for edge in job.workflow.weight_edges}
    states: dict[ModelStage, StageState] = {}
    for stage in job.sites:
        kv_heads = job.decoder(stage).num_kv_heads
        if stage in job.trains:
            engine = job.trains[stage]
            states[stage] = StageState(
                parameters=parameter_leaves(engine),
                optimizer=optimizer_leaves(engine, engine.spec),
                num_kv_heads=kv_heads,
                zero1=engine.zero1,
                zero1_after=new.trains[stage].zero1 if new is not None else None,
                parked_before=stage in resting or stage in arriving,
                parked_after=stage in resting,
            )
        else:
            frozen = stage not in origins
            states[stage] = StageState(
                parameters=job.model_spec(stage),
                num_kv_heads=kv_heads,
                refreshed_by=origins.get(stage),
                recovery=(RecoverySource.CHECKPOINT,) if frozen else (),
                parked_before=stage in resting or stage in arriving,
                parked_after=stage in resting,
            )
    return states


def waiting(old: Job, new: Job) -> frozenset[ModelStage]:
    """Model-stages with state of their own that both plans park, in the same place and cut."""
    found: set[ModelStage] = set()
    for stage in state_stages(old):
        choices = [job.execution.choices[stage] for job in (old, new)]
        same = old.plan[stage] == new.plan[stage] and choices[0].zero1 == choices[1].zero1
        if same and all(choice.parked for choice in choices):
            found.add(stage)
    return frozenset(found)


def coming(old: Job, lost: Iterable[DeviceId]) -> frozenset[ModelStage]:
    """Model-stages that would go from host memory straight to their new places.

    The hosts of one process reach all of its devices. Where some are lost, or there are other
    processes, what is parked comes to its own devices first.
    """
    if old.world.num_processes > 1 or frozenset(lost):
        return frozenset()
    choices = old.execution.choices
    return frozenset(stage for stage in state_stages(old) if choices[stage].parked)
