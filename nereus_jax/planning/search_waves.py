# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""The ways to run one wave: its model-stages in lanes, each with an option, as one curve.

Shapes: L lane layouts, G distinct seconds, V widths of a lane.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from nereus_jax.core.roles import ModelStage
from nereus_jax.planning.candidates import Ints
from nereus_jax.planning.frontier import (
    Curves,
    Floats,
    Frontiers,
    StageOptions,
    frontier,
    lower_left,
    one_after_the_other,
)
from nereus_jax.planning.search_lanes import Subset, lane_layouts, make_cells, subsets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pick:
    """How one model-stage runs in a plan.

    Attributes:
      model_stage: which.
      index: its candidate.
      parked: whether it is in the host's memory while others run.
      seconds: of the candidate, and of parking it.
      resident_bytes: on each device while others run.
      working_bytes: on top of all resident ones while it runs.
      lane: of its wave.
      width: devices of that lane.
    """

    model_stage: ModelStage
    index: int
    parked: bool
    seconds: float
    resident_bytes: float
    working_bytes: float
    lane: int
    width: int


class Wave:
    """The model-stages of a wave, with what may be best of their candidates in every lane."""

    def __init__(
        self,
        options: Sequence[StageOptions],
        num_devices: int,
        devices_per_node: int,
        limit_bytes: float,
    ) -> None:
        """Takes the priced candidates.

        Args:
          options: of each model-stage.
          num_devices: of the pool.
          devices_per_node: that share the fast links.
          limit_bytes: of every device.
        """
        self.options = tuple(options)
        self.cells = make_cells(num_devices, devices_per_node, len(options))
        self.layouts = lane_layouts(len(options), self.cells.count)
        widths = self.cells.widths if len(options) > 1 else [num_devices]
        self.frontiers = [frontier(stage, widths, limit_bytes) for stage in options]
        self._table = Frontiers.of(self.frontiers)
        self._last: WaveCurve | None = None

    @property
    def runs(self) -> bool:
        """Whether every model-stage has an option."""
        return all(len(front.seconds) for front in self.frontiers)

    @property
    def working_bytes(self) -> Floats:
        """Of all options."""
        return np.concatenate([front.working for front in self.frontiers])

    def curve(self, working_bytes: float, seconds: float = np.inf) -> "WaveCurve":
        """The wave with only those options that work in so many bytes, up to so many seconds.

        The curve of the call before is given again where the options that it is made of are allowed
        still: to leave out others changes nothing. It may then reach beyond the seconds.
        """
        last = self._last
        if last is not None and last.serves(working_bytes, seconds):
            return last
        self._last = self._curve(working_bytes, seconds)
        return self._last

    def _curve(self, working_bytes: float, seconds: float) -> "WaveCurve":
        single = self._table.below(working_bytes, seconds)
        blocks = [single]
        widths = len(single.seconds) // len(self.frontiers)
        for size in range(2, len(self.frontiers) + 1):
            firsts, lasts = _grown_from(len(self.frontiers), size, widths)
            first, last = blocks[-1].rows(firsts), single.rows(lasts)
            blocks.append(one_after_the_other(first, last, seconds))
        return WaveCurve(
            wave=self,
            blocks=blocks,
            needed_bytes=self._table.working_bytes(single),
            working_bytes=working_bytes,
            seconds=seconds,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WaveCurve:
    """Resident bytes against seconds of a wave.

    Attributes:
      wave: whose.
      blocks: curves of one, two, ... model-stages one after the other in a lane, one set of them
        after the other in the order of `subsets`, with a row for every width; `source` is an option
        of one, else as `one_after_the_other` has it.
      needed_bytes: that its options work in.
      working_bytes, seconds: within which its options were chosen.
    """

    wave: Wave
    blocks: Sequence[Curves]
    needed_bytes: float
    working_bytes: float
    seconds: float

    def serves(self, working_bytes: float, seconds: float) -> bool:
        """Whether it is the curve within other bytes and seconds, too."""
        fewer = self.needed_bytes <= working_bytes <= self.working_bytes
        return fewer and seconds <= self.seconds

    @property
    def _widths(self) -> int:
        """V."""
        return len(self.blocks[0].seconds) // len(self.wave.options)

    def _lane(self, subset: Subset, row: int) -> tuple[Curves, int]:
        """The block of model-stages one after the other, and its row for a row of the widths."""
        number = _numbers(len(self.wave.options))[subset]
        return self.blocks[len(subset) - 1], number * self._widths + row

    @functools.cached_property
    def _table(self) -> tuple[Floats, Floats]:
        """Seconds [G], and the resident bytes of every lane layout in them [L, G].

        Of the lanes of a layout the largest seconds and the largest resident bytes count.
        """
        table = _layout_table(len(self.wave.options), self._widths)
        lanes = self.blocks
        fastest = np.concatenate([curves.fastest() for curves in lanes])[table].max(axis=1)
        points = np.concatenate([curves.seconds.ravel() for curves in lanes])
        seconds = np.unique(points[(points >= fastest.min()) & np.isfinite(points)])
        if not len(seconds):
            return seconds, np.empty((len(table), 0))
        within = np.concatenate([_on_grid(curves, seconds) for curves in lanes])
        resident = within[table[:, 0]]
        for lane in table.T[1:]:
            np.maximum(resident, within[lane], out=resident)
        return seconds, resident

    @functools.cached_property
    def curve(self) -> Curves:
        """One row: the best layout for each number of seconds; `source` is the layout."""
        if len(self.wave.options) == 1:
            alone = self.blocks[0]
            return dataclasses.replace(alone, source=np.zeros_like(alone.source))
        seconds, resident = self._table
        layout = resident.argmin(axis=0)
        lowest = resident[layout, np.arange(len(seconds))]
        return lower_left(seconds[None], lowest[None], layout[None])

    def by_layout(self, resident_bytes: float) -> Floats:
        """[L] fewest seconds of every lane layout with at most so many resident bytes; or inf."""
        seconds, resident = self._table
        fits = resident <= resident_bytes
        if not len(seconds):
            return np.full(len(fits), np.inf)
        return np.where(fits.any(axis=1), seconds[fits.argmax(axis=1)], np.inf)

    def picks(self, layout: int, seconds: float) -> tuple[Pick, ...]:
        """What every model-stage does in a lane layout that takes so many seconds."""
        picks: dict[int, Pick] = {}
        for number, (subset, cells) in enumerate(self.wave.layouts[layout]):
            row = min(cells, self._widths) - 1
            curves, at_row = self._lane(subset, row)
            at = curves.point_within(at_row, seconds)
            for last in range(len(subset), 1, -1):
                curves, at_row = self._lane(subset[:last], row)
                at, right = divmod(int(curves.source[at_row, at]), self.blocks[0].seconds.shape[1])
                picks[subset[last - 1]] = self._pick(subset[last - 1], row, right, number, cells)
            picks[subset[0]] = self._pick(subset[0], row, at, number, cells)
        return tuple(picks[i] for i in range(len(self.wave.options)))

    def _pick(self, position: int, row: int, point: int, lane: int, cells: int) -> Pick:
        front = self.wave.frontiers[position]
        curves, at_row = self._lane((position,), row)
        option = int(curves.source[at_row, point])
        return Pick(
            model_stage=self.wave.options[position].model_stage,
            index=int(front.index[option]),
            parked=bool(front.parked[option]),
            seconds=float(front.seconds[option]),
            resident_bytes=float(front.resident[option]),
            working_bytes=float(front.working[option]),
            lane=lane,
            width=self.wave.cells.width(cells),
        )


def _on_grid(curves: Curves, seconds: Floats) -> Floats:
    """[V, G] fewest resident bytes of each curve in so many seconds; inf where none is as fast."""
    rows, points = np.nonzero(np.isfinite(curves.seconds))
    column = np.searchsorted(seconds, curves.seconds[rows, points])
    grid = np.full((len(curves.seconds), len(seconds)), np.inf)
    # Points before the grid's first one fall on it together; the last of them has fewest bytes.
    grid[rows, column] = curves.resident[rows, points]
    return np.minimum.accumulate(grid, axis=1, out=grid)


@functools.cache
def _numbers(model_stages: int) -> Mapping[Subset, int]:
    """The number of each set of positions among those of its size."""
    sizes: dict[int, int] = {}
    numbers: dict[Subset, int] = {}
    for subset in subsets(model_stages):
        numbers[subset] = sizes.get(len(subset), 0)
        sizes[len(subset)] = numbers[subset] + 1
    return numbers


@functools.cache
def _grown_from(model_stages: int, size: int, widths: int) -> tuple[Ints, Ints]:
    """For every set of a size, rows of so many widths each: those of the set without its last
    position, and those of that."""
    numbers = _numbers(model_stages)
    sets = [subset for subset in subsets(model_stages) if len(subset) == size]
    firsts, lasts = [numbers[s[:-1]] for s in sets], [s[-1] for s in sets]
    rows = np.array([firsts, lasts], np.int64)[:, :, None] * widths + np.arange(widths)
    return rows[0].ravel(), rows[1].ravel()


@functools.cache
def _layout_table(model_stages: int, cells: int) -> Ints:
    """[L, lanes] which curve each lane of a layout has; the first one again where it has fewer."""
    number = {subset: i for i, subset in enumerate(subsets(model_stages))}
    rows: list[list[int]] = []
    for lanes in lane_layouts(model_stages, cells):
        row = [number[subset] * cells + n - 1 for subset, n in lanes]
        rows.append(row + row[:1] * (model_stages - len(row)))
    return np.array(rows, np.int64)
