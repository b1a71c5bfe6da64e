"""`--dry-run`: the plan, the shapes and the bytes per device of every model-stage."""

from nereus_jax.trainer.job import Job


def dry_run(job: Job) -> None:
    """Prints what the run would take, after compiling everything."""
