"""Per-token rewards, advantages and returns: whole-batch functions, between scoring and training.

Shapes: B rows, T response tokens; mask_BT is 1 on a prefix of each row. Nothing here is jitted:
callers compile.
"""

import jax
import jax.numpy as jnp

from nereus_jax.rl._shapes import Array, check_same_shape
from nereus_jax.rl.kl import KLEstimator, masked, token_kl

_WHITEN_EPSILON = 1e-8


def token_rewards(
    scores_B: Array,
    logprobs_BT: Array,
    ref_logprobs_BT: Array,
    mask_BT: Array,
    kl_coef: float | Array,
    estimator: KLEstimator,
    reward_clip: float = 0.0,
) -> jax.Array:
    """Rewards of the token-level decision process: a KL penalty everywhere, the score at the end.

    r[b, t] = -kl_coef * kl[b, t] + [t is the last response token] * clip(score[b], +-reward_clip)

    Args:
        scores_B: one finite score per response.
        logprobs_BT: nats, policy that sampled.
        ref_logprobs_BT: nats, reference policy.
        mask_BT: bool or 0/1.
        kl_coef: weight >= 0, may be traced; 0 for no penalty in the reward.
        estimator: see `token_kl`.
        reward_clip: bound of |score|; 0 for none. Static.

    Returns:
        float32 [B, T], 0 where masked. A row without response tokens has no place for its score and
        gets none.

    Source: Ouyang et al., "Training language models to follow instructions" (2022), equation 2,
    spread over tokens as in Stiennon et al. (2020).
    """
    kl_BT = token_kl(logprobs_BT, ref_logprobs_BT, mask_BT, estimator)
    scores_B = jnp.asarray(scores_B).astype(jnp.float32)
    if scores_B.shape != kl_BT.shape[:1]:
        raise ValueError(
            f"expected one score for each of {kl_BT.shape[0]} rows, got shape {scores_B.shape}"
        )
    if reward_clip > 0:
        scores_B = jnp.clip(scores_B, -reward_clip, reward_clip)
    lengths_B = (jnp.asarray(mask_BT) != 0).sum(axis=1)
    is_last_BT = jnp.arange(mask_BT.shape[1])[None, :] == lengths_B[:, None] - 1
    penalties_BT = jnp.asarray(kl_coef, jnp.float32) * kl_BT
    return jnp.where(is_last_BT, scores_B[:, None], 0.0) - penalties_BT


def group_normalized(scores_B: Array, group_size: int, *, divide: bool = True) -> jax.Array:
    """Scores against those of the other responses to the same prompt: GRPO's baseline.

    y[b] = (r[b] - mean(group)) / (std(group) + 1e-6), std with group_size - 1 in the denominator;
    without `divide` the difference alone.

    Args:
        scores_B: one score per response; the responses to a prompt follow each other.
        group_size: responses per prompt, at least 2.
        divide: False leaves the scale alone (Liu et al., "Understanding R1-Zero-Like Training",
          2025, who call the result Dr. GRPO).

    Returns:
        float32 [B]; all 0 in a group whose scores are equal.

    Source: Shao et al., "DeepSeekMath" (2024), section 4.1.2.
    """
    groups_GN = _groups(scores_B, group_size)
    centered_GN = groups_GN - groups_GN.mean(axis=1, keepdims=True)
    # Equal scores leave the rounding error of their mean, which a division would blow up.
    varied_G1 = (groups_GN != groups_GN[:, :1]).any(axis=1, keepdims=True)
    centered_GN = jnp.where(varied_G1, centered_GN, 0.0)
    if divide:
        centered_GN = centered_GN / (groups_GN.std(axis=1, ddof=1, keepdims=True) + 1e-6)
    return centered_GN.reshape(-1)


