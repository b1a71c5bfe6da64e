"""What the job is watched for: signals with references, and when they trigger.

A signal x triggers when |x - x_ref| / x_ref > delta_x. Its reference is the value at the last
replan, whatever came of that replan. H_x, the number of steps for which a move can be expected to
be right, is the moving average of the steps from one crossing of x to the next.

The paper (Nereus, arXiv 2609.34645) takes H_x = 1 before the first interval, so that the first move
must pay back within half a step. Here the steps from the first reference to the first crossing are
an interval like any other (`Prior.ELAPSED`): a signal that took n steps to leave its band is
expected to need about n steps to leave the next one. Nothing is assumed beside what was seen; a
crossing in the first steps gives a short horizon. `Prior.PAPER` is the other rule.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

LENGTH_MEAN = "length_mean"
LENGTH_TAIL = "length_tail"
PEAK_MEMORY = "peak_memory"
POOL = "pool"
MEMORY_FORECAST = "memory_forecast"
OUT_OF_MEMORY = "out_of_memory"
PERIOD = "period"
EFFICIENCY = "efficiency "
"""Followed by the operation class."""
NO_SIGNALS = (MEMORY_FORECAST, OUT_OF_MEMORY, PERIOD)
"""Triggers that have no value which crosses a threshold."""


class Prior(enum.StrEnum):
    """H_x before the first interval between two crossings.

    ELAPSED: the steps from the first reference to the first crossing.
    PAPER: one step.
    """

    ELAPSED = "elapsed"
    PAPER = "paper"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signal:
    """A signal that is watched.

    Attributes:
      reference: its value at the last replan.
      since: step of its first reference.
      crossed: step of its last crossing; None: it has not crossed.
      interval: moving average of the steps between crossings; None: there was none.
    """

    reference: float
    since: int
    crossed: int | None = None
    interval: float | None = None

    def deviation(self, value: float) -> float:
        """|x - x_ref| / x_ref."""
        return abs(value - self.reference) / max(abs(self.reference), 1e-30)

    def with_crossing(self, step: int, weight: float, prior: Prior) -> "Signal":
        """After it crossed its threshold at a step.

        Args:
          step: of the crossing.
          weight: of the newest interval in the average, 0 to 1.
          prior: what counts before the first interval.
        """
        start = self.crossed
        if start is None:
            if prior is Prior.PAPER:
                return dataclasses.replace(self, crossed=step)
            start = self.since
        newest = float(max(step - start, 1))
        old = self.interval
        average = newest if old is None else (1.0 - weight) * old + weight * newest
        return dataclasses.replace(self, crossed=step, interval=average)

    @property
    def horizon(self) -> float:
        """H_x in steps; 1 where nothing is known."""
        return 1.0 if self.interval is None else self.interval

    def to_json(self) -> list[float | int | None]:
        """What `from_json` reads."""
        return [self.reference, self.since, self.crossed, self.interval]

    @classmethod
    def from_json(cls, data: list[Any]) -> "Signal":
        """Reads what `to_json` made."""
        return cls(
            reference=float(data[0]),
            since=int(data[1]),
            crossed=None if data[2] is None else int(data[2]),
            interval=None if data[3] is None else float(data[3]),
        )


Signals = Mapping[str, Signal]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """delta_x by kind of signal.

    Attributes:
      length: of the mean and of the tail.
      efficiency: of an operation class.
      memory: of the measured peak.
    """

    length: float = 0.30
    efficiency: float = 0.25
    memory: float = 0.15

    def of(self, name: str) -> float:
        """Of a signal."""
        if name in (LENGTH_MEAN, LENGTH_TAIL):
            return self.length
        return self.memory if name == PEAK_MEMORY else self.efficiency


def crossings(signals: Signals, values: Mapping[str, float], limits: Thresholds) -> list[str]:
    """The signals that are beyond their thresholds, in the order of `values`.

    Args:
      signals: those that have a reference.
      values: what they are now.
      limits: the thresholds.
    """
    return [
        name
        for name, value in values.items()
        if name in signals and signals[name].deviation(value) > limits.of(name)
    ]


def with_first_references(signals: Signals, values: Mapping[str, float], step: int) -> Signals:
    """The same, with a reference for each signal that has none yet."""
    new = {n: Signal(reference=v, since=step) for n, v in values.items() if n not in signals}
    return {**signals, **new} if new else signals


def with_references(signals: Signals, values: Mapping[str, float]) -> Signals:
    """The same with the values of now as references: after every replan."""
    renewed = {
        name: dataclasses.replace(signals[name], reference=value)
        for name, value in values.items()
        if name in signals
    }
    return {**signals, **renewed}


def with_crossings(
    signals: Signals, names: list[str], step: int, weight: float, prior: Prior
) -> Signals:
    """The same with new intervals for the signals that triggered; those without a value of their
    own (the pool) are added, as of the run's start."""
    crossed = {
        name: signals.get(name, Signal(reference=1.0, since=0)).with_crossing(step, weight, prior)
        for name in names
    }
    return {**signals, **crossed}


def horizon(signals: Signals, names: list[str], quiet_steps: float = 1.0) -> float:
    """The smallest H_x of the signals that triggered; of all known ones where none did.

    Args:
      signals: all.
      names: of those that triggered.
      quiet_steps: where no interval is known: steps without any crossing.
    """
    known = [signals[n].horizon for n in names if n in signals]
    if known:
        return min(known)
    intervals = [s.interval for s in signals.values() if s.interval is not None]
    return min(intervals, default=quiet_steps)
