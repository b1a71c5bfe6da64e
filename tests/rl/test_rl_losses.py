"""Losses: by hand, equal for every layout of the rows, and without NaN from masked positions."""

import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.errors import ConfigError
from nereus_jax.rl import losses

B, T = 4, 5
MASK_BT = np.arange(T)[None, :] < np.array([5, 2, 1, 3])[:, None]


def policy(x, a, b, w):
    return losses.ppo_policy_loss(x, a, b, w, 0.2, correction_BT=jnp.abs(b))


def value(x, a, b, w):
    return losses.clipped_value_loss(x, a, b, w, 0.2)


def kl_k2(x, a, b, w):
    return losses.kl_loss(x, a, w, "k2")


def kl_k3(x, a, b, w):
    return losses.kl_loss(x, a, w, "k3")


def entropy(x, a, b, w):
    return losses.entropy_loss(x, w)


def supervised(x, a, b, w):
    return losses.supervised_loss(x, w)


ALL: dict[str, Callable] = {
    f.__name__: f for f in (policy, value, kl_k2, kl_k3, entropy, supervised)
}
GRADS = {name: jax.jit(jax.value_and_grad(f, has_aux=True)) for name, f in ALL.items()}
every_loss = pytest.mark.parametrize("name", ALL)
both_means = pytest.mark.parametrize("aggregation", ["token", "sequence"])


def inputs(seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).normal(size=(3, B, T)).astype(np.float32))


def test_token_weights_by_hand():
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    # token: 4 tokens.  sequence: 2 rows with tokens, of 3 and 1: 1 / (3 * 2) and 1 / (1 * 2)
    token = losses.token_weights(mask, "token")
    np.testing.assert_array_equal(token, mask / np.float32(4))
    sequence = losses.token_weights(mask, "sequence")
    np.testing.assert_allclose(sequence, [[1 / 6] * 3, [1 / 2, 0, 0], [0, 0, 0]], rtol=1e-6)
    assert isinstance(token, np.ndarray)
    assert token.dtype == sequence.dtype == np.float32
    with pytest.raises(ConfigError, match="use one of token, sequence"):
        losses.token_weights(mask, "batch")  # type: ignore[arg-type]


@both_means
@given(lengths=st.lists(st.integers(0, T), min_size=1, max_size=6))
def test_token_weights_sum_to_1_and_agree_in_numpy_and_jax(aggregation, lengths):
    mask = np.arange(T)[None, :] < np.array(lengths)[:, None]
    weights = losses.token_weights(mask, aggregation)
    assert weights.sum() == pytest.approx(float(mask.any()), rel=1e-5)
    assert ((weights > 0) == mask).all()
    in_jax = losses.token_weights(jnp.asarray(mask), aggregation)
    assert in_jax.dtype == jnp.float32
    np.testing.assert_allclose(in_jax, weights, rtol=1e-6)


def test_policy_loss_by_hand():
    ratio = jnp.array([[1.5, 1.5, 0.5, 0.5, 1.1]])
    advantages = jnp.array([[1.0, -1.0, 1.0, -1.0, 2.0]])
    weights = jnp.full((1, 5), 0.2)
    # -A * ratio:   -1.5   1.5  -0.5   0.5  -2.2
    # -A * clipped: -1.2   1.2  -0.8   0.8  -2.2
    # larger:       -1.2   1.5  -0.5   0.8  -2.2   sum -1.6, mean -0.32; clipped: first and fourth
    loss, metrics = losses.ppo_policy_loss(
        jnp.log(ratio), jnp.zeros((1, 5)), advantages, weights, 0.2
    )
    assert float(loss) == pytest.approx(-0.32, rel=1e-5)
    assert float(metrics["clip_fraction"]) == pytest.approx(0.4)
    assert float(metrics["ratio_mean"]) == pytest.approx(1.02, rel=1e-5)  # 5.1 / 5
    # mean of ratio - 1 - log ratio: 0.02 - (2 log 1.5 + 2 log 0.5 + log 1.1) / 5
    logs = 2 * math.log(1.5) + 2 * math.log(0.5) + math.log(1.1)
    assert float(metrics["approx_kl"]) == pytest.approx(0.02 - logs / 5, rel=1e-5)
    # only the second token corrected by 2: -1.6 + 1.5 = -0.1, mean -0.02
    correction = jnp.array([[1.0, 2.0, 1.0, 1.0, 1.0]])
    corrected, _ = losses.ppo_policy_loss(
        jnp.log(ratio), jnp.zeros((1, 5)), advantages, weights, 0.2, correction
    )
    assert float(corrected) == pytest.approx(-0.02, rel=1e-4)


