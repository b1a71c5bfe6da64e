"""What a TRAIN model-stage minimizes: the losses of `rl/losses.py` put together, as values.

An objective is a frozen dataclass that is called inside the compiled step. It is part of the key of
the compiled program, so two equal objectives share one. Numbers that change during a run (the KL
coefficient) come in `scalars`.

Shapes: B rows, T response tokens; all arrays [B, T], response aligned.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp

from nereus_jax.rl.kl import KLEstimator
from nereus_jax.rl.losses import (
    Metrics,
    clipped_value_loss,
    entropy_loss,
    kl_loss,
    ppo_policy_loss,
    supervised_loss,
)

Arrays = Mapping[str, jax.Array]


class Objective(Protocol):
    """A loss of a model's outputs on some rows of a minibatch: a sum over tokens with `weights`."""

    @property
    def batch_keys(self) -> tuple[str, ...]:
        """The [B, T] arrays that the objective reads beside the outputs."""
        ...

    @property
    def scalar_keys(self) -> tuple[str, ...]:
        """The scalars that the objective reads."""
        ...

    def __call__(
        self, outputs: Arrays, batch: Arrays, scalars: Arrays
    ) -> tuple[jax.Array, Metrics]:
        """The loss of these rows, and metrics that are weighted sums like it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """Clipped policy loss, less an entropy bonus, plus (optionally) a KL penalty.

    Attributes:
      clip: half width of the ratio's trust interval.
      entropy_coef: weight of the entropy bonus.
      kl_estimator: of the KL penalty in the loss; None where the penalty is in the reward.
      corrected: whether the batch brings importance weights in `correction`.
    """

    clip: float
    entropy_coef: float = 0.0
    kl_estimator: KLEstimator | None = None
    corrected: bool = False

    @property
    def batch_keys(self) -> tuple[str, ...]:
        keys = ["weights", "old_logprobs", "advantages"]
        keys += ["ref_logprobs"] if self.kl_estimator else []
        keys += ["correction"] if self.corrected else []
        return tuple(keys)

    @property
    def scalar_keys(self) -> tuple[str, ...]:
        return ("kl_coef",) if self.kl_estimator else ()

    def __call__(
        self, outputs: Arrays, batch: Arrays, scalars: Arrays
    ) -> tuple[jax.Array, Metrics]:
        loss, metrics = ppo_policy_loss(
            outputs["logprobs"],
            batch["old_logprobs"],
            batch["advantages"],
            batch["weights"],
            self.clip,
            batch["correction"] if self.corrected else None,
        )
        policy_loss = loss
        negative_entropy, entropy_metrics = entropy_loss(outputs["entropy"], batch["weights"])
        loss = loss + self.entropy_coef * negative_entropy
        weights = batch["weights"]
        off = jnp.abs(jnp.where(weights > 0, outputs["logprobs"] - batch["old_logprobs"], 0.0))
        metrics = {
            **metrics,
            **entropy_metrics,
            "policy_loss": policy_loss,
            "old_logprob_diff": jnp.sum(weights * off),
        }
        if self.kl_estimator is not None:
            penalty, kl_metrics = kl_loss(
                outputs["logprobs"], batch["ref_logprobs"], batch["weights"], self.kl_estimator
            )
            loss = loss + scalars["kl_coef"] * penalty
            metrics = {**metrics, "kl_in_loss": kl_metrics["kl"]}
        return loss, jax.lax.stop_gradient(metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """Squared error of the critic with clipped change.

    Attributes:
      value_clip: largest rewarded change of a value; 0 for no clipping.
    """

    value_clip: float

    @property
    def batch_keys(self) -> tuple[str, ...]:
        return ("weights", "old_values", "returns")

    @property
    def scalar_keys(self) -> tuple[str, ...]:
        return ()

    def __call__(
        self, outputs: Arrays, batch: Arrays, scalars: Arrays
    ) -> tuple[jax.Array, Metrics]:
        loss, metrics = clipped_value_loss(
            outputs["values"],
            batch["old_values"],
            batch["returns"],
            batch["weights"],
            self.value_clip,
        )
        mean = jnp.sum(batch["weights"] * jnp.where(batch["weights"] > 0, outputs["values"], 0.0))
        metrics = {**metrics, "value_loss": loss, "value_mean": mean}
        return loss, jax.lax.stop_gradient(metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedObjective:
    """Negative log-likelihood of given responses."""

    @property
    def batch_keys(self) -> tuple[str, ...]:
        return ("weights",)

    @property
    def scalar_keys(self) -> tuple[str, ...]:
        return ()

    def __call__(
        self, outputs: Arrays, batch: Arrays, scalars: Arrays
    ) -> tuple[jax.Array, Metrics]:
        return supervised_loss(outputs["logprobs"], batch["weights"])
