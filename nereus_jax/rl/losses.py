"""Losses of a training step: pure per-token formulas under one weighted sum.

Shapes: B rows (of any part of a minibatch), T response tokens.
`weights_BT` carries mask and normalization, made once for the whole minibatch by `token_weights`:
every loss and metric here is sum(weights * per-token quantity), so the sums over microbatches and
replicas add up to the minibatch value for every layout, and padded rows add 0. Positions
of weight 0 may hold NaN: it reaches no value and no gradient. Only the first argument of a loss
gets a gradient. All arithmetic is float32.
"""

from typing import Any, Literal, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from nereus_jax.core.errors import ConfigError
from nereus_jax.rl._shapes import Array, check_same_shape
from nereus_jax.rl.kl import KLEstimator, clamp_log_ratio, masked, token_kl

Aggregation = Literal["token", "sequence"]
Metrics: TypeAlias = dict[str, jax.Array]
"""Scalars that are weighted sums: add them over the parts of a minibatch."""

_ArrayT = TypeVar("_ArrayT", np.ndarray, jax.Array)


def token_weights(mask_BT: _ArrayT, aggregation: Aggregation) -> _ArrayT:
    """Weights that turn a sum over tokens into the mean of a whole minibatch.

    token: mask / number of tokens (every token counts alike).
    sequence: mask / (length of its row * number of rows with tokens) (every response counts alike).

    Args:
        mask_BT: bool or 0/1, of the whole minibatch, numpy or jax.
        aggregation: which mean.

    Returns:
        float32 [B, T] of the same array kind, summing to 1 (0 for an empty mask); 0 where masked.

    Raises:
        ConfigError: an unknown aggregation.
    """
    check_same_shape(2, mask=mask_BT)
    weights_BT: Any = (mask_BT != 0).astype(np.float32)  # one code for numpy and jax
    if aggregation == "token":
        return weights_BT / weights_BT.sum(keepdims=True).clip(1.0)
    if aggregation == "sequence":
        lengths_B1 = weights_BT.sum(axis=1, keepdims=True)
        num_rows_11 = (lengths_B1 > 0).astype(np.float32).sum(keepdims=True)
        return weights_BT / lengths_B1.clip(1.0) / num_rows_11.clip(1.0)
    allowed = ", ".join(get_args(Aggregation))
    raise ConfigError(f"unknown loss aggregation {aggregation!r}: use one of {allowed}")


