"""Prompts through the pipeline into a KV cache.

Shapes: n rows = M microbatches of b rows, P prompt, S cache, L layers held here, C key/value heads
held here, K head dim, D embed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nereus_jax.models.decoder import Decoder
from nereus_jax.models.mesh_axes import axis_index, axis_size
from nereus_jax.models.pipeline import from_last_rank


class KVCache(NamedTuple):
    """Keys and values [L, n, S, C, K] of the layers and heads held here."""

    k: jax.Array
    v: jax.Array


def prefill(
    decoder: Decoder,
    tokens_nP: jax.Array,
    lengths_n: jax.Array,
    micro: int,
    cache_length: int,
) -> tuple[KVCache, jax.Array]:
    """Runs prompts through the layers of all pp ranks.

    Microbatches pass through the pipeline one after the other, so that activations are those of
    one microbatch.

    Args:
      decoder: the shards that the device holds.
      tokens_nP: right-padded prompts.
      lengths_n: their lengths.
      micro: rows of a microbatch, a divisor of n.
      cache_length: S, at least P; what is behind the prompts is zero.

    Returns:
      The keys and values [L, n, S, C, K], and the hidden state [n, D] of each prompt's last token.
    """
    axes, groups = decoder.axes, axis_size(decoder.axes.pp)
    num_rows, width = tokens_nP.shape
    tokens_MbP = tokens_nP.reshape(-1, micro, width)
    lengths_Mb = lengths_n.reshape(-1, micro)
    num_micro = tokens_MbP.shape[0]
    cos, sin = decoder.rope(jnp.arange(width)[None, :])
    graphdef, stacked = nnx.split(decoder.layers)
    rank = axis_index(axes.pp)
    ring = [(r, (r + 1) % groups) for r in range(groups)]

    def layer(x: jax.Array, params: nnx.State) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return nnx.merge(graphdef, params)(x, cos, sin)

    def tick(
        carry: tuple[jax.Array, KVCache], t: jax.Array
    ) -> tuple[tuple[jax.Array, KVCache], jax.Array]:
        received, cache = carry
        entering = decoder.embed_tokens(pick(tokens_MbP, jnp.minimum(t, num_micro - 1)))
        out, (k, v) = lax.scan(layer, jnp.where(rank == 0, entering, received), stacked)
        index = t - rank
        cache = KVCache(_store(cache.k, k, index), _store(cache.v, v, index))
        last_b = jnp.maximum(pick(lengths_Mb, jnp.clip(index, 0, num_micro - 1)) - 1, 0)
        hidden_bD = jnp.take_along_axis(out, last_b[:, None, None], axis=1)[:, 0]
        moved = lax.ppermute(out, axes.pp, ring) if groups > 1 else out
        return (moved, cache), hidden_bD

    embed_dim, dtype = decoder.config.embed_dim, decoder.layers.k.dtype
    start = jnp.zeros((micro, width, embed_dim), dtype)
    carry = (start, empty_cache(decoder, num_rows, cache_length))
    (_, cache), hidden = lax.scan(tick, carry, jnp.arange(num_micro + groups - 1))
    hidden_nD = hidden[groups - 1 :].reshape(num_rows, embed_dim)
    return cache, from_last_rank(hidden_nD, axes)


def empty_cache(decoder: Decoder, num_rows: int, length: int) -> KVCache:
    """A cache of zeros for so many rows of this length."""
    layers, _, kv_width = decoder.layers.k.shape
    head_dim = decoder.config.head_dim
    shape = (layers, num_rows, length, kv_width // head_dim, head_dim)
    empty = jnp.zeros(shape, decoder.layers.k.dtype)
    return KVCache(empty, empty)


def pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """Entry `index` of the first dim."""
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _store(cache: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    """Writes keys or values [L, b, P, C, K] of microbatch `index` into [L, n, S, C, K].

    An index outside the n / b microbatches writes nowhere.
    """
    micro = new.shape[1]
    num_micro = cache.shape[1] // micro
    place = (0, jnp.clip(index, 0, num_micro - 1) * micro, 0, 0, 0)
    old = lax.dynamic_slice(cache, place, new.shape)
    kept = jnp.where((index >= 0) & (index < num_micro), new, old)
    return lax.dynamic_update_slice(cache, kept, place)
