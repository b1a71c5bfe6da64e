"""What `nereus train` does, from a checked configuration on."""

from pathlib import Path

import jax

from nereus_jax.config import RunConfig
from nereus_jax.core.errors import DataError
from nereus_jax.runtime.processes import DistributedConfig
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
) -> None:
    """Trains, or prints what training would take.

    Args:
      config: of the run.
      workdir: where results go; None only with `dry_run`.
      dry_run: compile and print, but allocate and run nothing.
      distributed: how the processes of the job find each other.
    """
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
    if dry_run:
        run_dry(make_job(config, inputs, world))
        return
    assert workdir is not None
    train(config, inputs, world, workdir)


__all__ = ["DistributedConfig", "run_train"]
