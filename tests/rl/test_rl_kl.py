"""KL estimators by hand and against the exact KL; the controller against its formula."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.errors import ConfigError, DivergenceError
from nereus_jax.rl.kl import KLControllerState, KLEstimator, token_kl, update_kl_controller

ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3")


def test_hand_computed_values():
    # l = log policy - log reference = -1 - (-1 - log 2) = log 2 = 0.693147
    logprobs, ref = jnp.array([[-1.0, 0.0]]), jnp.array([[-1.0 - math.log(2), 0.0]])
    mask = jnp.array([[True, False]])
    # k1 = log 2;  k2 = 0.693147^2 / 2 = 0.240227;  k3 = 1/2 - 1 + 0.693147 = 0.193147
    for estimator, expected in zip(ESTIMATORS, (0.693147, 0.240227, 0.193147), strict=True):
        np.testing.assert_allclose(
            token_kl(logprobs, ref, mask, estimator), [[expected, 0.0]], rtol=1e-5
        )


def test_k1_and_k3_are_unbiased_and_k2_is_close():
    policy, ref = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    exact = float((policy * np.log(policy / ref)).sum())
    logprobs, ref_logprobs = np.log(policy)[None], np.log(ref)[None]
    mask = np.ones((1, 3), bool)
    means = {
        e: float((policy * np.asarray(token_kl(logprobs, ref_logprobs, mask, e))[0]).sum())
        for e in ESTIMATORS
    }
    assert means["k1"] == pytest.approx(exact, rel=1e-4)
    assert means["k3"] == pytest.approx(exact, rel=1e-4)
    assert means["k2"] == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_extreme_and_masked_inputs_stay_finite(estimator: KLEstimator):
    logprobs = jnp.array([[-1e4, -1e-3, jnp.nan, -jnp.inf]])
    ref = jnp.array([[-1e-3, -1e4, -jnp.inf, -jnp.inf]])
    mask = jnp.array([[1, 1, 0, 0]])
    value, grad = jax.value_and_grad(lambda x: token_kl(x, ref, mask, estimator).sum())(logprobs)
    assert jnp.isfinite(value)
    assert jnp.isfinite(grad).all()
    assert grad[0, 2:].tolist() == [0.0, 0.0]


def test_misuse_is_refused():
    x = jnp.zeros((2, 3))
    with pytest.raises(ConfigError, match="unknown KL estimator 'k4': use one of k1, k2, k3"):
        token_kl(x, x, x, "k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one shape of rank 2"):
        token_kl(x, x[:, :1], x, "k1")


def update(coef: float, observed: float, num_samples: int = 1000, **changes: object) -> float:
    arguments = {"kind": "adaptive", "target": 6.0, "horizon_samples": 10_000, **changes}
    state = KLControllerState(coef=coef)
    return update_kl_controller(state, observed, num_samples, **arguments).coef  # type: ignore[arg-type]


def test_controller_by_hand():
    # e = 6.6 / 6 - 1 = 0.1;  0.2 * (1 + 0.1 * 1000 / 10000) = 0.202
    assert update(0.2, 6.6) == pytest.approx(0.202)
    # 12 / 6 - 1 = 1, clipped to 0.2:  0.2 * (1 + 0.2 * 0.1) = 0.204
    assert update(0.2, 12.0) == pytest.approx(0.204)
    # a negative estimate is clipped to e = -0.2:  0.2 * (1 - 0.02) = 0.196
    assert update(0.2, -1.0) == pytest.approx(0.196)
    assert update(0.2, 6.0) == 0.2
    # ten horizons in one batch count as one:  0.2 * (1 - 0.2) = 0.16, not 0.2 * (1 - 2) < 0
    assert update(0.2, 0.0, num_samples=100_000) == pytest.approx(0.16)
    assert update(0.2, math.nan, kind="fixed") == 0.2


@given(st.floats(0.0, 10.0), st.floats(-5.0, 50.0), st.integers(0, 10**6))
def test_controller_moves_towards_the_target_and_stays_valid(coef: float, kl: float, samples: int):
    new = update(coef, kl, samples)
    assert new >= coef if kl >= 6 else new <= coef
    assert 0.8 * coef * (1 - 1e-9) <= new <= 1.2 * coef * (1 + 1e-9)


def test_controller_state_round_trips_through_json():
    state = KLControllerState(coef=0.1 + 0.2)
    assert KLControllerState(**json.loads(json.dumps(dataclasses.asdict(state)))) == state


def test_controller_misuse_is_refused():
    with pytest.raises(ConfigError, match="finite number >= 0, got -1"):
        KLControllerState(coef=-1.0)
    with pytest.raises(ConfigError, match="use one of fixed, adaptive"):
        update(0.1, 1.0, kind="pid")
    with pytest.raises(ConfigError, match="above 0, got target 0"):
        update(0.1, 1.0, target=0)
    with pytest.raises(DivergenceError, match="observed KL is nan"):
        update(0.1, math.nan)
