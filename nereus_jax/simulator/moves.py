# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What changes of plan take on the simulated cluster: moving, compiling, starting again.

The operations of a transition are those that its graph has; how long they take is the truth's
matter. A device does one operation at a time, in dispatch order. Operations that leave a node share
what the node's links reach together.
"""

import dataclasses
import heapq
import zlib

import numpy as np
from numpy.typing import NDArray

from nereus_jax.control.planner_costs import PROGRAMS
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import DTYPE_BYTES
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.hardware import Link
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.core.transition import LinkBytes, Operation, TransitionGraph
from nereus_jax.planning.calibration import Efficiencies, OperationClass
from nereus_jax.simulator.cluster import SimulatedCluster
from nereus_jax.simulator.operations import message_s

Floats = NDArray[np.float64]
Compiled = frozenset[tuple[object, ...]]
"""Programs that exist: by model-stage, placement and choice."""

COMPILE_TAG = 6
COPIES = {Stage.TRAIN: 3}
"""Arrays of a model's size that belong to a model-stage's state and are in a checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """Programs that a plan needs and that are not there.

    Attributes:
      seconds: one after the other.
      programs: what exists after that.
    """

    seconds: float
    programs: Compiled


def compilation(cluster: SimulatedCluster, plan: ExecutionPlan, compiled: Compiled) -> Compilation:
    """What compiling for a plan takes.

    Args:
      cluster: whose seed draws the seconds of each program.
      plan: wanted.
      compiled: what exists.
    """
    overheads = cluster.truth.overheads
    seconds, programs = 0.0, set(compiled)
    for stage, placement in plan.plan.placements.items():
        key = stage, placement, plan.choices[stage]
        if key in compiled:
            continue
        programs.add(key)
        name = zlib.crc32(repr((str(stage), placement.layout, plan.choices[stage])).encode())
        rng = np.random.default_rng([cluster.seed, COMPILE_TAG, name])
        logs = overheads.compile_std * rng.standard_normal(PROGRAMS[stage.stage])
        seconds += overheads.compile_s * float(np.exp(logs).sum())
    return Compilation(seconds=seconds, programs=frozenset(programs))


def restart_s(
    cluster: SimulatedCluster, source: ExecutionPlan, target: ExecutionPlan, *, write: bool
) -> float:
    """Of a checkpoint written and a job started from it, without the compiler.

    Args:
      cluster: that it runs on.
      source: the plan that held the state.
      target: the plan that reads it.
      write: the state is whole and is written first; else an older checkpoint is read.
    """
    overheads = cluster.truth.overheads
    written_s = checkpoint_s(cluster, source) if write else 0.0
    read_bytes = sum(
        _state_bytes(cluster, s) / (p.layout.pp * p.layout.tp)
        for s, p in target.plan.placements.items()
    )
    return written_s + read_bytes / overheads.storage_bytes_per_s + overheads.restart_s


def checkpoint_s(cluster: SimulatedCluster, plan: ExecutionPlan) -> float:
    """Of writing the state, every device its part."""
    written = sum(
        _state_bytes(cluster, s) / p.layout.num_devices for s, p in plan.plan.placements.items()
    )
    return written / cluster.truth.overheads.storage_bytes_per_s


def _state_bytes(cluster: SimulatedCluster, stage: ModelStage) -> float:
    """Of a model-stage in a checkpoint; what a weight edge fills is in none."""
    p = cluster.problem
    if any(e.target == stage for e in p.workflow.weight_edges):
        return 0.0
    train = stage.stage is Stage.TRAIN
    each = DTYPE_BYTES[p.param_dtype if train else p.compute_dtype]
    return 1.0 * COPIES.get(stage.stage, 1) * each * p.models[stage.role].num_params(p.head(stage))


def transition_s(
    cluster: SimulatedCluster, graph: TransitionGraph, beliefs: Efficiencies, time_s: float
) -> float:
    """Seconds from the first operation to the end of the last, and the set-up.

    Args:
      cluster: that it runs on.
      graph: the operations, priced with links at these efficiencies.
      beliefs: those efficiencies.
      time_s: when it starts.
    """
    operations = tuple(graph.operations)
    network = cluster.conditions.network(time_s)
    alone = [_alone_s(cluster, o, beliefs, network) for o in operations]
    return cluster.truth.overheads.setup_s + _Schedule(cluster, graph, operations, alone).end_s()


