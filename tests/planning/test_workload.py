"""Length histograms and the work of a step."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.errors import ConfigError, DataError
from nereus_jax.planning.workload import LengthHistogram, Workload

SAMPLES = st.lists(st.integers(1, 500), min_size=1, max_size=60)


def workload(**changes: object) -> Workload:
    fields: dict[str, object] = {
        "prompts": 8,
        "samples_per_prompt": 2,
        "prompt_lengths": LengthHistogram.constant(10),
        "response_lengths": LengthHistogram(lengths=(4, 20), weights=(0.5, 0.5)),
        "max_response_tokens": 30,
        "minibatch_size": 6,
        "epochs": 2,
    }
    return Workload(**(fields | changes))  # type: ignore[arg-type]


@given(SAMPLES)
def test_a_histogram_of_samples_says_what_the_samples_do(samples: list[int]) -> None:
    histogram = LengthHistogram.from_samples(samples)
    assert histogram.mean == pytest.approx(np.mean(samples))
    assert histogram.mean_square == pytest.approx(np.mean(np.square(samples)))
    assert histogram.max == max(samples)
    tokens = np.arange(0, 502, dtype=np.float64)
    alive = [(np.asarray(samples) > t).mean() for t in tokens]
    np.testing.assert_allclose(histogram.alive(tokens), alive, atol=1e-12)
    # The area under the curve of the living is the mean.
    assert histogram.alive(tokens).sum() == pytest.approx(histogram.mean)


@given(SAMPLES, st.floats(0, 1))
def test_a_quantile_is_the_smallest_length_that_covers_the_share(
    samples: list[int], q: float
) -> None:
    histogram = LengthHistogram.from_samples(samples)
    found = histogram.quantile(q)
    covered = (np.asarray(samples) <= found).mean()
    assert covered >= q - 1e-9
    below = [n for n in samples if n < found]
    assert not below or (np.asarray(samples) <= max(below)).mean() < q + 1e-9


@pytest.mark.parametrize(
    ("lengths", "weights", "message"),
    [
        ((1, 2), (0.5, 0.4), r"weights must add up to 1, got 0.9; divide each by that"),
        ((2, 1), (0.5, 0.5), r"positive and ascending, got \(2, 1\)"),
        ((0, 1), (0.5, 0.5), r"positive and ascending, got \(0, 1\)"),
        ((1, 2), (1.5, -0.5), r"weights must be at least 0, got \(1.5, -0.5\)"),
        ((1,), (0.5, 0.5), r"got 1 lengths and 2 weights"),
        ((), (), r"at least one, got 0 lengths"),
    ],
)
def test_what_is_no_histogram(
    lengths: tuple[int, ...], weights: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LengthHistogram(lengths=lengths, weights=weights)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h.json", '{"lengths": [4, 20], "weights": [0.25, 0.75]}'),
        ("h.json", "[4, 20, 20, 20]"),
        ("h.csv", "length,share\n4,0.25\n20,0.75\n"),
        ("h.csv", "# of last week\n4,1\n20,3\n"),
    ],
)
def test_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    histogram = LengthHistogram.from_file(tmp_path / name)
    assert histogram.lengths == (4, 20)
    assert histogram.weights == pytest.approx((0.25, 0.75))


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("h.json", '{"lengths": [4]}', DataError, r"is no histogram \('weights'\)"),
        ("h.json", "[4.5]", DataError, r"4.5 is not a whole number"),
        ("h.csv", "4,x\n", DataError, r"is no histogram"),
        ("h.csv", "4,0.5\n20,0.4\n", ConfigError, r"add up to 1, got 0.9"),
        ("h.json", "[]", ConfigError, r"no sample was given"),
    ],
)
def test_files_that_are_wrong(
    tmp_path: Path, name: str, text: str, error: type[Exception], message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        LengthHistogram.from_file(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent.csv cannot be read: No such file"):
        LengthHistogram.from_file(tmp_path / "absent.csv")


def test_the_work_of_a_step() -> None:
    work = workload()
    assert work.rows == 16
    assert work.row_tokens == 40
    assert work.mean_row_tokens == 22
    assert work.mean_square_row_tokens == pytest.approx((14**2 + 30**2) / 2)
    assert work.updates == 2 * 3  # 16 rows in minibatches of 6, twice
    assert workload(minibatch_size=100, epochs=1).updates == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 0}, "prompts must be at least 1, got 0"),
        ({"epochs": -1}, "epochs must be at least 1, got -1"),
        ({"max_response_tokens": 19}, "responses of 20 tokens exceed max_response_tokens 19"),
    ],
)
def test_a_step_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workload(**changes)
