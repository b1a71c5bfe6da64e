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

GROWTHS = (1.5, 1.25, 1.125)
"""Of the room: each size is compiled once, and rows are at most so many times too wide. The smaller
ones are for when there is no memory for more."""
MULTIPLE = 8
"""Sizes are whole multiples of it."""
SOON = 0.8
"""Share of the room from which on the longest response has the next one compiled."""


def next_rooms(config: RunConfig, room: int) -> tuple[int, ...]:
    """The rooms that may come after this one, in response tokens, the one that is wanted first."""
    sizes = [-(-int(room * growth) // MULTIPLE) * MULTIPLE for growth in GROWTHS]
    most = config.rollout.max_response_length
    return tuple(dict.fromkeys(min(max(size, room + 1), most) for size in sizes))


def outgrows(job: Job, rollout: Rollout) -> bool:
    """Whether a response ended for want of room."""
    if job.room >= job.config.rollout.max_response_length:
        return False
    return bool((~rollout.finished_B & (rollout.response_lengths_B >= job.room)).any())


def with_more_room(job: Job) -> Job:
    """The run with the next room that there is memory for, everything compiled for it.

    Raises:
      OutOfMemoryError: the plan has no memory for any; the same on every process.
    """
    refused, room = "", job.room
    for room in next_rooms(job.config, job.room):
        larger = job.with_room(room)
        for recipe in step_recipes(larger):
            larger.programs.get(*recipe)
        try:
            with host.together():
                check_memory(larger, stage_bytes(larger))
        except InfeasiblePlanError as error:
            refused = f"for {room} there is no memory: {error}"
        else:
            return larger
    raise OutOfMemoryError(f"responses outgrow {job.room} tokens, and {refused}", room)


def compile_more_room(job: Job, rollout: Rollout, queue: CompileQueue) -> None:
    """Compiles for the next room in the background, if responses come near the end of this one."""
    full = job.room >= job.config.rollout.max_response_length
    if not full and rollout.response_lengths_B.max() >= SOON * job.room:
        for recipe in step_recipes(job.with_room(next_rooms(job.config, job.room)[0])):
            job.programs.prefetch(*recipe, queue)
