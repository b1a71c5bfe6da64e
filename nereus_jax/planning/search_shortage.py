# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Why nothing fits, and what would: the term that is too large, the smallest number of devices."""

import dataclasses

from nereus_jax.core.roles import ModelStage
from nereus_jax.planning.memory import StageMemory
from nereus_jax.planning.search import find_best
from nereus_jax.planning.search_problem import (
    PlanProblem,
    Pricer,
    stage_candidates,
    stage_memory,
    with_edges,
)
from nereus_jax.planning.search_waves import Wave

MOST_DEVICES = 4096
"""A job that does not fit so many needs a smaller model or shorter rows."""

ADVICE = {
    "kv_cache": "shorter responses, or fewer rows at a time",
    "activations": "shorter rows, or more devices for tp",
    "logits": "a smaller token chunk",
    "gradients": "bfloat16 parameters, or more devices",
    "optimizer": "bfloat16 parameters, or more devices",
    "parameters": "more devices, or a smaller model",
    "inputs": "smaller minibatches",
    "results": "fewer rows a step",
    "buffers": "more devices",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortage:
    """Why nothing fits.

    Attributes:
      model_stage: the model-stage that is short of most; None: each fits alone, all together not.
      needed_bytes: the least that it needs on a device.
      limit_bytes: what there is.
      term: its largest kind of bytes.
      term_bytes: of that kind.
      min_devices: the smallest number of devices that a plan fits; None: none up to
        `MOST_DEVICES`.
      advice: what to change.
    """

    model_stage: ModelStage | None
    needed_bytes: float
    limit_bytes: float
    term: str
    term_bytes: float
    min_devices: int | None
    advice: str


def find_shortage(problem: PlanProblem) -> Shortage:
    """Explains a problem of which no plan fits."""
    widest = dataclasses.replace(problem, tp_across_nodes=True)
    memories = {stage: _memory(widest, stage) for stage in _stages(problem)}
    stage = max(memories, key=lambda s: _least_bytes(memories[s]))
    memory = memories[stage]
    least = int((memory.held_bytes + memory.working_bytes).argmin())
    term, size = max(memory.at(least).items(), key=lambda item: item[1])
    alone = _least_bytes(memory) > problem.limit_bytes
    smallest = min_devices(problem, problem.num_devices + 1)
    more = f"{smallest} devices" if smallest else "a smaller model"
    park = "" if problem.park or alone else ", or let idle model-stages wait on the host"
    return Shortage(
        model_stage=stage if alone else None,
        needed_bytes=_least_bytes(memory),
        limit_bytes=problem.limit_bytes,
        term=term,
        term_bytes=size,
        min_devices=smallest,
        advice=f"{more}, or {ADVICE[term]}{park}",
    )


def min_devices(problem: PlanProblem, start: int = 1) -> int | None:
    """The smallest number of devices that a plan fits; None: none up to `MOST_DEVICES`.

    Numbers are tried one by one inside a node, then by whole nodes, in steps of a sixteenth.

    Args:
      problem: the job; its own number of devices does not count.
      start: the first number that is tried.
    """
    node = problem.hardware.devices_per_node
    count = start
    while count <= MOST_DEVICES:
        if _fits(dataclasses.replace(problem, num_devices=count)):
            return count
        step = max(node, count // 16 // node * node)
        count = count + 1 if count < node else count // node * node + step
    return None


def _stages(problem: PlanProblem) -> list[ModelStage]:
    return [stage for wave in problem.waves() for stage in wave]


def _memory(problem: PlanProblem, stage: ModelStage) -> StageMemory:
    memory = stage_memory(problem, stage, stage_candidates(problem, stage))
    return with_edges(problem, stage, memory)


def _least_bytes(memory: StageMemory) -> float:
    """What the most sparing candidate needs of a device while it runs."""
    return float((memory.held_bytes + memory.working_bytes).min())


def _fits(problem: PlanProblem) -> bool:
    """Whether any plan fits, tensor parallelism over nodes included."""
    widest, limit = dataclasses.replace(problem, tp_across_nodes=True), problem.limit_bytes
    for stage in _stages(problem):
        if _least_bytes(_memory(widest, stage)) > limit:
            return False
    if problem.park:  # what fits alone fits with all others parked
        return True
    pricer = Pricer(widest)
    waves = [
        Wave(
            [pricer.price(stage).options for stage in wave],
            problem.num_devices,
            problem.hardware.devices_per_node,
            limit,
        )
        for wave in problem.waves()
    ]
    return find_best(waves, limit) is not None
