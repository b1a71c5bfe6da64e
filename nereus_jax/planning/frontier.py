# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What of a model-stage's candidates can be part of a best plan, and how such sets add up.

A plan asks three numbers of a candidate: its seconds, the bytes that stay on a device while other
model-stages run (resident), and the bytes that it needs on top of all that is resident while it
runs (working). A candidate that another one beats in all three is never needed. Parking trades
seconds for resident bytes: what is parked comes back only to work.

Shapes: C candidates, K options or points, V widths of a lane; rows of fewer points are filled up
with infinite ones.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.roles import ModelStage
from nereus_jax.planning.candidates import Bools, Candidates, Ints, starts

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StageOptions:
    """The candidates of a model-stage with their prices, [C] each.

    Attributes:
      model_stage: which.
      candidates: what they are.
      seconds: of all its calls of a step.
      held_bytes: on each device between its programs: weights, optimizer.
      working_bytes: on each device on top of that while it runs.
      park_seconds: what it takes a step to keep the held bytes in the memory of the host; None: it
        cannot be parked.
    """

    model_stage: ModelStage
    candidates: Candidates
    seconds: Floats
    held_bytes: Floats
    working_bytes: Floats
    park_seconds: Floats | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Frontier:
    """The options of one model-stage that may be best in a lane, [K] each.

    Attributes:
      seconds: ascending; parking included.
      resident: bytes.
      working: bytes; the held ones too where the option is parked.
      index: candidate of the model-stage.
      parked: whether it is parked.
      fits: [V, K] whether the option fits a lane of that width.
    """

    seconds: Floats
    resident: Floats
    working: Floats
    index: Ints
    parked: Bools
    fits: Bools


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Frontiers:
    """Those of the model-stages of a wave in one table, [S * V, K]: a row for every width of each.

    Attributes:
      seconds: ascending along a row.
      resident: bytes; inf where the option does not fit a lane of that width.
      working: bytes.
      number: of the option in its frontier.
    """

    seconds: Floats
    resident: Floats
    working: Floats
    number: Ints

    @classmethod
    def of(cls, frontiers: Sequence[Frontier]) -> "Frontiers":
        """One after the other, in their order."""
        widths = len(frontiers[0].fits)
        shape = len(frontiers), widths, max(len(front.seconds) for front in frontiers)
        seconds, resident, working = (np.full(shape, np.inf) for _ in range(3))
        for i, front in enumerate(frontiers):
            own = slice(len(front.seconds))
            seconds[i, :, own], working[i, :, own] = front.seconds, front.working
            resident[i, :, own] = np.where(front.fits, front.resident, np.inf)
        rows = len(frontiers) * widths, -1
        return cls(
            seconds=seconds.reshape(rows),
            resident=resident.reshape(rows),
            working=working.reshape(rows),
            number=np.broadcast_to(np.arange(shape[-1]), (rows[0], shape[-1])),
        )

    def below(self, working_bytes: float, seconds: float) -> "Curves":
        """The options that work in so many bytes and seconds, as curves."""
        quick = self.seconds <= seconds
        part = slice(int(quick.sum(axis=1).max()))
        allowed = quick[:, part] & (self.working[:, part] <= working_bytes)
        return lower_left(
            self.seconds[:, part],
            np.where(allowed, self.resident[:, part], np.inf),
            self.number[:, part],
        )

    def working_bytes(self, curves: "Curves") -> float:
        """The most that a point of curves of these options works with."""
        rows = np.arange(len(curves.source))[:, None]
        working = np.where(np.isfinite(curves.seconds), self.working[rows, curves.source], 0.0)
        return float(working.max(initial=0.0))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """Resident bytes against seconds, [V, K]: along a row seconds ascend and bytes fall.

    Attributes:
      seconds, resident: of each point.
      source: what the point was made of.
    """

    seconds: Floats
    resident: Floats
    source: Ints

    def fastest(self) -> Floats:
        """[V] fewest seconds; inf for a row without points."""
        return self.seconds.min(axis=1, initial=np.inf)

    def point_within(self, row: int, seconds: float) -> int:
        """The point with fewest resident bytes in so many seconds; there must be one."""
        return int(np.searchsorted(self.seconds[row], seconds, side="right")) - 1

    def rows(self, index: Ints) -> "Curves":
        """Some of the rows."""
        return Curves(
            seconds=self.seconds[index], resident=self.resident[index], source=self.source[index]
        )

    def first_below(self, resident_bytes: float) -> int | None:
        """The fastest point of the first row with at most so many resident bytes."""
        below = np.flatnonzero(self.resident[0] <= resident_bytes)
        return int(below[0]) if len(below) else None


