"""Grouped-query attention over whole rows and over a KV cache, and the match of query heads to
key/value heads.

Shapes: B batch, S sequence, Q query positions of one block, H query heads held here, G key/value
heads, K head dim, R = H / G.
"""

import jax
import jax.numpy as jnp
from jax import lax

from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.models.mesh_axes import MeshAxes, axis_index

MASKED_SCORE = -1e30
QUERY_BLOCK = 512


def match_heads(
    num_heads_here: int,
    keys: jax.Array,
    values: jax.Array,
    config: DecoderConfig,
    axes: MeshAxes,
    dim: int = 2,
) -> tuple[jax.Array, jax.Array]:
    """Keys and values such that query head i held here uses key/value head i // R.

    Where tp divides the key/value heads, or they divide tp, this holds as it is. Otherwise (6
    key/value heads on tp = 4) a device's query heads use its key/value heads unevenly, and each
    query head gets its own copy.

    Args:
      num_heads_here: query heads.
      keys: with key/value heads in dim `dim`.
      values: likewise.
      config: of the model.
      axes: mesh axes in use.
      dim: of the heads.
    """
    held = keys.shape[dim]
    kv_ranks = config.num_kv_heads // held
    tp_ranks = config.num_heads // num_heads_here
    if held == 1 or kv_ranks == tp_ranks:
        return keys, values
    first = axis_index(axes.tp) * num_heads_here
    heads_H = first + jnp.arange(num_heads_here)
    index_H = heads_H * config.num_kv_heads // config.num_heads - axis_index(axes.kv) * held
    return jnp.take(keys, index_H, axis=dim), jnp.take(values, index_H, axis=dim)


def _attend(
    q_BQHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask_BQS: jax.Array
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v with scores and weights in float32; mask [B or 1, Q, S]."""
    batch, length, heads, head_dim = q_BQHK.shape
    groups = k_BSGK.shape[2]
    q_BQGRK = q_BQHK.reshape(batch, length, groups, heads // groups, head_dim)
    scores = jnp.einsum(
        "bqgrk,bsgk->bgrqs", q_BQGRK, k_BSGK, preferred_element_type=jnp.float32
    ) * (head_dim**-0.5)
    scores = jnp.where(mask_BQS[:, None, None, :, :], scores, MASKED_SCORE)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSGK.dtype)
    out = jnp.einsum("bgrqs,bsgk->bqgrk", weights, v_BSGK)
    return out.reshape(batch, length, heads, head_dim)


def causal_attention(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    query_block: int = QUERY_BLOCK,
    *,
    segments_BS: jax.Array | None = None,
    span: int | None = None,
) -> jax.Array:
    """Causal attention over whole rows, of one sequence each or of several.

    Rows longer than `query_block`, or than the longest sequence, go block by block of queries, each
    block recomputed in the backward pass: the scores take B*H*query_block*(span + query_block)
    elements rather than B*H*S*S, and a block meets only the keys that its sequences can reach.

    Args:
      q_BSHK: queries.
      k_BSGK: keys.
      v_BSGK: values.
      query_block: most queries of a block.
      segments_BS: which sequence of its row a token belongs to, at least 0; None: one a row.
      span: longest sequence; None: the row.

    Returns:
      [B, S, H, K] in the dtype of the values.
    """
    batch, length, heads, head_dim = q_BSHK.shape
    span = min(span or length, length)
    block_size = min(query_block, span)
    if length == block_size:
        columns_S = jnp.arange(length)
        mask_BSS = columns_S[None, None, :] <= columns_S[None, :, None]
        if segments_BS is not None:
            mask_BSS = mask_BSS & (segments_BS[:, :, None] == segments_BS[:, None, :])
        return _attend(q_BSHK, k_BSGK, v_BSGK, mask_BSS)
    num_blocks = -(-length // block_size)
    behind = num_blocks * block_size - length
    before = 0 if span == length else span - 1
    reach = length if span == length else before + block_size
    columns_S = jnp.arange(-before, num_blocks * block_size)
    if segments_BS is None:
        segments_BS = jnp.zeros((1, length), jnp.int32)
    segments_BS = jnp.pad(segments_BS, ((0, 0), (before, behind)), constant_values=-1)
    k_BSGK, v_BSGK = (
        jnp.pad(x, ((0, 0), (before, behind), (0, 0), (0, 0))) for x in (k_BSGK, v_BSGK)
    )
    padded = jnp.pad(q_BSHK, ((0, 0), (0, behind), (0, 0), (0, 0)))
    blocks = padded.reshape(batch, num_blocks, block_size, heads, head_dim).swapaxes(0, 1)

    @jax.checkpoint
    def block(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_BQHK, first = args  # column of the first query
        start = first if before else 0  # of the keys, in the padded row
        k, v, segments, columns = (
            lax.dynamic_slice_in_dim(x, start, reach, axis)
            for x, axis in ((k_BSGK, 1), (v_BSGK, 1), (segments_BS, 1), (columns_S, 0))
        )
        own = lax.dynamic_slice_in_dim(segments_BS, first + before, block_size, 1)
        rows_Q = first + jnp.arange(block_size)
        mask_BQS = columns[None, None, :] <= rows_Q[None, :, None]
        mask_BQS = mask_BQS & (own[:, :, None] == segments[:, None, :])
        return _attend(q_BQHK, k, v, mask_BQS)

    out = lax.map(block, (blocks, jnp.arange(num_blocks) * block_size))
    out = out.swapaxes(0, 1).reshape(batch, num_blocks * block_size, heads, head_dim)
    return out[:, :length]


def cached_attention(
    q_BHK: jax.Array, k_BGSK: jax.Array, v_BGSK: jax.Array, positions_B: jax.Array
) -> jax.Array:
    """Attention of one new token a row, at `positions_B`, over a cache that holds it already.

    Returns:
      [B, 1, H, K].
    """
    batch, heads, head_dim = q_BHK.shape
    groups, length = k_BGSK.shape[1:3]
    q_BGRK = q_BHK.reshape(batch, groups, heads // groups, head_dim)
    scores = jnp.einsum("bgrk,bgsk->bgrs", q_BGRK, k_BGSK, preferred_element_type=jnp.float32)
    mask_BS = jnp.arange(length)[None, :] <= positions_B[:, None]
    scores = jnp.where(mask_BS[:, None, None, :], scores * head_dim**-0.5, MASKED_SCORE)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BGSK.dtype)
    return jnp.einsum("bgrs,bgsk->bgrk", weights, v_BGSK).reshape(batch, 1, heads, head_dim)
