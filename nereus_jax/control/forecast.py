# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""How long responses will be in the next steps, with how much doubt, from past steps only.

Two series are looked at in logarithms. The mean is a level and a slope, damped with the distance:
the median of the newest values less the slope, and the slope of Theil and Sen (the median of all
pairwise slopes: one spike in three does not move it) over a window. The tail is the mean times a
ratio, longest over mean, whose logarithm is taken as stationary over a longer window: the longest
of some hundred draws scatters far more than their mean, and follows it. What is left over of both
gives the doubt.

    log tail(h) = level + slope * damped(h) + ratio + z * sqrt(s_mean(h)^2 + s_ratio^2)

The longest of all steps up to h counts, not that of step h alone: z is larger by what the largest
of h draws adds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastSettings:
    """How the future is drawn from the past.

    Attributes:
      window: steps that level and slope are fitted to.
      ratio_window: steps that the ratio of longest and mean is taken from.
      level_steps: newest steps whose median residual is the level.
      damping: of the slope, a step: a trend is taken to go on for damping / (1 - damping) steps.
      sigmas: standard deviations that an upper bound is above what is expected.
      lead_steps: a violation is looked for in so many steps to come.
      prior_std: of the logarithm of a ratio, before two steps were seen; it weighs as
        `prior_steps` steps.
      prior_steps: see there.
      least_std: of the logarithm of the mean's residuals at least: batches scatter.
    """

    window: int = 16
    ratio_window: int = 48
    level_steps: int = 3
    damping: float = 0.9
    sigmas: float = 2.0
    lead_steps: int = 8
    prior_std: float = 0.15
    prior_steps: int = 4
    least_std: float = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is expected of the steps to come.

    Attributes:
      settings: how it was made.
      level: logarithm of the mean length now.
      slope: of it, a step.
      mean_std: of what is left over of the mean's logarithm.
      slope_std: of the slope.
      ratio: mean logarithm of longest over mean.
      ratio_std: of it.
      longest: longest that can be, in tokens: where responses are cut.
    """

    settings: ForecastSettings
    level: float
    slope: float
    mean_std: float
    slope_std: float
    ratio: float
    ratio_std: float
    longest: float

    def _damped(self, steps: float) -> float:
        """Steps that the slope still counts for after so many steps."""
        factor = self.settings.damping
        return factor * (1.0 - factor**steps) / (1.0 - factor)

    def mean_tokens(self, steps: float) -> float:
        """Expected mean length in so many steps."""
        return min(math.exp(self.level + self.slope * self._damped(steps)), self.longest)

    def tail_tokens(self, steps: float) -> float:
        """Expected longest response in so many steps."""
        ahead = self.level + self.slope * self._damped(steps) + self.ratio
        return min(math.exp(ahead), self.longest)

    def tail_bound(self, steps: int) -> float:
        """What the longest response of all of the next steps will not exceed, as far as can be
        seen, in tokens."""
        bounds = [self._bound(h, steps) for h in (1, steps)]
        return min(math.exp(max(bounds)), self.longest)

    def _bound(self, ahead: int, steps: int) -> float:
        damped = self._damped(ahead)
        spread = math.hypot(self.mean_std, self.slope_std * damped, self.ratio_std)
        more = expected_largest(steps)
        centre = self.level + self.slope * damped + self.ratio
        return centre + (self.settings.sigmas + more) * spread

    def crossing_step(self, limit_tokens: float) -> int | None:
        """In how many steps the tail may exceed a length for the first time; None: not within
        `lead_steps`."""
        for steps in range(1, self.settings.lead_steps + 1):
            if self.tail_bound(steps) > limit_tokens:
                return steps
        return None


@functools.cache
def expected_largest(count: int) -> float:
    """Standard deviations that the largest of so many normal draws is above their mean, by the
    quantile at (n - 0.375) / (n + 0.25) (Blom 1958)."""
    if count <= 1:
        return 0.0
    share = (count - 0.375) / (count + 0.25)
    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        if 0.5 * math.erfc(-middle / math.sqrt(2.0)) < share:
            low = middle
        else:
            high = middle
    return low


def make_forecast(
    means: Sequence[float],
    longest: Sequence[float],
    cut_tokens: float,
    settings: ForecastSettings | None = None,
) -> Forecast:
    """The forecast from past steps.

    Args:
      means: mean lengths of the steps so far, the newest last, in tokens; at least one.
      longest: the longest response of each.
      cut_tokens: where responses are cut.
      settings: how.
    """
    s = settings or ForecastSettings()
    logs = np.log(np.asarray(means[-s.window :], np.float64))
    level, slope, residuals = _trend(logs, s)
    spread = max(_robust_std(residuals), s.least_std) if len(logs) > 2 else 2.0 * s.least_std
    count = len(logs)
    # Of n equally spaced points the slope of least squares has this deviation; Theil and Sen's is
    # about as good (efficiency 0.91 to 1 for normal residuals).
    slope_std = spread * math.sqrt(12.0 / (count * (count * count - 1))) if count > 2 else spread
    every = np.asarray(means[-s.ratio_window :], np.float64)
    ratios = np.log(np.asarray(longest[-s.ratio_window :], np.float64) / every)
    centre = float(ratios.mean())
    seen = float(((ratios - centre) ** 2).sum())
    variance = (seen + s.prior_steps * s.prior_std**2) / (len(ratios) - 1 + s.prior_steps)
    return Forecast(
        settings=s,
        level=level,
        slope=slope,
        mean_std=spread,
        slope_std=slope_std,
        ratio=centre,
        ratio_std=math.sqrt(variance),
        longest=cut_tokens,
    )


def _trend(logs: Floats, settings: ForecastSettings) -> tuple[float, float, Floats]:
    """Level now, slope, and residuals."""
    count = len(logs)
    if count < 3:
        return float(logs[-1]), 0.0, logs - logs[-1]
    first, second = _pairs(count)
    slope = float(np.median((logs[second] - logs[first]) / (second - first)))
    along = logs - slope * (np.arange(count) - (count - 1))
    level = float(np.median(along[-settings.level_steps :]))
    return level, slope, along - float(np.median(along))


@functools.cache
def _pairs(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    first, second = np.triu_indices(count, 1)
    return first.astype(np.int64), second.astype(np.int64)


def _robust_std(residuals: Floats) -> float:
    """1.4826 times the median absolute deviation: the standard deviation of normal values."""
    return 1.4826 * float(np.median(np.abs(residuals)))


def largest_length(
    num_bytes: Callable[[int], float], limit_bytes: float, low: int, high: int
) -> int:
    """The longest response for which a plan's memory suffices, in tokens.

    Args:
      num_bytes: of the fullest device by longest response; never falls.
      limit_bytes: of a device.
      low: a length; where not even that fits, the result is low - 1.
      high: the longest that can be.
    """
    below, above = num_bytes(low), num_bytes(high)
    if above <= limit_bytes:
        return high
    if below > limit_bytes:
        return low - 1
    while high - low > max(1, low // 256):
        # Bytes are nearly linear in the length: interpolate, but leave a part to each side.
        share = (limit_bytes - below) / (above - below)
        middle = low + round((high - low) * min(max(share, 0.1), 0.9))
        middle = min(max(middle, low + 1), high - 1)
        value = num_bytes(middle)
        if value <= limit_bytes:
            low, below = middle, value
        else:
            high, above = middle, value
    return low
