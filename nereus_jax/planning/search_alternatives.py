# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What comes next after the best plan: the best one with one thing changed.

Either the lanes of a wave are others, or one model-stage has another layout. Each alternative fits,
and is the fastest one with its change.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from nereus_jax.planning.frontier import Floats, StageOptions
from nereus_jax.planning.search import Found, found_of, lane_sums, wave_resident_bytes
from nereus_jax.planning.search_waves import Pick, Wave

LAYOUTS = 16
"""Other layouts that are looked at, of each model-stage."""


def next_best(
    waves: Sequence[Wave], best: Found, limit_bytes: float, count: int, apart: float = 0.0
) -> tuple[Found, ...]:
    """The fastest alternatives to a plan, at most so many, ascending by seconds.

    Args:
      waves: of the step.
      best: the plan.
      limit_bytes: of every device.
      count: how many.
      apart: least relative difference of the seconds of two of them. Many differ only in lanes that
        wait for another one, and take equally long.
    """
    found = [
        candidate
        for i in range(len(waves))
        for candidate in (
            *_other_lanes(waves[i], best, i, limit_bytes),
            *_other_layouts(waves[i], best, i, limit_bytes),
        )
        if candidate.peak_bytes <= limit_bytes
    ]
    chosen: list[Found] = []
    last_s = best.seconds
    for candidate in sorted(found, key=lambda f: f.seconds):
        if candidate.seconds >= last_s * (1.0 + apart) and len(chosen) < count:
            chosen.append(candidate)
            last_s = candidate.seconds
    return tuple(chosen)


def _with_wave(best: Found, number: int, picks: tuple[Pick, ...]) -> Found:
    return found_of([*best.waves[:number], picks, *best.waves[number + 1 :]])


def _other_lanes(wave: Wave, best: Found, number: int, limit_bytes: float) -> Iterator[Found]:
    """The plan with other lanes in one wave."""
    if len(wave.options) == 1:
        return
    level = max(p.working_bytes for picks in best.waves for p in picks)
    resident = sum(wave_resident_bytes(p) for i, p in enumerate(best.waves) if i != number)
    curve = wave.curve(level)
    seconds = curve.by_layout(limit_bytes - level - resident)
    own = [(p.lane, p.width) for p in best.waves[number]]
    for layout in np.argsort(seconds, kind="stable"):
        if np.isfinite(seconds[layout]):
            picks = curve.picks(int(layout), float(seconds[layout]))
            if [(p.lane, p.width) for p in picks] != own:
                yield _with_wave(best, number, picks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Others:
    """What the rest of a plan leaves to one model-stage.

    Attributes:
      lane_s: seconds of the others in its lane.
      slowest_s: of the slowest other lane of its wave.
      lane_bytes: resident ones of the others in its lane.
      heaviest_bytes: resident ones of the heaviest other lane.
      waves_bytes: resident ones of the other waves.
      working_bytes: the most that another model-stage works with.
    """

    lane_s: float
    slowest_s: float
    lane_bytes: float
    heaviest_bytes: float
    waves_bytes: float
    working_bytes: float

    @classmethod
    def of(cls, best: Found, number: int, pick: Pick) -> "_Others":
        picks = best.waves[number]
        seconds = lane_sums(picks, [p.seconds for p in picks])
        resident = lane_sums(picks, [p.resident_bytes for p in picks])
        everyone = [p for wave in best.waves for p in wave]
        return cls(
            lane_s=seconds.pop(pick.lane) - pick.seconds,
            slowest_s=max(seconds.values(), default=0.0),
            lane_bytes=resident.pop(pick.lane) - pick.resident_bytes,
            heaviest_bytes=max(resident.values(), default=0.0),
            waves_bytes=sum(
                wave_resident_bytes(p) for i, p in enumerate(best.waves) if i != number
            ),
            working_bytes=max((p.working_bytes for p in everyone if p is not pick), default=0.0),
        )

    def peak_bytes(self, resident: Floats, working: Floats) -> Floats:
        """[C] of a device with these candidates of the model-stage."""
        lanes = np.maximum(self.lane_bytes + resident, self.heaviest_bytes)
        return self.waves_bytes + lanes + np.maximum(self.working_bytes, working)


def _other_layouts(wave: Wave, best: Found, number: int, limit_bytes: float) -> Iterator[Found]:
    """The plan with another layout of one model-stage, by model-stage and layout."""
    picks = best.waves[number]
    for position, (options, pick) in enumerate(zip(wave.options, picks, strict=True)):
        others = _Others.of(best, number, pick)
        for other in _fastest_layouts(options, pick, others, limit_bytes):
            yield _with_wave(best, number, (*picks[:position], other, *picks[position + 1 :]))


def _fastest_layouts(
    options: StageOptions, pick: Pick, others: _Others, limit_bytes: float
) -> Iterator[Pick]:
    """Picks with other layouts in the same lane, the fastest of each, the fastest first."""
    candidates, held = options.candidates, options.held_bytes
    resident, working, seconds = held, options.working_bytes, options.seconds
    if pick.parked and options.park_seconds is not None:
        resident, working = np.zeros_like(held), working + held
        seconds = seconds + options.park_seconds
    fits = (candidates.devices <= pick.width) & (pick.width % candidates.tp == 0)
    fits &= others.peak_bytes(resident, working) <= limit_bytes
    index = np.flatnonzero(fits)
    wave_s = np.maximum(others.lane_s + seconds[index], others.slowest_s)
    seen = {candidates.layout(pick.index)}
    for i in index[np.lexsort((seconds[index], wave_s))]:
        layout = candidates.layout(int(i))
        if layout in seen:
            continue
        seen.add(layout)
        yield Pick(
            model_stage=pick.model_stage,
            index=int(i),
            parked=pick.parked,
            seconds=float(seconds[i]),
            resident_bytes=float(resident[i]),
            working_bytes=float(working[i]),
            lane=pick.lane,
            width=pick.width,
        )
        if len(seen) > LAYOUTS:
            return
