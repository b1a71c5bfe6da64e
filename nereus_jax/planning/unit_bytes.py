"""Bytes of units and of moves between them, in closed form and for many operations at once.

A leaf is cut dim by dim, so what two blocks share is a product of one-dimensional overlaps, and
leaves that are cut alike differ only in a constant. No leaf is taken apart into boxes: the bytes
are those that `plan_transfer` would move, for a thousand devices in a fraction of a millisecond.

Legend of shapes: E entries (an operation's device), O operations, R ranks of a mesh.
"""
# pyright: reportUnknownMemberType=false
# (numpy's own types of `searchsorted`, `unique` and `reduceat` are partly unknown.)

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from nereus_jax.core.emu_spec import DTYPE_BYTES, EmuSpec
from nereus_jax.core.layout import MESH_AXES, ParallelLayout

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

Axes = tuple[str, ...]
Dim = tuple[int, Axes, Axes]
"""Extent of a dim, and the mesh axes that it is split over at the source and at the target."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafClass:
    """Leaves whose split dims are the same.

    Attributes:
      dims: those that are split at either end.
      cell_bytes: bytes of all the leaves for one index of those dims.
    """

    dims: tuple[Dim, ...]
    cell_bytes: int


def leaf_classes(sources: Sequence[EmuSpec], targets: Sequence[EmuSpec]) -> tuple[LeafClass, ...]:
    """The leaves of a state, by how they are cut at its two ends.

    Args:
      sources: the leaves as they are, parameters and optimizer.
      targets: the same leaves; only what is split over dp (ZeRO-1) may differ.
    """
    totals: dict[tuple[Dim, ...], int] = {}
    for source, target in zip(sources, targets, strict=True):
        for before, after in zip(source.leaves, target.leaves, strict=True):
            dims: list[Dim] = []
            cell_bytes = DTYPE_BYTES[before.dtype]
            cuts = before.dim_axes(source.rules), after.dim_axes(target.rules)
            for extent, here, there in zip(before.shape, *cuts, strict=True):
                if here or there:
                    dims.append((extent, here, there))
                else:
                    cell_bytes *= extent
            totals[tuple(dims)] = totals.get(tuple(dims), 0) + cell_bytes
    return tuple(LeafClass(dims=dims, cell_bytes=n) for dims, n in totals.items())


class Cut:
    """How a mesh cuts dims: the position of each rank [R] along any axes, and their number.

    Args:
      mesh_shape: sizes of the axes (dp, pp, kv, kvr); ranks are in row-major order.
    """

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self.mesh_shape = mesh_shape
        self.num_ranks = int(np.prod(mesh_shape))
        self._sizes = dict(zip(MESH_AXES, mesh_shape, strict=True))
        places = np.unravel_index(np.arange(self.num_ranks), mesh_shape)
        self._places = dict(zip(MESH_AXES, places, strict=True))
        self._known: dict[Axes, tuple[Ints, int]] = {}

    @classmethod
    def of(cls, layout: ParallelLayout, num_kv_heads: int) -> "Cut":
        """The cut of a layout's mesh."""
        return cls(layout.mesh_shape(num_kv_heads))

    def along(self, axes: Axes) -> tuple[Ints, int]:
        """Position of every rank [R], and how many positions there are."""
        if axes not in self._known:
            position = np.zeros(self.num_ranks, np.int64)
            count = 1
            for axis in axes:
                position = position * self._sizes[axis] + self._places[axis]
                count *= self._sizes[axis]
            self._known[axes] = position, count
        return self._known[axes]