def lower_left(seconds: Floats, resident: Floats, source: Ints) -> Curves:
    """Of points by ascending seconds [V, N], those with fewer bytes than all before."""
    lowest = np.minimum.accumulate(resident, axis=1)
    kept = np.isfinite(lowest)
    kept[:, 1:] &= lowest[:, 1:] < lowest[:, :-1]
    counts = kept.sum(axis=1)
    place: Bools = np.arange(int(counts.max(initial=0))) < counts[:, None]
    packed = Curves(
        seconds=np.full(place.shape, np.inf),
        resident=np.full(place.shape, np.inf),
        source=np.zeros(place.shape, np.int64),
    )
    packed.seconds[place] = seconds[kept]
    packed.resident[place] = resident[kept]
    packed.source[place] = source[kept]
    return packed


def one_after_the_other(first: Curves, second: Curves, seconds: float = np.inf) -> Curves:
    """Both on the same devices in turn: seconds and resident bytes add up.

    Args:
      first, second: with as many rows.
      seconds: slower points are left out.

    Returns:
      Curves whose `source` is (point of first) * (points of second) + (point of second).
    """
    rows = len(first.seconds)
    total = (first.seconds[:, :, None] + second.seconds[:, None, :]).reshape(rows, -1)
    resident = (first.resident[:, :, None] + second.resident[:, None, :]).reshape(rows, -1)
    resident = np.where(total <= seconds, resident, np.inf)
    some = np.flatnonzero(np.isfinite(resident).any(axis=0))
    total, resident = total[:, some], resident[:, some]
    order = np.lexsort((resident, total), axis=1)
    row = np.arange(rows)[:, None]
    return lower_left(total[row, order], resident[row, order], some[order])


def frontier(options: StageOptions, widths: list[int], limit_bytes: float) -> Frontier:
    """The options of a model-stage that may be best in lanes of some widths.

    Of those that hold as many bytes, the ones that a faster one does not beat in working bytes too.

    Args:
      options: of the model-stage.
      widths: devices of a lane, ascending; the last is the whole pool. Lanes beside others start
        at multiples of their tp degrees only if their widths are such: see `search_lanes`.
      limit_bytes: of a device.
    """
    candidates = options.candidates
    index = np.flatnonzero(options.held_bytes + options.working_bytes <= limit_bytes)
    index = _best_of_groups(options, index, by_form=len(widths) > 1)
    resident, peak = options.held_bytes[index], options.working_bytes[index]
    seconds, parked = options.seconds[index], np.zeros(len(index), np.bool_)
    if options.park_seconds is not None:
        seconds = np.concatenate([seconds, seconds + options.park_seconds[index]])
        peak = np.concatenate([peak, peak + resident])
        resident = np.concatenate([resident, np.zeros_like(resident)])
        parked = np.concatenate([parked, ~parked])
        index = np.concatenate([index, index])
    order = np.lexsort((peak, seconds, resident))
    seconds, resident, peak = seconds[order], resident[order], peak[order]
    index, parked = index[order], parked[order]
    shifted = _shifted(peak, np.cumsum(starts(resident)))
    lanes = np.array(widths, np.int64)[:, None]
    fits = candidates.devices[index] <= lanes
    fits[:-1] &= lanes[:-1] % candidates.tp[index] == 0
    lowest = np.minimum.accumulate(np.where(fits, shifted, np.inf), axis=1)
    needed = np.isfinite(lowest)
    needed[:, 1:] &= lowest[:, 1:] < lowest[:, :-1]
    kept = np.flatnonzero(needed.any(axis=0))
    kept = kept[np.argsort(seconds[kept], kind="stable")]
    return Frontier(
        seconds=seconds[kept],
        resident=resident[kept],
        working=peak[kept],
        index=index[kept],
        parked=parked[kept],
        fits=needed[:, kept],
    )


def _best_of_groups(options: StageOptions, index: Ints, *, by_form: bool) -> Ints:
    """Those of some candidates that have fewer working bytes than all faster ones of their group.

    A group holds as many bytes: this is what most candidates fail, and it is found before the
    widths of lanes, and parking, multiply them.

    Args:
      options: of the model-stage.
      index: the candidates.
      by_form: a group is on as many devices, too; else any number of devices fits.
    """
    group = options.candidates.forms[index] if by_form else options.held_bytes[index]
    order = np.lexsort((options.seconds[index], group))
    index = index[order]
    first = starts(options.held_bytes[index])
    if by_form:
        first |= starts(group[order])
    lowest = np.minimum.accumulate(_shifted(options.working_bytes[index], np.cumsum(first)))
    first[1:] |= lowest[1:] < lowest[:-1]
    return index[first]


def _shifted(values: Floats, group: Ints) -> Floats:
    """Each group's values below those of the groups before it, so that a running minimum starts
    anew."""
    return values - group * (2.0 * float(values.max(initial=0.0)) + 1.0)
