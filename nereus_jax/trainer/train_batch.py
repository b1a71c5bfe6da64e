"""From scores to what TRAIN works on: baselines, token rewards, advantages, minibatches.

Shapes: B rows, T response, N responses to a prompt.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nereus_jax.config import RunConfig
from nereus_jax.core.errors import RewardError
from nereus_jax.core.roles import ACTOR_SCORE
from nereus_jax.core.workflow import ALGORITHMS
from nereus_jax.planning.run_problem import old_logprobs_mode
from nereus_jax.rl.advantages import (
    gae,
    group_normalized,
    leave_one_out,
    token_rewards,
    whiten,
)
from nereus_jax.rl.losses import truncated_importance
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime import host
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.state import Counters


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """What TRAIN works on, on the host.

    Attributes:
      rollout: the rows.
      arrays: [B, T] float32 by the names that the objectives read, but for the weights.
      minibatches: rows of every update, in order.
      kl_coef: weight of the KL penalty in this step.
      metrics: of the rewards and the policies' differences.
    """

    rollout: Rollout
    arrays: Mapping[str, np.ndarray]
    minibatches: list[np.ndarray]
    kl_coef: float
    metrics: Mapping[str, float]


def minibatch_rows(config: RunConfig, step: int) -> list[np.ndarray]:
    """Rows of every update of a step: each epoch shuffled anew, the same on every layout."""
    rows: list[np.ndarray] = []
    size = config.algorithm.minibatch_size
    for epoch in range(config.algorithm.epochs):
        generator = np.random.Generator(np.random.Philox(key=[config.seed, step * 1000 + epoch]))
        order = generator.permutation(config.rollout.num_rows)
        rows += [np.sort(order[i : i + size]) for i in range(0, len(order), size)]
    return rows


def make_batch(job: Job, counters: Counters, values: Mapping[str, Any]) -> TrainBatch:
    """The batch of a step, from the values that its workflow has made.

    Raises:
      RewardError: a reward is not finite.
    """
    rollout: Rollout = values["rollout"]
    algorithm, mask_BT = job.config.algorithm, rollout.mask_BT
    rewards_B = np.asarray(values["rewards"], np.float32)
    if not np.all(np.isfinite(rewards_B)):
        raise RewardError(
            f"the reward model gave a non-finite score for sample "
            f"{int(np.argmax(~np.isfinite(rewards_B)))}; "
            f"check reward.model_path"
        )
    mode = old_logprobs_mode(job.config)
    arrays: dict[str, np.ndarray] = {"old_logprobs": rollout.logprobs_BT}
    metrics: dict[str, float] = {}
    if ACTOR_SCORE in job.scores:
        scored_BT = values["actor_scores"]["logprobs"]
        difference = np.abs(scored_BT - rollout.logprobs_BT)[mask_BT]
        metrics["rollout_train_logp_diff"] = float(difference.mean())
        metrics["entropy"] = float(values["actor_scores"]["entropy"][mask_BT].mean())
        if mode == "corrected":
            with jax.default_device(host.cpu_device()):
                correction = truncated_importance(
                    scored_BT, rollout.logprobs_BT, mask_BT, algorithm.correction_cap
                )
            arrays["correction"] = np.asarray(correction)
        arrays["old_logprobs"] = scored_BT
    has_reference = "reference_scores" in values
    ref_BT = values["reference_scores"]["logprobs"] if has_reference else arrays["old_logprobs"]
    arrays["ref_logprobs"] = ref_BT
    kl_coef = counters.kl_coef if algorithm.kl.place == "reward" else 0.0
    computed = prepare(
        job.config,
        rewards_B,
        arrays["old_logprobs"],
        ref_BT,
        mask_BT,
        kl_coef,
        values_BT=values.get("values"),
        greedy_rewards=values.get("greedy_rewards"),
    )
    arrays["advantages"] = computed["advantages"]
    if "values" in values:
        arrays |= {"old_values": values["values"], "returns": computed["returns"]}
    kl_B = np.where(mask_BT, arrays["old_logprobs"] - ref_BT, 0.0).sum(axis=1)
    success = rewards_B >= job.config.reward.success_threshold
    metrics |= {
        "reward_mean": float(rewards_B.mean()),
        "success_rate": float(success.mean()),
        "kl": float(kl_B.mean()),
        "advantage_std": float(computed["raw_advantages"][mask_BT].std()),
    }
    return TrainBatch(
        rollout=rollout,
        arrays=arrays,
        minibatches=minibatch_rows(job.config, counters.step),
        kl_coef=counters.kl_coef,
        metrics=metrics,
    )


def prepare(
    config: RunConfig,
    rewards_B: np.ndarray,
    logprobs_BT: np.ndarray,
    ref_logprobs_BT: np.ndarray,
    mask_BT: np.ndarray,
    kl_coef: float,
    *,
    values_BT: np.ndarray | None = None,
    greedy_rewards: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Token rewards, advantages and returns of a batch, on the host.

    Args:
      config: the run.
      rewards_B: one reward per response; the responses to a prompt follow each other.
      logprobs_BT: nats, policy that sampled.
      ref_logprobs_BT: nats, reference policy.
      mask_BT: which tokens are response.
      kl_coef: weight of the KL penalty in the token rewards.
      values_BT: of the critic; None for an algorithm without one.
      greedy_rewards: [B / N] of the greedy response to each prompt (ReMax).

    Returns:
      advantages [B, T] (whitened where configured), raw_advantages [B, T], returns [B, T].
    """
    algorithm, count = config.algorithm, config.rollout.samples_per_prompt
    has_critic = ALGORITHMS[algorithm.name].critic
    if values_BT is None:
        values_BT = np.zeros(mask_BT.shape, np.float32)
    if greedy_rewards is None:
        greedy_rewards = np.zeros(len(rewards_B) // count, np.float32)
    whitened = algorithm.whiten_advantages
    if whitened == "auto":
        whitened = "on" if algorithm.name in ("ppo", "reinforce_pp") else "off"
    with jax.default_device(host.cpu_device()):
        computed = _prepare(
            algorithm.name,
            algorithm.gamma,
            algorithm.gae_lambda if has_critic else 1.0,
            algorithm.kl.estimator,
            whitened == "on",
            config.reward.clip,
            count,
            algorithm.group_std,
            rewards_B,
            greedy_rewards,
            logprobs_BT,
            ref_logprobs_BT,
            values_BT,
            mask_BT,
            np.float32(kl_coef),
        )
    return {name: np.asarray(x) for name, x in computed.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5, 6, 7))
