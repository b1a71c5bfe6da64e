"""Which boxes each device of the target lacks, and who sends them.

Leaves that are cut alike form a class and move alike: the senders are chosen once for a class, so
that all its leaves travel in the same permutations. Senders are, in this order: the destination
itself (nothing moves), a device of the same node, the device that has sent least so far. A box
that several devices of a node lack, and none of the node has, crosses the slow link once, cut in
as many parts as there are receivers, and is then passed on inside the node.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import LostStateError
from nereus_jax.core.tiling import LeafTiling, Position, overlaps_1d, same_blocks
from nereus_jax.core.transfer import Ints, Kept

Cut = tuple[int, int]
"""(part, number of parts) of a box that is shared out."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Edges:
    """Boxes on their way, the same for every leaf of a class but for the coordinates.

    Attributes:
      senders, receivers: [N] indices of devices.
      forwards: [N] whether the sender passes on what it received.
      source, target: [N, D] positions of the blocks; the box is their intersection.
      cuts: [N, 2] which part of that box, of how many.
    """

    senders: Ints
    receivers: Ints
    forwards: Ints
    source: Ints
    target: Ints
    cuts: Ints

    def __len__(self) -> int:
        return len(self.senders)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassKey:
    """What two leaves share that move alike."""

    source_devices: tuple[DeviceId, ...]
    source_positions: tuple[Position, ...]
    target_devices: tuple[DeviceId, ...]
    target_positions: tuple[Position, ...]
    meets: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    same_blocks: bool


Meets = tuple[Mapping[int, tuple[int, ...]], ...]
"""For each dim: target position -> the source positions it meets."""


def class_key(source: LeafTiling, target: LeafTiling) -> ClassKey:
    """The class of a leaf."""
    meets: list[tuple[tuple[int, tuple[int, ...]], ...]] = []
    for dim, extent in enumerate(source.shape):
        lengths = source.local_shape[dim], target.local_shape[dim]
        wanted = sorted({p[dim] for p in target.positions})
        rows = [(q, tuple(o[0] for o in overlaps_1d(extent, *lengths, q))) for q in wanted]
        meets.append(tuple(rows))
    return ClassKey(
        source_devices=source.devices,
        source_positions=source.positions,
        target_devices=target.devices,
        target_positions=target.positions,
        meets=tuple(meets),
        same_blocks=same_blocks(source, target),
    )


def boxes(edges: Edges, source: LeafTiling, target: LeafTiling) -> tuple[Ints, Ints]:
    """Start and stop [N, D] of every box, for one leaf of the class."""
    start, stop = _intersections(edges.source, edges.target, source, target)
    part, parts = edges.cuts[:, 0], edges.cuts[:, 1]
    if start.shape[1] and len(edges) and parts.max() > 1:
        rows = np.arange(len(edges))
        dim = (stop - start).argmax(axis=1)  # the longest dim is cut
        begin, extent = start[rows, dim].copy(), (stop - start)[rows, dim]
        start[rows, dim] = begin + extent * part // parts
        stop[rows, dim] = begin + extent * (part + 1) // parts
    return start, stop


def _intersections(
    source_at: Ints, target_at: Ints, source: LeafTiling, target: LeafTiling
) -> tuple[Ints, Ints]:
    source_local, target_local = np.array(source.local_shape), np.array(target.local_shape)
    start = np.maximum(source_at * source_local, target_at * target_local)
    stop = np.minimum((source_at + 1) * source_local, (target_at + 1) * target_local)
    stop = np.minimum(stop, np.array(source.shape))
    return start.astype(np.int64), np.maximum(stop, start).astype(np.int64)


def what_is_kept(
    source: LeafTiling,
    target: LeafTiling,
    index: Mapping[DeviceId, int],
    lost: frozenset[DeviceId],
    share: bool,
) -> Kept:
    """What each target device has already of one leaf; blocks are handed on only if `share`."""
    had = dict(zip(source.devices, source.positions, strict=True))
    identical = share and same_blocks(source, target)
    shared: list[int] = []
    receiving: list[int] = []
    copied: list[tuple[int, Position, Position]] = []
    for device, position in zip(target.devices, target.positions, strict=True):
        own = None if device in lost else had.get(device)
        if identical and own == position:
            shared.append(index[device])
            continue
        receiving.append(index[device])
        if own is not None:
            copied.append((index[device], own, position))
    num_dims = len(source.shape)
    source_at = np.array([c[1] for c in copied], np.int64).reshape(len(copied), num_dims)
    target_at = np.array([c[2] for c in copied], np.int64).reshape(len(copied), num_dims)
    start, stop = _intersections(source_at, target_at, source, target)
    some = np.asarray((stop > start).all(axis=1))
    movers = np.array([c[0] for c in copied], np.int64)
    return Kept(
        shared=tuple(sorted(shared)),
        copied=tuple(int(device) for device in movers[some]),
        starts=start[some],
        extents=(stop - start)[some],
        receiving=tuple(sorted(receiving)),
    )