def test_policy_gradient_at_the_old_policy_is_that_of_reinforce():
    logprobs, advantages, _ = inputs()
    weights = losses.token_weights(MASK_BT, "token")
    grad = jax.grad(lambda x: losses.ppo_policy_loss(x, logprobs, advantages, weights, 0.2)[0])(
        logprobs
    )
    np.testing.assert_allclose(grad, -weights * advantages, rtol=1e-6)


def test_policy_gradient_is_0_where_clipped():
    ratio, advantages = jnp.array([[1.5, 1.5, 0.5, 0.5]]), jnp.array([[1.0, -1.0, 1.0, -1.0]])
    grad = jax.grad(
        lambda x: losses.ppo_policy_loss(x, jnp.zeros((1, 4)), advantages, jnp.ones((1, 4)), 0.2)[0]
    )(jnp.log(ratio))
    np.testing.assert_allclose(grad, [[0.0, 1.5, -0.5, 0.0]], rtol=1e-6)  # -A * ratio


def test_ratios_do_not_overflow():
    logprobs, old = jnp.array([[0.0, -1e4, -1e30]]), jnp.array([[-1e4, 0.0, 0.0]])
    (loss, metrics), grad = jax.value_and_grad(
        lambda x: losses.ppo_policy_loss(
            x, old, jnp.array([[-1.0, 1.0, -1.0]]), jnp.ones((1, 3)), 0.2
        ),
        has_aux=True,
    )(logprobs)
    chex.assert_tree_all_finite((loss, metrics, grad))


def test_value_loss_by_hand():
    values, old = jnp.array([[1.0, 1.0, 0.1]]), jnp.array([[0.0, 0.0, 0.0]])
    returns, weights = jnp.array([[2.0, 0.5, 1.0]]), jnp.full((1, 3), 1.0)
    # plain (V - R)^2:        1.00  0.25  0.81
    # clipped V 0.2 0.2 0.1:  3.24  0.09  0.81   larger: 3.24 + 0.25 + 0.81 = 4.30, half 2.15
    loss, metrics = losses.clipped_value_loss(values, old, returns, weights, 0.2)
    assert float(loss) == pytest.approx(2.15, rel=1e-5)
    assert float(metrics["value_clip_fraction"]) == 1.0  # one token of weight 1
    # without clipping: 1.00 + 0.25 + 0.81 = 2.06, half 1.03
    loss, metrics = losses.clipped_value_loss(values, old, returns, weights, 0.0)
    assert float(loss) == pytest.approx(1.03, rel=1e-5)
    assert float(metrics["value_clip_fraction"]) == 0.0


def test_kl_entropy_and_supervised_losses_by_hand():
    weights = jnp.array([[0.25, 0.75]])
    logprobs, ref = jnp.array([[-1.0, -2.0]]), jnp.array([[-2.0, -2.0]])
    # k2: l = 1, 0: 0.25 * 1/2 = 0.125.  k3: 0.25 * (exp(-1) - 1 + 1) = 0.25 * 0.367879 = 0.0919699
    for estimator, expected in (("k2", 0.125), ("k3", 0.0919699)):
        loss, metrics = losses.kl_loss(logprobs, ref, weights, estimator)  # type: ignore[arg-type]
        assert float(loss) == float(metrics["kl"]) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match="'k1' has no mean gradient"):
        losses.kl_loss(logprobs, ref, weights, "k1")
    # 0.25 * 1 + 0.75 * 2 = 1.75
    loss, metrics = losses.entropy_loss(-logprobs, weights)
    assert (float(loss), float(metrics["entropy"])) == (-1.75, 1.75)
    loss, metrics = losses.supervised_loss(logprobs, weights)
    assert (float(loss), float(metrics["nll"])) == (1.75, 1.75)


def test_k2_as_a_loss_has_the_gradient_of_the_kl():
    logits, ref = jnp.array([0.3, -0.2, 0.5]), jax.nn.log_softmax(jnp.array([0.1, 0.4, -0.3]))

    def exact(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - ref))

    def sampled(logits, weights):  # the mean over all outcomes, with the sampling held fixed
        logp = jax.nn.log_softmax(logits)[None, :]
        return losses.kl_loss(logp, ref[None, :], weights, "k2")[0]

    grad = jax.grad(sampled)(logits, jax.nn.softmax(logits)[None, :])
    np.testing.assert_allclose(grad, jax.grad(exact)(logits), rtol=1e-5, atol=1e-7)


