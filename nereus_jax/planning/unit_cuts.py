"""How meshes cut the leaves of a state, leaves that are cut alike taken together."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from nereus_jax.core.emu_spec import DTYPE_BYTES, EmuSpec
from nereus_jax.core.layout import MESH_AXES

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

Axes = tuple[str, ...]
MeshShape = tuple[int, ...]
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


@functools.lru_cache(maxsize=256)
def cut_of(mesh_shape: MeshShape) -> Cut:
    """The cut of a mesh, worked out once."""
    return Cut(mesh_shape)


def held_bytes(classes: Iterable[LeafClass], mesh_shape: MeshShape, end: int) -> int:
    """What a device holds, padding included; the same as `EmuSpec.local_bytes`.

    Args:
      classes: the leaves.
      mesh_shape: sizes of the axes (dp, pp, kv, kvr).
      end: 0: as the leaves are cut at the source; 1: at the target.
    """
    sizes = dict(zip(MESH_AXES, mesh_shape, strict=True))
    total = 0
    for leaves in classes:
        num_bytes = leaves.cell_bytes
        for extent, here, there in leaves.dims:
            num_bytes *= -(-extent // math.prod([sizes[a] for a in (there if end else here)]))
        total += num_bytes
    return total