def held_bytes(classes: Iterable[LeafClass], cut: Cut, end: int) -> int:
    """What a device holds, padding included; `end` is 0 for the source's axes, 1 for the target's.

    The same as `EmuSpec.local_bytes`.
    """
    total = 0
    for leaves in classes:
        size = leaves.cell_bytes
        for dim in leaves.dims:
            size *= -(-dim[0] // cut.along(dim[2] if end else dim[1])[1])
        total += size
    return total


def block_bytes(classes: Iterable[LeafClass], cut: Cut, end: int) -> Ints:
    """Logical bytes of every rank's blocks [R]: padding is not counted."""
    total = np.zeros(cut.num_ranks, np.int64)
    for leaves in classes:
        size = np.full(cut.num_ranks, leaves.cell_bytes, np.int64)
        for dim in leaves.dims:
            position, count = cut.along(dim[2] if end else dim[1])
            local = -(-dim[0] // count)
            size *= np.clip(dim[0] - position * local, 0, local)
        total += size
    return total


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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Moved:
    """What operations move; per operation [O].

    Attributes:
      local: bytes copied inside devices (a block that is handed on whole is not copied).
      intra_node, inter_node: bytes between devices.
      receive_intra_node, receive_inter_node: the most that one device receives.
      local_max: the most that one device copies.
    """

    local: Floats
    intra_node: Floats
    inter_node: Floats
    receive_intra_node: Floats
    receive_inter_node: Floats
    local_max: Floats


def moved_bytes(
    classes: Iterable[LeafClass],
    source_cut: Cut,
    target_cut: Cut,
    sources: Entries,
    targets: Entries,
    node: Ints,
    num_operations: int,
) -> Moved:
    """What operations move, each from all of its source blocks to all of its target blocks.

    A device receives the part of its target block that its own source block does not hold; a box
    that a node lacks crosses the slow link once, and is then passed on inside the node.

    Args:
      classes: the leaves.
      source_cut, target_cut: the meshes; a device's rank gives its blocks.
      sources: the blocks that can be read.
      targets: the blocks wanted; every operation has some.
      node: [devices] where links are fast.
      num_operations: O.
    """
    classes = tuple(classes)
    own = _own_entry(sources, targets, len(node))
    has = np.flatnonzero(own >= 0)
    mine, wanted = sources.rank[own[has]], targets.rank[has]
    kept, copied = _overlaps(classes, source_cut, target_cut, mine, wanted)
    block = block_bytes(classes, target_cut, 1)[targets.rank]
    lacking, local = block.astype(np.float64), np.zeros(len(block))
    lacking[has] -= kept
    local[has] = copied
    inter, share = _crossing(
        classes, source_cut, target_cut, sources, targets, node, num_operations
    )
    near = np.maximum(lacking - share, 0.0)
    wire = np.bincount(targets.operation, lacking, num_operations)
    first = np.searchsorted(targets.operation, np.arange(num_operations))
    return Moved(
        local=np.bincount(targets.operation, local, num_operations),
        intra_node=wire - inter,
        inter_node=inter,
        receive_intra_node=np.maximum.reduceat(near, first),
        receive_inter_node=np.maximum.reduceat(share, first),
        local_max=np.maximum.reduceat(local, first),
    )


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


def _overlaps(
    classes: tuple[LeafClass, ...], source_cut: Cut, target_cut: Cut, mine: Ints, wanted: Ints
) -> tuple[Ints, Ints]:
    """Bytes that a source and a target rank share, and those of them that must be copied."""
    known: dict[Dim, tuple[Ints, Bools]] = {}
    shared, copied = np.zeros(len(mine), np.int64), np.zeros(len(mine), np.int64)
    for leaves in classes:
        size, same = np.full(len(mine), leaves.cell_bytes, np.int64), None
        for dim in leaves.dims:
            if dim not in known:
                known[dim] = _overlap_1d(dim, source_cut, target_cut, mine, wanted)
            length, equal = known[dim]
            size *= length
            same = equal if same is None else same & equal
        shared += size
        if same is not None:
            copied += np.where(same, 0, size)
    return shared, copied


def _overlap_1d(
    dim: Dim, source_cut: Cut, target_cut: Cut, mine: Ints, wanted: Ints
) -> tuple[Ints, Bools]:
    """Common length along one dim, and whether the two blocks are the same one."""
    extent, here, there = dim
    source_at, source_count = source_cut.along(here)
    target_at, target_count = target_cut.along(there)
    a, b = -(-extent // source_count), -(-extent // target_count)
    p, q = source_at[mine], target_at[wanted]
    start = np.maximum(p * a, q * b)
    stop = np.minimum(np.minimum((p + 1) * a, (q + 1) * b), extent)
    return np.maximum(stop - start, 0), (p == q) & (a == b)


def _crossing(
    classes: tuple[LeafClass, ...],
    source_cut: Cut,
    target_cut: Cut,
    sources: Entries,
    targets: Entries,
    node: Ints,
    num_operations: int,
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
    giving, taking = np.flatnonzero(far[sources.operation]), np.flatnonzero(far[targets.operation])
    num_nodes = int(node.max()) + 1
    take = targets.operation[taking] * num_nodes + target_node[taking]
    give = sources.operation[giving] * num_nodes + source_node[giving]
    groups, member = np.unique(take, return_inverse=True)
    place = np.minimum(np.searchsorted(groups, give), len(groups) - 1)
    near = groups[place] == give  # a giver in a node where nobody takes is near to nobody
    missing = np.zeros(len(groups))
    for leaves in classes:
        missing += _missing(
            leaves,
            (source_cut, target_cut),
            (place[near], sources.rank[giving][near]),
            (member, targets.rank[taking]),
            len(groups),
        )
    share[taking] = (missing / np.bincount(member, minlength=len(groups)))[member]
    return np.bincount(groups // num_nodes, missing, num_operations), share


def _missing(
    leaves: LeafClass,
    cuts: tuple[Cut, Cut],
    holding: tuple[Ints, Ints],
    wanting: tuple[Ints, Ints],
    num_groups: int,
) -> Floats:
    """Bytes of a class that each group of devices wants and holds nowhere.

    Args:
      leaves: the class.
      cuts: of source and target.
      holding: (group, source rank) of the blocks that are there.
      wanting: (group, target rank) of the blocks that are wanted.
      num_groups: of (operation, node) pairs.
    """
    overlap = np.full((1, 1), float(leaves.cell_bytes))
    flat = [np.zeros(cut.num_ranks, np.int64) for cut in cuts]
    for extent, here, there in leaves.dims:
        lengths: list[tuple[Ints, int]] = []
        for end, (cut, axes) in enumerate(zip(cuts, (here, there), strict=True)):
            position, count = cut.along(axes)
            flat[end] = flat[end] * count + position
            lengths.append((np.arange(count), -(-extent // count)))
        (p, a), (q, b) = lengths
        stop = np.minimum(np.minimum((p + 1) * a, ((q + 1) * b)[:, None]), extent)
        length = np.maximum(stop - np.maximum(p * a, (q * b)[:, None]), 0)
        overlap = np.kron(overlap, length)
    rows, columns = overlap.shape
    wanted = np.zeros((num_groups, rows), np.bool_)
    wanted[wanting[0], flat[1][wanting[1]]] = True
    absent = np.ones((num_groups, columns))
    absent[holding[0], flat[0][holding[1]]] = 0.0
    group, position = np.nonzero(wanted)
    lacking: Floats = np.einsum("ij,ij->i", overlap[position], absent[group])
    return np.bincount(group, lacking, num_groups)
