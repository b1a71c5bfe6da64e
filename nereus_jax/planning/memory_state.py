# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Bytes of a model-stage's state and inputs on each device, for many candidates at once.

The same numbers that `EmuSpec.local_bytes` gives for one mesh, padding included; and what a program
takes as arguments beside the state. These are exact.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def local_dims(leaf: LeafSpec, spec: EmuSpec, degrees: Degrees) -> list[Ints]:
    """Extent of every dim of a device's shard, [C] each."""
    cuts = [_product([degrees[a] for a in axes], degrees) for axes in leaf.dim_axes(spec.rules)]
    return [-(-dim // cut) for dim, cut in zip(leaf.shape, cuts, strict=True)]


def local_elements(spec: EmuSpec, degrees: Degrees) -> Ints:
    """[C] elements that a device holds of all leaves."""
    some, which = _distinct(degrees, (PP, KV, KVR))
    total = np.zeros_like(some[PP])
    for leaf in spec:
        total = total + _product(local_dims(leaf, spec, some), some)
    return total[which]


def zero_elements(spec: EmuSpec, degrees: Degrees) -> Ints:
    """[C] the same with every leaf also split over dp, where a dim of the shard divides."""
    some, which = _distinct(degrees, (DP, PP, KV, KVR))
    total = np.zeros_like(some[DP])
    for leaf in spec:
        dims = local_dims(leaf, spec, some)
        divides = np.any([dim % some[DP] == 0 for dim in dims], axis=0)
        total = total + _product(dims, some) // np.where(divides, some[DP], 1)
    return total[which]


def _distinct(degrees: Degrees, axes: tuple[str, ...]) -> tuple[Degrees, Ints]:
    """Degrees of the layouts that differ in these axes, and [C] which of them each is.

    There are a hundred times fewer of them than candidates.
    """
    code = np.zeros_like(degrees[PP])
    for axis in axes:
        code = code * (int(degrees[axis].max(initial=0)) + 1) + degrees[axis]
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return {axis: values[first] for axis, values in degrees.items()}, which


def _product(factors: list[Ints], degrees: Degrees) -> Ints:
    """[C]; ones for no factor."""
    product = np.ones_like(degrees[DP])
    for factor in factors:
        product = product * factor
    return product


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
    spec: EmuSpec, dtype: str, candidates: Candidates, num_kv_heads: int, *, train: bool
) -> StateBytes:
    """What a model-stage holds between its programs.

    Args:
      spec: leaves of the parameters.
      dtype: of the parameters; moments have the same.
      candidates: layouts.
      num_kv_heads: of the model.
      train: there is an optimizer.
    """
    degrees = mesh_degrees(candidates, num_kv_heads)
    item = DTYPE_BYTES[dtype]
    elements = local_elements(spec, degrees)
    optimizer = np.zeros(len(candidates))
    if train:
        owned = elements
        if candidates.zero1.any():
            owned = np.where(candidates.zero1, zero_elements(spec, degrees), elements)
        optimizer = floats(MOMENTS * owned * item + COUNTER_BYTES)
    return StateBytes(parameters=floats(elements * item), optimizer=optimizer)
