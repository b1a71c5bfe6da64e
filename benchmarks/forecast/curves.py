"""Length curves and a histogram of lengths: from files, or made up."""

import csv
import dataclasses
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

UPDATES_PER_STEP = {"length_dapo_qwen2.5-32b": 16}
"""Of figures that count optimizer updates: 8,192 rows a step, 512 an update."""
TUNED = ("length_dapo_qwen2.5-32b", "length_orz-1.5b", "synthetic_slow")
HISTOGRAM = "servegen_deepseek-r1_output_tokens_hist.csv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Mean response lengths.

    Attributes:
      name: of the file without its ending.
      means: one a step, in tokens.
    """

    name: str
    means: Floats

    @property
    def tuned(self) -> bool:
        """Whether settings were chosen on it."""
        return self.name in TUNED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram:
    """Lengths by bins.

    Attributes:
      low, high: of each bin, in tokens.
      shares: of each.
    """

    low: Floats
    high: Floats
    shares: Floats

    def draw(self, mean: float, rows: int, rng: np.random.Generator) -> Floats:
        """Lengths of this shape whose expected mean is `mean`."""
        bins = rng.choice(len(self.shares), rows, p=self.shares)
        low, high = np.log(self.low[bins]), np.log(self.high[bins])
        return np.exp(rng.uniform(low, high)) * (mean / self.mean)

    @property
    def mean(self) -> float:
        """Expected length."""
        inside = (self.high - self.low) / np.log(self.high / self.low)
        return float(inside @ self.shares)


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror or error}") from None
    return list(csv.DictReader(x for x in lines if not x.startswith("#")))


def read_curves(directory: Path) -> list[Curve]:
    """The curves of a directory, one value a step."""
    paths = sorted(directory.glob("*.csv"))
    if not paths:
        raise SystemExit(f"--lengths: {directory} has no CSV file with step,mean_response_length")
    curves: list[Curve] = []
    for path in paths:
        rows = _rows(path)
        at = np.array([float(r["step"]) for r in rows]) / UPDATES_PER_STEP.get(path.stem, 1)
        values = np.array([float(r["mean_response_length"]) for r in rows])
        steps = np.arange(math.ceil(at[0]), math.floor(at[-1]) + 1)
        curves.append(Curve(name=path.stem, means=np.interp(steps, at, values)))
    return curves


def read_histogram(directory: Path) -> Histogram:
    """The histogram of a directory."""
    rows = _rows(directory / HISTOGRAM)
    shares = np.array([float(r["probability"]) for r in rows])
    return Histogram(
        low=np.array([max(float(r["lo_tokens"]), 1.0) for r in rows]),
        high=np.array([float(r["hi_tokens"]) for r in rows]),
        shares=shares / shares.sum(),
    )


def synthetic() -> tuple[list[Curve], Histogram]:
    """A slow and a faster growth with waves, and a log-normal histogram."""
    steps = np.arange(150)
    slow = 400.0 * np.exp(0.008 * steps + 0.05 * np.sin(steps / 9.0))
    fast = 300.0 * np.exp(2.0 / (1.0 + np.exp(-(steps - 70.0) / 15.0)))
    edges = np.exp(np.linspace(math.log(20.0), math.log(20_000.0), 81))
    middle = np.log(edges[1:] * edges[:-1]) / 2
    shares = np.exp(-0.5 * ((middle - math.log(600.0)) / 0.8) ** 2)
    histogram = Histogram(low=edges[:-1], high=edges[1:], shares=shares / shares.sum())
    curves = [Curve(name="synthetic_slow", means=slow), Curve(name="synthetic_fast", means=fast)]
    return curves, histogram
