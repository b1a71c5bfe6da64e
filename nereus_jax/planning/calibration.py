# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""How much of the peaks programs reach: one efficiency per operation class, learned from seconds.

The cost model gives the seconds of a stage by operation class, each divided by its efficiency. The
logarithm x_k of an inverse efficiency is a normal variable. A measurement y of a stage with
predicted seconds s_k (sum s) tells of sum_k (s_k / s) x_k with noise, so that one step of an
extended Kalman filter moves each class by its share and its uncertainty:

    innovation r = log(y / s)    share h_k = s_k / s    variance S = sum_k h_k^2 v_k + noise^2
    gain g_k = v_k h_k / S       x_k += g_k r           v_k -= g_k h_k v_k

An innovation beyond `OUTLIER_SIGMAS` standard deviations counts as one of that size (Huber 1964),
and a first call after a compile counts not at all. Efficiencies drift, so variances grow a little
with each observation and never fall below a floor.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class OperationClass(enum.StrEnum):
    """What seconds are spent on; each has one efficiency."""

    GEMM = "gemm"  # matrix products at the peak of their dtype
    UNALIGNED_GEMM = "unaligned gemm"  # the same with a width that no tile of a matrix unit fits
    ATTENTION = "attention"  # scores and weighted sums
    MEMORY = "memory"  # elementwise work and the optimizer, at the bandwidth of the memory
    DECODE_MEMORY = "decode memory"  # weights and caches that a decode step reads
    ALL_REDUCE_INTRA = "all-reduce in a node"  # and reduce-scatter, all-gather, broadcast
    ALL_REDUCE_INTER = "all-reduce between nodes"
    P2P_INTRA = "p2p in a node"
    P2P_INTER = "p2p between nodes"
    HOST_COPY = "host copy"
    COMPILE = "compile"
    LAUNCH = "launch"  # what a program or a step of a loop costs before it computes anything


PRIOR: Mapping[OperationClass, tuple[float, float]] = {
    OperationClass.GEMM: (0.60, 0.25),
    OperationClass.UNALIGNED_GEMM: (0.40, 0.30),
    OperationClass.ATTENTION: (0.30, 0.40),
    OperationClass.MEMORY: (0.60, 0.30),
    OperationClass.DECODE_MEMORY: (0.50, 0.30),
    OperationClass.ALL_REDUCE_INTRA: (0.50, 0.40),
    OperationClass.ALL_REDUCE_INTER: (0.40, 0.50),
    OperationClass.P2P_INTRA: (0.50, 0.50),
    OperationClass.P2P_INTER: (0.40, 0.50),
    OperationClass.HOST_COPY: (0.40, 0.50),
    OperationClass.COMPILE: (0.50, 0.70),
    OperationClass.LAUNCH: (0.50, 0.50),
}
"""(efficiency, standard deviation of its logarithm) before anything is measured: a little below
what well-tuned programs reach, so that a plan is rather too slow on paper than too fast."""

