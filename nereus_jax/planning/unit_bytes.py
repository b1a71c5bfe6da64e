"""Bytes of units and of moves between them, in closed form and for many operations at once.

A leaf is cut dim by dim, so what two blocks share is a product of one-dimensional overlaps, and
leaves that are cut alike differ only in a constant. No leaf is taken apart into boxes: the bytes
are those that `plan_transfer` would move, for a thousand devices in a fraction of a millisecond.

Legend of shapes: E entries (an operation's device), O operations, R ranks of a mesh.
"""
# pyright: reportUnknownMemberType=false
# (numpy's own types of `searchsorted`, `unique` and `reduceat` are partly unknown.)

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from nereus_jax.planning.unit_cuts import (
    Axes,
    Cut,
    Floats,
    Ints,
    LeafClass,
    MeshShape,
    cut_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Entries:
    """Devices of operations, grouped by operation in ascending order.

    Attributes:
      operation: [E] index of the operation.
      device: [E] index of the device; at most once for an operation.
      rank: [E] the device's rank in its unit.
    """

    operation: Ints
    device: Ints
    rank: Ints


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """What operations move.

    Attributes:
      table: [6, O], the properties in their order.
    """

    table: Floats

    @property
    def local(self) -> Floats:
        """[O] bytes copied inside devices; a block that is handed on whole is not copied."""
        return self.table[0]

    @property
    def intra_node(self) -> Floats:
        """[O] bytes between devices of a node."""
        return self.table[1]

    @property
    def inter_node(self) -> Floats:
        """[O] bytes between nodes."""
        return self.table[2]

    @property
    def receive_intra_node(self) -> Floats:
        """[O] the most that one device receives from its node."""
        return self.table[3]

    @property
    def receive_inter_node(self) -> Floats:
        """[O] the most that one device receives from other nodes."""
        return self.table[4]

    @property
    def local_max(self) -> Floats:
        """[O] the most that one device copies."""
        return self.table[5]


class Recut:
    """Bytes of moves from one cut of a state to another.

    A device receives the part of its target block that its own source block does not hold; a box
    that a node lacks crosses the slow link once, and is then passed on inside the node.

    Args:
      classes: the leaves.
      source_cut, target_cut: the meshes; a device's rank gives its blocks.

    Attributes:
      source_block, block: [R] logical bytes of every rank's blocks at the source and the target:
        padding is not counted.
    """

    def __init__(self, classes: Iterable[LeafClass], source_cut: Cut, target_cut: Cut) -> None:
        self._classes = tuple(classes)
        self._dims = list(dict.fromkeys(d for c in self._classes for d in c.dims))
        at = {dim: i for i, dim in enumerate(self._dims)}
        self._members = [[at[d] for d in c.dims] for c in self._classes]
        self._extent = np.array([d[0] for d in self._dims], np.int64)[:, None]
        here, there = [d[1] for d in self._dims], [d[2] for d in self._dims]
        self._source = _Positions(self._extent, source_cut, here)
        self._target = _Positions(self._extent, target_cut, there)
        self.source_block = self._products(self._source.length(self._extent))
        self.block = self._products(self._target.length(self._extent))
        whole = self._extent  # the length of a block that is not cut
        self._total_bytes = int(self._products(whole)[0])
        self._overlap: list[Floats | None] = [None] * len(self._classes)
        self._known: dict[bytes, Floats] = {}

    def moved(self, sources: Entries, targets: Entries, node: Ints, num_operations: int) -> Moved:
        """What operations move, each from all of its source blocks to all of its target blocks.

        Args:
          sources: the blocks that can be read.
          targets: the blocks wanted; every operation has some.
          node: [devices] where links are fast.
          num_operations: O.
        """
        own = _own_entry(sources, targets, len(node))
        has = np.flatnonzero(own >= 0)
        lacking = self.block[targets.rank].astype(np.float64)
        local = np.zeros(len(lacking))
        if len(has):
            kept, copied = self._kept(sources.rank[own[has]], targets.rank[has])
            lacking[has] -= kept
            local[has] = copied
        inter, share = self._crossing(sources, targets, node, num_operations)
        near = np.maximum(lacking - share, 0.0)
        wire = np.bincount(targets.operation, lacking, num_operations)
        first = np.searchsorted(targets.operation, np.arange(num_operations))
        columns = (
            np.bincount(targets.operation, local, num_operations),
            wire - inter,
            inter,
            np.maximum.reduceat(near, first),
            np.maximum.reduceat(share, first),
            np.maximum.reduceat(local, first),
        )
        return Moved(np.array(columns))

    def moved_alike(
        self, source_rows: Ints, target_rows: Ints, node: Ints, num_operations: int
    ) -> Moved:
        """As `moved` for operations of whole units, all with as many of them.

        Operations whose devices lie alike (which devices recur, and which share a node) move alike,
        so only one of each kind is looked at.

        Args:
          source_rows: [units, ranks], those of an operation one after the other.
          target_rows: as `source_rows`.
          node: [devices] where links are fast.
          num_operations: O.
        """
        sources = source_rows.reshape(num_operations, -1)
        targets = target_rows.reshape(num_operations, -1)
        patterns = _patterns(sources, targets, node)
        chosen, kind = _kinds(patterns)
        keys = [patterns[i].tobytes() for i in chosen.tolist()]
        fresh = np.array([i for i, k in zip(chosen, keys, strict=True) if k not in self._known])
        if len(fresh):
            ends: list[Entries] = []
            for rows, ranks in ((sources, source_rows.shape[1]), (targets, target_rows.shape[1])):
                width = rows.shape[1]
                entries = Entries(
                    operation=np.repeat(np.arange(len(fresh)), width),
                    device=rows[fresh].ravel(),
                    rank=np.arange(len(fresh) * width) % ranks,
                )
                ends.append(entries)
            table = self.moved(ends[0], ends[1], node, len(fresh)).table
            for column, i in enumerate(fresh.tolist()):
                self._known[patterns[i].tobytes()] = table[:, column]
        if len(keys) == 1:
            return Moved(np.repeat(self._known[keys[0]][:, None], num_operations, axis=1))
        return Moved(np.stack([self._known[key] for key in keys], axis=1)[:, kind])

    def _products(self, lengths: Ints) -> Ints:
        """Bytes of all leaves, from the lengths [D, ...] of something along every dim."""
        total = np.zeros(lengths.shape[1:], np.int64)
        for leaves, members in zip(self._classes, self._members, strict=True):
            size = leaves.cell_bytes
            for i in members:
                size = size * lengths[i]
            total += size
        return total

    def _kept(self, mine: Ints, wanted: Ints) -> tuple[Ints, Ints]:
        """Bytes that source and target ranks share, and those of them that must be copied."""
        source, target = self._source, self._target
        p, q = source.position[:, mine], target.position[:, wanted]
        start = np.maximum(p * source.local, q * target.local)
        stop = np.minimum((p + 1) * source.local, (q + 1) * target.local)
        length = np.maximum(np.minimum(stop, self._extent) - start, 0)
        same = (p == q) & (source.local == target.local)
        shared, copied = np.zeros(len(mine), np.int64), np.zeros(len(mine), np.int64)
        for leaves, members in zip(self._classes, self._members, strict=True):
            size: Ints | int = leaves.cell_bytes
            for i in members:
                size = size * length[i]
            shared += size
            if members:
                whole = same[members[0]]
                for i in members[1:]:
                    whole = whole & same[i]
                copied += np.where(whole, 0, size)
        return shared, copied

    def _crossing(
        self, sources: Entries, targets: Entries, node: Ints, num_operations: int
    ) -> tuple[Floats, Floats]:
        """Bytes between nodes of each operation [O], and each target entry's share of them [E]."""
        share = np.zeros(len(targets.device))
        source_node, target_node = node[sources.device], node[targets.device]
        some = np.zeros(num_operations, np.int64)
        some[targets.operation] = target_node
        far = np.zeros(num_operations, np.bool_)
        far[sources.operation[source_node != some[sources.operation]]] = True
        far[targets.operation[target_node != some[targets.operation]]] = True
        if not far.any():
            return np.zeros(num_operations), share
        giving = np.flatnonzero(far[sources.operation])
        taking = np.flatnonzero(far[targets.operation])
        num_nodes = len(node) + 1
        take = targets.operation[taking] * num_nodes + target_node[taking]
        give = sources.operation[giving] * num_nodes + source_node[giving]
        groups, member = np.unique(take, return_inverse=True)
        place = np.minimum(np.searchsorted(groups, give), len(groups) - 1)
        near = groups[place] == give  # a giver in a node where nobody takes is near to nobody
        holding = place[near], sources.rank[giving][near]
        missing = self._lacking(holding, (member, targets.rank[taking]), len(groups))
        share[taking] = (missing / np.bincount(member, minlength=len(groups)))[member]
        return np.bincount(groups // num_nodes, missing, num_operations), share

    def _lacking(
        self, holding: tuple[Ints, Ints], wanting: tuple[Ints, Ints], groups: int
    ) -> Floats:
        """Bytes that each group of devices wants and holds nowhere; arguments as for `_missing`.

        A group that holds a whole unit lacks nothing, one that holds nothing and wants a whole unit
        lacks all; only the others are looked at leaf by leaf.
        """
        held, wanted = (
            np.zeros((groups, end.position.shape[1]), np.bool_)
            for end in (self._source, self._target)
        )
        held[holding] = True
        wanted[wanting] = True
        nothing = ~held.any(axis=1) & wanted.all(axis=1)
        missing = np.where(nothing, float(self._total_bytes), 0.0)
        some = np.flatnonzero(~nothing & ~held.all(axis=1))
        if len(some):
            number = np.full(groups, -1, np.int64)
            number[some] = np.arange(len(some))
            parts: list[tuple[Ints, Ints]] = []
            for group, rank in (holding, wanting):
                inside = number[group] >= 0
                parts.append((number[group[inside]], rank[inside]))
            for i in range(len(self._classes)):
                missing[some] += self._missing(i, parts[0], parts[1], len(some))
        return missing

    def _missing(
        self, leaves: int, holding: tuple[Ints, Ints], wanting: tuple[Ints, Ints], groups: int
    ) -> Floats:
        """Bytes of a class that each group of devices wants and holds nowhere.

        Args:
          leaves: the class.
          holding: (group, source rank) of the blocks that are there.
          wanting: (group, target rank) of the blocks that are wanted.
          groups: how many (operation, node) pairs there are.
        """
        members = self._members[leaves]
        overlap = self._overlap[leaves]
        if overlap is None:
            overlap = self._overlap[leaves] = self._overlap_matrix(leaves)
        rows, columns = overlap.shape
        wanted = np.zeros((groups, rows), np.bool_)
        wanted[wanting[0], self._target.flat(members)[wanting[1]]] = True
        absent = np.ones((groups, columns))
        absent[holding[0], self._source.flat(members)[holding[1]]] = 0.0
        group, position = np.nonzero(wanted)
        lacking: Floats = (overlap[position] * absent[group]).sum(axis=1)
        return np.bincount(group, lacking, groups)

    def _overlap_matrix(self, leaves: int) -> Floats:
        """Bytes that every target position of a class shares with every source position."""
        overlap = np.full((1, 1), float(self._classes[leaves].cell_bytes))
        for i in self._members[leaves]:
            a, b = int(self._source.local[i, 0]), int(self._target.local[i, 0])
            p = np.arange(self._source.count[i])
            q = np.arange(self._target.count[i])[:, None]
            stop = np.minimum(np.minimum((p + 1) * a, (q + 1) * b), self._extent[i, 0])
            length = np.maximum(stop - np.maximum(p * a, q * b), 0)
            outer = overlap[:, None, :, None] * length[None, :, None, :]
            overlap = outer.reshape(len(overlap) * len(q), -1)
        return overlap


@functools.lru_cache(maxsize=512)
def recut(classes: tuple[LeafClass, ...], source: MeshShape, target: MeshShape) -> Recut:
    """The table of moves between two meshes; a job asks for the same ones again and again."""
    return Recut(classes, cut_of(source), cut_of(target))


class _Positions:
    """How one end cuts all dims: positions [D, R], lengths of blocks [D, 1], numbers of them."""

    def __init__(self, extent: Ints, cut: Cut, axes: Sequence[Axes]) -> None:
        along = [cut.along(a) for a in axes]
        self.count = [count for _, count in along]
        position = np.array([position for position, _ in along], np.int64)
        self.position = position.reshape(len(along), cut.num_ranks)
        self.local = -(-extent // np.array(self.count, np.int64)[:, None])

    def length(self, extent: Ints) -> Ints:
        """[D, R] logical length of every rank's block along every dim."""
        return np.minimum(np.maximum(extent - self.position * self.local, 0), self.local)

    def flat(self, dims: Sequence[int]) -> Ints:
        """[R] position along some dims as one number, the first dim major."""
        number = np.zeros(self.position.shape[1], np.int64)
        for i in dims:
            number = number * self.count[i] + self.position[i]
        return number


def _own_entry(sources: Entries, targets: Entries, num_devices: int) -> Ints:
    """For each target entry the source entry of the same operation and device, or -1."""
    have = sources.operation * num_devices + sources.device
    want = targets.operation * num_devices + targets.device
    if not len(have):
        return np.full(len(want), -1, np.int64)
    order = np.argsort(have, kind="stable")
    place = np.minimum(np.searchsorted(have, want, sorter=order), len(have) - 1)
    found = order[place]
    return np.where(have[found] == want, found, -1)


def _patterns(sources: Ints, targets: Ints, node: Ints) -> Ints:
    """[O, P] how the devices of each operation lie: equal patterns move alike.

    Args:
      sources, targets: [O, devices].
      node: [devices].
    """
    nodes = node[np.concatenate([sources, targets], axis=1)]
    first = (nodes[:, :, None] == nodes[:, None, :]).argmax(axis=2)
    match = targets[:, :, None] == sources[:, None, :]
    own = np.where(match.any(axis=2), match.argmax(axis=2), -1)
    shape = np.broadcast_to([sources.shape[1]], (len(sources), 1))
    return np.concatenate([shape, first, own], axis=1)


def _kinds(patterns: Ints) -> tuple[Ints, Ints]:
    """One operation of each pattern, and the pattern of each operation."""
    if len(patterns) == 1:
        return np.zeros(1, np.int64), np.zeros(1, np.int64)
    mixed = patterns @ _MIX[np.arange(patterns.shape[1]) % len(_MIX)]
    _, chosen, kind = np.unique(mixed, return_index=True, return_inverse=True)
    if not (patterns == patterns[chosen][kind]).all():  # two patterns with one sum: all but never
        _, chosen, kind = np.unique(patterns, axis=0, return_index=True, return_inverse=True)
    return chosen, kind.reshape(-1)


_MIX = np.cumprod(np.full(1024, 6364136223846793005, np.int64))
"""Odd numbers (Knuth's multiplier and its powers, modulo 2**64): weights of a row's sum."""
