# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Bytes of a model-stage's state and inputs on each device, for many candidates at once.

The same numbers that `EmuSpec.local_bytes` gives for one mesh, padding included; and what a program
takes as arguments beside the state. These are exact.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.architectures import LAYER_PREFIX
from nereus_jax.core.emu_spec import DTYPE_BYTES, EmuSpec, LeafSpec
from nereus_jax.core.layout import DP, KV, KVR, PP
from nereus_jax.planning.candidates import Candidates, Ints, by_degree, starts

Floats = NDArray[np.float64]
Degrees = Mapping[str, Ints]
"""Mesh axis -> its size [C]."""
_Cut = tuple[tuple[int, ...], tuple[str | None, ...]]
"""Shape and logical axes of a leaf: what says how it is cut."""

MOMENTS = 2
"""Arrays like the parameters that Adam keeps."""
COUNTER_BYTES = 8
"""Two int32: of Adam and of the schedule."""


def mesh_degrees(candidates: Candidates, num_kv_heads: int) -> Degrees:
    """Sizes of the mesh axes, as `ParallelLayout.mesh_shape` gives them."""
    kv = by_degree(lambda tp: np.gcd(tp, num_kv_heads), candidates.tp)
    kvr = by_degree(lambda tp: tp // np.gcd(tp, num_kv_heads), candidates.tp)
    return {DP: candidates.dp, PP: candidates.pp, KV: kv, KVR: kvr}


class Shards:
    """What a device holds of models on the layouts of some candidates.

    Leaves that are cut alike are cut once, those that several models have too; all their specs have
    the same rules. Shapes: L layouts, far fewer than candidates.
    """

    def __init__(self, degrees: Degrees) -> None:
        self._degrees, self._layout = _distinct(degrees)
        self._cuts: dict[tuple[str, ...], Ints | int] = {(): 1}
        self._dims: dict[_Cut, list[Ints | int]] = {}
        self._elements: dict[_Cut, Ints | int] = {}
        self._zero: dict[_Cut, Ints] = {}

    def elements(self, spec: EmuSpec, prefix: str = "") -> Ints:
        """[C] what a device holds of a model, or of its leaves whose names begin with a prefix."""
        total = np.zeros_like(self._degrees[DP])
        for leaf, count in _alike(spec):
            key = leaf.shape, leaf.logical_axes
            if key not in self._elements:
                self._elements[key] = math.prod(self._shard(leaf, spec))
            if leaf.name.startswith(prefix):
                total = total + count * self._elements[key]
        return total[self._layout]

    def zero_elements(self, spec: EmuSpec) -> Ints:
        """[C] the same of all leaves, each also split over dp, where a dim of the shard divides."""
        total = np.zeros_like(self._degrees[DP])
        for leaf, count in _alike(spec):
            key = leaf.shape, leaf.logical_axes
            if key not in self._zero:
                self._zero[key] = self._split(self._shard(leaf, spec))
            total = total + count * self._zero[key]
        return total[self._layout]

    def _shard(self, leaf: LeafSpec, spec: EmuSpec) -> list[Ints | int]:
        """Extent of every dim of a device's shard: [L], or a number where it is not cut."""
        key = leaf.shape, leaf.logical_axes
        if key not in self._dims:
            axes = zip(leaf.shape, leaf.dim_axes(spec.rules), strict=True)
            self._dims[key] = [-(-dim // self._cut(own)) for dim, own in axes]
        return self._dims[key]

    def _cut(self, axes: tuple[str, ...]) -> Ints | int:
        """Parts of a dim that is split over these axes."""
        if axes not in self._cuts:
            self._cuts[axes] = self._cut(axes[:-1]) * self._degrees[axes[-1]]
        return self._cuts[axes]

    def _split(self, dims: list[Ints | int]) -> Ints:
        """[L] elements of a shard of these dims, split over dp where it divides one of them."""
        dp = self._degrees[DP]
        divides = np.zeros_like(dp, np.bool_)
        for dim in dims:
            divides |= dim % dp == 0
        return math.prod(dims) // np.where(divides, dp, 1)


def _alike(spec: EmuSpec) -> list[tuple[LeafSpec, int]]:
    """One of the leaves that are cut alike, those of the layers and others apart, and how many."""
    groups: dict[tuple[object, ...], list[LeafSpec]] = {}
    for leaf in spec:
        key = leaf.name.startswith(LAYER_PREFIX), leaf.shape, leaf.logical_axes
        groups.setdefault(key, []).append(leaf)
    return [(leaves[0], len(leaves)) for leaves in groups.values()]


def _distinct(degrees: Degrees) -> tuple[Degrees, Ints]:
    """Degrees where they change from one candidate to the next, and [C] which of them each has.
    Candidates of one layout follow each other, so that there are far fewer."""
    changes = np.logical_or.reduce([starts(values) for values in degrees.values()])
    some = {axis: values[changes] for axis, values in degrees.items()}
    return some, np.cumsum(changes) - 1


def floats(values: NDArray[Any]) -> Floats:
    """As float64: bytes of large models times microbatches leave int64's comfort."""
    return np.asarray(values, np.float64)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateBytes:
    """Bytes of state on each device, [C].

    Attributes:
      parameters: weights.
      optimizer: moments and counters (TRAIN).
    """

    parameters: Floats
    optimizer: Floats


def state_bytes(
    spec: EmuSpec,
    dtype: str,
    candidates: Candidates,
    shards: Shards,
    *,
    train: bool,
    elements: Ints | None = None,
) -> StateBytes:
    """What a model-stage holds between its programs.

    Args:
      spec: leaves of the parameters.
      dtype: of the parameters; moments have the same.
      candidates: layouts.
      shards: of the candidates' layouts.
      train: there is an optimizer.
      elements: [C] of the parameters on a device, where they are known.
    """
    item = DTYPE_BYTES[dtype]
    if elements is None:
        elements = shards.elements(spec)
    optimizer = np.zeros(len(candidates))
    if train:
        owned = elements
        if candidates.zero1.any():
            owned = np.where(candidates.zero1, shards.zero_elements(spec), elements)
        optimizer = floats(MOMENTS * owned * item + COUNTER_BYTES)
    return StateBytes(parameters=floats(elements * item), optimizer=optimizer)
