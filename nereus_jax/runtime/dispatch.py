"""Running the model-stages of one wave: disjoint devices at the same time, shared ones in turn.

Programs are launched from one thread in one deterministic order, so that every process of a job
launches them alike. Threads only wait for completion, to time it.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest

import jax
import numpy as np

from nereus_jax.core.timeline import Span
from nereus_jax.runtime import host

MAX_IN_FLIGHT = 8
"""Launches that may be unfinished: more than 32 collective programs deadlock emulated CPU
devices."""

Arrays = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one model-stage does in a wave.

    Attributes:
      name: of the model-stage.
      devices: names of the devices it runs on.
      launches: called in order; each starts one program and returns arrays that are ready when it
        has ended. A launch may use what an earlier one of the same work made.
      bring: brings to the devices what waits in host memory for this work; None: nothing does. It
        is called when the work before on these devices has ended and has put away its own.
      put_away: takes it back when the work has ended.
    """

    name: str
    devices: tuple[str, ...]
    launches: tuple[Callable[[], Arrays], ...]
    bring: Callable[[], None] | None = None
    put_away: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """What became of a work.

    Attributes:
      arrays: of its launches, in order.
      span: when it ran.
      parking: when its parked state came, and when it was put away.
    """

    arrays: tuple[Arrays, ...]
    span: Span
    parking: tuple[Span, ...] = ()


def lanes(works: Sequence[Work]) -> list[list[Work]]:
    """Groups works that share devices, directly or through others; order is kept in each group."""
    groups: list[list[Work]] = []
    for work in works:
        joined = [g for g in groups if any(set(w.devices) & set(work.devices) for w in g)]
        merged = sorted((w for g in joined for w in g), key=works.index) + [work]
        groups = [g for g in groups if g not in joined] + [merged]
    return groups


def run_wave(
    works: Sequence[Work], step: int, meanwhile: Callable[[], None] | None = None
) -> dict[str, Finished]:
    """Runs the works of a wave and waits for them.

    Lanes are launched round-robin, one program of each lane at a time.

    Args:
      works: independent of each other.
      step: recorded in the spans.
      meanwhile: host work to do between the launches and their end.
    """
    arrays: dict[str, list[Arrays]] = {work.name: [] for work in works}
    launched_s: dict[str, float] = {}
    ends: dict[str, Future[float]] = {}
    in_flight: deque[Arrays] = deque()
    groups = lanes(works)
    if not groups:
        if meanwhile:
            meanwhile()
        return {}
    started_s = time.time()
    parking = _Parking(step)
    with ThreadPoolExecutor(max_workers=len(works)) as pool:
        for work, index in _round_robin(groups):
            if len(in_flight) >= MAX_IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
            if index == 0:
                parking.give_devices(work, ends)
            launched_s.setdefault(work.name, time.time())
            result = work.launches[index]()
            arrays[work.name].append(result)
            in_flight.append(result)
            if index == len(work.launches) - 1:
                ends[work.name] = pool.submit(_wait, result)
        if meanwhile:
            meanwhile()
        ended_s = _latest({name: end.result() for name, end in ends.items()}, started_s)
    parking.put_rest_away(ends)
    finished: dict[str, Finished] = {}
    for group in groups:
        free_s = 0.0
        for work in group:
            # A program launched behind another one on the same devices starts when that one ends.
            start_s = max(launched_s[work.name], free_s)
            free_s = ended_s[work.name]
            span = Span(
                name=work.name,
                kind="model_stage",
                start_s=min(start_s, free_s),
                end_s=free_s,
                devices=work.devices,
                step=step,
            )
            finished[work.name] = Finished(
                arrays=tuple(arrays[work.name]),
                span=span,
                parking=tuple(parking.spans.get(work.name, ())),
            )
    return finished


class _Parking:
    """Gives devices from one work to the next, with what is parked of each."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._begun: list[Work] = []  # and not put away
        self.spans: dict[str, list[Span]] = {}

    def give_devices(self, work: Work, ends: Mapping[str, Future[float]]) -> None:
        """Before a work begins: what was on its devices has ended and is put away, and what is
        parked of it comes. Works without parked state do not wait for each other."""
        for old in [w for w in self._begun if set(w.devices) & set(work.devices)]:
            if work.bring or old.put_away:
                self._put_away(old, ends)
        if work.bring:
            self._timed(work, work.bring)
        self._begun.append(work)

    def put_rest_away(self, ends: Mapping[str, Future[float]]) -> None:
        """At the end of the wave."""
        for work in list(self._begun):
            self._put_away(work, ends)

    def _put_away(self, work: Work, ends: Mapping[str, Future[float]]) -> None:
        ends[work.name].result()
        if work.put_away:
            self._timed(work, work.put_away)
        self._begun.remove(work)

    def _timed(self, work: Work, move: Callable[[], None]) -> None:
        start_s, begin_s = time.time(), time.perf_counter()  # only the second never steps back
        move()
        span = Span(
            name=f"park {work.name}",
            kind="park",
            start_s=start_s,
            end_s=start_s + time.perf_counter() - begin_s,
            devices=work.devices,
            step=self._step,
        )
        self.spans.setdefault(work.name, []).append(span)


def _round_robin(groups: Iterable[list[Work]]) -> Iterable[tuple[Work, int]]:
    queues = [[(work, i) for work in g for i in range(len(work.launches))] for g in groups]
    for turn in zip_longest(*queues):
        yield from (item for item in turn if item is not None)


def _wait(arrays: Arrays) -> float:
    """When the arrays were ready; NaN if no part of them is on this process's devices."""
    if not any(x.addressable_shards for x in jax.tree.leaves(arrays)):
        return math.nan
    jax.block_until_ready(arrays)
    return time.time()


def _latest(ended_s: dict[str, float], started_s: float) -> dict[str, float]:
    """When each work had ended on all processes that take part in it, by this process's clock."""
    seconds = host.gather(np.array([end_s - started_s for end_s in ended_s.values()]))
    latest_s = np.nanmax(seconds, axis=0).astype(np.float64)  # times of day do not fit 32 bits
    return dict(zip(ended_s, (started_s + latest_s).tolist(), strict=True))
