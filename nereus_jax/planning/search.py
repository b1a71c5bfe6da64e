# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""The best plan of a step: which candidate each model-stage runs with, on which lane.

A step is its waves one after the other. A wave takes as long as its slowest lane, a lane the sum of
its model-stages. On every device the resident bytes of the model-stages that share it, and the
working bytes of the one that runs, must fit. Which lanes of different waves share devices is left
open in the search: the heaviest lane of each wave is taken to. So a plan that is found fits
whichever way lanes lie, and what that refuses can be had by parking.

With a threshold on the working bytes, what remains is to add up curves of seconds against resident
bytes: model-stages in a lane add up, of lanes the larger counts, waves add up. That is exact
dynamic programming. Thresholds are searched by branch and bound: a plan that is faster than all
that fit, but works with more than there is room for, cuts them into those with and those without
it.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from nereus_jax.planning.frontier import Curves, one_after_the_other
from nereus_jax.planning.search_waves import Pick, Wave, WaveCurve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A plan as the search has it.

    Attributes:
      waves: the picks of each wave, in the order of its model-stages.
      seconds: of a step's model-stages.
      peak_bytes: of a device if the heaviest lanes of all waves share it.
    """

    waves: tuple[tuple[Pick, ...], ...]
    seconds: float
    peak_bytes: float


def lane_sums(picks: Sequence[Pick], values: Sequence[float]) -> dict[int, float]:
    """Sums by lane of a value of each model-stage."""
    sums: dict[int, float] = {}
    for pick, value in zip(picks, values, strict=True):
        sums[pick.lane] = sums.get(pick.lane, 0.0) + value
    return sums


def wave_seconds(picks: Sequence[Pick]) -> float:
    """Of its slowest lane."""
    return max(lane_sums(picks, [p.seconds for p in picks]).values())


def wave_resident_bytes(picks: Sequence[Pick]) -> float:
    """Of its heaviest lane."""
    return max(lane_sums(picks, [p.resident_bytes for p in picks]).values())


def found_of(waves: Sequence[tuple[Pick, ...]]) -> Found:
    """The numbers of these picks."""
    resident = sum(wave_resident_bytes(picks) for picks in waves)
    return Found(
        waves=tuple(waves),
        seconds=sum(wave_seconds(picks) for picks in waves),
        peak_bytes=resident + max(p.working_bytes for picks in waves for p in picks),
    )


def find_best(waves: Sequence[Wave], limit_bytes: float) -> Found | None:
    """The fastest plan; None: nothing fits.

    Args:
      waves: of a step.
      limit_bytes: of every device.
    """
    if not all(wave.runs for wave in waves):
        return None
    levels = np.sort(np.concatenate([wave.working_bytes for wave in waves]))
    best: Found | None = None
    fewest: list[float] = []
    total: _Total | None = None
    # Levels [low, high], a bound of their plans' seconds, and how many came before: of equal
    # bounds the older one first.
    ranges = [(0.0, 0, 0, len(levels) - 1)]
    count = 1
    while ranges:
        bound, _, low, high = heapq.heappop(ranges)
        if best is not None and bound >= best.seconds:
            break
        caps = _caps(best, fewest, len(waves))
        curves = [w.curve(float(levels[high]), s) for w, s in zip(waves, caps, strict=True)]
        total = _Total(curves, total)
        fewest = fewest or total.fewest_seconds
        while low <= high:
            # Of levels from `low` on, no plan has more options than this pass, or more room.
            found = total.fastest(limit_bytes - float(levels[low]))
            if found is None or (best is not None and found.seconds >= best.seconds):
                break
            if found.peak_bytes <= limit_bytes:
                best = found
                break
            # It works with more than the room that `low` leaves: what works with less needs a
            # pass without it, what works with as much has less room.
            working = max(p.working_bytes for wave in found.waves for p in wave)
            above = int(np.searchsorted(levels, working))
            heapq.heappush(ranges, (found.seconds, count, low, above - 1))
            count, low = count + 1, above
    return best


def _caps(best: Found | None, fewest: Sequence[float], count: int) -> list[float]:
    """Seconds that each wave may take in a better plan, by the fewest that the others can take."""
    if best is None:
        return [np.inf] * count
    return [best.seconds - sum(fewest) + own for own in fewest]


class _Total:
    """The waves of a step, added up."""

    def __init__(self, waves: list[WaveCurve], before: "_Total | None") -> None:
        """Takes the waves; the sums of those that `before` begins with too are taken over."""
        self._waves = waves
        self._sums = before.sums_of_first(waves) if before else []
        self._sums = self._sums or [waves[0].curve]
        for wave in waves[len(self._sums) :]:
            self._sums.append(one_after_the_other(self._sums[-1], wave.curve))

    def sums_of_first(self, waves: list[WaveCurve]) -> list[Curves]:
        """The sums of as many first waves as are the same."""
        same = itertools.takewhile(lambda i: self._waves[i] is waves[i], range(len(waves)))
        return [self._sums[i] for i in same]

    @property
    def fewest_seconds(self) -> list[float]:
        """Of every wave."""
        return [float(wave.curve.fastest()[0]) for wave in self._waves]

    def fastest(self, resident_bytes: float) -> Found | None:
        """The fastest plan with at most so many resident bytes."""
        point = self._sums[-1].first_below(resident_bytes)
        if point is None:
            return None
        seconds = float(self._sums[-1].seconds[0, point])
        resident = float(self._sums[-1].resident[0, point])
        points: list[int] = []
        for i in range(len(self._waves) - 1, 0, -1):
            source = int(self._sums[i].source[0, point])
            point, last = divmod(source, self._waves[i].curve.seconds.shape[1])
            points.append(last)
        points.append(point)
        picks: list[tuple[Pick, ...]] = []
        for wave, at in zip(self._waves, reversed(points), strict=True):
            curve = wave.curve
            picks.append(wave.picks(int(curve.source[0, at]), float(curve.seconds[0, at])))
        return Found(
            waves=tuple(picks),
            seconds=seconds,
            peak_bytes=resident + max(p.working_bytes for wave in picks for p in wave),
        )
