"""Room for responses: programs take rows as long as responses are, not as they may become.

A run whose responses may grow to thousands of tokens starts with programs for `rollout.first_room`
tokens, which need less memory. When a response reaches the end of the room, the room grows, and
the batch is generated anew: draws are named by row and position, so that every token comes again
and the longer ones go on. No response is cut that would not be cut with all room from the start.
"""

from nereus_jax.config import RunConfig
from nereus_jax.core.errors import InfeasiblePlanError, OutOfMemoryError
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime import host
from nereus_jax.runtime.compile_queue import CompileQueue
from nereus_jax.trainer.compilation import step_recipes
from nereus_jax.trainer.footprint import check_memory, stage_bytes
from nereus_jax.trainer.job import Job

GROWTH = 1.5
"""Of the room: each size is compiled once, and rows are at most so many times too wide."""
MULTIPLE = 8
"""Sizes are whole multiples of it."""
SOON = 0.8
"""Share of the room from which on the longest response has the next one compiled."""


def next_room(config: RunConfig, room: int) -> int:
    """The room after this one, in response tokens."""
    larger = -(-int(room * GROWTH) // MULTIPLE) * MULTIPLE
    return min(max(larger, room + 1), config.rollout.max_response_length)


def outgrows(job: Job, rollout: Rollout) -> bool:
    """Whether a response ended for want of room."""
    if job.room >= job.config.rollout.max_response_length:
        return False
    return bool((~rollout.finished_B & (rollout.response_lengths_B >= job.room)).any())


def with_more_room(job: Job) -> Job:
    """The run with the next room, everything compiled for it.

    Raises:
      OutOfMemoryError: the plan has no memory for it; the same on every process.
    """
    larger = job.with_room(next_room(job.config, job.room))
    for recipe in step_recipes(larger):
        larger.programs.get(*recipe)
    with host.together():
        try:
            check_memory(larger, stage_bytes(larger))
        except InfeasiblePlanError as error:
            raise OutOfMemoryError(
                f"responses outgrow {job.room} tokens, and for {larger.room} there is no memory: "
                f"{error}"
            ) from None
    return larger


def compile_more_room(job: Job, rollout: Rollout, queue: CompileQueue) -> None:
    """Compiles for the next room in the background, if responses come near the end of this one."""
    full = job.room >= job.config.rollout.max_response_length
    if not full and rollout.response_lengths_B.max() >= SOON * job.room:
        for recipe in step_recipes(job.with_room(next_room(job.config, job.room))):
            job.programs.prefetch(*recipe, queue)
