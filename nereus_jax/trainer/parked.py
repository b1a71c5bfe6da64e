"""Model-stages that wait in host memory between their calls: they come to their devices to work.

What is trained is moved, and goes back when its updates are done. Weights that a call only reads
stay where they are: what comes to the devices is a copy, which is dropped.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from nereus_jax.core.roles import ModelStage
from nereus_jax.runtime.emu import Params
from nereus_jax.runtime.parking import on_devices
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.state import JobState, as_planned, stage_params


def is_parked(job: Job, stage: ModelStage) -> bool:
    """Whether the plan has a model-stage wait in host memory."""
    return job.execution.choices[stage].parked


def bring(job: Job, state: JobState, stage: ModelStage) -> None:
    """The state of a parked model-stage comes to its devices, which must have nothing else to do.

    Raises:
      JaxRuntimeError: they have no memory for it.
    """
    if stage in state.trained:
        state.trained[stage] = jax.block_until_ready(on_devices(state.trained[stage]))
    else:
        state.at_work[stage] = jax.block_until_ready(on_devices(stage_params(job, state, stage)))
    try:
        job.programs.ledger.hold(state.live_bytes(job.world))
    except jax.errors.JaxRuntimeError:
        break_off(job, state)
        raise


def put_away(job: Job, state: JobState, stage: ModelStage) -> None:
    """The state of a parked model-stage whose work has ended waits in host memory again."""
    state.at_work.pop(stage, None)
    if stage in state.trained:
        state.trained[stage] = as_planned(job, stage, state.trained[stage])
    job.programs.ledger.hold(state.live_bytes(job.world))


def break_off(job: Job, state: JobState) -> None:
    """After work that was broken off: what the plan parks waits in host memory, all of it."""
    state.at_work.clear()
    put_all_away(job, state)


@contextmanager
def weights_at_work(job: Job, state: JobState, stage: ModelStage) -> Iterator[Params]:
    """The weights of a GENERATE or SCORE stage on its devices, for a call outside of a step."""
    if not is_parked(job, stage):
        yield stage_params(job, state, stage)
        return
    bring(job, state, stage)
    try:
        yield state.at_work[stage]
    finally:
        put_away(job, state, stage)


def put_all_away(job: Job, state: JobState) -> None:
    """What the plan parks goes to host memory, after a change of plan."""
    state.trained = {s: as_planned(job, s, x) for s, x in state.trained.items()}
    state.frozen = {s: as_planned(job, s, x) for s, x in state.frozen.items()}
