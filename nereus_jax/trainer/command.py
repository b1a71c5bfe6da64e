"""What `nereus train` does, from a checked configuration on."""

import sys
from pathlib import Path

import jax

from nereus_jax.config import RunConfig, fit_plan_files, fit_plans
from nereus_jax.control.policies import parse_policy
from nereus_jax.core.errors import DataError
from nereus_jax.runtime.faults import watch_processes
from nereus_jax.runtime.membership import DistributedConfig
from nereus_jax.runtime.world import form_world
from nereus_jax.trainer.dry_run import dry_run as run_dry
from nereus_jax.trainer.job import make_job, read_inputs
from nereus_jax.trainer.loop import train
from nereus_jax.trainer.outputs import check_writable


def run_train(
    config: RunConfig,
    *,
    workdir: Path | None,
    dry_run: bool,
    distributed: DistributedConfig,
    fit_plan: bool = False,
) -> None:
    """Trains, or prints what training would take.

    Args:
      config: of the run.
      workdir: where results go; None only with `dry_run`.
      dry_run: compile and print, but allocate and run nothing.
      distributed: how the processes of the job find each other.
      fit_plan: take the nearest plan that fits where devices of the configured one are missing.
    """
    if config.control.policy:
        parse_policy(config.control.policy)  # before anything is read or measured
    try:
        inputs = read_inputs(config)
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror or error}; mend it, or name another"
        ) from error
    if config.compilation_cache_dir:
        cache = Path(config.compilation_cache_dir).expanduser()
        check_writable("compilation_cache_dir", cache)
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    world = form_world(distributed, config.emulated_devices)
    if fit_plan:
        config, replaced = fit_plan_files(config, world.pool)
        config, more = fit_plans(config, len(world.pool))
        replaced += more
        if world.is_main:
            print(*(f"nereus: {line}\n" for line in replaced), sep="", end="", file=sys.stderr)
    if dry_run:
        run_dry(make_job(config, inputs, world))
        return
    assert workdir is not None
    with watch_processes(world):
        train(config, inputs, world, workdir)
