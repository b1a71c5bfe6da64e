"""Conditions of a simulated cluster: the same for whoever asks, as scattered as they should be."""

import dataclasses

import numpy as np
import pytest

from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_SCORE, ACTOR_TRAIN
from nereus_jax.simulator.conditions import Conditions
from nereus_jax.simulator.curves import load_truth

SCATTER = load_truth().scatter


def conditions(seed: int = 0, **changes: float) -> Conditions:
    scatter = dataclasses.replace(SCATTER, **changes)
    return Conditions(scatter=scatter, nodes=64, devices_per_node=4, seed=seed)


def test_they_do_not_depend_on_who_asks_when() -> None:
    one, other = conditions(), conditions()
    late = one.device_factors(9, 1e5)
    for step in range(9):
        other.device_factors(step, 10.0 * step)
        other.stage_factor(step, ACTOR_TRAIN)
    np.testing.assert_array_equal(other.device_factors(9, 1e5), late)
    assert other.stage_factor(9, ACTOR_TRAIN) == one.stage_factor(9, ACTOR_TRAIN)
    assert other.network(1e5) == one.network(1e5)


def test_they_differ_by_seed_step_time_and_stage() -> None:
    one = conditions()
    assert (conditions(1).device_factors(0, 0.0) != one.device_factors(0, 0.0)).all()
    assert (one.device_factors(1, 0.0) != one.device_factors(0, 0.0)).all()
    assert one.network(0.0) != one.network(1e4)
    assert one.stage_factor(0, ACTOR_TRAIN) != one.stage_factor(1, ACTOR_TRAIN)
    assert one.stage_factor(0, ACTOR_TRAIN) != one.stage_factor(0, ACTOR_SCORE)


@pytest.mark.parametrize(
    ("stage", "name"),
    [(ACTOR_TRAIN, "train_std"), (ACTOR_SCORE, "score_std"), (ACTOR_GENERATE, "generate_std")],
)
def test_the_noise_of_stages(stage: object, name: str) -> None:
    logs = [np.log(conditions().stage_factor(step, stage)) for step in range(2000)]  # type: ignore[arg-type]
    assert np.std(logs) == pytest.approx(getattr(SCATTER, name), rel=0.08)
    assert abs(np.mean(logs)) < 0.005


def test_nodes_and_devices() -> None:
    """Devices of a node are alike, those of different nodes differ by as much as is said."""
    still = conditions(straggler_rate=0.0, drift_std=0.0, device_std=0.0, node_std=0.05)
    factors = still.device_factors(3, 0.0).reshape(64, 4)
    np.testing.assert_allclose(factors, factors[:, :1] * np.ones((1, 4)))
    assert np.std(np.log(factors[:, 0])) == pytest.approx(0.05, rel=0.25)
    np.testing.assert_array_equal(still.device_factors(4, 9e9), still.device_factors(3, 0.0))


def test_drift_is_slow_and_as_large_as_it_is_said() -> None:
    moving = conditions(
        straggler_rate=0.0, device_std=0.0, node_std=0.0, drift_std=0.1, drift_period_s=1000.0
    )
    times = np.arange(0.0, 40_000.0, 50.0)
    logs = np.log([moving.device_factors(0, t)[::4] for t in times])
    assert np.std(logs) == pytest.approx(0.1, rel=0.1)
    assert np.std(np.diff(logs, axis=0)) < 0.05


def test_stragglers_are_rare_and_slow() -> None:
    some = conditions(
        straggler_rate=0.05,
        straggler_factor=2.0,
        device_std=0.0,
        node_std=0.0,
        drift_std=0.0,
    )
    factors = np.concatenate([some.device_factors(s, 0.0)[::4] for s in range(200)])
    slow = factors[factors > 1.0]
    assert len(slow) / len(factors) == pytest.approx(0.05, rel=0.1)
    assert slow.mean() == pytest.approx(2.0, rel=0.1)
    assert (factors >= 1.0).all()
