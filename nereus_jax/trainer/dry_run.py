"""`--dry-run`: the plan, the shapes and the bytes per device of every model-stage."""

from collections.abc import Mapping, Sequence

from nereus_jax.core.architectures import Head
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.execution_plan import StageChoice
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.trainer.compilation import compile_programs
from nereus_jax.trainer.footprint import (
    StageBytes,
    check_memory,
    device_bytes,
    gib,
    host_memory_bytes,
    stage_bytes,
)
from nereus_jax.trainer.job import Job

COLUMNS = "{:<17} {:<17} {:<14} {:>12} {:>12} {:>12}  {}"


def dry_run(job: Job) -> None:
    """Prints what the run would take, compiling everything and allocating nothing.

    Raises:
      InfeasiblePlanError: the state alone, or the state and the compiled temporaries, do not fit.
    """
    # The state alone, before minutes of compilation.
    check_memory(job, stage_bytes(job), dry_run=True)
    compile_programs(job, warmup=True)
    stages = stage_bytes(job)
    if job.world.is_main:
        _report(job, stages)
    check_memory(job, stages, dry_run=True)


def _report(job: Job, stages: Mapping[ModelStage, StageBytes]) -> None:
    model, config = job.inputs.model, job.config
    print(
        f"model: {model.num_params(Head.LM):,} parameters, {model.num_layers} layers, "
        f"{model.num_heads} query and {model.num_kv_heads} key/value heads of {model.head_dim}, "
        f"vocabulary {model.vocab_size:,}; {config.model.param_dtype} weights, "
        f"{config.model.compute_dtype} compute"
    )
    print(
        f"batch: {config.rollout.batch_size} prompts of up to {config.data.max_prompt_length} "
        f"tokens, {config.rollout.samples_per_prompt} responses to each of up to "
        f"{config.rollout.max_response_length}; minibatches of "
        f"{config.algorithm.minibatch_size} rows"
    )
    print("\nbytes on each device of a model-stage (padding included):")
    print(
        COLUMNS.format(
            "model-stage", "layout", "devices", "parameters", "optimizer", "temporaries", "how"
        )
    )
    for stage, need in stages.items():
        placement = job.plan[stage]
        print(
            COLUMNS.format(
                str(stage),
                str(placement.layout),
                _shown(placement.devices),
                gib(need.parameters) if need.parameters else "shared",
                gib(need.optimizer),
                gib(need.temporaries),
                _how(stage, job.execution.choices[stage]),
            )
        )
    needs = device_bytes(job, stages)
    worst = max(needs, key=lambda d: needs[d])
    print(f"\nlargest device: {worst} with {gib(needs[worst])} (all held + largest temporary)")
    if config.device_memory_gib:
        print(f"each may have {config.device_memory_gib:.2f} GiB (device_memory_gib)")
    elif config.emulated_devices:
        here = [need for device, need in needs.items() if device.host == job.world.process_index]
        print(
            f"all {len(here)} emulated devices of this host: {gib(sum(here))} of "
            f"{gib(host_memory_bytes())} host memory"
        )
    print(f"compiled {len(job.programs.items())} programs in {job.compile_cost['exposed']:.1f} s")


def _how(stage: ModelStage, choice: StageChoice) -> str:
    """A choice in words."""
    if stage.stage is Stage.GENERATE:
        parts = [f"{choice.microbatch_size or 'all'} rows at a time"]
    else:
        parts = [f"microbatches of {choice.microbatch_size}"]
    parts += [f"flushes of {choice.microbatches}"] if choice.microbatches > 1 else []
    parts += ["recomputed"] if choice.remat else []
    parts += ["ZeRO-1"] if choice.zero1 else []
    parts += ["parked when idle"] if choice.parked else []
    return ", ".join(parts)


def _shown(devices: Sequence[DeviceId]) -> str:
    """Devices as `0:0..0:3` where they follow each other on one host, else one by one."""
    first, last = devices[0], devices[-1]
    run = [DeviceId(first.host, first.index + i) for i in range(len(devices))]
    if len(devices) > 1 and list(devices) == run:
        return f"{first}..{last}"
    return ",".join(str(d) for d in devices)
