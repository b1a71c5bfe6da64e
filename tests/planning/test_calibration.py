"""Efficiencies are found again from seconds, outliers and first calls do no harm."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.errors import ConfigError
from nereus_jax.planning.calibration import (
    CLASSES,
    COMMON_STD,
    PRIOR,
    Efficiencies,
    OperationClass,
    fit,
    observe,
)
from nereus_jax.planning.calibration_record import (
    CalibrationError,
    Prediction,
    load_efficiencies,
    save_efficiencies,
)

GEMM, ATTENTION, MEMORY = OperationClass.GEMM, OperationClass.ATTENTION, OperationClass.MEMORY
TRUTH = {GEMM: 0.5, ATTENTION: 0.2, MEMORY: 0.8}
VERSIONS = {"jax": "0.10.2"}


def work(rng: np.random.Generator, count: int) -> dict[OperationClass, np.ndarray]:
    """Seconds at the peak of different mixtures."""
    return {c: rng.uniform(0.0, 3.0, count) for c in TRUTH}


def seconds(
    ideal: dict[OperationClass, np.ndarray], efficiencies: Efficiencies
) -> dict[OperationClass, np.ndarray]:
    return {c: s / efficiencies[c] for c, s in ideal.items()}


def true_seconds(ideal: dict[OperationClass, np.ndarray]) -> np.ndarray:
    return np.sum([s / TRUTH[c] for c, s in ideal.items()], axis=0)


def learn(
    known: Efficiencies, ideal: dict[OperationClass, np.ndarray], measured: np.ndarray
) -> Efficiencies:
    for k, measured_s in enumerate(measured):
        one = {c: float(s[k] / known[c]) for c, s in ideal.items()}
        known = observe(known, one, float(measured_s))
    return known


def test_the_prior_is_a_distribution_over_all_classes() -> None:
    prior = Efficiencies.prior()
    assert np.linalg.eigvalsh(prior.covariance).min() > 0
    for operation in CLASSES:
        value, std = PRIOR[operation]
        assert prior[operation] == pytest.approx(value)
        assert prior.log_std(operation) == pytest.approx(math.hypot(std, COMMON_STD))


def test_one_class_moves_to_what_was_measured() -> None:
    """By hand: gain = v / (v + noise^2) of the logarithm."""
    prior = Efficiencies.prior()
    variance = prior.log_std(GEMM) ** 2 + 0.003**2
    learned = observe(prior, {GEMM: 2.0}, 2.4, noise=0.1)
    moved = variance / (variance + 0.01) * math.log(1.2)
    assert math.log(prior[GEMM] / learned[GEMM]) == pytest.approx(moved)
    assert learned.log_std(GEMM) == pytest.approx(0.1 * math.sqrt(variance / (variance + 0.01)))
    # What all classes share moves the others too, by their covariance with it.
    other = math.log(prior[ATTENTION] / learned[ATTENTION])
    assert other == pytest.approx(COMMON_STD**2 / (variance + 0.01) * math.log(1.2))


@pytest.mark.parametrize("how", ["fit", "observe"])
def test_efficiencies_are_found_again(how: str) -> None:
    rng = np.random.default_rng(0)
    ideal = work(rng, 200)
    measured = true_seconds(ideal) * np.exp(rng.normal(0, 0.02, 200))
    prior = Efficiencies.prior()
    if how == "fit":
        learned = fit(lambda e: seconds(ideal, e), measured, noise=0.02)
    else:
        learned = learn(prior, ideal, measured)
    for operation, value in TRUTH.items():
        assert learned[operation] == pytest.approx(value, rel=0.05)
        assert learned.log_std(operation) < prior.log_std(operation) / 4
    assert learned.observations.sum() == pytest.approx(200)


def test_a_fit_finds_what_lies_far_from_the_prior() -> None:
    ideal = {GEMM: np.array([1.0, 2.0, 3.0])}
    learned = fit(lambda e: seconds(ideal, e), ideal[GEMM] / 0.02, noise=0.02)
    assert learned[GEMM] == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("how", ["fit", "observe"])
def test_outliers_do_little(how: str) -> None:
    rng = np.random.default_rng(1)
    ideal = work(rng, 200)
    measured = true_seconds(ideal) * np.exp(rng.normal(0, 0.02, 200))
    measured[7::20] *= 20.0
    if how == "fit":
        learned = fit(lambda e: seconds(ideal, e), measured, noise=0.02)
    else:
        learned = learn(Efficiencies.prior(), ideal, measured)
    predicted = np.sum(list(seconds(ideal, learned).values()), axis=0)
    good = np.arange(200) % 20 != 7
    # Without the cut of outliers their mean, log(20) / 20, would be the bias: 16 %.
    assert np.abs(predicted / measured - 1)[good].mean() < 0.05


@given(st.floats(0.01, 100.0))
def test_the_first_call_after_a_compile_never_counts(measured_s: float) -> None:
    prior = Efficiencies.prior()
    assert observe(prior, {GEMM: 1.0}, measured_s, first_after_compile=True) is prior


@pytest.mark.parametrize("measured_s", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_time_changes_nothing(measured_s: float) -> None:
    prior = Efficiencies.prior()
    assert observe(prior, {GEMM: 1.0}, measured_s) is prior


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.01, 5.0), st.floats(0.1, 50)), max_size=30)
)
def test_observing_keeps_a_covariance(steps: list[tuple[float, float, float]]) -> None:
    known = Efficiencies.prior()
    for gemm_s, memory_s, measured_s in steps:
        known = observe(known, {GEMM: gemm_s, MEMORY: memory_s}, measured_s)
    assert (known.covariance == known.covariance.T).all()
    assert np.linalg.eigvalsh(known.covariance).min() > 0


def test_drift_is_followed() -> None:
    rng = np.random.default_rng(2)
    known = Efficiencies.prior()
    for k in range(600):
        true = 0.6 if k < 300 else 0.45
        one = {GEMM: 1.0 / known[GEMM]}
        known = observe(known, one, float(np.exp(rng.normal(0, 0.02))) / true)
    assert known[GEMM] == pytest.approx(0.45, rel=0.03)


def test_the_error_of_predictions() -> None:
    """By hand: errors 0.5 and -0.2; the classes' shares are (1, 0) and (0.25, 0.75)."""
    predictions = [
        Prediction(seconds={GEMM: 3.0}, measured_s=2.0),
        Prediction(seconds={GEMM: 1.0, MEMORY: 3.0}, measured_s=5.0),
    ]
    error = CalibrationError.of(predictions)
    assert error.mape == pytest.approx(0.35)
    assert error.max_error == pytest.approx(0.5)
    assert error.bias == pytest.approx({GEMM: (0.5 - 0.2 * 0.25) / 1.25, MEMORY: -0.2})
    assert error.count == 2


