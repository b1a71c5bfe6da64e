"""The dataflow of an algorithm: which model-stage reads and writes what.

This is the only place that knows the order of a step. The trainer dispatches from it, the cost
model takes its critical path from it, and the simulator replays it: order and concurrency follow
from the names that calls read and write.
"""

import dataclasses
from collections.abc import Mapping

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
    """One model-stage's part in a step, as the names of the values it reads and writes.

    Attributes:
      purpose: tells the calls of a model-stage apart that a step makes several of.
    """

    model_stage: ModelStage
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    purpose: str = ""

    @property
    def name(self) -> str:
        return f"{self.model_stage} {self.purpose}".rstrip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCall:
    """Work on the host between model-stages: rewards from a function, advantages.

    Attributes:
      function: what is done.
      purpose: as in `StageCall`.
    """

    function: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    purpose: str = ""

    @property
    def name(self) -> str:
        return f"{self.function} {self.purpose}".rstrip()


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
        stages = [c.model_stage for c in self.calls if isinstance(c, StageCall)]
        return tuple(dict.fromkeys(stages))

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """What tells the algorithms apart in the order of a step.

    Attributes:
      critic: a critic gives values, and is trained.
      greedy_baseline: the reward of a greedy response to the same prompt is the baseline.
      grouped: the baseline comes from several responses to the same prompt.
    """

    critic: bool = False
    greedy_baseline: bool = False
    grouped: bool = False


ALGORITHMS: Mapping[str, Traits] = {
    "ppo": Traits(critic=True),
    "grpo": Traits(grouped=True),
    "rloo": Traits(grouped=True),
    "reinforce_pp": Traits(),
    "remax": Traits(greedy_baseline=True),
}
"""ppo: Schulman et al. 2017 with the roles of Ouyang et al. 2022; grpo: Shao et al. 2024; rloo:
Ahmadian et al. 2024; reinforce_pp: REINFORCE++, Hu 2025; remax: Li et al. 2023."""


def policy_gradient(
    algorithm: str, *, reward_model: bool, reference: bool, recompute_old_logprobs: bool
) -> Workflow:
    """The workflow of one of `ALGORITHMS`.

    Args:
      algorithm: its name.
      reward_model: rewards come from a reward model, not from a function on the host.
      reference: a frozen reference model gives the KL penalty.
      recompute_old_logprobs: the old log-probabilities come from a SCORE pass, not from the
        rollout.
    """
    traits = ALGORITHMS[algorithm]
    calls: list[Call] = [_generate("rollout")]
    edges = [WeightEdge(source=ACTOR_TRAIN, target=ACTOR_GENERATE)]
    read = ["rollout"]
    if traits.greedy_baseline:
        calls += [
            _generate("greedy_rollout", "greedy"),
            _rewards("greedy_rollout", "greedy_rewards", reward_model, "greedy"),
        ]
        read.append("greedy_rewards")
    if recompute_old_logprobs:
        calls.append(_score(ACTOR_SCORE, "actor_scores"))
        edges.append(WeightEdge(source=ACTOR_TRAIN, target=ACTOR_SCORE))
    if reference:
        calls.append(_score(REFERENCE_SCORE, "reference_scores"))
    if traits.critic:
        calls.append(_score(CRITIC_SCORE, "values"))
        edges.append(WeightEdge(source=CRITIC_TRAIN, target=CRITIC_SCORE))
    calls.append(_rewards("rollout", "rewards", reward_model))
    read += [c.outputs[0] for c in calls if c.inputs[-1] == "rollout"]
    trained = {ACTOR_TRAIN: "actor_metrics"} | (
        {CRITIC_TRAIN: "critic_metrics"} if traits.critic else {}
    )
    calls.append(HostCall(function="advantages", inputs=tuple(read), outputs=("batch",)))
    calls += [
        StageCall(model_stage=stage, inputs=("batch",), outputs=(metrics,))
        for stage, metrics in trained.items()
    ]
    return Workflow(
        name=algorithm, given=("prompts",), calls=tuple(calls), weight_edges=tuple(edges)
    )


def _generate(output: str, purpose: str = "") -> StageCall:
    return StageCall(
        model_stage=ACTOR_GENERATE, inputs=("prompts",), outputs=(output,), purpose=purpose
    )


def _score(model_stage: ModelStage, output: str) -> StageCall:
    return StageCall(model_stage=model_stage, inputs=("rollout",), outputs=(output,))


def _rewards(rollout: str, output: str, reward_model: bool, purpose: str = "") -> Call:
    if reward_model:
        return StageCall(
            model_stage=REWARD_SCORE, inputs=(rollout,), outputs=(output,), purpose=purpose
        )
    return HostCall(
        function="rewards", inputs=("prompts", rollout), outputs=(output,), purpose=purpose
    )