NOISE = 0.05
"""Standard deviation of the logarithm of a measured time that repeats."""
DRIFT = 0.01
"""What it grows by in one observation, where no measurement says otherwise."""
FLOOR = 0.005
"""Smallest standard deviation of a class: nothing is ever known for good."""
OUTLIER_SIGMAS = 3.0
"""Innovations beyond so many standard deviations are cut to that."""
FIT_ITERATIONS = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What a class reaches of the peak.

    Attributes:
      value: share of the peak; above 0. It may exceed 1 where the peak in the table is too low.
      log_std: standard deviation of its logarithm.
      observations: measurements that it was learned from, weighted with the class's share in each.
    """

    value: float
    log_std: float
    observations: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.value < math.inf and 0 <= self.log_std < math.inf):
            raise ValueError(f"an efficiency is above 0 with a finite deviation, got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """An efficiency for each operation class."""

    by_class: Mapping[OperationClass, Efficiency]

    def __post_init__(self) -> None:
        missing = [c.value for c in OperationClass if c not in self.by_class]
        if missing:
            raise ValueError(f"efficiencies are missing for {missing}")

    @classmethod
    def prior(cls) -> "Efficiencies":
        """What is assumed before anything is measured."""
        return cls(by_class={c: Efficiency(value=v, log_std=std) for c, (v, std) in PRIOR.items()})

    def __getitem__(self, operation: OperationClass) -> float:
        return self.by_class[operation].value

    def replace(self, values: Mapping[OperationClass, float]) -> "Efficiencies":
        """The same with other values for some classes."""
        changed = {c: dataclasses.replace(self.by_class[c], value=v) for c, v in values.items()}
        return Efficiencies(by_class={**self.by_class, **changed})


def observe(
    efficiencies: Efficiencies,
    seconds: Mapping[OperationClass, float],
    measured_s: float,
    *,
    first_after_compile: bool = False,
    noise: float = NOISE,
) -> Efficiencies:
    """Learns from one measured time.

    Args:
      efficiencies: what is known.
      seconds: what those efficiencies predict by class (`StageCost.at`); at least one above 0.
      measured_s: how long it took.
      first_after_compile: that call's time has the compiler, caches and allocations in it, and
        changes nothing.
      noise: standard deviation of the logarithm of such a measurement.
    """
    total_s = sum(seconds.values())
    if first_after_compile or not measured_s > 0 or not math.isfinite(measured_s) or total_s <= 0:
        return efficiencies
    shares = {c: s / total_s for c, s in seconds.items() if s > 0}
    variances = {
        c: efficiencies.by_class[c].log_std ** 2 + (DRIFT * h) ** 2 for c, h in shares.items()
    }
    spread = math.sqrt(sum(h**2 * variances[c] for c, h in shares.items()) + noise**2)
    innovation = math.log(measured_s / total_s)
    limit = OUTLIER_SIGMAS * spread
    innovation = min(max(innovation, -limit), limit)
    updated = dict(efficiencies.by_class)
    for operation, share in shares.items():
        old, variance = updated[operation], variances[operation]
        gain = variance * share / spread**2
        updated[operation] = Efficiency(
            value=old.value * math.exp(-gain * innovation),
            log_std=max(math.sqrt(max(variance * (1 - gain * share), 0.0)), FLOOR),
            observations=old.observations + share,
        )
    return Efficiencies(by_class=updated)


Predict = Callable[[Efficiencies], Mapping[OperationClass, Floats]]
"""Seconds [N] of N measurements by class, with these efficiencies."""


def fit(
    predict: Predict,
    measured_s: Sequence[float] | Floats,
    prior: Efficiencies | None = None,
    *,
    noise: float = NOISE,
) -> Efficiencies:
    """Learns from many measurements at once.

    The maximum of the posterior: least sum_i huber((log y_i - log s_i) / noise) + sum_k ((x_k -
    prior_k) / deviation_k)^2 / 2, by Gauss-Newton steps with the classes' shares as the Jacobian.
    Classes that no measurement has seconds of keep their prior.

    Args:
      predict: the seconds [N] of the measurements by class; may depend on the efficiencies in any
        way (a roofline, overlap), the shares are taken as its slope.
      measured_s: N times.
      prior: where to start from, and how firmly to hold to it.
      noise: standard deviation of the logarithm of a measurement, errors of the model included.
    """
    start = prior or Efficiencies.prior()
    classes = tuple(OperationClass)
    measured = np.log(np.asarray(measured_s, np.float64))
    deviation = np.array([start.by_class[c].log_std for c in classes])
    precision = 1.0 / np.maximum(deviation, 1e-9) ** 2
    shift = np.zeros(len(classes))  # of log(1 / efficiency) from the prior
    shares = np.zeros((len(measured), len(classes)))
    weights = np.ones(len(measured))
    current = start
    for _ in range(FIT_ITERATIONS):
        seconds = predict(current)
        table = np.stack([np.broadcast_to(seconds[c], measured.shape) for c in classes], axis=1)
        total = table.sum(axis=1)
        shares, residual = table / total[:, None], measured - np.log(total)
        scale = np.abs(residual) / noise
        weights = np.minimum(1.0, OUTLIER_SIGMAS / np.maximum(scale, 1e-12)) / noise**2
        normal = shares.T @ (weights[:, None] * shares) + np.diag(precision)
        step = np.linalg.solve(normal, shares.T @ (weights * residual) - precision * shift)
        step = np.clip(step, -0.5, 0.5)
        shift = shift + step
        current = start.replace({c: start[c] * math.exp(-shift[i]) for i, c in enumerate(classes)})
        if np.abs(step).max() < 1e-6:
            break
    normal = shares.T @ (weights[:, None] * shares) + np.diag(precision)
    stds = np.sqrt(np.diag(np.linalg.inv(normal)))
    seen = shares.sum(axis=0)
    return Efficiencies(
        by_class={
            c: Efficiency(
                value=current[c],
                log_std=max(float(stds[i]), FLOOR) if seen[i] else start.by_class[c].log_std,
                observations=start.by_class[c].observations + float(seen[i]),
            )
            for i, c in enumerate(classes)
        }
    )