def learned_file(path: Path) -> Efficiencies:
    known = observe(Efficiencies.prior(), {GEMM: 1.0, MEMORY: 0.5}, 2.0)
    save_efficiencies(path, known, "h100", VERSIONS)
    return known


def test_a_calibration_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    known = learned_file(path)
    again = load_efficiencies(path, "h100", VERSIONS)
    np.testing.assert_allclose(again.log_values, known.log_values, rtol=1e-12)
    np.testing.assert_array_equal(again.covariance, known.covariance)
    np.testing.assert_array_equal(again.observations, known.observations)
    assert list(tmp_path.iterdir()) == [path]


def test_other_hardware_is_refused_with_both_names(tmp_path: Path) -> None:
    learned_file(tmp_path / "c.json")
    with pytest.raises(ConfigError, match=r"was learned on h100, this is a100-80gb"):
        load_efficiencies(tmp_path / "c.json", "a100-80gb", VERSIONS)


def test_other_versions_make_it_less_sure(tmp_path: Path) -> None:
    known = learned_file(tmp_path / "c.json")
    again = load_efficiencies(tmp_path / "c.json", "h100", {"jax": "0.11.0"})
    assert again[GEMM] == pytest.approx(known[GEMM])
    assert again.log_std(GEMM) > known.log_std(GEMM)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"gemm": 0.', '"gemm": -0.'),
        ('"log_covariance"', '"covariance"'),
        ('"launch": ', '"lunch": '),
        ("{", "["),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "c.json"
    learned_file(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=r"c.json is no calibration file"):
        load_efficiencies(path, "h100", VERSIONS)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c.json cannot be read: No such file"):
        load_efficiencies(tmp_path / "c.json", "h100", VERSIONS)


def test_replacing_values_leaves_the_rest() -> None:
    prior = Efficiencies.prior()
    changed = prior.replace({GEMM: 0.9})
    assert changed[GEMM] == pytest.approx(0.9) and changed[MEMORY] == prior[MEMORY]
    assert dataclasses.replace(changed, log_values=prior.log_values)[GEMM] == prior[GEMM]
