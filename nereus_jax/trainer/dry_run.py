"""`--dry-run`: the plan, the shapes and the bytes per device of every model-stage."""

from nereus_jax.core.architectures import Head
from nereus_jax.trainer.compilation import compile_programs
from nereus_jax.trainer.footprint import (
    check_memory,
    device_bytes,
    gib,
    host_memory_bytes,
    stage_bytes,
)
from nereus_jax.trainer.job import Job

COLUMNS = "{:<17} {:<17} {:<14} {:>12} {:>12} {:>12}"


def dry_run(job: Job) -> None:
    """Prints what the run would take, compiling everything and allocating nothing.

    Raises:
      InfeasiblePlanError: the state alone, or the state and the compiled temporaries, do not fit.
    """
    check_memory(job, stage_bytes(job))  # the state alone, before minutes of compilation
    compile_programs(job, warmup=True)
    stages = stage_bytes(job)
    model, config = job.inputs.model, job.config
    print(
        f"model: {model.num_params(Head.LM):,} parameters, {model.num_layers} layers, "
        f"{model.num_heads} query and {model.num_kv_heads} key/value heads of {model.head_dim}, "
        f"vocabulary {model.vocab_size:,}; {config.model.param_dtype} weights, "
        f"{config.model.compute_dtype} compute"
    )
    print(
        f"batch: {config.rollout.batch_size} prompts of up to {config.data.max_prompt_length} "
        f"tokens, responses of up to {config.rollout.max_response_length}; minibatches of "
        f"{config.algorithm.minibatch_size} rows, microbatches of {config.train.microbatch_size}"
    )
    print("\nbytes on each device of a model-stage (padding included):")
    print(
        COLUMNS.format("model-stage", "layout", "devices", "parameters", "optimizer", "temporaries")
    )
    for stage, need in stages.items():
        placement = job.plan[stage]
        devices = [str(d) for d in placement.devices]
        shown = devices[0] if len(devices) == 1 else f"{devices[0]}..{devices[-1]}"
        print(
            COLUMNS.format(
                str(stage),
                str(placement.layout),
                shown,
                gib(need.parameters) if need.parameters else "shared",
                gib(need.optimizer),
                gib(need.temporaries),
            )
        )
    needs = device_bytes(job, stages)
    worst = max(needs, key=lambda d: needs[d])
    print(f"\nlargest device: {worst} with {gib(needs[worst])} (all held + largest temporary)")
    if config.emulated_devices:
        print(
            f"all {len(needs)} emulated devices: {gib(sum(needs.values()))} of "
            f"{gib(host_memory_bytes())} host memory"
        )
    print(f"compiled {len(job.programs.items())} programs in {job.programs.compile_s:.1f} s")
    check_memory(job, stages)
