# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""How long responses are: a curve of means over steps, and the shape of a batch around its mean.

Known formats: CSV of a curve (`step,mean_response_length`), CSV logs of RL runs with a column
`response_length_mean`, and for shapes CSV bins (`lo_tokens,hi_tokens,probability`) or what
`LengthHistogram.from_file` reads. Lines that start with # are comments.
"""

import csv
import dataclasses
import functools
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.errors import ConfigError
from nereus_jax.planning.workload import LengthHistogram

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FORMATS = (
    "CSV with the columns step,mean_response_length, or a log of an RL run as CSV with a column "
    "response_length_mean"
)
SHAPE_FORMATS = (
    "CSV with the columns lo_tokens,hi_tokens,probability, CSV of length,weight, or JSON with "
    "lengths and weights"
)
BISECTIONS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthCurve:
    """Mean response length over the steps of a run.

    Attributes:
      name: of the trace.
      steps: ascending.
      mean_tokens: at each of them.
      longest_tokens: at each of them; empty: not known.
    """

    name: str
    steps: tuple[float, ...]
    mean_tokens: tuple[float, ...]
    longest_tokens: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.steps or len(self.steps) != len(self.mean_tokens):
            raise ValueError("a curve needs a mean at every step, and at least one")
        if any(a >= b for a, b in zip(self.steps, self.steps[1:], strict=False)):
            raise ValueError(f"steps must ascend, got {self.steps[:6]}")
        if not all(0.0 < x < math.inf for x in self.mean_tokens):
            raise ValueError("lengths must be above 0")

    def at(self, step: float) -> float:
        """Mean at a step, on straight lines; before the first and after the last as there."""
        return float(np.interp(step, self.steps, self.mean_tokens))

    def cut(self, start: float, stop: float) -> "LengthCurve":
        """A window of steps, whose start becomes step 0.

        Raises:
          ConfigError: it is empty or outside of the curve.
        """
        if not self.steps[0] <= start < stop <= self.steps[-1]:
            raise ConfigError(
                f"lengths {self.name}: a window must lie in steps {self.steps[0]:g} to "
                f"{self.steps[-1]:g} and not be empty, got {start:g} to {stop:g}"
            )
        inside = [x for x in self.steps if start < x < stop]
        steps = [start, *inside, stop]
        return LengthCurve(
            name=self.name,
            steps=tuple(x - start for x in steps),
            mean_tokens=tuple(self.at(x) for x in steps),
        )

    def stretched(self, steps: int) -> Floats:
        """[steps] means: the whole curve over so many steps."""
        if steps < 1:
            raise ConfigError(f"lengths {self.name}: steps must be at least 1, got {steps}")
        at = np.linspace(self.steps[0], self.steps[-1], steps)
        return np.interp(at, self.steps, self.mean_tokens)

    def scaled(self, factor: float) -> "LengthCurve":
        """All lengths times a factor."""
        return dataclasses.replace(
            self,
            mean_tokens=tuple(factor * x for x in self.mean_tokens),
            longest_tokens=tuple(factor * x for x in self.longest_tokens),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthTrace:
    """The lengths of every batch of a run.

    Attributes:
      curve: their means.
      shape: how they lie around it.
    """

    curve: LengthCurve
    shape: LengthHistogram

    @functools.cached_property
    def _relative(self) -> Floats:
        return relative(self.shape)

    def draw(self, step: int, count: int, cut_tokens: int, seed: int) -> Ints:
        """[count] lengths of a step's rows, the same whenever it is run."""
        rng = np.random.default_rng([seed, step])
        return draw_lengths(self._relative, self.curve.at(step), cut_tokens, count, rng)


def read_lengths(path: str | Path) -> LengthCurve:
    """Reads a curve, or the curve in a log; rows of a log are numbered from 0.

    Raises:
      ConfigError: it cannot be read, or its format is not known; the message has the formats and
        the first line that fails.
    """
    path = Path(path)
    header, rows = _table(path, FORMATS)
    mean = next((c for c in ("mean_response_length", "response_length_mean") if c in header), "")
    if not mean:
        _fail(path, rows[0][0] - 1, ",".join(header), "has no column of mean lengths", FORMATS)
    step_column = header.index("step") if "step" in header else None
    longest = header.index("response_length_max") if "response_length_max" in header else None
    steps: list[float] = []
    means: list[float] = []
    most: list[float] = []
    for index, (number, row) in enumerate(rows):
        try:
            step = float(index) if step_column is None else float(row[step_column])
            tokens = float(row[header.index(mean)])
            if not 0.0 < tokens < math.inf or (steps and step <= steps[-1]):
                raise ValueError(f"step {step:g} with {tokens:g} tokens")
            if longest is not None:
                most.append(float(row[longest]))
        except (ValueError, IndexError) as error:
            _fail(path, number, ",".join(row), f"is no row of it ({error})", FORMATS)
        else:
            steps.append(step)
            means.append(tokens)
    return LengthCurve(
        name=path.stem,
        steps=tuple(steps),
        mean_tokens=tuple(means),
        longest_tokens=tuple(most),
    )


