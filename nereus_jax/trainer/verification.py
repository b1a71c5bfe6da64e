"""Whether a change of plan left the logical state as it was, to the bit."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.errors import DigestError
from nereus_jax.core.roles import ModelStage
from nereus_jax.runtime import host
from nereus_jax.runtime.digests import compare_digests, state_digests
from nereus_jax.runtime.emu import ElasticModelUnit, Params, group_arrays, group_site
from nereus_jax.runtime.parking import on_devices, unparked
from nereus_jax.runtime.train_state import flatten, unit_leaves
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.state import JobState

Fingerprints = Mapping[ModelStage, Mapping[str, Any]]
"""Of every leaf of every model-stage: its digest, or all its values."""


def state_stages(job: Job) -> tuple[ModelStage, ...]:
    """The model-stages that hold state of their own: those that no weight edge fills."""
    filled = {edge.target for edge in job.workflow.weight_edges}
    return tuple(stage for stage in job.sites if stage not in filled)


def holds_state(job: Job, state: JobState) -> bool:
    """Whether a state is whole: a transition that needs the room gives it up."""
    return all(stage in state.trained or stage in state.frozen for stage in state_stages(job))


def unit_spec(job: Job, stage: ModelStage) -> EmuSpec:
    """The leaves that the units of a model-stage hold."""
    return unit_leaves(job.trains[stage]) if stage in job.trains else job.model_spec(stage)


def state_arrays(job: Job, state: JobState, stage: ModelStage) -> Params:
    """The arrays of these leaves."""
    if stage in job.trains:
        return flatten(job.trains[stage], state.trained[stage])
    return dict(state.frozen[stage])


def fingerprints(job: Job, state: JobState, how: str) -> Fingerprints:
    """What tells the logical state of a job apart.

    Args:
      job: under the plan that the state is in.
      state: what to look at.
      how: `transition.verify`.

    Raises:
      DigestError: two copies of a leaf differ.
    """
    if how == "off":
        return {}
    return {stage: _fingerprint(job, state, stage, how) for stage in state_stages(job)}


def _fingerprint(job: Job, state: JobState, stage: ModelStage, how: str) -> Mapping[str, Any]:
    """Of one model-stage; what is parked of it is on its devices meanwhile."""
    spec, arrays = unit_spec(job, stage), on_devices(state_arrays(job, state, stage))
    digests = state_digests(job.sites[stage], spec, arrays, job.programs)
    if how == "digest":
        return digests
    inside = {leaf.name: tuple(slice(0, n) for n in leaf.shape) for leaf in spec}
    values = host.fetch(arrays)
    return {name: x[inside[name]].tobytes() for name, x in values.items()}


def surviving_fingerprints(
    job: Job,
    units: Mapping[ModelStage, Sequence[ElasticModelUnit]],
    lost: frozenset[DeviceId],
) -> Fingerprints:
    """The digests of what lost devices have left whole: of model-stages with an intact unit.

    Under ZeRO-1 no unit is whole by itself.

    Args:
      job: under the plan of the units.
      units: of each model-stage; blocks of those of other processes cannot be looked at.
      lost: devices that are gone, in whatever process.
    """
    found: dict[ModelStage, Mapping[str, Any]] = {}
    for stage, of_stage in units.items():
        intact = [u for u in of_stage if u.is_intact and lost.isdisjoint(u.unit.devices)]
        if not intact or (stage in job.trains and job.trains[stage].zero1):
            continue
        kv_heads, spec = job.decoder(stage).num_kv_heads, unit_spec(job, stage)
        site = group_site(job.world, [u.unit for u in intact], kv_heads)
        arrays = group_arrays(job.world, site, spec, intact)
        found[stage] = state_digests(site, spec, arrays, job.programs)
    return found


def verify(job: Job, state: JobState, before: Fingerprints, how: str) -> None:
    """Compares a state with what it was, and with where the plan wants it.

    Args:
      job: under the plan that the state is in now.
      state: what to look at.
      before: `fingerprints` of the state as it was; empty: it cannot be compared.
      how: `transition.verify`.

    Raises:
      DigestError: a leaf is somewhere else, has changed, or its copies differ; the message names
        the leaf, and the devices where they are known.
    """
    for stage in state_stages(job):
        _check_placement(job, state, stage)
    after = fingerprints(job, state, how)
    for stage, leaves in before.items():
        if how == "digest":
            compare_digests(str(stage), leaves, after[stage])
            continue
        for name, value in leaves.items():
            if after[stage][name] != value:
                raise DigestError(f"{stage}: {name!r} has other bits than before the transition")


def _check_placement(job: Job, state: JobState, stage: ModelStage) -> None:
    site, spec = job.sites[stage], unit_spec(job, stage)
    arrays = state_arrays(job, state, stage)
    for leaf in spec:
        wanted, got = site.leaf_sharding(leaf, spec.rules), arrays[leaf.name].sharding
        if unparked(got) != unparked(wanted):
            raise DigestError(f"{stage}: {leaf.name!r} lies as {got}, the plan wants {wanted}")
