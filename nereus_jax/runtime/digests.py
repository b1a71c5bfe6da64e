"""A digest of logical state that does not depend on the layout, computed where the state is.

Every element is hashed with its place in the logical leaf, and the hashes are added up modulo 2^32:
in any order, over any cut, without padding. Two such sums with different constants make a digest of
64 bits. Each copy of a leaf (a replica, a tensor-parallel rank that shares its heads) is digested
on its own; copies that differ are an error by themselves.

A sum finds what a transfer can do wrong (a block in another place, of another time, not written, or
written twice), not an attacker who chooses the bits.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from nereus_jax.core.emu_spec import EmuSpec, LeafSpec, ShardingRules
from nereus_jax.core.errors import DigestError
from nereus_jax.core.layout import MESH_AXES
from nereus_jax.models.mesh_axes import axis_index
from nereus_jax.runtime import host
from nereus_jax.runtime.emu import Site, partition_spec
from nereus_jax.runtime.programs import ProgramCache, ProgramKey, Recipe

Digest = tuple[int, int]

SEEDS = (0x243F6A88, 0x85A308D3)
PLACES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
"""Odd numbers, one a dim, that make a place of its indices (primes of xxHash)."""


def state_digests(
    site: Site, spec: EmuSpec, arrays: Mapping[str, jax.Array], programs: ProgramCache
) -> dict[str, Digest]:
    """The digest of every leaf of a DP group.

    Args:
      site: where the arrays are.
      spec: their leaves.
      arrays: by name; on this site.
      programs: where compiled programs are kept: one for the leaves that are cut alike.

    Raises:
      DigestError: two copies of a leaf differ; the message names the leaf and the devices.
    """
    sums = {
        leaf.name: programs.get(*digest_recipe(site, leaf, spec.rules)).run(arrays[leaf.name])
        for leaf in spec
    }
    found = host.fetch(sums)
    return {leaf.name: _whole(leaf, spec.rules, site, found[leaf.name]) for leaf in spec}


def digest_recipe(site: Site, leaf: LeafSpec, rules: ShardingRules) -> Recipe:
    """Key and lowering of the program that digests a leaf: [dp, pp, kv, kvr, 2] uint32, each
    device's own sums."""
    unnamed = dataclasses.replace(leaf, name="")
    key = ProgramKey(
        model_stage=str(site.model_stage),
        name="digest",
        layout=str(site.placement.layout),
        devices=tuple(str(d) for d in site.placement.devices),
        static=(unnamed, tuple(leaf.dim_axes(rules))),
    )

    def lower() -> jax.stages.Lowered:
        mapped = jax.shard_map(
            functools.partial(_block_sums, leaf, rules),
            mesh=site.mesh,
            in_specs=partition_spec(leaf, rules),
            out_specs=PartitionSpec(*MESH_AXES),
            check_vma=False,
        )
        spec = EmuSpec(leaves=(leaf,), rules=rules)
        return jax.jit(mapped).lower(site.abstract(spec)[leaf.name])

    return key, lower


def _whole(leaf: LeafSpec, rules: ShardingRules, site: Site, sums: np.ndarray) -> Digest:
    """Adds up the blocks of each copy of a leaf; raises DigestError if copies differ."""
    split_over = {axis for axes in leaf.dim_axes(rules) for axis in axes}
    dims = tuple(i for i, axis in enumerate(MESH_AXES) if axis in split_over)
    copies = sums.sum(axis=dims, keepdims=True, dtype=np.uint32)
    flat = np.broadcast_to(copies, sums.shape).reshape(-1, len(SEEDS))
    wrong = np.flatnonzero((flat != flat[0]).any(axis=1))
    if len(wrong):
        devices = [str(site.placement.devices[i]) for i in wrong[:4]]
        raise DigestError(
            f"{site.model_stage}: the copies of {leaf.name!r} differ: that on "
            f"{', '.join(devices)} is not the one on {site.placement.devices[0]}"
        )
    return int(flat[0, 0]), int(flat[0, 1])


def _block_sums(leaf: LeafSpec, rules: ShardingRules, block: jax.Array) -> jax.Array:
    """[1, 1, 1, 1, 2] sums of the hashes of a device's block."""
    bits = _bits(block)
    place = jnp.zeros(block.shape, jnp.uint32)
    inside = jnp.ones(block.shape, bool)
    for dim, axes in enumerate(leaf.dim_axes(rules)):
        index = lax.broadcasted_iota(jnp.uint32, block.shape, dim)
        offset = jnp.asarray(axis_index(axes) * block.shape[dim]).astype(jnp.uint32)
        index = index + offset
        inside &= index < leaf.shape[dim]
        place = place + index * jnp.uint32(PLACES[dim])
    mixed_place = _mix(place)
    sums = [
        jnp.sum(jnp.where(inside, _mix(bits ^ _mix(mixed_place + jnp.uint32(seed))), 0))
        for seed in SEEDS
    ]
    total = jnp.stack(sums).astype(jnp.uint32)
    return total.reshape((1,) * len(MESH_AXES) + (len(SEEDS),))


def _bits(block: jax.Array) -> jax.Array:
    """The bits of every element, as uint32."""
    if block.dtype == jnp.bool_:
        return block.astype(jnp.uint32)
    width = 8 * block.dtype.itemsize
    unsigned = lax.bitcast_convert_type(block, jnp.dtype(f"uint{width}"))
    if width == 64:
        high = (unsigned >> jnp.uint64(32)).astype(jnp.uint32)
        return unsigned.astype(jnp.uint32) ^ _mix(high)
    return unsigned.astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3: every bit of the input changes half of the output's."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def compare_digests(
    model_stage: str, before: Mapping[str, Digest], after: Mapping[str, Digest]
) -> None:
    """Raises DigestError, which names the leaf, if a leaf has changed, is missing or is new."""
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            raise DigestError(
                f"{model_stage}: {name!r} has changed: its digest was {before.get(name)}, it is "
                f"{after.get(name)}"
            )
