"""KL divergence to the reference policy: per-token estimates and control of the coefficient.

Shapes: B rows, T response tokens.
"""

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from nereus_jax.core.errors import ConfigError, DivergenceError
from nereus_jax.rl._shapes import Array, check_same_shape

KLEstimator = Literal["k1", "k2", "k3"]
KLControllerKind = Literal["fixed", "adaptive"]

MAX_LOG_RATIO = 20.0
"""Log ratios (nats) are clamped to +-this before exp: exp(20)^2 is still finite in float32."""

_MAX_RELATIVE_ERROR = 0.2


def token_kl(
    logprobs_BT: Array, ref_logprobs_BT: Array, mask_BT: Array, estimator: KLEstimator
) -> jax.Array:
    """Single-sample estimates of KL(policy || reference) at each response token.

    With l = log policy - log reference at the sampled token:
        k1 = l (unbiased, can be negative); k2 = l^2 / 2 (biased, low variance);
        k3 = exp(-l) - 1 + l (unbiased, never negative).
    They are estimates under samples of the policy itself.

    Args:
        logprobs_BT: nats, of the sampled tokens.
        ref_logprobs_BT: nats, of the same tokens.
        mask_BT: bool or 0/1.
        estimator: which of the three.

    Returns:
        float32 [B, T] in nats, 0 where masked. Masked inputs may be NaN: value and gradient stay 0
        there.

    Raises:
        ConfigError: an unknown estimator.

    Source: Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
    Departure: -l is clamped to +-MAX_LOG_RATIO inside the exponential of k3.
    """
    check_same_shape(2, logprobs=logprobs_BT, ref_logprobs=ref_logprobs_BT, mask=mask_BT)
    valid_BT = jnp.asarray(mask_BT) != 0
    log_ratio_BT = masked(logprobs_BT, valid_BT) - masked(ref_logprobs_BT, valid_BT)
    if estimator == "k1":
        return log_ratio_BT
    if estimator == "k2":
        return 0.5 * jnp.square(log_ratio_BT)
    if estimator == "k3":
        return jnp.expm1(clamp_log_ratio(-log_ratio_BT)) + log_ratio_BT
    raise ConfigError(
        f"unknown KL estimator {estimator!r}: use one of {', '.join(get_args(KLEstimator))}"
    )


def masked(x_BT: Array, valid_BT: jax.Array) -> jax.Array:
    """Selects float32 x where valid, else 0: a masked NaN reaches no value and no gradient."""
    return jnp.where(valid_BT, jnp.asarray(x_BT).astype(jnp.float32), 0.0)


def clamp_log_ratio(log_ratio: jax.Array) -> jax.Array:
    """Clamps to +-MAX_LOG_RATIO; the gradient beyond is 0."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLControllerState:
    """What a checkpoint keeps of the controller; `dataclasses.asdict` gives its JSON form."""

    coef: float
    """Weight of the KL penalty, finite and >= 0."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coef) and self.coef >= 0):
            raise ConfigError(f"KL coefficient must be a finite number >= 0, got {self.coef}")


def update_kl_controller(
    state: KLControllerState,
    observed_kl: float,
    num_samples: int,
    *,
    kind: KLControllerKind,
    target: float,
    horizon_samples: int,
) -> KLControllerState:
    """One step of the coefficient: "fixed" keeps it, "adaptive" steers the KL to the target.

    e = clip(observed / target - 1, -0.2, 0.2);  coef' = coef * (1 + e * min(num_samples / horizon,
    1))

    Args:
        state: the coefficient in use.
        observed_kl: mean KL of the last batch, in the unit of `target` (nats per response or nats
            per token).
        num_samples: responses since the last update.
        kind: "fixed" or "adaptive".
        target: wanted KL, > 0.
        horizon_samples: responses over which the coefficient may change by its full step, > 0.

    Raises:
        ConfigError: an unknown kind, or a target or horizon that is not positive.
        DivergenceError: the observed KL is not finite (adaptive only).

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section
    2.2, with K_beta = num_samples / horizon as in the authors' code. Departure: that factor is at
    most 1, so that a batch of more than five horizons cannot turn the coefficient negative.
    """
    if kind == "fixed":
        return state
    if kind != "adaptive":
        allowed = ", ".join(get_args(KLControllerKind))
        raise ConfigError(f"unknown KL controller {kind!r}: use one of {allowed}")
    if not (target > 0 and horizon_samples > 0):
        raise ConfigError(
            "the adaptive KL controller needs a target and a horizon above 0, "
            f"got target {target} and horizon {horizon_samples} samples"
        )
    if not math.isfinite(observed_kl):
        raise DivergenceError(
            f"the observed KL is {observed_kl}: lower the learning rate or raise the KL coefficient"
        )
    error = min(max(observed_kl / target - 1.0, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
    step = min(num_samples / horizon_samples, 1.0)
    return KLControllerState(coef=state.coef * (1.0 + error * step))