class SenderChoice:
    """Chooses senders, and remembers how much each device has sent."""

    def __init__(
        self,
        index: Mapping[DeviceId, int],
        nodes: Sequence[int],
        lost: frozenset[DeviceId],
    ) -> None:
        self._index = index
        self._nodes = nodes
        self._lost = lost
        self._sent_bytes = [0.0] * len(nodes)

    def edges(self, source: LeafTiling, target: LeafTiling, key: ClassKey, weight: int) -> Edges:
        """The boxes of a class.

        Args:
          source: one leaf of the class, for messages too.
          target: its other end.
          key: of the class.
          weight: bytes of all leaves of the class.

        Raises:
          LostStateError: a box has no copy left on any device.
        """
        holders: dict[Position, list[int]] = {}
        own: dict[int, Position] = {}
        for device, position in zip(source.devices, source.positions, strict=True):
            if device not in self._lost:
                holders.setdefault(position, []).append(self._index[device])
                own[self._index[device]] = position
        meets: Meets = tuple(dict(rows) for rows in key.meets)
        wanted: dict[Position, list[int]] = {}
        for device, position in zip(target.devices, target.positions, strict=True):
            wanted.setdefault(position, []).append(self._index[device])
        rows: list[tuple[int, int, bool, Position, Position, Cut]] = []
        for position, receivers in wanted.items():
            cells = list(itertools.product(*(m[q] for m, q in zip(meets, position, strict=True))))
            for cell in cells:
                lacking = [r for r in receivers if own.get(r) != cell]
                if not lacking:
                    continue
                if cell not in holders:
                    raise LostStateError(_lost_message(source, cell, self._lost))
                share = weight / (len(cells) * len(wanted))
                spread = self._spread(lacking, holders[cell], share, can_cut=bool(cell))
                for sender, receiver, forwards, cut in spread:
                    rows.append((sender, receiver, forwards, cell, position, cut))
        num_dims = len(source.shape)
        return Edges(
            senders=np.array([r[0] for r in rows], np.int64),
            receivers=np.array([r[1] for r in rows], np.int64),
            forwards=np.array([r[2] for r in rows], np.int64),
            source=np.array([r[3] for r in rows], np.int64).reshape(len(rows), num_dims),
            target=np.array([r[4] for r in rows], np.int64).reshape(len(rows), num_dims),
            cuts=np.array([r[5] for r in rows], np.int64).reshape(len(rows), 2),
        )

    def _spread(
        self, receivers: Sequence[int], holders: Sequence[int], share: float, can_cut: bool
    ) -> list[tuple[int, int, bool, Cut]]:
        """Who sends one box to each of the receivers: (sender, receiver, forwards, cut)."""
        found: list[tuple[int, int, bool, Cut]] = []
        by_node: dict[int, list[int]] = {}
        for receiver in receivers:
            by_node.setdefault(self._nodes[receiver], []).append(receiver)
        for node, group in by_node.items():
            near = [h for h in holders if self._nodes[h] == node]
            if near or len(group) == 1:
                for receiver in group:
                    sender = self._take(near or holders, receiver, share)
                    found.append((sender, receiver, False, (0, 1)))
                continue
            parts = len(group) if can_cut else 1
            for part, leader in enumerate(group[:parts]):
                cut = (part, parts)
                found.append((self._take(holders, leader, share / parts), leader, False, cut))
                for receiver in group:
                    if receiver != leader:
                        self._sent_bytes[leader] += share / parts
                        found.append((leader, receiver, True, cut))
        return found

    def _take(self, candidates: Sequence[int], receiver: int, share: float) -> int:
        """The candidate that has sent least; of equals the next one after the receiver."""
        count = len(self._nodes)
        best = min(candidates, key=lambda h: (self._sent_bytes[h], (h - receiver) % count))
        self._sent_bytes[best] += share
        return best


def _lost_message(source: LeafTiling, cell: Position, lost: frozenset[DeviceId]) -> str:
    box = ", ".join(f"{a}:{b}" for a, b in source.box(cell))
    gone = ", ".join(str(d) for d in sorted(lost & set(source.devices)))
    return (
        f"no device is left that holds [{box}] of {source.name!r}: every copy was on {gone}; "
        f"restore it from a snapshot or a checkpoint"
    )
