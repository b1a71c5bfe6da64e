# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""How much of the peaks programs reach: one efficiency per operation class, learned from seconds.

The cost model gives the seconds of a stage by operation class, each divided by its efficiency. The
logarithms x of the inverse efficiencies are normal variables with mean and covariance P. A
measurement y of a stage with predicted seconds s_k (sum s) tells of sum_k (s_k / s) x_k with noise,
so that one step of an extended Kalman filter moves each class by its share and its uncertainty:

    innovation r = log(y / s)    share h_k = s_k / s    variance S = h' P h + noise^2
    gain g = P h / S             x += g r               P -= g (P h)'

An innovation beyond `OUTLIER_SIGMAS` standard deviations counts as one of that size (Huber 1964),
and a first call after a compile counts not at all. Efficiencies drift, so P grows a little with
each observation. Before anything is measured the classes share a part of their uncertainty: a slow
software stack is slow in everything.
"""

import dataclasses
import enum
import functools
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


CLASSES = tuple(OperationClass)

PRIOR: Mapping[OperationClass, tuple[float, float]] = {
    OperationClass.GEMM: (0.65, 0.20),
    OperationClass.UNALIGNED_GEMM: (0.45, 0.30),
    OperationClass.ATTENTION: (0.30, 0.40),
    OperationClass.MEMORY: (0.60, 0.40),
    OperationClass.DECODE_MEMORY: (0.65, 0.35),
    OperationClass.ALL_REDUCE_INTRA: (0.60, 0.30),
    OperationClass.ALL_REDUCE_INTER: (0.60, 0.30),
    OperationClass.P2P_INTRA: (0.60, 0.40),
    OperationClass.P2P_INTER: (0.60, 0.40),
    OperationClass.HOST_COPY: (0.50, 0.50),
    OperationClass.COMPILE: (0.50, 0.70),
    OperationClass.LAUNCH: (0.60, 1.00),
}
"""(efficiency, standard deviation of its logarithm) before anything is measured: a little below
what well-tuned programs reach, so that a plan is rather too slow on paper than too fast."""

COMMON_STD = 0.30
"""Standard deviation of the logarithm that all classes share before anything is measured."""

NOISE = 0.05
"""Standard deviation of the logarithm of a measured time that repeats."""
DRIFT = 0.003
"""What that of an efficiency grows by from one observation to the next."""
OUTLIER_SIGMAS = 3.0
"""Innovations beyond so many standard deviations are cut to that."""
FIT_ITERATIONS = 30
LARGEST_STEP = 0.5
"""Most that a logarithm moves in one iteration of a fit, which only is right near its start."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Efficiencies:
    """An efficiency for each operation class, and how sure it is.

    Attributes:
      log_values: [K] logarithm of each class's efficiency, in the order of `OperationClass`.
      covariance: [K, K] of them.
      observations: [K] measurements that each was learned from, weighted with its share in them.
    """

    log_values: Floats
    covariance: Floats
    observations: Floats

    @classmethod
    def prior(cls) -> "Efficiencies":
        """What is assumed before anything is measured."""
        own = np.diag([PRIOR[c][1] ** 2 for c in CLASSES])
        return cls(
            log_values=np.log([PRIOR[c][0] for c in CLASSES]),
            covariance=own + COMMON_STD**2,
            observations=np.zeros(len(CLASSES)),
        )

    @functools.cached_property
    def _values(self) -> dict[OperationClass, float]:
        return {c: math.exp(x) for c, x in zip(CLASSES, self.log_values, strict=True)}

    def __getitem__(self, operation: OperationClass) -> float:
        """Share of the peak that a class reaches; above 1 where the table has the peak too low."""
        return self._values[operation]

    def log_std(self, operation: OperationClass) -> float:
        """Standard deviation of the logarithm of a class's efficiency."""
        index = CLASSES.index(operation)
        return math.sqrt(float(self.covariance[index, index]))

    def replace(self, values: Mapping[OperationClass, float]) -> "Efficiencies":
        """The same with other values for some classes."""
        log_values = self.log_values.copy()
        for operation, value in values.items():
            log_values[CLASSES.index(operation)] = math.log(value)
        return dataclasses.replace(self, log_values=log_values)


def shares_of(seconds: Mapping[OperationClass, float]) -> Floats:
    """[K] of the classes in some seconds, of which at least one is above 0."""
    values = np.array([seconds.get(c, 0.0) for c in CLASSES])
    return values / values.sum()


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
    predicted_s = sum(seconds.values())
    if first_after_compile or not 0 < measured_s < math.inf or predicted_s <= 0:
        return efficiencies
    shares = shares_of(seconds)
    covariance = efficiencies.covariance + DRIFT**2 * np.diag(shares > 0)
    spread = covariance @ shares
    variance = float(shares @ spread) + noise**2
    innovation = math.log(measured_s / predicted_s)
    limit = OUTLIER_SIGMAS * math.sqrt(variance)
    innovation = min(max(innovation, -limit), limit)
    gain = spread / variance
    return Efficiencies(
        log_values=efficiencies.log_values - gain * innovation,
        covariance=covariance - np.outer(spread, spread) / variance,
        observations=efficiencies.observations + shares,
    )


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

    The maximum of the posterior: least sum_i huber((log y_i - log s_i) / noise) + (x - prior)'
    P^-1 (x - prior) / 2, by Gauss-Newton steps with the classes' shares as the Jacobian.

    Args:
      predict: the seconds [N] of the measurements by class; may depend on the efficiencies in any
        way (a roofline, overlap), the shares are taken as its slope.
      measured_s: N times.
      prior: where to start from, and how firmly to hold to it.
      noise: standard deviation of the logarithm of a measurement, errors of the model included.
    """
    start = prior or Efficiencies.prior()
    measured = np.log(np.asarray(measured_s, np.float64))
    precision = np.linalg.inv(start.covariance)
    current, normal = start, precision
    seen = np.zeros(len(CLASSES))
    for _ in range(FIT_ITERATIONS):
        seconds = predict(current)
        zero = np.zeros(measured.shape)
        table = np.stack([np.broadcast_to(seconds.get(c, zero), zero.shape) for c in CLASSES], 1)
        total = table.sum(axis=1)
        shares, residual = table / total[:, None], measured - np.log(total)
        scale = np.maximum(np.abs(residual) / noise, OUTLIER_SIGMAS)
        weights = OUTLIER_SIGMAS / scale / noise**2
        normal = shares.T @ (weights[:, None] * shares) + precision
        shift = start.log_values - current.log_values
        step = np.linalg.solve(normal, shares.T @ (weights * residual) - precision @ shift)
        step = np.clip(step, -LARGEST_STEP, LARGEST_STEP)
        current = dataclasses.replace(current, log_values=current.log_values - step)
        seen = shares.sum(axis=0)
        if np.abs(step).max() < 1e-6:
            break
    return Efficiencies(
        log_values=current.log_values,
        covariance=_symmetric(np.linalg.inv(normal)),
        observations=start.observations + seen,
    )


def _symmetric(matrix: Floats) -> Floats:
    return (matrix + matrix.T) / 2
