"""What a model's state consists of, and which part of it each device holds.

`EmuSpec` lists the leaves of one replica of a model: name, logical shape, dtype, logical axes.
`ShardingRules` says which mesh axes a logical axis is split over. The two and a mesh shape give
every device's box (index ranges) in the leaf's logical coordinates. A dim that does not divide is
padded at its end up to the next multiple; padding holds zeros, is no part of the logical state, and
stays zero under training (see `models/decoder.py`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from nereus_jax.core.errors import ReshardError
from nereus_jax.core.layout import DP, KV, MESH_AXES, PP, TP_AXES

Box = tuple[tuple[int, int], ...]
"""Half-open index ranges (start, stop), one for each dim of a leaf."""

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex128": 16,
    "complex64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Logical axis -> the mesh axes it is split over; an axis that is not named is not split.

    Attributes:
      mesh_axes: for each logical axis, major first.
      axis_names: the axes of the mesh, in its order.
    """

    mesh_axes: Mapping[str, tuple[str, ...]]
    axis_names: tuple[str, ...] = MESH_AXES

    def __call__(self, logical_axis: str | None) -> tuple[str, ...]:
        return self.mesh_axes.get(logical_axis, ()) if logical_axis else ()


# The vocabulary is split over the pipeline too (Yeung et al., "Balancing Pipeline Parallelism with
# Vocabulary Parallelism", arXiv 2411.05288): no pipeline rank is left with the embedding and the
# head as its own burden.
DECODER_RULES = ShardingRules(
    mesh_axes={
        "layers": (PP,),
        "vocab": (PP, *TP_AXES),
        "heads": TP_AXES,
        "kv_heads": (KV,),
        "mlp": TP_AXES,
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSpec:
    """One named array of a model's state, in logical (unpadded) terms.

    Attributes:
      name: dotted, unique inside the spec; `layers.` leads the stacked ones.
      shape: logical shape.
      dtype: a numpy or ml_dtypes name.
      logical_axes: the logical axis of each dim, None for one that is never split.
      zero_dim: the dim that is additionally split over dp (optimizer state under ZeRO-1), or None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    logical_axes: tuple[str | None, ...]
    zero_dim: int | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.logical_axes):
            raise ValueError(f"{self.name}: shape {self.shape} against axes {self.logical_axes}")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    def dim_axes(self, rules: ShardingRules) -> tuple[tuple[str, ...], ...]:
        """Mesh axes of every dim, major first."""
        axes = [rules(a) for a in self.logical_axes]
        if self.zero_dim is not None:
            axes[self.zero_dim] = (*axes[self.zero_dim], DP)
        return tuple(axes)

    def num_shards(self, rules: ShardingRules, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Into how many parts each dim is cut."""
        sizes = dict(zip(rules.axis_names, mesh_shape, strict=True))
        return tuple(math.prod(sizes[a] for a in axes) for axes in self.dim_axes(rules))

    def padded_shape(self, rules: ShardingRules, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the global array on this mesh: every dim a multiple of its shards."""
        shards = self.num_shards(rules, mesh_shape)
        return tuple(-(-dim // n) * n for dim, n in zip(self.shape, shards, strict=True))

    def local_shape(self, rules: ShardingRules, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's shard, padding included."""
        padded = self.padded_shape(rules, mesh_shape)
        shards = self.num_shards(rules, mesh_shape)
        return tuple(dim // n for dim, n in zip(padded, shards, strict=True))

    def local_bytes(self, rules: ShardingRules, mesh_shape: tuple[int, ...]) -> int:
        return math.prod(self.local_shape(rules, mesh_shape)) * DTYPE_BYTES[self.dtype]

    def box(
        self, rules: ShardingRules, mesh_shape: tuple[int, ...], coordinates: tuple[int, ...]
    ) -> Box:
        """The index ranges of the padded array that the device at mesh `coordinates` holds."""
        position = _position(self.dim_axes(rules), rules.axis_names, mesh_shape, coordinates)
        local = self.local_shape(rules, mesh_shape)
        return tuple((p * n, (p + 1) * n) for p, n in zip(position, local, strict=True))

    def positions(
        self, rules: ShardingRules, mesh_shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], ...]:
        """Which block every device holds, in row-major order of the mesh."""
        return _positions(self.dim_axes(rules), rules.axis_names, mesh_shape)

    def with_zero(self, rules: ShardingRules, mesh_shape: tuple[int, ...]) -> "LeafSpec":
        """This leaf with one dim also split over dp: the last one whose local extent dp divides.

        A leaf with no such dim (a short vector) stays replicated over dp; it is small.
        """
        dp = mesh_shape[rules.axis_names.index(DP)]
        if dp == 1:
            return self
        local = self.local_shape(rules, mesh_shape)
        candidates = [i for i in range(len(local)) if local[i] % dp == 0]
        if not candidates:
            return self
        return dataclasses.replace(self, zero_dim=candidates[-1])


def _position(
    dim_axes: tuple[tuple[str, ...], ...],
    axis_names: tuple[str, ...],
    mesh_shape: tuple[int, ...],
    coordinates: tuple[int, ...],
) -> tuple[int, ...]:
    sizes = dict(zip(axis_names, mesh_shape, strict=True))
    place = dict(zip(axis_names, coordinates, strict=True))
    position: list[int] = []
    for axes in dim_axes:
        index = 0
        for axis in axes:
            index = index * sizes[axis] + place[axis]
        position.append(index)
    return tuple(position)


def _mesh_axes(name: str, shape: tuple[int, ...], spec: tuple[Any, ...]) -> list[tuple[str, ...]]:
    """The mesh axes of each dim, of a partition spec that may be shorter than the shape."""
    if len(spec) > len(shape):
        raise ReshardError(
            f"{name!r} has shape {shape}, {len(shape)} dims, but its spec {spec} names {len(spec)}"
        )
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    return [e if isinstance(e, tuple) else (e,) if isinstance(e, str) else () for e in entries]


@functools.lru_cache(maxsize=1024)  # leaves that are cut alike share one tuple
def _positions(
    dim_axes: tuple[tuple[str, ...], ...],
    axis_names: tuple[str, ...],
    mesh_shape: tuple[int, ...],
) -> tuple[tuple[int, ...], ...]:
    places = itertools.product(*(range(n) for n in mesh_shape))
    return tuple(_position(dim_axes, axis_names, mesh_shape, place) for place in places)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmuSpec:
    """The leaves of one model's state, in a fixed order."""

    leaves: tuple[LeafSpec, ...]
    rules: ShardingRules = DECODER_RULES

    def __post_init__(self) -> None:
        names = [leaf.name for leaf in self.leaves]
        if len(set(names)) != len(names):
            raise ValueError(f"leaf names are not unique: {sorted(names)}")

    @classmethod
    def from_tree(cls, tree: Any, shardings: Any) -> "EmuSpec":
        """The leaves of any pytree, as its named shardings cut them.

            spec = EmuSpec.from_tree(params, shardings)
            spec.local_bytes(tuple(mesh.shape.values()))

        Args:
          tree: of arrays, or of anything with `shape` and `dtype`.
          shardings: a `jax.sharding.NamedSharding` for each leaf or subtree, or one for all; their
            meshes have the same axes.

        Returns:
          Leaves named by their path, dots between its parts. A logical axis is named by the mesh
          axes that it is split over.

        Raises:
          ReshardError: the two trees do not fit, or a leaf cannot be described.
        """
        import jax  # whoever has a pytree of arrays has jax; nothing else in core needs it

        tree_util: Any = jax.tree_util
        flat: list[tuple[Any, Any]] = tree_util.tree_flatten_with_path(tree)[0]
        try:
            ends = jax.tree.leaves(jax.tree.broadcast(shardings, tree))
        except ValueError as error:
            raise ReshardError(f"the tree does not match its shardings: {error}") from None
        leaves: list[LeafSpec] = []
        mesh_axes: dict[str, tuple[str, ...]] = {}
        axis_names: tuple[str, ...] | None = None
        for (path, x), sharding in zip(flat, ends, strict=True):
            name = tree_util.keystr(path, simple=True, separator=".")
            if not isinstance(sharding, jax.sharding.NamedSharding):
                raise ReshardError(
                    f"the sharding of {name!r} is a {type(sharding).__name__}; "
                    f"give a jax.sharding.NamedSharding"
                )
            if axis_names not in (None, sharding.mesh.axis_names):
                raise ReshardError(
                    f"the mesh of {name!r} has the axes {sharding.mesh.axis_names}, that of the "
                    f"leaves before it {axis_names}; all leaves of a spec lie on one mesh"
                )
            axis_names = tuple(sharding.mesh.axis_names)
            if str(x.dtype) not in DTYPE_BYTES:
                raise ReshardError(
                    f"{name!r} has dtype {x.dtype}; dtypes that a leaf can have: "
                    f"{', '.join(sorted(DTYPE_BYTES))}"
                )
            cuts = _mesh_axes(name, tuple(x.shape), tuple(sharding.spec))
            mesh_axes |= {",".join(axes): axes for axes in cuts if axes}
            leaf = LeafSpec(
                name=name,
                shape=tuple(x.shape),
                dtype=str(x.dtype),
                logical_axes=tuple(",".join(axes) or None for axes in cuts),
            )
            leaves.append(leaf)
        rules = ShardingRules(mesh_axes=mesh_axes, axis_names=axis_names or MESH_AXES)
        return cls(leaves=tuple(leaves), rules=rules)

    def __iter__(self) -> Iterator[LeafSpec]:
        return iter(self.leaves)

    def __getitem__(self, name: str) -> LeafSpec:
        for leaf in self.leaves:
            if leaf.name == name:
                return leaf
        raise KeyError(name)

    @functools.cached_property
    def num_elements(self) -> int:
        return sum(leaf.num_elements for leaf in self.leaves)

    def with_zero(self, mesh_shape: tuple[int, ...]) -> "EmuSpec":
        """The same leaves, also split over dp where they can be: optimizer state of ZeRO-1."""
        leaves = tuple(leaf.with_zero(self.rules, mesh_shape) for leaf in self.leaves)
        return dataclasses.replace(self, leaves=leaves)

    def local_bytes(self, mesh_shape: tuple[int, ...]) -> int:
        """Bytes that one device holds, padding included; the same for every device."""
        return sum(leaf.local_bytes(self.rules, mesh_shape) for leaf in self.leaves)
