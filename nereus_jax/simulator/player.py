"""The pool's changes as a run meets them: at a boundary between steps, or in the middle of one."""

import heapq
import math

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.events import DevicesJoined, DevicesLost, Revocation
from nereus_jax.simulator.cluster import SimulatedCluster
from nereus_jax.simulator.traces import DeviceChange, DriftTrace, nodes_that_change

PoolEvent = DevicesLost | DevicesJoined | Revocation


class Player:
    """Gives the events of a trace in their order, each once.

    Args:
      trace: what happens.
      cluster: whose nodes.
      seed: which nodes go.

    Raises:
      ConfigError: the cluster has fewer nodes than the trace.
    """

    def __init__(self, trace: DriftTrace, cluster: SimulatedCluster, seed: int) -> None:
        self.first, self._changes = _pool(trace, cluster, seed)
        self._by_step, self._step_s = trace.by_step, trace.step_s
        self._notice_s = trace.notice_s
        self._gone: list[tuple[float, tuple[DeviceId, ...]]] = []

    def next_time(self, step: int, start_s: float, step_s: float) -> float:
        """When something happens next in a step; infinite where nothing does before its end.

        Args:
          step: its number.
          start_s: when it starts.
          step_s: what it takes if nothing happens.
        """
        times = [self._gone[0][0]] if self._gone else []
        if self._changes:
            times.append(self._change_time(step, start_s, step_s))
        at_s = max(min(times, default=math.inf), start_s)
        return at_s if at_s < start_s + step_s else math.inf

    def pop(self, step: int, start_s: float, step_s: float, time_s: float) -> list[PoolEvent]:
        """The events until a moment of a step, which are taken off.

        Args:
          step: its number.
          start_s: when it starts.
          step_s: what it takes if nothing happens; 0: it has not started.
          time_s: the moment.
        """
        events: list[PoolEvent] = []
        while self._gone and self._gone[0][0] <= time_s:
            events.append(DevicesLost(time_s=time_s, devices=heapq.heappop(self._gone)[1]))
        while self._changes and self._change_time(step, start_s, step_s) <= time_s:
            events += self._events(self._changes.pop(0), time_s)
        return events

    def _change_time(self, step: int, start_s: float, step_s: float) -> float:
        at = self._changes[0].at
        if not self._by_step:
            return at
        if at <= step:
            return start_s
        return start_s + (at - step) * step_s if step_s and at < step + 1 else math.inf

    def skip(self, step: int, time_s: float) -> tuple[float, list[PoolEvent]]:
        """For a job that waits: the next change, and when it comes.

        Args:
          step: that the job waits before.
          time_s: now.
        """
        if self._gone:
            at_s = max(self._gone[0][0], time_s)
            return at_s, [DevicesLost(time_s=at_s, devices=heapq.heappop(self._gone)[1])]
        if not self._changes:
            return math.inf, []
        change = self._changes.pop(0)
        at_s = max(change.at, time_s)
        if self._by_step:
            at_s = time_s + max(change.at - step, 0.0) * self._step_s
        return at_s, self._events(change, at_s)

    def _events(self, change: DeviceChange, time_s: float) -> list[PoolEvent]:
        events: list[PoolEvent] = []
        if change.coming:
            events.append(DevicesJoined(time_s=time_s, devices=change.coming))
        if change.going and self._notice_s > 0.0:
            events.append(
                Revocation(time_s=time_s, devices=change.going, deadline_s=self._notice_s)
            )
            heapq.heappush(self._gone, (time_s + self._notice_s, change.going))
        elif change.going:
            events.append(DevicesLost(time_s=time_s, devices=change.going))
        return events


def _pool(
    trace: DriftTrace, cluster: SimulatedCluster, seed: int
) -> tuple[tuple[DeviceId, ...], list[DeviceChange]]:
    """The devices at the start, and the changes."""
    if trace.recorded is not None:
        return trace.recorded.first, list(trace.recorded.changes)
    first, changes = nodes_that_change(trace, cluster.nodes, seed)
    of = cluster.devices_of
    found = [
        DeviceChange(at=at, going=of(going), coming=of(coming)) for at, going, coming in changes
    ]
    return of(first), found