def leave_one_out(scores_B: Array, group_size: int) -> jax.Array:
    """Scores less the mean score of the other responses to the same prompt: RLOO's baseline.

    y[b] = r[b] - mean(r of the other group_size - 1 responses)

    Args:
        scores_B: one score per response; the responses to a prompt follow each other.
        group_size: responses per prompt, at least 2.

    Returns:
        float32 [B].

    Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE-Style Optimization" (2024),
    equation 9.
    """
    groups_GN = _groups(scores_B, group_size)
    others_GN = (groups_GN.sum(axis=1, keepdims=True) - groups_GN) / (group_size - 1)
    return (groups_GN - others_GN).reshape(-1)


def _groups(scores_B: Array, group_size: int) -> jax.Array:
    scores_B = jnp.asarray(scores_B).astype(jnp.float32)
    if group_size < 2 or scores_B.shape[0] % group_size:
        raise ValueError(
            f"expected groups of at least 2 that divide the {scores_B.shape[0]} scores, "
            f"got groups of {group_size}"
        )
    return scores_B.reshape(-1, group_size)


def gae(
    rewards_BT: Array, values_BT: Array, mask_BT: Array, gamma: float, gae_lambda: float
) -> tuple[jax.Array, jax.Array]:
    """Generalized advantage estimation over each response.

    delta[t] = r[t] + gamma * V[t+1] - V[t]
    A[t] = delta[t] + gamma * lambda * A[t+1];  return[t] = A[t] + V[t]

    The episode ends at the last response token: V and A beyond it are 0, also for a response that
    the length limit cut (no bootstrapping).

    Args:
        rewards_BT: rewards given for each token.
        values_BT: value of the state before each token.
        mask_BT: bool or 0/1.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1]; 1 gives Monte-Carlo returns, 0 one-step errors.

    Returns:
        (advantages_BT, returns_BT), float32, 0 where masked. Masked inputs may be NaN.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation" (2016), equation 16.
    """
    check_same_shape(2, rewards=rewards_BT, values=values_BT, mask=mask_BT)
    valid_BT = jnp.asarray(mask_BT) != 0
    values_BT = masked(values_BT, valid_BT)
    next_values_BT = jnp.pad(values_BT, ((0, 0), (0, 1)))[:, 1:]
    deltas_BT = masked(masked(rewards_BT, valid_BT) + gamma * next_values_BT - values_BT, valid_BT)

    def step(advantage_B: jax.Array, delta_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        advantage_B = delta_B + gamma * gae_lambda * advantage_B
        return advantage_B, advantage_B

    # Masked columns lie after the response only, where delta is 0: so is A when it enters.
    start_B = jnp.zeros(deltas_BT.shape[0], jnp.float32)
    _, advantages_TB = jax.lax.scan(step, start_B, deltas_BT.T, reverse=True)
    advantages_BT = advantages_TB.T
    return advantages_BT, advantages_BT + values_BT


def whiten(x_BT: Array, mask_BT: Array, shift_mean: bool = True) -> jax.Array:
    """Scales to variance 1, and with `shift_mean` to mean 0, over the unmasked entries.

    y = (x - mean) / sqrt(var + 1e-8) (+ mean without `shift_mean`), var the population variance.

    Args:
        x_BT: advantages of the whole batch (not of one microbatch or replica).
        mask_BT: bool or 0/1.
        shift_mean: False keeps the mean.

    Returns:
        float32 [B, T], 0 where masked; entries that are all equal give 0 (or the mean).
    """
    check_same_shape(2, x=x_BT, mask=mask_BT)
    valid_BT = jnp.asarray(mask_BT) != 0
    count = jnp.maximum(valid_BT.sum(), 1).astype(jnp.float32)
    x_BT = masked(x_BT, valid_BT)
    mean = x_BT.sum() / count
    centered_BT = masked(x_BT - mean, valid_BT)
    # The rounding error of the mean would be blown up by a tiny deviation: take it out once more.
    centered_BT = masked(centered_BT - centered_BT.sum() / count, valid_BT)
    variance = jnp.square(centered_BT).sum() / count
    whitened_BT = centered_BT * jax.lax.rsqrt(variance + _WHITEN_EPSILON)
    return whitened_BT if shift_mean else masked(whitened_BT + mean, valid_BT)
