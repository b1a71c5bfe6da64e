"""The named sharded pytree of a model-stage: how the leaves of an `EmuSpec` lie on a mesh.

State is a flat dict of named global arrays. A global array has the leaf's padded shape on its mesh;
padding is zero. The arrays of a DP group and its Elastic Model Units are two views of the same
buffers.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nereus_jax.core.architectures import LAYER_PREFIX, DecoderConfig, Head
from nereus_jax.core.emu_spec import Box, EmuSpec, LeafSpec, ShardingRules
from nereus_jax.core.layout import MESH_AXES, ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ModelStage
from nereus_jax.core.transition import Unit, placed_units
from nereus_jax.models.decoder import initial_values
from nereus_jax.runtime.blocks import Blocks, BlockViews
from nereus_jax.runtime.world import DeviceHandle, World

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """Where a model-stage lives: its placement and the mesh made of it."""

    model_stage: ModelStage
    placement: Placement
    mesh: Mesh

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape[a] for a in MESH_AXES)

    def sharding(self, *spec: str | tuple[str, ...] | None) -> NamedSharding:
        """The sharding with this partition spec on the mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def leaf_sharding(self, leaf: LeafSpec, rules: ShardingRules) -> NamedSharding:
        """How a leaf lies on the mesh."""
        return NamedSharding(self.mesh, partition_spec(leaf, rules))

    def shardings(self, spec: EmuSpec) -> dict[str, NamedSharding]:
        """How every leaf lies on the mesh."""
        return {leaf.name: self.leaf_sharding(leaf, spec.rules) for leaf in spec}

    def abstract(self, spec: EmuSpec) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of the global arrays, nothing allocated."""
        return {
            leaf.name: jax.ShapeDtypeStruct(
                leaf.padded_shape(spec.rules, self.mesh_shape),
                jnp.dtype(leaf.dtype),
                sharding=self.leaf_sharding(leaf, spec.rules),
            )
            for leaf in spec
        }


def make_site(
    world: World, model_stage: ModelStage, placement: Placement, num_kv_heads: int
) -> Site:
    """Builds the mesh of a model-stage."""
    mesh = world.mesh(placement, num_kv_heads)
    return Site(model_stage=model_stage, placement=placement, mesh=mesh)


def partition_spec(leaf: LeafSpec, rules: ShardingRules) -> PartitionSpec:
    """The leaf's mesh axes as a PartitionSpec."""
    return PartitionSpec(*(axes if axes else None for axes in leaf.dim_axes(rules)))


def initialize(config: DecoderConfig, head: Head, site: Site, dtype: str, seed: int) -> Params:
    """Random parameters; the same draws on every mesh, equal up to the last bit of rounding."""
    spec = config.spec(head, dtype)
    shardings = site.shardings(spec)

    def make(key: jax.Array) -> Params:
        params = {}
        for leaf in spec:
            # The crc of the name is stable between runs; Python's hash of a string is not.
            leaf_key = jax.random.fold_in(key, zlib.crc32(leaf.name.encode()))
            name = leaf.name.rsplit(".", 1)[-1]
            values = initial_values(name, leaf.shape, leaf_key).astype(leaf.dtype)
            params[leaf.name] = pad_to(values, leaf.padded_shape(spec.rules, site.mesh_shape))
        return params

    key = jax.random.key(seed, impl="threefry2x32")
    return jax.jit(make, out_shardings=shardings)(key)


