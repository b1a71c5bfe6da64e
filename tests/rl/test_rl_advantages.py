"""Token rewards, GAE and whitening: by hand, against naive loops, and under padding and NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nereus_jax.rl.advantages import (
    gae,
    group_normalized,
    leave_one_out,
    token_rewards,
    whiten,
)

B, T = 3, 5
jit_gae = jax.jit(gae)
jit_whiten = jax.jit(whiten, static_argnames="shift_mean")


def floats(low: float, high: float, shape: tuple[int, ...] = (B, T)) -> st.SearchStrategy:
    return hnp.arrays(np.float32, shape, elements=st.floats(low, high, width=32))


masks = hnp.arrays(np.int32, (B,), elements=st.integers(0, T)).map(
    lambda lengths: np.arange(T)[None, :] < lengths[:, None]
)


def naive_gae(rewards, values, mask, gamma, lam):
    """The double sum of the paper: A[t] = sum_l (gamma * lambda)^l * delta[t + l]."""
    advantages = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        length = int(mask[b].sum())
        value = [*values[b, :length].astype(float), 0.0]
        delta = [rewards[b, t] + gamma * value[t + 1] - value[t] for t in range(length)]
        for t in range(length):
            advantages[b, t] = sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, length))
    return advantages


def test_gae_by_hand():
    rewards = jnp.array([[1.0, 0.0, 2.0, 9.0]])
    values = jnp.array([[0.5, 1.0, 1.5, 9.0]])
    mask = jnp.array([[1, 1, 1, 0]])
    # gamma = 0.5, lambda = 0.5
    # delta2 = 2 + 0 - 1.5 = 0.5;  delta1 = 0 + 0.75 - 1 = -0.25;  delta0 = 1 + 0.5 - 0.5 = 1
    # A2 = 0.5;  A1 = -0.25 + 0.25 * 0.5 = -0.125;  A0 = 1 + 0.25 * -0.125 = 0.96875
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
    assert advantages.tolist() == [[0.96875, -0.125, 0.5, 0.0]]
    assert returns.tolist() == [[1.46875, 0.875, 2.0, 0.0]]


@given(floats(-10, 10), floats(-10, 10), masks, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_the_double_sum(rewards, values, mask, gamma, lam):
    advantages, returns = jit_gae(rewards, values, mask, gamma, lam)
    expected = naive_gae(rewards, values, mask, gamma, lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(returns, expected + values * mask, rtol=1e-4, atol=1e-4)


@given(floats(-10, 10), floats(-10, 10), masks)
def test_gae_with_lambda_1_gives_the_rewards_to_go(rewards, values, mask):
    _, returns = jit_gae(rewards, values, mask, 1.0, 1.0)
    to_go = np.cumsum((rewards * mask)[:, ::-1], axis=1)[:, ::-1] * mask
    np.testing.assert_allclose(returns, to_go, rtol=1e-4, atol=1e-4)


def test_gae_ignores_what_is_masked_and_padding_columns():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, B, T)).astype(np.float32)
    mask = np.arange(T)[None, :] < np.array([5, 2, 0])[:, None]
    expected = gae(rewards, values, mask, 0.9, 0.8)
    wide = ((0, 1), (0, 4))
    hole = np.where(np.pad(mask, wide), 0, np.nan).astype(np.float32)
    got = gae(
        np.pad(rewards, wide) + hole, np.pad(values, wide) + hole, np.pad(mask, wide), 0.9, 0.8
    )
    for x, y in zip(expected, got, strict=True):
        np.testing.assert_array_equal(np.pad(np.asarray(x), wide), np.asarray(y))


@given(floats(-10, 10), masks)
def test_whitening_gives_mean_0_and_variance_1_under_the_mask(x, mask):
    y = np.asarray(jit_whiten(x, mask))
    assert (y[~mask] == 0).all()
    if mask.any():
        assert abs(y[mask].mean()) < 1e-4
        variance = x[mask].astype(np.float64).var()
        assert y[mask].var() == pytest.approx(variance / (variance + 1e-8), abs=1e-3)
        kept = np.asarray(jit_whiten(x, mask, shift_mean=False))
        np.testing.assert_allclose(kept[mask], y[mask] + x[mask].mean(), rtol=1e-4, atol=1e-4)
        assert (kept[~mask] == 0).all()


@pytest.mark.parametrize("value", [0.0, 0.1, 1234.567])
def test_whitening_equal_entries_gives_zeros(value: float):
    mask = np.arange(T)[None, :] < np.array([5, 2, 0])[:, None]
    x = np.where(mask, np.float32(value), np.float32(np.nan))
    np.testing.assert_allclose(whiten(x, mask), np.zeros((B, T)), atol=1e-3)
    np.testing.assert_array_equal(whiten(x, np.zeros_like(mask)), np.zeros((B, T)))


def test_token_rewards_by_hand():
    logprobs = jnp.array([[-1.0, -2.0, jnp.nan], [-0.5, jnp.nan, jnp.nan], [jnp.nan] * 3])
    ref = jnp.array([[-1.5, -1.0, jnp.nan], [-0.5, jnp.nan, jnp.nan], [jnp.nan] * 3])
    mask = jnp.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    scores = jnp.array([5.0, -7.0, 3.0])
    # row 0: k1 = [0.5, -1];  r = -0.1 * [0.5, -1] + [0, 5] = [-0.05, 5.1]
    # row 1: k1 = [0];  r = -7.  Row 2 has no token.
    got = token_rewards(scores, logprobs, ref, mask, 0.1, "k1", 0.0)
    np.testing.assert_allclose(got, [[-0.05, 5.1, 0.0], [-7.0, 0, 0], [0, 0, 0]], rtol=1e-6)
    # |score| <= 2
    got = token_rewards(scores, logprobs, ref, mask, 0.1, "k1", 2.0)
    np.testing.assert_allclose(got, [[-0.05, 2.1, 0.0], [-2.0, 0, 0], [0, 0, 0]], rtol=1e-6)
    assert got.dtype == jnp.float32


@given(floats(-5, 5, (B,)), floats(-5, 0), floats(-5, 0), masks, st.floats(0, 1))
def test_token_rewards_sum_to_score_minus_kl(scores, logprobs, ref, mask, coef):
    rewards = np.asarray(token_rewards(scores, logprobs, ref, mask, coef, "k1"))
    has_token = mask.any(axis=1)
    expected = scores * has_token - coef * ((logprobs - ref) * mask).sum(axis=1)
    np.testing.assert_allclose(rewards.sum(axis=1), expected, rtol=1e-4, atol=1e-4)
    assert (rewards[~mask] == 0).all()


def test_the_coefficient_may_be_traced():
    x, mask = jnp.zeros((B, T)), jnp.ones((B, T), bool)
    f = jax.jit(token_rewards, static_argnames=("estimator", "reward_clip"))
    got = f(jnp.ones(B), x, x - 1.0, mask, jnp.float32(0.25), estimator="k1", reward_clip=0.0)
    np.testing.assert_allclose(got, np.tile([[-0.25] * 4 + [0.75]], (B, 1)))


def test_shapes_are_strict():
    x = jnp.zeros((B, T))
    with pytest.raises(ValueError, match="one shape of rank 2"):
        gae(x, x[:, :1], x, 1.0, 1.0)
    with pytest.raises(ValueError, match="one score for each of 3 rows"):
        token_rewards(jnp.zeros((B, 1)), x, x, x, 0.1, "k1")


def test_group_baselines_by_hand():
    scores = jnp.array([1.0, 2.0, 6.0, 4.0, 4.0, 4.0])  # means 3 and 4; std sqrt(7) and 0
    root = float(np.sqrt(7.0)) + 1e-6
    wanted = [-2 / root, -1 / root, 3 / root, 0, 0, 0]
    np.testing.assert_allclose(group_normalized(scores, 3), wanted, rtol=1e-6)
    assert group_normalized(scores, 3, divide=False).tolist() == [-2, -1, 3, 0, 0, 0]
    assert leave_one_out(scores, 3).tolist() == [1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0]


@given(hnp.arrays(np.float32, (12,), elements=st.floats(-100, 100, width=32)))
def test_leave_one_out_is_the_difference_from_the_mean_stretched(scores):
    centered = group_normalized(scores, 4, divide=False)
    np.testing.assert_allclose(leave_one_out(scores, 4), centered * 4 / 3, atol=1e-3)


@given(st.floats(-1e4, 1e4, width=32))
def test_equal_scores_in_a_group_have_no_advantage(score):
    assert not np.any(group_normalized(np.full(6, score, np.float32), 3))


@pytest.mark.parametrize("size", [1, 0, 4])
def test_groups_must_divide_the_scores(size):
    with pytest.raises(ValueError, match=f"got groups of {size}"):
        leave_one_out(jnp.zeros(6), size)
