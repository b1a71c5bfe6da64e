"""Weights on their way from one model-stage to another: another mesh, other padding, another dtype.

The move is `jax.device_put`, after a program on the source that casts and re-pads where the two
ends differ. Where nothing differs the target holds the source's own arrays. Between other device
sets of several processes, which `device_put` cannot serve, a leaf goes through the hosts: whole,
one leaf at a time.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from nereus_jax.core.emu_spec import EmuSpec, LeafSpec
from nereus_jax.runtime import host
from nereus_jax.runtime.emu import Params, Site, partition_spec


def transfer(
    params: Mapping[str, jax.Array],
    source_spec: EmuSpec,
    source: Site,
    target_spec: EmuSpec,
    target: Site,
    *,
    copy: bool = False,
) -> Params:
    """The leaves of `target_spec` on the target site, from the arrays of the source site.

    Args:
      params: arrays on the source site; leaves that the target does not ask for are ignored.
      source_spec: their leaves.
      source: where they are.
      target_spec: the leaves wanted, by name and with their dtype; each is a leaf of the source.
      target: where they go.
      copy: never return the source's own arrays (they may be donated while the copy lives on).

    Returns:
      Global arrays of the target's padded shapes.
    """
    moved: Params = {}
    for leaf in target_spec:
        value = params[leaf.name]
        shape = leaf.padded_shape(target_spec.rules, target.mesh_shape)
        sharding = target.leaf_sharding(leaf, target_spec.rules)
        if value.shape != shape or value.dtype != jnp.dtype(leaf.dtype):
            value = _reform(value, leaf, shape, source_spec, source)
        value = value if value.sharding == sharding else _move(value, sharding)
        # device_put shares the buffers of slices that stay where they are: every leaf is copied,
        # not only those that came back as they were.
        moved[leaf.name] = jnp.copy(value) if copy else value
    return moved


def _move(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    if jax.process_count() == 1 or value.sharding.device_set == sharding.device_set:
        return jax.device_put(value, sharding)
    return host.put(host.fetch({"": value})[""], sharding)


def _reform(
    value: jax.Array, leaf: LeafSpec, shape: tuple[int, ...], source_spec: EmuSpec, source: Site
) -> jax.Array:
    """Casts, cuts and pads on the source's devices; dims that no longer divide are not split."""
    shards = leaf.num_shards(source_spec.rules, source.mesh_shape)
    spec = partition_spec(leaf, source_spec.rules)
    fits = [s if n % k == 0 else None for s, n, k in zip(spec, shape, shards, strict=True)]
    sharding: NamedSharding = source.sharding(*fits)

    return _reformer(leaf.shape, shape, leaf.dtype, sharding)(value)


@functools.cache
def _reformer(
    logical: tuple[int, ...], padded: tuple[int, ...], dtype: str, sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    def reform(x: jax.Array) -> jax.Array:
        x = x[tuple(slice(0, n) for n in logical)]
        x = jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, padded, strict=True)])
        return x.astype(dtype)

    return jax.jit(reform, out_shardings=sharding)
