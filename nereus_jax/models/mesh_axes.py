"""Names of the mesh axes that a model's arrays are split over, as seen from inside `shard_map`.

Models run on one device and inside a manual `shard_map` with the same code: a collective over no
axis is nothing.
"""

import dataclasses
import math
from typing import TypeVar

import jax
from jax import lax

from nereus_jax.core.layout import DP, KV, KVR, PP

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshAxes:
    """The mesh axes in use; an empty tuple where the model is not split."""

    dp: tuple[str, ...] = ()
    pp: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()
    kvr: tuple[str, ...] = ()

    @property
    def tp(self) -> tuple[str, ...]:
        return self.kv + self.kvr

    @property
    def vocab(self) -> tuple[str, ...]:
        return self.pp + self.tp

    @property
    def all(self) -> tuple[str, ...]:
        return self.dp + self.pp + self.tp


UNSHARDED = MeshAxes()
SHARDED = MeshAxes(dp=(DP,), pp=(PP,), kv=(KV,), kvr=(KVR,))


def psum(tree: Tree, axes: tuple[str, ...]) -> Tree:
    """Sum over mesh axes; the tree itself when there are none."""
    return lax.psum(tree, axes) if axes else tree


def axis_index(axes: tuple[str, ...]) -> jax.Array | int:
    """Position along the product of `axes`, major first; 0 when there are none."""
    return lax.axis_index(axes) if axes else 0


def axis_size(axes: tuple[str, ...]) -> int:
    """Number of positions along the product of `axes`."""
    return math.prod(lax.axis_size(a) for a in axes)


def varying(tree: Tree, axes: tuple[str, ...]) -> Tree:
    """Marks arrays as differing along `axes`, as the carry of a loop has to be from its start."""

    def cast(x: jax.Array) -> jax.Array:
        have = jax.typeof(x).manual_axis_type.varying
        missing = tuple(a for a in axes if a not in have)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)
