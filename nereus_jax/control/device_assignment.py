# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Which device of a pool stands at which position of a plan.

A search plans for positions 0 to n - 1 in tidy nodes. A real pool has holes, and its devices hold
state already. So nodes are cut into blocks as wide as the widest group of tensor ranks, what is
left over of them into blocks of the next width, and those come last; and of the nodes that are
equally full, those go to a position that hold the most of what will be needed there.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement

NodeOf = Callable[[DeviceId], int]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_MATCHED = 256
"""Nodes, or blocks of a node, that are matched to positions; of more the order stays: the table of
pairs would take longer than what moves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """State that lies on devices now and will be needed at positions.

    Attributes:
      old: where it is.
      layout: degrees that it will have.
      first: position of the first device that it will be on; the others follow.
      num_bytes: of the whole model-stage's state in one replica.
    """

    old: Placement
    layout: ParallelLayout
    first: int
    num_bytes: float


def node_counts(devices: Sequence[DeviceId], node_of: NodeOf) -> dict[int, list[DeviceId]]:
    """The devices of each node, ascending."""
    nodes: dict[int, list[DeviceId]] = {}
    for device in sorted(devices):
        nodes.setdefault(node_of(device), []).append(device)
    return nodes


def assign(
    devices: Sequence[DeviceId], node_of: NodeOf, blocks: Sequence[int], held: Sequence[Held] = ()
) -> tuple[DeviceId, ...]:
    """The device at each position.

    Args:
      devices: of the pool.
      node_of: the node of a device.
      blocks: numbers of devices that should share a node: the tp degrees of a plan.
      held: what lies where, and where it will be needed.
    """
    left = node_counts(devices, node_of)
    chunks: list[tuple[int, list[DeviceId]]] = []
    for block in sorted({*blocks, 1}, reverse=True):
        for node in sorted(left, key=lambda n: (-(len(left[n]) // block), -len(left[n]), n)):
            whole = len(left[node]) // block * block
            if whole:
                chunks.append((block, left[node][:whole]))
                left[node] = left[node][whole:]
    order = [d for _, chunk in chunks for d in chunk]
    return tuple(_nearest(chunks, order, held) if held else order)


def spread(devices: Sequence[DeviceId], node_of: NodeOf, block: int) -> tuple[DeviceId, ...]:
    """The device at each position when blocks of devices are dealt to the nodes in turn, so that
    replicas that follow each other are on different nodes.

    Args:
      devices: of the pool.
      node_of: the node of a device.
      block: devices of a replica; where a node has fewer, all of a node.
    """
    cut = [
        [own[i : i + block] for i in range(0, len(own), block)]
        for own in node_counts(devices, node_of).values()
    ]
    dealt = [d for turn in itertools.zip_longest(*cut, fillvalue=()) for part in turn for d in part]
    whole = {d for own in cut for part in own if len(part) == block for d in part}
    return tuple(sorted(dealt, key=lambda d: d not in whole))


def group_node_size(placement: Placement, node_of: NodeOf, devices_per_node: int) -> int:
    """Devices of a placement's groups of tensor ranks that share a node: `devices_per_node` where
    no group is torn, else the fewest of a group that are in one node."""
    tp = placement.layout.tp
    if tp == 1:
        return devices_per_node
    nodes = np.array([node_of(d) for d in placement.devices]).reshape(-1, tp)
    torn = (nodes != nodes[:, :1]).any(axis=1)
    if not torn.any():
        return devices_per_node
    fewest = min(min(np.unique(row, return_counts=True)[1]) for row in nodes[torn])
    return max(int(fewest), 1)


def _nearest(
    chunks: Sequence[tuple[int, list[DeviceId]]], order: Sequence[DeviceId], held: Sequence[Held]
) -> list[DeviceId]:
    """The same chunks with nodes that are alike in another order, and blocks in each node."""
    overlap = _Overlap(order, held)
    sizes = [(block, len(chunk)) for block, chunk in chunks]
    starts = np.cumsum([0, *(size for _, size in sizes)])
    numbers = np.arange(len(order))
    for block, size in dict.fromkeys(sizes):
        places = [i for i, alike in enumerate(sizes) if alike == (block, size)]
        slots = starts[places][:, None] + np.arange(size)
        rows = slots.copy()
        if len(places) > 1:
            gain = overlap.between(rows[:, None, :], slots[None, :, :]).sum(axis=2)
            rows = rows[[node for node, _ in sorted(_greedy(gain), key=lambda p: p[1])]]
        if size > block:
            rows = _blocks_nearest(overlap, rows, slots, block)
        numbers[slots] = rows
    return [order[i] for i in numbers.tolist()]


def _blocks_nearest(overlap: "_Overlap", rows: Ints, slots: Ints, block: int) -> Ints:
    """[N, size] the devices of each node with their blocks in the order that keeps most."""
    count, size = rows.shape
    rows = rows.reshape(count, size // block, block)
    slots = slots.reshape(rows.shape)
    gain = overlap.between(rows[:, :, None], slots[:, None]).sum(axis=3)
    moved = rows.copy()
    for node in range(count):
        for source, slot in _greedy(gain[node]):
            moved[node, slot] = rows[node, source]
    return moved.reshape(count, size)


def _greedy(gain: Floats) -> list[tuple[int, int]]:
    """Pairs (row, column) of a square table, the largest first; of equal ones the diagonal."""
    count = len(gain)
    stays = gain.diagonal()
    best = (stays >= gain.max(axis=0)).all() and (stays >= gain.max(axis=1)).all()
    if count > MOST_MATCHED or best:
        return [(i, i) for i in range(count)]
    tie = np.abs(np.arange(count)[:, None] - np.arange(count)[None, :])
    rows, columns = np.unravel_index(np.lexsort((tie.ravel(), -gain.ravel())), gain.shape)
    free_rows, free_columns = np.ones(count, np.bool_), np.ones(count, np.bool_)
    pairs: list[tuple[int, int]] = []
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        if free_rows[row] and free_columns[column]:
            free_rows[row] = free_columns[column] = False
            pairs.append((row, column))
            if len(pairs) == count:
                break
    return pairs


class _Overlap:
    """Bytes that a device holds of what a position will need.

    A rank's part of a model-stage is taken as a box: an interval of layers by one of every layer's
    width. A device counts a little more for its own replica, whose part of an optimizer that is
    split over replicas it may have.
    """

    def __init__(self, order: Sequence[DeviceId], held: Sequence[Held]) -> None:
        number = {d: i for i, d in enumerate(order)}
        self._held = held
        self._old: list[Ints] = []
        self._new: list[Ints] = []
        for item in held:
            old, new = np.full(len(order), -1), np.full(len(order), -1)
            for rank, device in enumerate(item.old.devices):
                if device in number:
                    old[number[device]] = rank
            count = item.layout.num_devices
            new[item.first : item.first + count] = np.arange(count)
            self._old.append(old)
            self._new.append(new)

    def between(self, devices: Ints, positions: Ints) -> Floats:
        """For devices and positions of shapes that broadcast."""
        total = np.zeros(np.broadcast_shapes(devices.shape, positions.shape))
        for item, olds, news in zip(self._held, self._old, self._new, strict=True):
            old, new = olds[devices], news[positions]
            a, b = item.old.layout, item.layout
            replicas = _meet(old // (a.pp * a.tp), a.dp, new // (b.pp * b.tp), b.dp)
            layers = _meet(old // a.tp % a.pp, a.pp, new // b.tp % b.pp, b.pp)
            widths = _meet(old % a.tp, a.tp, new % b.tp, b.tp)
            share = layers * widths * (1.0 + a.dp * replicas)
            total += np.where((old >= 0) & (new >= 0), item.num_bytes * share, 0.0)
        return total


def _meet(a: Ints, a_parts: int, b: Ints, b_parts: int) -> Floats:
    """Length of the intersection of parts of the unit interval."""
    low = np.maximum(a / a_parts, b / b_parts)
    high = np.minimum((a + 1) / a_parts, (b + 1) / b_parts)
    return np.maximum(high - low, 0.0)
