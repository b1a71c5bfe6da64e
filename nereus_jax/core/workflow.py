"""The dataflow of an algorithm: which model-stage reads and writes what.

This is the only place that knows the order of a step. The trainer dispatches from it, the cost
model takes its critical path from it, and the simulator replays it: order and concurrency follow
from the names that calls read and write.
"""

import dataclasses

from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_SCORE,
    ACTOR_TRAIN,
    CRITIC_SCORE,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
    REWARD_SCORE,
    ModelStage,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCall:
    """One model-stage's part in a step, as the names of the values it reads and writes."""

    model_stage: ModelStage
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def name(self) -> str:
        return str(self.model_stage)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCall:
    """Work on the host between model-stages: rewards from a function, advantages."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Call = StageCall | HostCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightEdge:
    """Weights that flow from where they are trained to where they are used, once a step."""

    source: ModelStage
    target: ModelStage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workflow:
    """The calls of a step, and the weight edges between its model-stages."""

    name: str
    given: tuple[str, ...]
    calls: tuple[Call, ...]
    weight_edges: tuple[WeightEdge, ...]

    def __post_init__(self) -> None:
        self.waves()  # an unmet input or a cycle is an error at construction

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        return tuple(c.model_stage for c in self.calls if isinstance(c, StageCall))

    def waves(self) -> tuple[tuple[Call, ...], ...]:
        """Calls grouped by the earliest moment at which their inputs exist.

        Calls of one wave do not depend on each other: on disjoint devices they run at the same
        time.

        Raises:
          ValueError: an input is produced by no call, or calls depend on each other in a circle.
        """
        known = set(self.given)
        left: list[Call] = list(self.calls)
        waves: list[tuple[Call, ...]] = []
        while left:
            ready = tuple(c for c in left if known.issuperset(c.inputs))
            if not ready:
                missing = {n for c in left for n in c.inputs} - known
                raise ValueError(
                    f"workflow {self.name}: no call can run; inputs missing: {missing}"
                )
            waves.append(ready)
            known.update(name for c in ready for name in c.outputs)
            left = [c for c in left if c not in ready]
        return tuple(waves)


def ppo(*, reward_model: bool, reference: bool, recompute_old_logprobs: bool) -> Workflow:
    """Proximal policy optimization: Schulman et al. 2017, with the roles of Ouyang et al. 2022.

    Args:
      reward_model: rewards come from a reward model, not from a function on the host.
      reference: a frozen reference model gives the KL penalty.
      recompute_old_logprobs: the old log-probabilities come from a SCORE pass, not from the
        rollout.
    """
    rollout = ("rollout",)
    calls: list[Call] = [
        StageCall(model_stage=ACTOR_GENERATE, inputs=("prompts",), outputs=rollout)
    ]
    edges = [WeightEdge(source=ACTOR_TRAIN, target=ACTOR_GENERATE)]
    scores: list[str] = []

    def score(model_stage: ModelStage, output: str) -> None:
        calls.append(StageCall(model_stage=model_stage, inputs=rollout, outputs=(output,)))
        scores.append(output)

    if recompute_old_logprobs:
        score(ACTOR_SCORE, "actor_scores")
        edges.append(WeightEdge(source=ACTOR_TRAIN, target=ACTOR_SCORE))
    if reference:
        score(REFERENCE_SCORE, "reference_scores")
    score(CRITIC_SCORE, "values")
    edges.append(WeightEdge(source=CRITIC_TRAIN, target=CRITIC_SCORE))
    if reward_model:
        score(REWARD_SCORE, "rewards")
    else:
        calls.append(HostCall(name="rewards", inputs=("prompts", *rollout), outputs=("rewards",)))
        scores.append("rewards")
    calls += [
        HostCall(name="advantages", inputs=(*rollout, *scores), outputs=("batch",)),
        StageCall(model_stage=ACTOR_TRAIN, inputs=("batch",), outputs=("actor_metrics",)),
        StageCall(model_stage=CRITIC_TRAIN, inputs=("batch",), outputs=("critic_metrics",)),
    ]
    return Workflow(name="ppo", given=("prompts",), calls=tuple(calls), weight_edges=tuple(edges))
