"""The critical path of a step, and what a weight edge takes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    CRITIC_SCORE,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
    REWARD_SCORE,
    ModelStage,
)
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.calibration import Efficiencies, OperationClass
from nereus_jax.planning.cost_step import edge_seconds, step_seconds
from nereus_jax.planning.cost_terms import Prices
from nereus_jax.planning.hardware import load_hardware

PPO = policy_gradient("ppo", reward_model=True, reference=True, recompute_old_logprobs=False)
SECONDS = {
    ACTOR_GENERATE: 10.0,
    REFERENCE_SCORE: 2.0,
    CRITIC_SCORE: 3.0,
    REWARD_SCORE: 1.5,
    ACTOR_TRAIN: 6.0,
    CRITIC_TRAIN: 5.0,
}
ALL, LEFT, RIGHT = range(8), range(4), range(4, 8)


def test_shared_devices_serialize() -> None:
    found = step_seconds(PPO, SECONDS, dict.fromkeys(SECONDS, ALL))
    assert found.step_s == pytest.approx(sum(SECONDS.values()))
    assert sum(found.waves_s) == pytest.approx(found.step_s)


def test_disjoint_devices_run_at_the_same_time() -> None:
    devices: dict[ModelStage, range] = {
        ACTOR_GENERATE: ALL,
        REFERENCE_SCORE: LEFT,
        CRITIC_SCORE: RIGHT,
        REWARD_SCORE: LEFT,
        ACTOR_TRAIN: LEFT,
        CRITIC_TRAIN: RIGHT,
    }
    found = step_seconds(PPO, SECONDS, devices)
    # Scores: 2 + 1.5 on the left beside 3 on the right; training: 6 beside 5.
    assert found.step_s == pytest.approx(10 + 3.5 + 6)
    spans = {s.name: (s.start_s, s.end_s) for s in found.spans}
    assert spans["critic-SCORE"] == (10.0, 13.0)
    assert spans["reward-SCORE"] == (12.0, 13.5)
    assert spans["critic-TRAIN"] == (13.5, 18.5)


def test_weight_edges_come_first() -> None:
    edges = dict(zip(PPO.weight_edges, (0.5, 0.25), strict=True))
    found = step_seconds(PPO, SECONDS, dict.fromkeys(SECONDS, ALL), edges)
    assert found.edges_s == 0.75
    assert found.spans[0].start_s == 0.75
    assert found.step_s == pytest.approx(0.75 + sum(SECONDS.values()))


def test_a_model_stage_may_be_called_twice() -> None:
    remax = policy_gradient(
        "remax", reward_model=False, reference=False, recompute_old_logprobs=False
    )
    found = step_seconds(remax, SECONDS, dict.fromkeys(SECONDS, ALL))
    assert found.step_s == pytest.approx(2 * 10.0 + 6.0)


DEVICES = st.sets(st.integers(0, 5), min_size=1)


@given(
    st.lists(DEVICES, min_size=6, max_size=6), st.lists(st.floats(0.1, 9.0), min_size=6, max_size=6)
)
def test_no_device_does_two_things_at_once_and_no_wave_waits_in_vain(
    placed: list[set[int]], seconds: list[float]
) -> None:
    devices = dict(zip(SECONDS, placed, strict=True))
    times = dict(zip(SECONDS, seconds, strict=True))
    found = step_seconds(PPO, times, devices)
    by_name = {s.name: s for s in found.spans}
    for a, b in itertools.combinations(SECONDS, 2):
        if devices[a] & devices[b]:
            one, two = by_name[str(a)], by_name[str(b)]
            assert one.end_s <= two.start_s + 1e-9 or two.end_s <= one.start_s + 1e-9
    stages = [[c.name for c in wave if c.name in by_name] for wave in PPO.waves()]
    for wave, wave_s in zip(stages, found.waves_s, strict=True):
        busy = [
            sum(times[s] for s in SECONDS if str(s) in wave and device in devices[s])
            for device in range(6)
        ]
        assert max(busy) - 1e-9 <= wave_s <= sum(times[s] for s in SECONDS if str(s) in wave) + 1e-9


def test_an_edge_brings_what_is_lacking() -> None:
    prices = Prices(
        hardware=load_hardware("h100"), efficiencies=Efficiencies.prior(), dtype="bfloat16"
    )
    same = np.array([True, False, True])
    found = edge_seconds(
        16e9, prices, np.array([1, 8, 4]), same_node=same, resident=np.array([0.0, 0.0, 1.0])
    )
    intra = (4e-6 + 16e9 / 450e9) / Efficiencies.prior()[OperationClass.P2P_INTRA]
    inter = (12e-6 + 2e9 / 50e9) / Efficiencies.prior()[OperationClass.P2P_INTER]
    np.testing.assert_allclose(found[OperationClass.P2P_INTRA], [intra, 0.0, 0.0])
    np.testing.assert_allclose(found[OperationClass.P2P_INTER], [0.0, inter, 0.0])
