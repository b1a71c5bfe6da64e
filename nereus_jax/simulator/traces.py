# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What a simulated run goes through: lengths over its steps, and a pool that changes.

A `DriftTrace` joins a supply and a length curve. Which nodes come and go is drawn by seed.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import ConfigError
from nereus_jax.planning.length_traces import LengthCurve, relative
from nereus_jax.planning.workload import LengthHistogram
from nereus_jax.simulator.supply import Supply, constant_supply

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

POOL_TAG, LENGTH_TAG = 11, 12
"""Tell the streams of random numbers of one seed apart."""
IN_STEP = 0.5
"""Where in a step a change happens that a trace over steps has in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolChange:
    """Another number of nodes.

    Attributes:
      at: step, with the part of it that is over, or seconds.
      nodes: from then on.
    """

    at: float
    nodes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceChange:
    """Devices that go and come.

    Attributes:
      at: step with the part of it that is over, or seconds, as the trace has it.
      going, coming: devices.
    """

    at: float
    going: tuple[DeviceId, ...]
    coming: tuple[DeviceId, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """What a run really went through, in the place of what is drawn.

    Attributes:
      responses: of each step the lengths of its rows, in tokens.
      first: devices that the run starts with.
      changes: of the pool, in order.
    """

    responses: tuple[Ints, ...]
    first: tuple[DeviceId, ...]
    changes: tuple[DeviceChange, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DriftTrace:
    """What happens to a run.

    Attributes:
      name: of the trace.
      mean_tokens: [steps] mean response length of each step.
      shape: [K] quantiles of a batch's lengths over their mean.
      nodes: that the run starts with.
      changes: of the pool, in order.
      by_step: their `at` is a step, else it is seconds.
      step_s: seconds that a step of the trace stands for while the job waits for devices.
      notice_s: seconds between a node's revocation and its loss; 0: it is lost without warning.
      recorded: the rows and the devices themselves; they take the place of `shape`, `nodes` and
        `changes`.
    """

    name: str
    mean_tokens: Floats
    shape: Floats
    nodes: int
    changes: tuple[PoolChange, ...] = ()
    by_step: bool = True
    step_s: float = 300.0
    notice_s: float = 0.0
    recorded: Recorded | None = None

    def __post_init__(self) -> None:
        if len(self.mean_tokens) < 1:
            raise ConfigError(f"trace {self.name}: steps must be at least 1, got 0")
        if self.nodes < 1:
            raise ConfigError(
                f"trace {self.name}: a run starts with at least 1 node, got {self.nodes}; cut the "
                f"trace to where there is one, or give some that stay"
            )

    @property
    def steps(self) -> int:
        """Of the run."""
        return len(self.mean_tokens)

    @property
    def most_nodes(self) -> int:
        """Of all times."""
        return max([self.nodes, *(c.nodes for c in self.changes)])

    def check_nodes(self, nodes: int) -> None:
        """Raises ConfigError if the pool never has as many nodes as the trace says."""
        for change in (PoolChange(at=0.0, nodes=self.nodes), *self.changes):
            if change.nodes > nodes:
                raise ConfigError(
                    f"trace {self.name}: {change.nodes} nodes at "
                    f"{'step' if self.by_step else 'second'} {change.at:g}, but the cluster has "
                    f"{nodes}; scale the trace or give a larger cluster"
                )


def drift_trace(
    supply: Supply,
    lengths: LengthCurve,
    shape: LengthHistogram,
    *,
    steps: int,
    name: str = "",
    seconds_per_step: float = 0.0,
    notice_s: float = 0.0,
) -> DriftTrace:
    """Joins a supply and a length curve.

    The whole length curve is taken over the steps.

    Args:
      supply: nodes over time, cut and scaled.
      lengths: means over steps, cut.
      shape: of a batch.
      steps: of the run.
      name: of the trace; by default those of its parts.
      seconds_per_step: of the supply, that become one step of the run; 0: the supply's seconds are
        those of the run.
      notice_s: before a node is lost.

    Raises:
      ConfigError: a number is not possible.
    """
    if notice_s < 0.0 or seconds_per_step < 0.0:
        raise ConfigError(
            f"trace: seconds must be at least 0, got notice_s {notice_s:g}, seconds_per_step "
            f"{seconds_per_step:g}"
        )
    changes: list[PoolChange] = []
    for time_s, nodes in list(zip(supply.times_s, supply.nodes, strict=True))[1:]:
        at = time_s
        if seconds_per_step:
            at = math.floor(time_s / seconds_per_step) + IN_STEP
            if at >= steps:
                break
        if changes and changes[-1].at == at:  # several within a step: the last one counts
            changes.pop()
        if nodes != (changes[-1].nodes if changes else supply.nodes[0]):
            changes.append(PoolChange(at=at, nodes=nodes))
    return DriftTrace(
        name=name or f"{supply.name}, {lengths.name}",
        mean_tokens=lengths.stretched(steps),
        shape=relative(shape),
        nodes=supply.nodes[0],
        changes=tuple(changes),
        by_step=bool(seconds_per_step),
        step_s=seconds_per_step,
        notice_s=notice_s,
    )


def nodes_that_change(
    trace: DriftTrace, nodes: int, seed: int
) -> tuple[tuple[int, ...], list[tuple[float, tuple[int, ...], tuple[int, ...]]]]:
    """Which nodes there are at the start, and for each change which leave and which come.

    Args:
      trace: with the numbers.
      nodes: of the cluster.
      seed: draws those that go.

    Raises:
      ConfigError: the cluster has fewer nodes than the trace.
    """
    trace.check_nodes(nodes)
    rng = np.random.default_rng([seed, POOL_TAG])
    there = set(range(trace.nodes))
    first = tuple(sorted(there))
    found: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []
    for change in trace.changes:
        gap = change.nodes - len(there)
        absent = sorted(set(range(nodes)) - there)
        going = _drawn(rng, sorted(there), max(-gap, 0))
        coming = tuple(absent[: max(gap, 0)])
        there = there.difference(going).union(coming)
        if going or coming:
            found.append((change.at, going, coming))
    return first, found


def _drawn(rng: np.random.Generator, values: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(sorted(int(x) for x in rng.choice(values, count, replace=False))) if count else ()


def synthetic_supply(
    seed: int, nodes: int, *, samples: int = 48, gap_s: float = 300.0, least: int = 1
) -> Supply:
    """A made-up spot market: it stays as it is for a while, drops at once and comes back in parts.

    Args:
      seed: draws it.
      nodes: at most.
      samples: how many.
      gap_s: from one to the next.
      least: nodes.
    """
    if not 1 <= least <= nodes or samples < 1 or seed < 0:
        raise ConfigError(
            f"synthetic supply: needs 1 <= least <= nodes, samples >= 1 and seed >= 0, got least "
            f"{least}, nodes {nodes}, samples {samples}, seed {seed}"
        )
    rng = np.random.default_rng([seed, POOL_TAG, 1])
    counts: list[int] = []
    now = nodes
    for _ in range(samples):
        if rng.random() < 0.15:
            now = int(rng.integers(least, nodes + 1))
        elif now < nodes and rng.random() < 0.3:
            now = min(nodes, now + int(rng.integers(1, max(nodes // 2, 1) + 1)))
        counts.append(now)
    counts[0] = max(counts[0], least)
    start = constant_supply(counts[0], gap_s)
    for count in counts[1:]:
        start = start.then(constant_supply(count, gap_s))
    return dataclasses.replace(start, name=f"synthetic supply {seed}")


def synthetic_lengths(
    seed: int, *, start_tokens: float = 500.0, end_tokens: float = 4000.0, steps: int = 50
) -> LengthCurve:
    """A made-up curve: it grows towards its end with a few plateaus and setbacks.

    Args:
      seed: draws it.
      start_tokens, end_tokens: about where it starts and ends.
      steps: of the curve.
    """
    if steps < 1 or seed < 0 or min(start_tokens, end_tokens) <= 0.0:
        raise ConfigError(
            f"synthetic lengths: steps must be at least 1, seed at least 0 and tokens above 0, got "
            f"{steps}, {seed}, {start_tokens:g}, {end_tokens:g}"
        )
    rng = np.random.default_rng([seed, LENGTH_TAG, 1])
    growth = np.maximum(rng.normal(1.0, 1.5, steps), -0.5)
    path = np.concatenate([[0.0], np.cumsum(growth)[:-1]]) if steps > 1 else np.zeros(1)
    path = path / max(abs(float(path[-1])), 1e-9)
    means = start_tokens * (end_tokens / start_tokens) ** np.clip(path, -0.2, 1.2)
    return LengthCurve(
        name=f"synthetic lengths {seed}",
        steps=tuple(float(i) for i in range(steps)),
        mean_tokens=tuple(float(x) for x in means),
    )
