"""Length curves, logs and histograms are read; batches have the mean of the curve."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.errors import ConfigError
from nereus_jax.planning.length_traces import (
    LengthCurve,
    LengthTrace,
    draw_lengths,
    lognormal_shape,
    parse_curve,
    parse_shape,
    read_lengths,
    read_shape,
    relative,
)
from nereus_jax.planning.workload import LengthHistogram


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_curve_is_read(tmp_path: Path) -> None:
    text = "# from a figure\nstep,mean_response_length\n0,400\n10,500\n20,900.5\n"
    curve = read_lengths(write(tmp_path / "curve.csv", text))
    assert curve.steps == (0.0, 10.0, 20.0)
    assert curve.at(5) == 450.0 and curve.at(-3) == 400.0 and curve.at(99) == 900.5
    assert curve.cut(5, 20).mean_tokens == (450.0, 500.0, 900.5)
    assert curve.cut(5, 20).steps == (0.0, 5.0, 15.0)
    np.testing.assert_allclose(curve.stretched(5), [400.0, 450.0, 500.0, 700.25, 900.5])
    assert curve.scaled(2.0).mean_tokens == (800.0, 1000.0, 1801.0)
    with pytest.raises(ConfigError, match="window"):
        curve.cut(0, 21)
    with pytest.raises(ConfigError, match="at least 1"):
        curve.stretched(0)


def test_a_log_is_read(tmp_path: Path) -> None:
    text = "iter,response_length_mean,response_length_max,t_gen\n1,192.4,1024,63\n2,198,900,57\n"
    curve = read_lengths(write(tmp_path / "log.csv", text))
    assert curve.steps == (0.0, 1.0)
    assert curve.mean_tokens == (192.4, 198.0)
    assert curve.longest_tokens == (1024.0, 900.0)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("# only\n", "line 1"),
        ("step,loss\n0,1\n", "line 1: 'step,loss' has no column"),
        ("step,mean_response_length\n0,400\n1,many\n", "line 3: '1,many'"),
        ("# note\nstep,mean_response_length\n5,400\n5,500\n", "line 4"),
        ("step,mean_response_length\n0,-3\n", "line 2"),
        ("step,mean_response_length\n0\n", "line 2"),
    ],
)
def test_another_format_is_refused_with_its_line(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_lengths(write(tmp_path / "x.csv", text))
    assert where in str(error.value)
    assert "known formats are CSV with the columns step,mean_response_length" in str(error.value)


def test_bins_are_read(tmp_path: Path) -> None:
    text = "# a service\nlo_tokens,hi_tokens,probability\n0,8,0.25\n8,16,0.5\n100,300,0.25\n"
    shape = read_shape(write(tmp_path / "bins.csv", text))
    assert shape.lengths == (4, 12, 200)
    assert shape.weights == (0.25, 0.5, 0.25)
    with pytest.raises(ConfigError, match="line 3"):
        read_shape(write(tmp_path / "y.csv", "lo_tokens,hi_tokens,probability\n0,8,1\n8,x,1\n"))
    with pytest.raises(ConfigError, match="all bins are empty"):
        read_shape(write(tmp_path / "z.csv", "lo_tokens,hi_tokens,probability\n0,8,0\n"))


def test_other_histograms_are_read_as_elsewhere(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path / "h.json", '{"lengths": [3, 9], "weights": [0.5, 0.5]}'))
    assert shape.lengths == (3, 9)


def test_a_shape_has_mean_one() -> None:
    shape = relative(LengthHistogram(lengths=(100, 1000), weights=(0.9, 0.1)))
    assert shape.mean() == pytest.approx(1.0)
    assert shape.max() / shape.min() == pytest.approx(10.0)
    # One row in a hundred thousand is no row of a batch.
    rare = relative(LengthHistogram(lengths=(10, 10**7), weights=(0.99999, 0.00001)))
    assert rare.max() == rare.min() == 1.0


@given(st.floats(20.0, 3000.0), st.integers(64, 4096), st.integers(0, 1000))
def test_batches_have_the_mean_of_the_curve(mean: float, cut: int, seed: int) -> None:
    """Also where the longest are cut off: the others make up for it, as far as there is room."""
    shape = relative(LengthHistogram(lengths=(1, 2, 5, 30), weights=(0.4, 0.4, 0.15, 0.05)))
    rows = draw_lengths(shape, mean, cut, 20_000, np.random.default_rng(seed))
    assert rows.min() >= 1 and rows.max() <= cut
    assert rows.mean() == pytest.approx(min(mean, cut), rel=0.06, abs=1.0)


def test_curves_that_are_none() -> None:
    for steps, means in (((), ()), ((0.0, 0.0), (1.0, 1.0)), ((0.0,), (0.0,)), ((0.0,), ())):
        with pytest.raises(ValueError):
            LengthCurve(name="x", steps=steps, mean_tokens=means)


def test_the_tail_in_one_number() -> None:
    shape = lognormal_shape(1.2)
    ratio = float(shape.quantile(0.95) / shape.quantile(0.5))
    assert ratio == pytest.approx(np.exp(1.2 * 1.645), rel=0.05)
    assert lognormal_shape(0.0).lengths == (1000,)
    with pytest.raises(ConfigError, match="at least 0"):
        lognormal_shape(-0.1)


def test_a_curve_in_three_numbers() -> None:
    curve = parse_curve("100:400:5")
    assert curve.at(0) == 100.0 and curve.at(2) == pytest.approx(200.0)
    assert curve.at(4) == pytest.approx(400.0) and curve.at(99) == pytest.approx(400.0)
    for text in ("100:0:5", "1:2:1", "a:b:c", "1:nan:5"):
        with pytest.raises(ConfigError, match="START:END:STEPS"):
            parse_curve(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_curve("nowhere.csv")


def test_a_shape_in_a_word(tmp_path: Path) -> None:
    assert parse_shape("lognormal=0.0").lengths == (1000,)
    assert parse_shape(str(write(tmp_path / "h.json", "[4, 4]"))).lengths == (4,)
    with pytest.raises(ConfigError, match="lognormal needs a number"):
        parse_shape("lognormal=much")


def test_the_lengths_of_a_step_are_the_same_whenever_it_is_run() -> None:
    trace = LengthTrace(curve=parse_curve("50:200:11"), shape=lognormal_shape(0.5))
    rows = trace.draw(3, 64, 150, seed=7)
    assert rows.max() <= 150 and rows.min() >= 1
    assert (trace.draw(3, 64, 150, seed=7) == rows).all()
    assert (trace.draw(4, 64, 150, seed=7) != rows).any()
