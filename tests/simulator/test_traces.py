"""Supply and lengths become what a run goes through; nodes come and go as the numbers say."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.errors import ConfigError
from nereus_jax.planning.length_traces import LengthCurve
from nereus_jax.planning.workload import LengthHistogram
from nereus_jax.simulator.supply import Supply, constant_supply
from nereus_jax.simulator.traces import (
    DriftTrace,
    drift_trace,
    nodes_that_change,
    synthetic_lengths,
    synthetic_supply,
)

CURVE = LengthCurve(name="curve", steps=(0.0, 9.0), mean_tokens=(100.0, 1000.0))
SUPPLY = Supply(
    name="supply", times_s=(0.0, 250.0, 320.0, 390.0, 900.0), nodes=(4, 2, 3, 2, 4), end_s=2000.0
)


def joined(**changes: object) -> DriftTrace:
    settings = {"steps": 10, "seconds_per_step": 100.0} | changes
    return drift_trace(SUPPLY, CURVE, LengthHistogram.constant(7), **settings)  # type: ignore[arg-type]


def test_seconds_become_steps() -> None:
    """Three changes fall into steps 2 and 3; of those in step 3 the last one counts, and it is
    none: there were 2 nodes before."""
    trace = joined()
    assert [(c.at, c.nodes) for c in trace.changes] == [(2.5, 2), (9.5, 4)]
    assert trace.by_step and trace.nodes == 4 and trace.most_nodes == 4
    np.testing.assert_allclose(trace.mean_tokens, np.linspace(100.0, 1000.0, 10))
    assert joined(steps=9).changes == trace.changes[:1]


def test_or_stay_seconds() -> None:
    trace = joined(seconds_per_step=0.0)
    assert [(c.at, c.nodes) for c in trace.changes] == [(250, 2), (320, 3), (390, 2), (900, 4)]
    assert not trace.by_step


def test_what_is_not_possible() -> None:
    with pytest.raises(ConfigError, match="steps must be at least 1"):
        joined(steps=0)
    with pytest.raises(ConfigError, match="at least 0"):
        joined(notice_s=-1.0)
    with pytest.raises(ConfigError, match=r"4 nodes at step 0, but the cluster has 3; scale"):
        joined().check_nodes(3)
    grows = dataclasses.replace(joined(), nodes=1)
    with pytest.raises(ConfigError, match=r"4 nodes at step 9.5, but the cluster has 3"):
        grows.check_nodes(3)
    with pytest.raises(ConfigError, match="at least 1 node, got 0"):
        drift_trace(constant_supply(0, 10.0), CURVE, LengthHistogram.constant(7), steps=3)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=20), st.integers(0, 99))
def test_nodes_are_as_many_as_the_trace_says(counts: list[int], seed: int) -> None:
    """None leaves that is not there, none comes that is, and all numbers are met."""
    supply = constant_supply(max(counts[0], 1), 10.0)
    for count in counts[1:]:
        supply = supply.then(constant_supply(count, 10.0))
    trace = drift_trace(supply, CURVE, LengthHistogram.constant(7), steps=4)
    first, changes = nodes_that_change(trace, 12, seed)
    assert (first, changes) == nodes_that_change(trace, 12, seed)
    there = set(first)
    assert len(there) == trace.nodes
    assert [at for at, _, _ in changes] == [c.at for c in trace.changes]
    for (_, going, coming), change in zip(changes, trace.changes, strict=True):
        assert there.issuperset(going) and there.isdisjoint(coming)
        there = there.difference(going).union(coming)
        assert len(there) == change.nodes and there <= set(range(12))


def test_which_nodes_go_is_drawn() -> None:
    trace = joined()
    assert len({nodes_that_change(trace, 8, seed)[1][0][1] for seed in range(20)}) > 3


def test_synthetic_traces() -> None:
    for seed in range(20):
        supply = synthetic_supply(seed, 8, least=2)
        assert supply == synthetic_supply(seed, 8, least=2)
        assert min(supply.nodes) >= 2 and supply.most <= 8
        curve = synthetic_lengths(seed, start_tokens=500.0, end_tokens=4000.0)
        assert curve == synthetic_lengths(seed, start_tokens=500.0, end_tokens=4000.0)
        assert min(curve.mean_tokens) > 250.0 and max(curve.mean_tokens) < 8000.0
    assert len({synthetic_supply(seed, 8).nodes for seed in range(20)}) > 15
    grown = [synthetic_lengths(s).mean_tokens[-1] / 500.0 for s in range(20)]
    assert np.median(grown) > 4.0
    for wrong in ({"nodes": 0}, {"nodes": 2, "least": 3}, {"nodes": 2, "samples": 0}):
        with pytest.raises(ConfigError):
            synthetic_supply(0, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="steps must be at least 1"):
        synthetic_lengths(0, steps=0)