def read_shape(path: str | Path) -> LengthHistogram:
    """Reads a histogram of lengths; of bins their middles count.

    Raises:
      ConfigError: its format is not known.
      DataError: it is no histogram.
    """
    path = Path(path)
    text = read_text(path)
    lines = [x for x in text.splitlines() if x.strip() and not x.startswith("#")]
    if not lines or not lines[0].startswith("lo_tokens"):
        return LengthHistogram.from_file(path)
    header, rows = _table(path, SHAPE_FORMATS)
    if header[:3] != ["lo_tokens", "hi_tokens", "probability"]:
        _fail(path, rows[0][0] - 1, ",".join(header), "has other columns", SHAPE_FORMATS)
    shares: dict[int, float] = {}
    for number, row in rows:
        try:
            middle = max(round((float(row[0]) + float(row[1])) / 2.0), 1)
            share = float(row[2])
            if not 0.0 <= share < math.inf:
                raise ValueError(f"probability {share:g}")
        except (ValueError, IndexError) as error:
            _fail(path, number, ",".join(row), f"is no bin ({error})", SHAPE_FORMATS)
        else:
            shares[middle] = shares.get(middle, 0.0) + share
    total = sum(shares.values())
    if total <= 0.0:
        _fail(path, rows[0][0], ",".join(rows[0][1]), "all bins are empty", SHAPE_FORMATS)
    lengths = sorted(n for n, w in shares.items() if w > 0.0)
    return LengthHistogram(
        lengths=tuple(lengths), weights=tuple(shares[n] / total for n in lengths)
    )


def read_text(path: Path) -> str:
    """The content of a trace file.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"trace: {path} cannot be read: {reason}; give another path") from None


def _table(path: Path, formats: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Header, and rows with the numbers of their lines."""
    text = read_text(path)
    lines = [(i, x) for i, x in enumerate(text.splitlines(), 1) if x.strip()]
    lines = [(i, x) for i, x in lines if not x.startswith("#")]
    if len(lines) < 2:
        _fail(path, lines[0][0] if lines else 1, lines[0][1] if lines else "", "is all", formats)
    parsed = [(i, next(csv.reader([x]))) for i, x in lines]
    return [c.strip() for c in parsed[0][1]], parsed[1:]


def _fail(path: Path, line: int, text: str, why: str, formats: str) -> None:
    shown = text if len(text) <= 60 else text[:57] + "..."
    raise ConfigError(
        f"length trace: {path}, line {line}: {shown!r} {why}; known formats are {formats}"
    )


def lognormal_shape(sigma: float) -> LengthHistogram:
    """Lengths whose logarithm is normal: the long tail in one number.

    Args:
      sigma: standard deviation of the logarithm; 1.2 has p95 / p50 = 7.2, as the outputs of a
        reasoning model's traffic (alibaba/ServeGen, deepseek-r1).
    """
    if not 0.0 <= sigma < math.inf:
        raise ConfigError(f"lognormal shape: sigma must be at least 0, got {sigma:g}")
    rng = np.random.default_rng(0)
    values = np.exp(sigma * rng.standard_normal(1 << 14))
    quantiles = np.quantile(values, (np.arange(512) + 0.5) / 512)
    return LengthHistogram.from_samples(int(x) for x in np.round(1000.0 * quantiles))


def parse_curve(text: str) -> LengthCurve:
    """A curve as a configuration has it: START:END:STEPS (tokens that grow evenly in their
    logarithm), or a file.

    Raises:
      ConfigError: it is neither.
    """
    parts = text.split(":")
    if len(parts) != 3 or Path(text).exists():
        return read_lengths(Path(text).expanduser())
    try:
        start, end, steps = float(parts[0]), float(parts[1]), int(parts[2])
        if not all(0.0 < x < math.inf for x in (start, end)) or steps < 2:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"length trace: {text!r} is no START:END:STEPS with tokens above 0 and at least 2 "
            f"steps; write 100:2000:500, or give a file"
        ) from None
    at = np.arange(steps)
    return LengthCurve(
        name=text,
        steps=tuple(float(i) for i in at),
        mean_tokens=tuple(float(x) for x in start * (end / start) ** (at / (steps - 1))),
    )


def parse_shape(text: str) -> LengthHistogram:
    """A shape as a configuration has it: lognormal=SIGMA, or a file.

    Raises:
      ConfigError, DataError: it is neither.
    """
    name, equals, sigma = text.partition("=")
    if name.strip() != "lognormal" or not equals:
        return read_shape(Path(text).expanduser())
    try:
        return lognormal_shape(float(sigma))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"tail: lognormal needs a number, got {sigma!r}") from None


def relative(histogram: LengthHistogram) -> Floats:
    """[1024] lengths over their mean, ascending: the quantiles of a batch's shape.

    What is rarer than one row in 2,048 is no part of it.
    """
    values = histogram.quantile((np.arange(1024) + 0.5) / 1024)
    return values / values.mean()


def draw_lengths(
    shape: Floats, mean_tokens: float, cut_tokens: int, count: int, rng: np.random.Generator
) -> Ints:
    """[count] lengths of a batch with a mean, none longer than the cut.

    What is cut off is made up for by the others, so that the mean that is expected is the curve's.

    Args:
      shape: [K] quantiles over the mean.
      mean_tokens: of the batch, as expected.
      cut_tokens: where responses end.
      count: rows.
      rng: draws.
    """
    scale = _scale(shape, min(mean_tokens, float(cut_tokens)), cut_tokens)
    drawn = scale * shape[rng.integers(0, len(shape), count)]
    return np.clip(np.round(drawn), 1, cut_tokens).astype(np.int64)


def _scale(shape: Floats, mean_tokens: float, cut_tokens: int) -> float:
    """What to multiply a shape with so that its mean, cut, is as wanted."""
    if shape.max() * mean_tokens <= cut_tokens:
        return mean_tokens
    low, high = mean_tokens, mean_tokens
    while np.minimum(high * shape, cut_tokens).mean() < mean_tokens and high < 1e9:
        high *= 2.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        if np.minimum(middle * shape, cut_tokens).mean() < mean_tokens:
            low = middle
        else:
            high = middle
    return high