def _prepare(
    algorithm: str,
    gamma: float,
    gae_lambda: float,
    estimator: Any,
    whitened: bool,
    reward_clip: float,
    count: int,
    group_std: bool,
    rewards_B: jax.Array,
    greedy_rewards: jax.Array,
    logprobs_BT: jax.Array,
    ref_logprobs_BT: jax.Array,
    values_BT: jax.Array,
    mask_BT: jax.Array,
    kl_coef: jax.Array,
) -> dict[str, jax.Array]:
    if reward_clip > 0:
        rewards_B = jnp.clip(rewards_B, -reward_clip, reward_clip)
        greedy_rewards = jnp.clip(greedy_rewards, -reward_clip, reward_clip)
    scores_B = _less_baseline(algorithm, rewards_B, greedy_rewards, count, group_std)
    rewards_BT = token_rewards(scores_B, logprobs_BT, ref_logprobs_BT, mask_BT, kl_coef, estimator)
    # Without a critic the values are 0, and this is the sum of the rewards to come.
    raw_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma, gae_lambda)
    return {
        "advantages": whiten(raw_BT, mask_BT) if whitened else raw_BT,
        "raw_advantages": raw_BT,
        "returns": returns_BT,
    }


def _less_baseline(
    algorithm: str,
    rewards_B: jax.Array,
    greedy_rewards: jax.Array,
    count: int,
    group_std: bool,
) -> jax.Array:
    """Rewards less what the algorithm expects of their prompt, from everything but a critic."""
    if algorithm == "grpo":
        return group_normalized(rewards_B, count, divide=group_std)
    if algorithm == "rloo":
        return leave_one_out(rewards_B, count)
    if algorithm == "remax":
        return rewards_B - jnp.repeat(greedy_rewards, count)
    if algorithm == "reinforce_pp" and count > 1:
        return group_normalized(rewards_B, count, divide=False)
    return rewards_B
