# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What a step of RL post-training works on: how many rows, and how long they are.

Lengths are histograms, not means: decode ends row by row, a batch waits for its longest, and
attention grows with the square.
"""

import csv
import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.errors import ConfigError, DataError

Floats = NDArray[np.float64]

SUM_TOLERANCE = 1e-3
"""How far the weights of a histogram may be from a sum of 1: what printing with 3 digits costs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthHistogram:
    """Lengths in tokens with their shares.

    Attributes:
      lengths: positive, ascending, in tokens.
      weights: share of rows of each length; they sum to 1.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.weights):
            raise ConfigError(
                f"length histogram: needs as many weights as lengths and at least one, got "
                f"{len(self.lengths)} lengths and {len(self.weights)} weights"
            )
        if self.lengths[0] < 1 or any(
            b <= a for a, b in zip(self.lengths, self.lengths[1:], strict=False)
        ):
            raise ConfigError(
                f"length histogram: lengths must be positive and ascending, got "
                f"{_short(self.lengths)}"
            )
        if not all(0 <= w < float("inf") for w in self.weights):
            raise ConfigError(
                f"length histogram: weights must be at least 0, got {_short(self.weights)}"
            )
        total = sum(self.weights)
        if abs(total - 1) > SUM_TOLERANCE:
            raise ConfigError(
                f"length histogram: weights must add up to 1, got {total:.6g}; divide each by that"
            )

    @functools.cached_property
    def _arrays(self) -> tuple[Floats, Floats]:
        weights = np.asarray(self.weights, np.float64)
        return np.asarray(self.lengths, np.float64), weights / weights.sum()

    @functools.cached_property
    def mean(self) -> float:
        """Mean length, tokens."""
        lengths, weights = self._arrays
        return float(lengths @ weights)

    @functools.cached_property
    def mean_square(self) -> float:
        """Mean of the squared length, tokens^2."""
        lengths, weights = self._arrays
        return float(lengths**2 @ weights)

    @functools.cached_property
    def max(self) -> int:
        """Longest length that has a weight, tokens."""
        return max(n for n, w in zip(self.lengths, self.weights, strict=True) if w > 0)

    def quantile(self, q: Floats | float) -> Floats:
        """The smallest length that a share `q` of the rows does not exceed, tokens.

        Args:
          q: in [0, 1], any shape.
        """
        lengths, weights = self._arrays
        index = np.searchsorted(np.cumsum(weights), np.asarray(q, np.float64) - 1e-12)
        return lengths[np.minimum(index, len(lengths) - 1)]

    def alive(self, tokens: Floats | float) -> Floats:
        """Share of rows that are longer than `tokens`: those still decoded after so many.

        Args:
          tokens: of any shape.
        """
        lengths, weights = self._arrays
        below = np.concatenate([[0.0], np.cumsum(weights)])
        return 1.0 - below[np.searchsorted(lengths, np.asarray(tokens, np.float64), side="right")]

    @classmethod
    def constant(cls, tokens: int) -> "LengthHistogram":
        """All rows have one length."""
        return cls(lengths=(tokens,), weights=(1.0,))

    @classmethod
    def from_samples(cls, samples: Iterable[int]) -> "LengthHistogram":
        """Measured lengths, in tokens, each with the same weight; lengths below 1 count as 1."""
        values = np.maximum(np.asarray(list(samples), np.int64), 1)
        if not values.size:
            raise ConfigError("length histogram: no sample was given; give at least one length")
        lengths, counts = np.unique(values, return_counts=True)
        return cls(
            lengths=tuple(int(n) for n in lengths),
            weights=tuple(float(c) / values.size for c in counts),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> "LengthHistogram":
        """Reads a histogram.

        JSON: `{"lengths": [...], "weights": [...]}`, or a list of measured lengths. CSV: two
        columns, length and weight or count, with or without a header.

        Raises:
          DataError: the file cannot be read as a histogram.
          ConfigError: its numbers are not one.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            lengths, weights = _parse_json(text) if path.suffix == ".json" else _parse_csv(text)
        except ConfigError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataError(f"lengths: {path} cannot be read: {reason}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"lengths: {path} is no histogram ({error}); give JSON with lengths and weights, a "
                f"JSON list of lengths, or a CSV of length,weight"
            ) from None
        return cls(lengths=lengths, weights=weights)