def pad_to(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Zeros at the end of every dim, up to `shape`."""
    return jnp.pad(values, [(0, n - m) for m, n in zip(values.shape, shape, strict=True)])


def load(
    spec: EmuSpec,
    site: Site,
    read: Callable[[str, tuple[slice, ...]], np.ndarray],
) -> Params:
    """Fills a mesh from a source of tensors, each device's shard read on its own.

    The host holds one shard of one leaf at a time; what several devices hold is read once.

    Args:
      spec: the leaves wanted.
      site: where they go.
      read: (leaf name, index in logical coordinates) -> values; called for local devices only, and
        for one layer at a time.
    """
    return {leaf.name: _load_leaf(leaf, spec.rules, site, read) for leaf in spec}


def _load_leaf(
    leaf: LeafSpec,
    rules: ShardingRules,
    site: Site,
    read: Callable[[str, tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    padded = leaf.padded_shape(rules, site.mesh_shape)
    sharding = site.leaf_sharding(leaf, rules)
    holders: dict[Box, list[DeviceHandle]] = {}
    for device, index in sharding.addressable_devices_indices_map(padded).items():
        assert index is not None  # jax's type allows for more than it returns
        box = tuple(s.indices(n)[:2] for s, n in zip(index, padded, strict=True))
        holders.setdefault(box, []).append(device)

    def put(box: Box, devices: list[DeviceHandle]) -> list[jax.Array]:
        block = _read_box(leaf, box, read)
        copies = [jax.device_put(block, device, may_alias=False) for device in devices]
        # Transfers are asynchronous and keep the block: wait, so that there is one at a time.
        return jax.block_until_ready(copies)

    shards = [shard for box, devices in holders.items() for shard in put(box, devices)]
    return jax.make_array_from_single_device_arrays(
        padded, sharding, shards, dtype=jnp.dtype(leaf.dtype)
    )


def _read_box(
    leaf: LeafSpec, box: Box, read: Callable[[str, tuple[slice, ...]], np.ndarray]
) -> np.ndarray:
    """A box of the padded leaf: what is inside the logical shape is read, the rest is zero."""
    inside = [(min(a, n), min(b, n)) for (a, b), n in zip(box, leaf.shape, strict=True)]
    block = np.zeros([b - a for a, b in box], jnp.dtype(leaf.dtype))
    if not math.prod(b - a for a, b in inside):
        return block
    first, last = inside[0]
    step = 1 if leaf.name.startswith(LAYER_PREFIX) else last - first
    for start in range(first, last, step):
        rows = (start, start + step)
        values = read(leaf.name, tuple(slice(a, b) for a, b in (rows, *inside[1:])))
        offset = start - box[0][0]
        target = (slice(offset, offset + step), *(slice(0, b - a) for a, b in inside[1:]))
        block[target] = values  # rounded to the leaf's dtype
    return block


def live_bytes_per_device(arrays: Mapping[str, jax.Array]) -> dict[DeviceHandle, int]:
    """Bytes that the arrays take on each local device; the caller leaves out aliases."""
    totals: dict[DeviceHandle, int] = {}
    for array in arrays.values():
        for shard in array.addressable_shards:
            totals[shard.device] = totals.get(shard.device, 0) + shard.data.nbytes
    return totals


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ElasticModelUnit:
    """The state of one replica: a view of the buffers that its DP group's arrays are made of.

    Attributes:
      unit: which replica, in which layout, on which devices.
      blocks: leaf -> the block of each of the unit's devices that this process has, as an array on
        that device alone.
      version: optimizer updates behind the values.
    """

    unit: Unit
    blocks: Mapping[str, Blocks]
    version: int = 0

    @property
    def is_intact(self) -> bool:
        """Whether no block is deleted: a lost device takes its buffers with it."""
        return not any(x.is_deleted() for leaf in self.blocks.values() for x in leaf.values())


def units_of(
    world: World,
    site: Site,
    arrays: Mapping[str, jax.Array],
    version: int = 0,
    views: BlockViews | None = None,
) -> tuple[ElasticModelUnit, ...]:
    """The units of a DP group, one a replica; nothing is copied.

    Args:
      world: the devices.
      site: of the group.
      arrays: its leaves, by name.
      version: optimizer updates behind them.
      views: knows the blocks of arrays that have lost some; None: all are whole.
    """
    views = BlockViews() if views is None else views
    held = {leaf: views.of(world, array) for leaf, array in arrays.items()}
    units: list[ElasticModelUnit] = []
    for unit in placed_units(site.model_stage, site.placement):
        blocks = {
            leaf: {d: of_device[d] for d in unit.devices if d in of_device}
            for leaf, of_device in held.items()
        }
        units.append(ElasticModelUnit(unit=unit, blocks=blocks, version=version))
    return tuple(units)


def group_site(world: World, units: Sequence[Unit], num_kv_heads: int) -> Site:
    """The site of the DP group that some units of one layout form, in their order."""
    first = units[0]
    placement = Placement(
        layout=ParallelLayout(len(units), first.pp, first.tp),
        devices=tuple(d for unit in units for d in unit.devices),
    )
    return make_site(world, first.model_stage, placement, num_kv_heads)


def group_arrays(
    world: World, site: Site, spec: EmuSpec, units: Sequence[ElasticModelUnit]
) -> Params:
    """The arrays of a DP group, made of its units' buffers; nothing is copied.

    Args:
      world: the devices.
      site: of the group.
      spec: its leaves.
      units: one for each replica, in any order.
    """
    arrays: Params = {}
    for leaf in spec:
        held = {d: x for unit in units for d, x in unit.blocks[leaf.name].items()}
        buffers = [held[d] for d in site.placement.devices if world.is_local(d)]
        arrays[leaf.name] = jax.make_array_from_single_device_arrays(
            leaf.padded_shape(spec.rules, site.mesh_shape),
            site.leaf_sharding(leaf, spec.rules),
            buffers,
            dtype=jnp.dtype(leaf.dtype),
        )
    return arrays