def test_truncated_importance_by_hand():
    train = jnp.array([[math.log(0.5), math.log(0.9), 0.0, jnp.nan]])
    rollout = jnp.array([[math.log(0.25), math.log(0.1), -1e9, jnp.nan]])
    mask = jnp.array([[True, True, True, False]])
    # 0.5 / 0.25 = 2;  0.9 / 0.1 = 9, capped to 3;  an impossible ratio is capped too
    got = losses.truncated_importance(train, rollout, mask, 3.0)
    np.testing.assert_allclose(got, [[2.0, 3.0, 3.0, 0.0]], rtol=1e-5)
    grad = jax.grad(lambda x: losses.truncated_importance(x, rollout, mask, 3.0).sum())(train)
    np.testing.assert_array_equal(grad, np.zeros((1, 4)))


@every_loss
def test_masked_nan_reaches_no_value_and_no_gradient(name: str):
    weights = losses.token_weights(MASK_BT, "token")
    clean = [np.where(MASK_BT, x, np.float32(0)) for x in inputs()]
    for poison in (np.nan, np.inf, -np.inf):
        dirty = [np.where(MASK_BT, x, np.float32(poison)) for x in clean]
        expected, got = GRADS[name](*clean, weights), GRADS[name](*dirty, weights)
        chex.assert_trees_all_equal(got, expected)
        chex.assert_tree_all_finite(got)
        assert (np.asarray(got[1])[~MASK_BT] == 0).all()


@every_loss
@both_means
def test_padding_changes_no_loss_and_no_gradient(name: str, aggregation: losses.Aggregation):
    x = inputs()
    (loss, metrics), grad = GRADS[name](*x, losses.token_weights(MASK_BT, aggregation))
    wide = ((0, 2), (0, 3))
    mask = np.pad(MASK_BT, wide)
    padded = [np.pad(a, wide, constant_values=77.0) for a in x]
    (loss2, metrics2), grad2 = GRADS[name](*padded, losses.token_weights(mask, aggregation))
    chex.assert_trees_all_close((loss2, metrics2), (loss, metrics), rtol=1e-5)
    np.testing.assert_allclose(grad2[:B, :T], grad, rtol=1e-6)
    assert (np.asarray(grad2)[~mask] == 0).all()


@every_loss
@both_means
def test_every_split_into_microbatches_gives_the_minibatch(name: str, aggregation):
    x = inputs()
    weights = losses.token_weights(MASK_BT, aggregation)
    (loss, metrics), grad = GRADS[name](*x, weights)
    order = np.array([2, 0, 3, 1])
    for rows in ([order], [order[:2], order[2:]], [[row] for row in order]):
        parts = [GRADS[name](*(a[r] for a in x), weights[r]) for r in map(np.asarray, rows)]
        summed = jax.tree.map(lambda *leaves: sum(leaves), *[p[0] for p in parts])
        chex.assert_trees_all_close(summed, (loss, metrics), rtol=1e-5, atol=1e-6)
        grads = np.concatenate([np.asarray(p[1]) for p in parts])
        np.testing.assert_allclose(grads, np.asarray(grad)[order], rtol=1e-6)


@every_loss
def test_only_the_first_argument_gets_a_gradient(name: str):
    weights = losses.token_weights(MASK_BT, "token")
    grads = jax.grad(lambda *a: ALL[name](*a)[0], argnums=(1, 2, 3))(*inputs(), weights)
    chex.assert_trees_all_equal(grads, jax.tree.map(jnp.zeros_like, grads))


@every_loss
def test_low_precision_inputs_are_computed_in_float32(name: str):
    x = [jnp.asarray(a, jnp.bfloat16) for a in inputs()]
    loss, metrics = ALL[name](*x, losses.token_weights(MASK_BT, "token"))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((loss, metrics)))


@pytest.mark.parametrize("loss", ALL.values())
def test_shapes_are_strict(loss: Callable):
    x = jnp.zeros((B, T))
    with pytest.raises(ValueError, match="one shape of rank 2"):
        loss(x, x, x, x[:, :1])
