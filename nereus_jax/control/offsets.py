# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What was measured of a model-stage in a layout, beyond what its operation classes explain.

A price is a model's, and a model is off by more in some layouts than in others. So every
`StageSetup` that has run has an offset: the logarithm of its seconds over those of the model. One
Kalman filter learns efficiencies and offsets together from each measured time,

    log measured = log modelled(efficiencies) + offset + noise

and keeps what they are unsure of in one covariance. A plan that has run before is then priced by
what it took, also after efficiencies have changed; one that has not by the model alone, and how far
that may be off is known as well: by what the efficiencies are unsure of where two plans differ, and
by how large the offsets are that were found so far.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice, StageSetup
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.roles import ModelStage
from nereus_jax.planning.calibration import (
    CLASSES,
    DRIFT,
    OUTLIER_SIGMAS,
    Efficiencies,
    OperationClass,
    shares_of,
)
from nereus_jax.planning.plan_price import PlanPrice

Floats = NDArray[np.float64]

OFFSET_STD = 0.06
"""Of an offset before any is known: the planner's held-out error on published training steps and
rollouts is 5 to 7 % (`benchmarks/cost_model`)."""
EMULATED_OFFSET_STD = 0.16
"""The same on emulated devices, which share cores and caches (`benchmarks/cost_model`, live)."""
OFFSET_WEIGHT = 8.0
"""Offsets that the first value counts as."""
OFFSET_DRIFT = 0.1 * DRIFT
"""What the standard deviation of an offset grows by from one observation to the next: far less than
that of an efficiency. What becomes slower in time is the hardware, whatever runs on it."""
MOST_SETUPS = 40
"""That are remembered; what was not observed for longest goes first."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Offsets:
    """Of the setups that have run.

    Attributes:
      setups: M of them.
      values: [M] logarithm of measured over modelled seconds.
      own: [M, M] their covariance.
      cross: [K, M] that with the logarithms of the efficiencies.
      first_std: standard deviation of one of which nothing is known.
    """

    setups: tuple[StageSetup, ...] = ()
    values: Floats = dataclasses.field(default_factory=lambda: np.zeros(0))
    own: Floats = dataclasses.field(default_factory=lambda: np.zeros((0, 0)))
    cross: Floats = dataclasses.field(default_factory=lambda: np.zeros((len(CLASSES), 0)))
    first_std: float = OFFSET_STD

    @functools.cached_property
    def std(self) -> float:
        """Standard deviation of the offset of a setup that has not run, as far as others tell."""
        found = float((self.values**2).sum() + np.trace(self.own))
        count = OFFSET_WEIGHT + len(self.setups)
        return math.sqrt((OFFSET_WEIGHT * self.first_std**2 + found) / count)

    def factor(self, setup: StageSetup) -> float:
        """Of modelled seconds; 1 for what has not run."""
        place = self.place(setup)
        return 1.0 if place is None else math.exp(float(self.values[place]))

    def factors(self, plan: ExecutionPlan) -> dict[ModelStage, float]:
        """Of every model-stage of a plan."""
        return {stage: self.factor(plan.setup(stage)) for stage in plan.choices}

    def place(self, setup: StageSetup) -> int | None:
        """Of a setup among those that have run."""
        return self._places.get(setup)

    @functools.cached_property
    def _places(self) -> dict[StageSetup, int]:
        return {setup: i for i, setup in enumerate(self.setups)}

    def with_last(self, setup: StageSetup) -> "Offsets":
        """With a setup as the last one; where it is new, nothing is known of it yet."""
        place = self.place(setup)
        if place is not None:
            order = [i for i in range(len(self.setups)) if i != place] + [place]
            return dataclasses.replace(
                self,
                setups=tuple(self.setups[i] for i in order),
                values=self.values[order],
                own=self.own[np.ix_(order, order)],
                cross=self.cross[:, order],
            )
        first = max(len(self.setups) + 1 - MOST_SETUPS, 0)
        own = np.pad(self.own[first:, first:], (0, 1))
        own[-1, -1] = self.std**2
        return dataclasses.replace(
            self,
            setups=(*self.setups[first:], setup),
            values=np.append(self.values[first:], 0.0),
            own=own,
            cross=np.pad(self.cross[:, first:], ((0, 0), (0, 1))),
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "setups": [_setup_to_json(setup) for setup in self.setups],
            "values": self.values.tolist(),
            "own": self.own.tolist(),
            "cross": self.cross.tolist(),
            "first_std": self.first_std,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Offsets":
        """Reads what `to_json` made."""
        setups = tuple(_setup_from_json(*entry) for entry in data["setups"])
        count = len(setups)
        return cls(
            setups=setups,
            values=np.array(data["values"], np.float64),
            own=np.array(data["own"], np.float64).reshape(count, count),
            cross=np.array(data["cross"], np.float64).reshape(len(CLASSES), count),
            first_std=float(data["first_std"]),
        )


def _setup_to_json(setup: StageSetup) -> list[Any]:
    layout = setup.layout
    degrees = [layout.dp, layout.pp, layout.tp]
    return [str(setup.model_stage), degrees, dataclasses.asdict(setup.choice)]


def _setup_from_json(stage: str, degrees: Sequence[int], choice: Mapping[str, Any]) -> StageSetup:
    return StageSetup(
        model_stage=ModelStage.parse(stage),
        layout=ParallelLayout(*degrees),
        choice=StageChoice(**choice),
    )


def first_offsets(*, emulated: bool) -> Offsets:
    """Before anything has run, on emulated devices or on real ones."""
    return Offsets(first_std=EMULATED_OFFSET_STD if emulated else OFFSET_STD)


def off_by_std(
    efficiencies: Efficiencies,
    offsets: Offsets,
    setup: StageSetup,
    seconds: Mapping[OperationClass, float],
) -> float:
    """Relative standard deviation of what a setup was predicted to take.

    Args:
      efficiencies, offsets: what is known.
      setup: which.
      seconds: predicted, by class.
    """
    known = offsets.with_last(setup)
    _, _, variance = _direction(efficiencies.covariance, known, shares_of(seconds))
    return math.sqrt(max(variance, 0.0))


def observe_setup(
    efficiencies: Efficiencies,
    offsets: Offsets,
    setup: StageSetup,
    seconds: Mapping[OperationClass, float],
    measured_s: float,
    noise: float,
) -> tuple[Efficiencies, Offsets]:
    """Learns from one measured time.

    Args:
      efficiencies, offsets: what is known.
      setup: what was measured.
      seconds: that those predict by class, the offset included; at least one above 0.
      measured_s: how long it took.
      noise: standard deviation of the logarithm of such a measurement.
    """
    shares, known = shares_of(seconds), offsets.with_last(setup)
    covariance = efficiencies.covariance + DRIFT**2 * np.diag(shares > 0)
    own = known.own + OFFSET_DRIFT**2 * np.eye(len(known.setups))
    known = dataclasses.replace(known, own=own)
    of_classes, of_offsets, variance = _direction(covariance, known, shares)
    variance += noise**2
    innovation = math.log(measured_s / sum(seconds.values()))
    limit = OUTLIER_SIGMAS * math.sqrt(variance)
    gain = min(max(innovation, -limit), limit) / variance
    after = dataclasses.replace(
        known,
        values=known.values + of_offsets * gain,
        own=known.own - np.outer(of_offsets, of_offsets) / variance,
        cross=known.cross - np.outer(of_classes, of_offsets) / variance,
    )
    return Efficiencies(
        log_values=efficiencies.log_values + of_classes * gain,
        covariance=covariance - np.outer(of_classes, of_classes) / variance,
        observations=efficiencies.observations + shares,
    ), after


def _direction(covariance: Floats, known: Offsets, shares: Floats) -> tuple[Floats, Floats, float]:
    """Covariance of the last setup's logarithm with the classes' [K] and with offsets [M], and its
    own: seconds fall with efficiencies and rise with their offset."""
    of_classes = known.cross[:, -1] - covariance @ shares
    of_offsets = known.own[:, -1] - known.cross.T @ shares
    return of_classes, of_offsets, float(of_offsets[-1] - shares @ of_classes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Priced:
    """A plan with its price.

    Attributes:
      plan: which.
      price: of it.
    """

    plan: ExecutionPlan
    price: PlanPrice


def doubt_s(efficiencies: Efficiencies, offsets: Offsets, now: Priced, then: Priced) -> float:
    """Standard deviation, in seconds, of the difference of two plans' prices.

    Offsets of a plan's setups that have not run are taken to be alike, for a model that is off in
    one stage of a layout will be so in others; those of two plans say nothing of each other.
    Seconds of all model-stages count, also of those that run beside each other.

    Args:
      efficiencies, offsets: what is known.
      now: the plan that runs.
      then: the other.
    """
    by_class, by_setup = np.zeros(len(CLASSES)), np.zeros(len(offsets.setups))
    new: list[float] = []
    for priced, sign in ((then, 1.0), (now, -1.0)):
        new_s = 0.0
        for stage, price in priced.price.stages.items():
            seconds = np.array([price.seconds_by_class.get(c, 0.0) for c in CLASSES])
            by_class -= sign * seconds
            place = offsets.place(priced.plan.setup(stage))
            if place is not None:
                by_setup[place] += sign * seconds.sum()
            elif now.plan.setup(stage) != then.plan.setup(stage):
                new_s += float(seconds.sum())
        new.append(new_s)
    variance = by_class @ efficiencies.covariance @ by_class
    variance += 2.0 * by_class @ offsets.cross @ by_setup + by_setup @ offsets.own @ by_setup
    return math.sqrt(max(float(variance), 0.0) + (offsets.std * math.hypot(*new)) ** 2)
