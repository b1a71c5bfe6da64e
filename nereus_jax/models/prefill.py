"""Prompts through the pipeline into a KV cache.

Microbatches pass through the pipeline one after the other. Each is computed at the least of a few
static widths that holds its longest prompt, so that short prompts do not pay for the longest one
there may be; who calls puts prompts of like length together.

Shapes: n rows = M microbatches of b rows, P prompt, w width of a microbatch, L layers held here,
D embed.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nereus_jax.models.decoder import Decoder
from nereus_jax.models.kv_cache import Cache
from nereus_jax.models.mesh_axes import axis_index, axis_size
from nereus_jax.models.pipeline import from_last_rank

MOST_WIDTHS = 5
"""Widths of a microbatch: the longest prompt there may be, half of that, and so on. Each of them is
one more copy of the layers to compile."""

SHORT_PROMPT = 16
"""No width is less: it would save less than it costs to compile."""


def prefill(
    decoder: Decoder,
    tokens_nP: jax.Array,
    lengths_n: jax.Array,
    places_n: tuple[jax.Array, jax.Array],
    micro: int,
    cache: Cache,
) -> tuple[Cache, jax.Array]:
    """Runs prompts through the layers of all pp ranks.

    Args:
      decoder: the shards that the device holds.
      tokens_nP: right-padded prompts.
      lengths_n: their lengths; 0 for what is no row.
      places_n: group and slot of each prompt in the cache; the group behind the last one is
        nowhere.
      micro: rows of a microbatch, a divisor of n.
      cache: where keys and values go.

    Returns:
      The cache, and the hidden state [n, D] of each prompt's last token.
    """
    axes, groups = decoder.axes, axis_size(decoder.axes.pp)
    num_rows, width = tokens_nP.shape
    tokens_MbP = tokens_nP.reshape(-1, micro, width)
    lengths_Mb, group_Mb, slot_Mb = (x.reshape(-1, micro) for x in (lengths_n, *places_n))
    num_micro = tokens_MbP.shape[0]
    rank = axis_index(axes.pp)
    ring = [(r, (r + 1) % groups) for r in range(groups)]

    def tick(
        carry: tuple[jax.Array, Cache], t: jax.Array
    ) -> tuple[tuple[jax.Array, Cache], jax.Array]:
        received, cache = carry
        entering = decoder.embed_tokens(pick(tokens_MbP, jnp.minimum(t, num_micro - 1)))
        here = jnp.clip(t - rank, 0, num_micro - 1)
        works = here == t - rank
        lengths_b = jnp.where(works, pick(lengths_Mb, here), 0)
        out, k, v = _layers(decoder, jnp.where(rank == 0, entering, received), lengths_b)
        group_b = jnp.where(works, pick(group_Mb, here), jnp.iinfo(jnp.int32).max)
        cache = cache.write_prompts(k, v, group_b, pick(slot_Mb, here))
        last_b = jnp.maximum(lengths_b - 1, 0)
        hidden_bD = jnp.take_along_axis(out, last_b[:, None, None], axis=1)[:, 0]
        moved = lax.ppermute(out, axes.pp, ring) if groups > 1 else out
        return (moved, cache), hidden_bD

    embed_dim, dtype = decoder.config.embed_dim, decoder.layers.k.dtype
    start = jnp.zeros((micro, width, embed_dim), dtype)
    ticks = jnp.arange(num_micro + groups - 1)
    (_, cache), hidden = lax.scan(tick, (start, cache), ticks)
    hidden_nD = hidden[groups - 1 :].reshape(num_rows, embed_dim)
    return cache, from_last_rank(hidden_nD, axes)


def prefill_tokens(lengths_n: jax.Array, micro: int, width: int) -> jax.Array:
    """Positions that `prefill` computes for rows of these lengths, padding included."""
    sizes = jnp.array([0, *_widths(width)])
    return micro * jnp.sum(sizes[_step(lengths_n.reshape(-1, micro), width)])


def _widths(width: int) -> list[int]:
    """From the least to the whole width."""
    widths = [width]
    while len(widths) < MOST_WIDTHS and widths[0] > SHORT_PROMPT:
        widths.insert(0, max(-(-widths[0] // 2), SHORT_PROMPT))
    return widths


def _step(lengths_xb: jax.Array, width: int) -> jax.Array:
    """Which width the longest of b rows takes: 0 for none of them, then those of `_widths`."""
    longest_x = jnp.max(lengths_xb, axis=-1)
    shorter = jnp.array([0, *_widths(width)[:-1]])
    return jnp.searchsorted(shorter, longest_x, method="compare_all")


def _layers(
    decoder: Decoder, x_bPD: jax.Array, lengths_b: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Activations [b, P, D], keys and values [L, b, P, C, K]; zeros behind the width taken.

    All tp ranks take the same branch, so that their collectives meet in it.
    """
    width = x_bPD.shape[1]
    graphdef, stacked = nnx.split(decoder.layers)
    layers, _, kv_width = decoder.layers.k.shape
    head_dim = decoder.config.head_dim
    kv_shape = (layers, x_bPD.shape[0], width, kv_width // head_dim, head_dim)

    def nothing(x_bPD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        empty = jnp.zeros(kv_shape, decoder.layers.k.dtype)
        return jnp.zeros_like(x_bPD), empty, empty

    def compute(size: int, x_bPD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        cos, sin = decoder.rope(jnp.arange(size)[None, :])

        def layer(x: jax.Array, params: nnx.State) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            return nnx.merge(graphdef, params)(x, cos, sin)

        x, (k, v) = lax.scan(layer, x_bPD[:, :size], stacked)
        behind = (0, width - size)
        k, v = (jnp.pad(y, ((0, 0), (0, 0), behind, (0, 0), (0, 0))) for y in (k, v))
        return jnp.pad(x, ((0, 0), behind, (0, 0))), k, v

    branches = [nothing, *(partial(compute, size) for size in _widths(width))]
    return lax.switch(_step(lengths_b, width), branches, x_bPD)


def pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """Entry `index` of the first dim."""
    return lax.dynamic_index_in_dim(x, index, keepdims=False)