def _alone_s(
    cluster: SimulatedCluster, operation: Operation, beliefs: Efficiencies, network: float
) -> float:
    """Of one operation with its links to itself: as it was priced, at the rates that links have."""
    if operation.link_bytes == LinkBytes() or not operation.seconds:
        return 0.0
    hardware, links = cluster.problem.hardware, cluster.truth.links
    kinds = (
        (operation.link_bytes.intra_node, hardware.intra_node, "intra_node", 1.0),
        (operation.link_bytes.inter_node, hardware.inter_node, "inter_node", network),
        (operation.link_bytes.host, hardware.host, "host", 1.0),
    )
    classes = OperationClass.P2P_INTRA, OperationClass.P2P_INTER, OperationClass.HOST_COPY
    local_s = operation.link_bytes.local / hardware.memory_bytes_per_s
    believed_s, true_s = local_s, local_s
    receivers = max(sum(len(u.devices) for u in operation.produces), 1)
    for (num_bytes, link, name, factor), operation_class in zip(kinds, classes, strict=True):
        if not num_bytes:
            continue
        believed_s += num_bytes / (link.bytes_per_s * beliefs[operation_class])
        message = num_bytes / receivers
        true_s += _true_s(cluster, link, name, num_bytes, message) / factor
    storage = operation.link_bytes.storage
    believed_s += storage / 1e9
    true_s += storage / cluster.truth.overheads.storage_bytes_per_s
    ratio = true_s / believed_s if believed_s > 0.0 and links else 1.0
    return cluster.truth.overheads.operation_s + operation.seconds * ratio


def _true_s(
    cluster: SimulatedCluster, link: Link, name: str, num_bytes: float, message: float
) -> float:
    return float(message_s(cluster.truth.links[name], link, num_bytes, message))


class _Schedule:
    """Operations side by side, as far as devices, edges and links allow."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        graph: TransitionGraph,
        operations: tuple[Operation, ...],
        alone: list[float],
    ) -> None:
        self._alone = np.array(alone)
        self._waits, self._followers = _waits(graph, operations)
        self._share = cluster.truth.overheads.uplink_share
        self._demand = [_uplinks(o, cluster.devices_per_node) for o in operations]
        self._load: dict[int, float] = {}

    def end_s(self) -> float:
        """When the last one has ended."""
        left = self._alone.copy()
        ready = [i for i, n in enumerate(self._waits) if not n]
        running: set[int] = set()
        clock = 0.0
        heapq.heapify(ready)
        while ready or running:
            while ready:
                i = heapq.heappop(ready)
                running.add(i)
                self._add(i, 1.0)
            order = sorted(running)
            rates = np.array([self._rate(i) for i in order])
            needs = left[order] / rates
            passed = float(needs.min())
            clock += passed
            left[order] -= passed * rates
            for i in (i for i, need in zip(order, needs, strict=True) if need <= passed + 1e-12):
                running.discard(i)
                self._add(i, -1.0)
                for follower in self._followers[i]:
                    self._waits[follower] -= 1
                    if not self._waits[follower]:
                        heapq.heappush(ready, follower)
        return clock

    def _add(self, i: int, sign: float) -> None:
        for node, share in self._demand[i].items():
            self._load[node] = self._load.get(node, 0.0) + sign * share

    def _rate(self, i: int) -> float:
        """Of its own speed; a node's links together reach a share of their sum."""
        busiest = max((self._load[n] for n in self._demand[i]), default=0.0)
        return min(1.0, self._share / busiest) if busiest > 0.0 else 1.0


def _uplinks(operation: Operation, devices_per_node: int) -> dict[int, float]:
    """Share of each node's links that an operation uses, where it leaves the node."""
    if not operation.link_bytes.inter_node:
        return {}
    counts: dict[int, float] = {}
    for device in operation.devices:
        counts[device.host] = counts.get(device.host, 0.0) + 1.0 / devices_per_node
    return counts


def _waits(
    graph: TransitionGraph, operations: tuple[Operation, ...]
) -> tuple[list[int], list[list[int]]]:
    """How many others each operation waits for, and which ones wait for it."""
    followers: list[list[int]] = [[] for _ in operations]
    waits = [0] * len(operations)
    last: dict[DeviceId, int] = {}
    for i, operation in enumerate(operations):
        before = set(graph.predecessors(i))
        before |= {last[d] for d in operation.devices if d in last}
        for j in before:
            followers[j].append(i)
        waits[i] = len(before)
        last |= dict.fromkeys(operation.devices, i)
    return waits, followers
