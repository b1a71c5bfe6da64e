"""Bytes per device of a run: what every model-stage holds, and what its programs need on top."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import DTYPE_BYTES, LeafSpec
from nereus_jax.core.errors import PlanTooLargeError
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import ModelStage
from nereus_jax.models.sampling import SamplingConfig
from nereus_jax.rl.packed_forms import PackedShape
from nereus_jax.runtime import host
from nereus_jax.runtime.engines.train import TrainEngine
from nereus_jax.runtime.optimizers import is_leaf_spec
from nereus_jax.runtime.programs import ProgramKey
from nereus_jax.trainer.edges import edge_temp_bytes
from nereus_jax.trainer.job import Job, make_job

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Bytes of one model-stage on each of its devices; padding included, the same on all of them.

    Attributes:
      parameters: weights; 0 where the model-stage uses the very arrays of the one that trains them.
      optimizer: moments and counters.
      parked: it waits in host memory while others run.
      temporaries: the largest of its programs (activations, gradients, KV cache, logits), as XLA
        counts them; 0 before they are compiled.
    """

    parameters: int
    optimizer: int
    temporaries: int
    parked: bool = False

    @property
    def held(self) -> int:
        """Its state, on the devices or in their hosts' memory."""
        return self.parameters + self.optimizer

    @property
    def resident(self) -> int:
        """What stays on the devices between its programs."""
        return 0 if self.parked else self.held

    @property
    def working(self) -> int:
        """What it needs while it runs on top of all that is resident."""
        return self.temporaries + self.held - self.resident


def stage_bytes(job: Job) -> dict[ModelStage, StageBytes]:
    """Bytes per device of every model-stage of the plan."""
    temporaries: dict[str, int] = {}
    for key, program in job.programs.items():
        if not _belongs(job, key):
            continue
        needs = max(temporaries.get(key.model_stage, 0), program.extra_bytes)
        temporaries[key.model_stage] = needs
    parked = {stage for stage, choice in job.execution.choices.items() if choice.parked}
    for edge in job.workflow.weight_edges:
        needs = edge_temp_bytes(job.edges[edge.target])
        for stage in (edge.source, edge.target):
            temporaries[str(stage)] = max(temporaries.get(str(stage), 0), needs)
    return {
        stage: StageBytes(
            parameters=_parameter_bytes(job, stage),
            optimizer=_optimizer_bytes(job.trains[stage]) if stage in job.trains else 0,
            temporaries=temporaries.get(str(stage), 0),
            parked=stage in parked,
        )
        for stage in sorted(job.sites)
    }


def _belongs(job: Job, key: ProgramKey) -> bool:
    """Whether a program is one of the plan, for rows as long as they are now: other plans leave
    theirs behind, and longer rows have theirs compiled ahead."""
    for part in key.static:
        if isinstance(part, PackedShape) and part.span > job.row_length:
            return False
        if isinstance(part, SamplingConfig) and part.max_tokens > job.room:
            return False
    return any(
        key.model_stage == str(stage)
        and key.layout == str(placement.layout)
        and key.devices == tuple(str(d) for d in placement.devices)
        for stage, placement in job.plan.placements.items()
    )


def _parameter_bytes(job: Job, stage: ModelStage) -> int:
    site, config = job.sites[stage], job.config.model
    if stage in job.trains:
        return job.trains[stage].spec.local_bytes(site.mesh_shape)
    sources = [e.source for e in job.workflow.weight_edges if e.target == stage]
    same_place = any(job.plan[source] == job.plan[stage] for source in sources)
    choices = job.execution.choices
    parked = choices[stage].parked or any(choices[source].parked for source in sources)
    if same_place and not parked and config.param_dtype == config.compute_dtype:
        return 0
    return job.model_spec(stage).local_bytes(site.mesh_shape)


def _optimizer_bytes(engine: TrainEngine) -> int:
    total = 0
    rules = engine.moment_spec.rules
    for leaf in jax.tree.leaves(engine.opt_state_spec, is_leaf=is_leaf_spec):
        if isinstance(leaf, LeafSpec):
            total += leaf.local_bytes(rules, engine.site.mesh_shape)
        else:
            total += DTYPE_BYTES.get(str(leaf.dtype), 4)
    return total


