# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Bytes of a model-stage's state and inputs on each device, for many candidates at once.

The same numbers that `EmuSpec.local_bytes` gives for one mesh, padding included; and what a program
takes as arguments beside the state. These are exact.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.architectures import LAYER_PREFIX
from nereus_jax.core.emu_spec import DTYPE_BYTES, EmuSpec, LeafSpec
from nereus_jax.core.layout import DP, KV, KVR, PP
from nereus_jax.planning.candidates import Candidates, Ints

Floats = NDArray[np.float64]
Degrees = Mapping[str, Ints]
"""Mesh axis -> its size [C]."""

MOMENTS = 2
"""Arrays like the parameters that Adam keeps."""
COUNTER_BYTES = 8
"""Two int32: of Adam and of the schedule."""


def mesh_degrees(candidates: Candidates, num_kv_heads: int) -> Degrees:
    """Sizes of the mesh axes, as `ParallelLayout.mesh_shape` gives them."""
    kv = np.gcd(candidates.tp, num_kv_heads)
    return {DP: candidates.dp, PP: candidates.pp, KV: kv, KVR: candidates.tp // kv}


class _Shards:
    """How dims are cut on some layouts; what several dims are split over is multiplied once."""

    def __init__(self, degrees: Degrees) -> None:
        self._degrees = degrees
        self._cuts: dict[tuple[str, ...], Ints | int] = {(): 1}

    def dims(self, leaf: LeafSpec, spec: EmuSpec) -> list[Ints | int]:
        """Extent of every dim of a device's shard: [C], or a number where it is not cut."""
        axes = leaf.dim_axes(spec.rules)
        return [-(-dim // self._cut(own)) for dim, own in zip(leaf.shape, axes, strict=True)]

    def _cut(self, axes: tuple[str, ...]) -> Ints | int:
        if axes not in self._cuts:
            self._cuts[axes] = self._cut(axes[:-1]) * self._degrees[axes[-1]]
        return self._cuts[axes]


def _alike(spec: EmuSpec) -> dict[tuple[object, ...], list[LeafSpec]]:
    """Leaves that are cut alike, those of the layers and others apart."""
    groups: dict[tuple[object, ...], list[LeafSpec]] = {}
    for leaf in spec:
        key = leaf.name.startswith(LAYER_PREFIX), leaf.shape, leaf.logical_axes
        groups.setdefault(key, []).append(leaf)
    return groups


class ShardElements(NamedTuple):
    """[C] elements that a device holds: of all leaves, and of those of the layers."""

    all: Ints
    layers: Ints


def shard_elements(spec: EmuSpec, degrees: Degrees) -> ShardElements:
    """What a device holds of a model."""
    some, which = _distinct(degrees, (PP, KV, KVR))
    shards, layers, rest = _Shards(some), np.zeros_like(some[PP]), np.zeros_like(some[PP])
    for (in_layers, *_), leaves in _alike(spec).items():
        elements = math.prod(shards.dims(leaves[0], spec)) * len(leaves)
        if in_layers:
            layers = layers + elements
        else:
            rest = rest + elements
    return ShardElements((layers + rest)[which], layers[which])


def zero_elements(spec: EmuSpec, degrees: Degrees) -> Ints:
    """[C] the same of all leaves, each also split over dp, where a dim of the shard divides."""
    some, which = _distinct(degrees, (DP, PP, KV, KVR))
    shards, total = _Shards(some), np.zeros_like(some[DP])
    for leaves in _alike(spec).values():
        dims = shards.dims(leaves[0], spec)
        divides = np.zeros_like(some[DP], np.bool_)
        for dim in dims:
            divides |= dim % some[DP] == 0
        total = total + len(leaves) * (math.prod(dims) // np.where(divides, some[DP], 1))
    return total[which]


def _distinct(degrees: Degrees, axes: tuple[str, ...]) -> tuple[Degrees, Ints]:
    """Degrees where these axes change from one candidate to the next, and [C] which of them each
    has. Candidates of one layout follow each other, so that there are far fewer."""
    changes = np.zeros_like(degrees[PP], np.bool_)
    changes[:1] = True
    for axis in axes:
        changes[1:] |= degrees[axis][1:] != degrees[axis][:-1]
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
    num_kv_heads: int,
    *,
    train: bool,
    elements: Ints | None = None,
) -> StateBytes:
    """What a model-stage holds between its programs.

    Args:
      spec: leaves of the parameters.
      dtype: of the parameters; moments have the same.
      candidates: layouts.
      num_kv_heads: of the model.
      train: there is an optimizer.
      elements: [C] of the parameters on a device, where they are known.
    """
    degrees = mesh_degrees(candidates, num_kv_heads)
    item = DTYPE_BYTES[dtype]
    if elements is None:
        elements = shard_elements(spec, degrees).all
    optimizer = np.zeros(len(candidates))
    if train:
        owned = elements
        if candidates.zero1.any():
            owned = np.where(candidates.zero1, zero_elements(spec, degrees), elements)
        optimizer = floats(MOMENTS * owned * item + COUNTER_BYTES)
    return StateBytes(parameters=floats(elements * item), optimizer=optimizer)