def ppo_policy_loss(
    logprobs_BT: Array,
    old_logprobs_BT: Array,
    advantages_BT: Array,
    weights_BT: Array,
    clip: float,
    correction_BT: Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """The clipped surrogate objective, negated.

    ratio = exp(logprobs - old)
    loss = sum w * c * max(-A * ratio, -A * clip(ratio, 1 - clip, 1 + clip))

    Args:
        logprobs_BT: nats, policy in training; gets the gradient.
        old_logprobs_BT: nats, policy at the start of the step.
        advantages_BT: any scale.
        weights_BT: see `token_weights`.
        clip: epsilon > 0.
        correction_BT: c, importance correction per token (see `truncated_importance`); None for 1.

    Returns:
        The loss, and clip_fraction (share of tokens whose gradient the clipping stopped), approx_kl
        (nats, k3 estimate of KL(old || new) under the old policy's samples), ratio_mean.

    Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), equation 7.
    Departure: the log ratio is clamped to +-MAX_LOG_RATIO, beyond which a token gets no gradient.
    """
    check_same_shape(
        2,
        logprobs=logprobs_BT,
        old_logprobs=old_logprobs_BT,
        advantages=advantages_BT,
        weights=weights_BT,
        correction=weights_BT if correction_BT is None else correction_BT,
    )
    weights_BT, valid_BT = _weights(weights_BT)
    old_BT, advantages_BT = _constant(old_logprobs_BT, valid_BT), _constant(advantages_BT, valid_BT)
    log_ratio_BT = clamp_log_ratio(masked(logprobs_BT, valid_BT) - old_BT)
    ratio_BT = jnp.exp(log_ratio_BT)
    plain_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * jnp.clip(ratio_BT, 1.0 - clip, 1.0 + clip)
    loss_BT = jnp.maximum(plain_BT, clipped_BT)
    if correction_BT is not None:
        loss_BT = loss_BT * _constant(correction_BT, valid_BT)
    metrics = {
        "clip_fraction": _sum(weights_BT, (clipped_BT > plain_BT).astype(jnp.float32)),
        "approx_kl": _sum(weights_BT, jnp.expm1(log_ratio_BT) - log_ratio_BT),
        "ratio_mean": _sum(weights_BT, ratio_BT),
    }
    return _sum(weights_BT, loss_BT), jax.lax.stop_gradient(metrics)


def clipped_value_loss(
    values_BT: Array, old_values_BT: Array, returns_BT: Array, weights_BT: Array, value_clip: float
) -> tuple[jax.Array, Metrics]:
    """Squared error of the critic, with the change from the old value clipped.

    loss = sum w * 1/2 * max((V - R)^2, (clip(V, old - value_clip, old + value_clip) - R)^2)

    Args:
        values_BT: critic in training; gets the gradient.
        old_values_BT: critic at the start of the step.
        returns_BT: targets.
        weights_BT: see `token_weights`.
        value_clip: largest change that is rewarded, in units of the value; 0 for no clipping.
            Static.

    Returns:
        The loss, and value_clip_fraction (share of tokens whose gradient the clipping stopped).

    Source: OpenAI baselines ppo2 (the form of PPO with clipped values; not in the paper).
    """
    check_same_shape(
        2, values=values_BT, old_values=old_values_BT, returns=returns_BT, weights=weights_BT
    )
    weights_BT, valid_BT = _weights(weights_BT)
    values_BT = masked(values_BT, valid_BT)
    old_BT, returns_BT = _constant(old_values_BT, valid_BT), _constant(returns_BT, valid_BT)
    plain_BT = clipped_BT = jnp.square(values_BT - returns_BT)
    if value_clip > 0:
        clipped_values_BT = jnp.clip(values_BT, old_BT - value_clip, old_BT + value_clip)
        clipped_BT = jnp.square(clipped_values_BT - returns_BT)
    loss = 0.5 * _sum(weights_BT, jnp.maximum(plain_BT, clipped_BT))
    fraction = _sum(weights_BT, (clipped_BT > plain_BT).astype(jnp.float32))
    return loss, {"value_clip_fraction": jax.lax.stop_gradient(fraction)}


def kl_loss(
    logprobs_BT: Array, ref_logprobs_BT: Array, weights_BT: Array, estimator: KLEstimator
) -> tuple[jax.Array, Metrics]:
    """KL penalty to the reference as a loss term, without its coefficient: sum w * kl.

    k2 has the gradient of the KL itself under samples of the current policy; k3 (as in GRPO) a
    biased, bounded-below one. k1 is refused: its gradient is that of log policy, whose mean is 0,
    so it would add noise and no penalty.

    Returns:
        The loss, and kl (nats per token or as `weights_BT` averages).

    Raises:
        ConfigError: estimator k1 or unknown.

    Source: Schulman (2020), see `token_kl`; Shao et al., "DeepSeekMath" (2024), equation 4, for k3
    in the loss.
    """
    if estimator == "k1":
        raise ConfigError(
            "KL estimator 'k1' has no mean gradient as a loss: "
            "use 'k2' or 'k3', or place the KL in the reward"
        )
    check_same_shape(2, logprobs=logprobs_BT, weights=weights_BT)
    weights_BT, valid_BT = _weights(weights_BT)
    ref_BT = _constant(ref_logprobs_BT, valid_BT)
    loss = _sum(weights_BT, token_kl(logprobs_BT, ref_BT, valid_BT, estimator))
    return loss, {"kl": jax.lax.stop_gradient(loss)}


def entropy_loss(entropies_BT: Array, weights_BT: Array) -> tuple[jax.Array, Metrics]:
    """The entropy bonus as a loss term, without its coefficient: -sum w * entropy.

    Args:
        entropies_BT: nats, entropy of the policy's distribution at each token; gets the gradient.
        weights_BT: see `token_weights`.

    Returns:
        The loss, and entropy (nats).
    """
    check_same_shape(2, entropies=entropies_BT, weights=weights_BT)
    weights_BT, valid_BT = _weights(weights_BT)
    entropy = _sum(weights_BT, masked(entropies_BT, valid_BT))
    return -entropy, {"entropy": jax.lax.stop_gradient(entropy)}


def supervised_loss(logprobs_BT: Array, weights_BT: Array) -> tuple[jax.Array, Metrics]:
    """Negative log-likelihood of the given tokens: -sum w * logprobs.

    Args:
        logprobs_BT: nats, of the target tokens; gets the gradient.
        weights_BT: see `token_weights`.

    Returns:
        The loss, and nll (nats).
    """
    check_same_shape(2, logprobs=logprobs_BT, weights=weights_BT)
    weights_BT, valid_BT = _weights(weights_BT)
    loss = -_sum(weights_BT, masked(logprobs_BT, valid_BT))
    return loss, {"nll": jax.lax.stop_gradient(loss)}


def truncated_importance(
    train_logprobs_BT: Array, rollout_logprobs_BT: Array, mask_BT: Array, cap: float
) -> jax.Array:
    """Corrects for sampling with other numerics than training: min(train / rollout, cap) per token.

    Args:
        train_logprobs_BT: nats, of the sampled tokens, recomputed by the trainer with the weights
            that sampled.
        rollout_logprobs_BT: nats, as the sampler saw them.
        mask_BT: bool or 0/1.
        cap: largest weight, > 0.

    Returns:
        float32 [B, T] in (0, cap], 0 where masked, without gradient. Pass as `correction_BT`.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (2025), truncated importance sampling. Departure: the log ratio is clamped to +-MAX_LOG_RATIO.
    """
    check_same_shape(
        2, train_logprobs=train_logprobs_BT, rollout_logprobs=rollout_logprobs_BT, mask=mask_BT
    )
    valid_BT = jnp.asarray(mask_BT) != 0
    log_ratio_BT = masked(train_logprobs_BT, valid_BT) - masked(rollout_logprobs_BT, valid_BT)
    weights_BT = jnp.minimum(jnp.exp(clamp_log_ratio(log_ratio_BT)), cap)
    return jax.lax.stop_gradient(masked(weights_BT, valid_BT))


def _weights(weights_BT: Array) -> tuple[jax.Array, jax.Array]:
    weights_BT = jax.lax.stop_gradient(jnp.asarray(weights_BT).astype(jnp.float32))
    return weights_BT, weights_BT != 0


def _constant(x_BT: Array, valid_BT: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(masked(x_BT, valid_BT))


def _sum(weights_BT: jax.Array, x_BT: jax.Array) -> jax.Array:
    return jnp.sum(weights_BT * x_BT)