def device_bytes(job: Job, stages: Mapping[ModelStage, StageBytes]) -> dict[DeviceId, int]:
    """Peak bytes of each device: all that it holds, and the largest temporary on top."""
    resident: dict[DeviceId, int] = {}
    largest: dict[DeviceId, int] = {}
    for stage, need in stages.items():
        for device in job.plan[stage].devices:
            resident[device] = resident.get(device, 0) + need.resident
            largest[device] = max(largest.get(device, 0), need.working)
    for edge in job.workflow.weight_edges:  # both ends of it are on devices, also what is parked
        needs = edge_temp_bytes(job.edges[edge.target])
        ends = [stage for stage in (edge.source, edge.target) if stages[stage].parked]
        for device in {d for stage in ends for d in job.plan[stage].devices}:
            here = [s for s in ends if device in job.plan[s].devices]
            comes = sum(stages[stage].parameters for stage in here)
            largest[device] = max(largest[device], needs + comes)
    return {device: resident[device] + largest[device] for device in sorted(resident)}


def host_bytes(job: Job, stages: Mapping[ModelStage, StageBytes]) -> dict[int, int]:
    """Bytes in the memory of each process's host: what is parked of its devices."""
    parked: dict[int, int] = {}
    for stage, need in stages.items():
        for device in job.plan[stage].devices:
            parked[device.host] = parked.get(device.host, 0) + need.held - need.resident
    return parked


def host_memory_bytes() -> int:
    """Memory of this machine, or of the container that the process runs in if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def check_memory(
    job: Job, stages: Mapping[ModelStage, StageBytes], *, dry_run: bool = False
) -> None:
    """Compares a run's bytes with the memory there is.

    Args:
      job: the run.
      stages: what its model-stages need.
      dry_run: nothing will be allocated: with `device_memory_gib` the host's memory does not count.

    Raises:
      PlanTooLargeError: they do not fit; the message names the device and the largest holder.
    """
    needs = device_bytes(job, stages)
    working = {stage: need.working for stage, need in stages.items()}
    worst = max(stages, key=lambda s: stages[s].held + stages[s].temporaries)
    advice = (
        f"the largest model-stage is {worst} with {gib(stages[worst].held)} held and "
        f"{gib(stages[worst].temporaries)} of temporaries on each of its devices; give it more "
        f"devices, a smaller microbatch, remat or zero1"
    )
    budget = job.config.device_memory_bytes
    for device, need in needs.items():
        if budget and need > budget:
            raise PlanTooLargeError(
                f"device {device} needs {gib(need)}, device_memory_gib allows {gib(budget)}; "
                f"{advice}",
                working,
            )
    if budget and dry_run:
        return
    parked, there = host_bytes(job, stages).get(job.world.process_index, 0), host_memory_bytes()
    if job.config.emulated_devices:
        here = {d: n for d, n in needs.items() if d.host == job.world.process_index}
        total = sum(here.values()) + parked
        if total > there:
            raise PlanTooLargeError(
                f"{len(here)} emulated devices need {gib(total)} together, this host has "
                f"{gib(there)}; {advice}"
            )
        return
    if parked > there:
        raise PlanTooLargeError(
            f"the plan parks {gib(parked)} in the memory of this host, which has {gib(there)}; "
            f"park fewer model-stages or use more hosts",
            working,
        )
    for device, need in needs.items():
        handle = job.world.handles[device]
        if handle.process_index != job.world.process_index:
            continue
        limit = (handle.memory_stats() or {}).get("bytes_limit")
        if limit is not None and need > limit:
            raise PlanTooLargeError(
                f"device {device} ({handle.device_kind}) needs {gib(need)}, it has {gib(limit)}; "
                f"{advice}",
                working,
            )


def job_under(job: Job, execution: ExecutionPlan) -> Job:
    """The run as it is now, under another plan.

    Raises:
      InfeasiblePlanError: the plan does not fit; the same on every process.
    """
    new = make_job(job.config, job.inputs, job.world, execution, job.programs)
    new = new.with_room(job.room)
    with host.together():
        check_memory(new, stage_bytes(new))
    return new


def gib(num_bytes: int) -> str:
    """A size in GiB, or MiB where that reads better."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"
