"""Signals, references and H_x."""

import math

import pytest

from nereus_jax.control.monitor import (
    EFFICIENCY,
    LENGTH_MEAN,
    LENGTH_TAIL,
    PEAK_MEMORY,
    POOL,
    Prior,
    Signal,
    Thresholds,
    crossings,
    horizon,
    with_crossings,
    with_first_references,
    with_references,
)

GEMM = EFFICIENCY + "gemm"


def test_a_signal_triggers_beyond_its_threshold_in_either_direction():
    signals = with_first_references({}, {LENGTH_MEAN: 100.0, GEMM: 0.5, PEAK_MEMORY: 10.0}, 0)
    limits = Thresholds(length=0.30, efficiency=0.25, memory=0.15)

    def crossed(**values):
        named = {LENGTH_MEAN: 100.0, GEMM: 0.5, PEAK_MEMORY: 10.0} | values
        return crossings(signals, named, limits)

    assert crossed() == [] and crossed(**{LENGTH_MEAN: 130.0}) == []  # equal is not beyond
    assert crossed(**{LENGTH_MEAN: 130.1}) == [LENGTH_MEAN]
    assert crossed(**{LENGTH_MEAN: 69.9, GEMM: 0.37}) == [LENGTH_MEAN, GEMM]
    assert crossed(**{PEAK_MEMORY: 11.6}) == [PEAK_MEMORY]
    assert crossings(signals, {LENGTH_TAIL: 5.0}, limits) == []  # it has no reference yet


def test_references_are_new_after_a_replan_and_old_signals_keep_their_intervals():
    signals = with_first_references({}, {LENGTH_MEAN: 100.0}, 0)
    signals = with_crossings(signals, [LENGTH_MEAN], 10, 0.5, Prior.ELAPSED)
    signals = with_references(signals, {LENGTH_MEAN: 140.0})
    assert signals[LENGTH_MEAN].reference == 140.0 and signals[LENGTH_MEAN].interval == 10.0
    assert not crossings(signals, {LENGTH_MEAN: 140.0}, Thresholds())  # lasting, but known


def test_the_horizon_as_in_the_paper():
    """H = 1 before the first interval, then the average of the steps between crossings."""
    signals = with_first_references({}, {LENGTH_MEAN: 1.0}, 0)
    seen = []
    for step in (12, 20, 36):
        signals = with_crossings(signals, [LENGTH_MEAN], step, 0.5, Prior.PAPER)
        seen.append(horizon(signals, [LENGTH_MEAN]))
    assert seen == [1.0, 8.0, 12.0]  # 8; 0.5 * 8 + 0.5 * 16


def test_the_horizon_with_the_prior():
    """The steps before the first crossing are an interval like any other."""
    signals = with_first_references({}, {LENGTH_MEAN: 1.0}, 4)
    seen = []
    for step in (16, 24, 40):
        signals = with_crossings(signals, [LENGTH_MEAN], step, 0.5, Prior.ELAPSED)
        seen.append(horizon(signals, [LENGTH_MEAN]))
    assert seen == [12.0, 10.0, 13.0]


def test_the_smallest_horizon_of_the_signals_that_triggered_counts():
    signals = {
        LENGTH_MEAN: Signal(reference=1.0, since=0, interval=20.0),
        LENGTH_TAIL: Signal(reference=1.0, since=0, interval=8.0),
        GEMM: Signal(reference=1.0, since=0, interval=2.0),
    }
    assert horizon(signals, [LENGTH_MEAN, LENGTH_TAIL]) == 8.0
    assert horizon(signals, []) == 2.0  # by period: whatever is known
    assert horizon({}, []) == 1.0


def test_a_signal_without_a_value_counts_from_the_start():
    signals = with_crossings({}, [POOL], 9, 0.5, Prior.ELAPSED)
    assert signals[POOL].interval == 9.0
    signals = with_crossings(signals, [POOL], 9, 0.5, Prior.ELAPSED)
    assert signals[POOL].interval == 5.0  # two changes at one step: an interval of one


@pytest.mark.parametrize(
    "signal",
    [Signal(reference=2.5, since=3), Signal(reference=1.0, since=0, crossed=4, interval=7.5)],
)
def test_signals_survive_json(signal):
    assert Signal.from_json(signal.to_json()) == signal


def test_a_reference_of_zero_is_no_division_by_zero():
    assert math.isfinite(Signal(reference=0.0, since=0).deviation(1.0))