def _short(values: tuple[float, ...]) -> str:
    shown = ", ".join(f"{v:g}" for v in values[:6])
    return f"({shown}{', ...' if len(values) > 6 else ''})"


def _whole(value: Any) -> int:
    if float(value) != int(float(value)):
        raise ValueError(f"{value!r} is not a whole number of tokens")
    return int(float(value))


def _parse_json(text: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    data = json.loads(text)
    if isinstance(data, list):
        samples: list[Any] = data  # pyright: ignore[reportUnknownVariableType]
        histogram = LengthHistogram.from_samples(_whole(x) for x in samples)
        return histogram.lengths, histogram.weights
    return tuple(_whole(x) for x in data["lengths"]), tuple(float(x) for x in data["weights"])


def _parse_csv(text: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Weights that add up to more than 1 by far are counts, and are divided by their sum."""
    rows = [r for r in csv.reader(text.splitlines()) if r and not r[0].startswith("#")]
    if rows and not rows[0][0].strip().replace(".", "", 1).isdigit():
        rows = rows[1:]
    lengths, weights = [_whole(r[0]) for r in rows], [float(r[1]) for r in rows]
    counts = all(w == int(w) for w in weights) and sum(weights) > 1 + SUM_TOLERANCE
    total = sum(weights) if counts else 1.0
    return tuple(lengths), tuple(w / total for w in weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A step's work.

    Attributes:
      prompts: prompts of a step.
      samples_per_prompt: responses to each.
      prompt_lengths: tokens of a prompt.
      response_lengths: tokens of a response.
      max_response_tokens: where a response is cut off; the width of the engines' arrays.
      minibatch_size: rows of an optimizer's update.
      epochs: passes of TRAIN over the rows.
      max_prompt_tokens: where a prompt is cut off; 0: at the longest of `prompt_lengths`.
    """

    prompts: int
    samples_per_prompt: int = 1
    prompt_lengths: LengthHistogram
    response_lengths: LengthHistogram
    max_response_tokens: int
    minibatch_size: int
    epochs: int = 1
    max_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        names = ("prompts", "samples_per_prompt", "max_response_tokens", "minibatch_size", "epochs")
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(f"workload: {name} must be at least 1, got {getattr(self, name)}")
        if self.response_lengths.max > self.max_response_tokens:
            raise ConfigError(
                f"workload: responses of {self.response_lengths.max} tokens exceed "
                f"max_response_tokens {self.max_response_tokens}; raise it or cut the histogram"
            )
        if self.max_prompt_tokens and self.prompt_lengths.max > self.max_prompt_tokens:
            raise ConfigError(
                f"workload: prompts of {self.prompt_lengths.max} tokens exceed max_prompt_tokens "
                f"{self.max_prompt_tokens}; raise it or cut the histogram"
            )

    @property
    def rows(self) -> int:
        """Responses of a step."""
        return self.prompts * self.samples_per_prompt

    @property
    def prompt_width(self) -> int:
        """Columns of the prompts in the engines' arrays."""
        return self.max_prompt_tokens or self.prompt_lengths.max

    @property
    def row_tokens(self) -> int:
        """Columns of the engines' arrays: the longest prompt and the longest response."""
        return self.prompt_width + self.max_response_tokens

    @property
    def mean_row_tokens(self) -> float:
        """Mean length of a prompt and its response."""
        return self.prompt_lengths.mean + self.response_lengths.mean

    @property
    def mean_square_row_tokens(self) -> float:
        """Mean square of that length, prompts and responses taken as independent."""
        cross = 2 * self.prompt_lengths.mean * self.response_lengths.mean
        return self.prompt_lengths.mean_square + cross + self.response_lengths.mean_square

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.epochs * -(-self.rows // min(self.minibatch_size, self.rows))
