"""Lengths foreseen from past steps, and the step at which memory ends."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.control.forecast import (
    ForecastSettings,
    expected_largest,
    largest_length,
    make_forecast,
)

CUT = 100_000


def growing(rate: float, steps: int, noise: float = 0.0, seed: int = 0) -> list[float]:
    rng = np.random.default_rng(seed)
    return [100.0 * math.exp(rate * i + noise * float(rng.standard_normal())) for i in range(steps)]


def test_growth_goes_on_but_less_and_less():
    means = growing(0.02, 30)
    found = make_forecast(means, [3 * m for m in means], CUT)
    assert found.slope == pytest.approx(0.02) and math.exp(found.level) == pytest.approx(means[-1])
    damping = found.settings.damping
    assert found.mean_tokens(1) == pytest.approx(means[-1] * math.exp(0.02 * damping))
    limit = means[-1] * math.exp(0.02 * damping / (1 - damping))
    ahead = [found.mean_tokens(h) for h in range(1, 200)]
    assert ahead == sorted(ahead) and ahead[-1] == pytest.approx(limit, rel=1e-3)
    assert found.tail_tokens(4) == pytest.approx(3 * found.mean_tokens(4))


def test_one_spike_moves_neither_level_nor_slope():
    means = growing(0.01, 24)
    spiked = [*means]
    spiked[20] *= 5
    ratio = [3.0 * m for m in means]
    clean, found = (make_forecast(m, ratio, CUT) for m in (means, spiked))
    assert found.slope == pytest.approx(clean.slope, abs=0.002)
    assert found.level == pytest.approx(clean.level, abs=0.02)


def test_the_first_step_says_little():
    one = make_forecast([100.0], [300.0], CUT)
    many = make_forecast([100.0] * 30, [300.0] * 30, CUT)
    assert one.mean_tokens(5) == pytest.approx(100.0) and one.slope == 0.0
    assert one.tail_bound(5) > many.tail_bound(5) > 300.0


def test_nothing_is_longer_than_where_responses_are_cut():
    found = make_forecast(growing(0.5, 20), growing(0.5, 20), 500)
    assert found.mean_tokens(5) == found.tail_tokens(5) == found.tail_bound(5) == 500


@given(st.floats(0.02, 0.2), st.floats(-0.01, 0.03), st.integers(0, 1000))
def test_the_bound_holds_for_what_follows(noise, rate, seed):
    """Of the bounds for the next 6 steps, drawn from the same process, nearly all hold."""
    rng = np.random.default_rng(seed)
    means = growing(rate, 80, 0.02, seed)
    longest = [m * math.exp(1.0 + noise * float(rng.standard_normal())) for m in means]
    held = [
        max(longest[t : t + 6]) <= make_forecast(means[:t], longest[:t], CUT).tail_bound(6)
        for t in range(20, 74)
    ]
    assert np.mean(held) > 0.85


def test_a_crossing_is_the_first_step_whose_bound_is_beyond():
    means = growing(0.05, 20)
    found = make_forecast(means, [3 * m for m in means], CUT)
    limit = (found.tail_bound(3) + found.tail_bound(4)) / 2
    assert found.crossing_step(limit) == 4
    assert found.crossing_step(found.tail_bound(1) - 1) == 1
    assert found.crossing_step(CUT) is None


@pytest.mark.parametrize(("count", "value"), [(1, 0.0), (2, 0.589), (5, 1.180), (10, 1.547)])
def test_the_largest_of_some_draws(count, value):
    """Blom's approximation: of 2 draws 0.564, of 5 1.163, of 10 1.539 in exact tables."""
    assert expected_largest(count) == pytest.approx(value, abs=2e-3)


@given(
    st.integers(1, 50),
    st.integers(51, 5000),
    st.floats(0.0, 100.0),
    st.floats(0.1, 3.0),
    st.floats(1.0, 2.0),
)
def test_the_longest_row_that_fits_is_found(low, high, base, each, power):
    def num_bytes(tokens: int) -> float:
        return base + each * tokens**power

    limit = num_bytes((low + high) // 2)
    found = largest_length(num_bytes, limit, low, high)
    assert num_bytes(found) <= limit
    assert num_bytes(found + 1 + found // 128) > limit


def test_borders_of_what_fits():
    assert largest_length(float, 10.0, 1, 5) == 5
    assert largest_length(float, 0.5, 1, 5) == 0
    calls: list[int] = []

    def counted(tokens: int) -> float:
        calls.append(tokens)
        return float(tokens)

    assert largest_length(counted, 3000.5, 1, 100_000) == pytest.approx(3000, rel=0.01)
    assert len(calls) < 12


def test_settings_are_taken():
    means = growing(0.02, 30)
    longest = [3 * m for m in means]
    bold = make_forecast(means, longest, CUT, ForecastSettings(sigmas=0.0))
    shy = make_forecast(means, longest, CUT, ForecastSettings(sigmas=4.0))
    assert bold.tail_bound(6) < shy.tail_bound(6)
