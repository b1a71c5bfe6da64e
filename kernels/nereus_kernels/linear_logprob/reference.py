"""Log-probability and entropy of given tokens from hidden states, in chunks of tokens.

The reference: plain jax, and the contract that faster implementations are tested against. Only
`token_chunk` rows of logits exist at a time, in the forward and in the backward pass (each chunk is
recomputed there), so memory does not grow with tokens x vocabulary.

Shapes: N tokens (of one of C chunks where C leads), D embed, V rows of the vocabulary held here.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

MASKED_LOGIT = -1e30


def masked_logits(
    hidden_ND: jax.Array,
    weight_VD: jax.Array,
    *,
    vocab_size: int,
    vocab_offset: jax.Array | int = 0,
    temperature: float = 1.0,
) -> jax.Array:
    """`hidden @ weight.T / temperature` in float32, rows at or above `vocab_size` set to -1e30.

    Args:
      hidden_ND: hidden states [N, D].
      weight_VD: the rows of the vocabulary held here [V, D], padding rows included.
      vocab_size: number of real tokens in the whole vocabulary.
      vocab_offset: token id of row 0 of `weight_VD`.
      temperature: positive divisor of the logits.

    Returns:
      logits [N, V], float32.
    """
    logits_NV = lax.dot_general(
        hidden_ND, weight_VD, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    ids_V = vocab_offset + jnp.arange(weight_VD.shape[0], dtype=jnp.int32)
    valid_NV = jnp.broadcast_to((ids_V < vocab_size)[None, :], logits_NV.shape)
    return jnp.where(valid_NV, logits_NV / temperature, MASKED_LOGIT)


def log_partition(logits_NV: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    """log(sum(exp(logits))) over the whole vocabulary, [N]; `axis_names` hold its other parts."""
    max_N = lax.stop_gradient(jnp.max(logits_NV, axis=-1))
    if axis_names:
        max_N = lax.pmax(max_N, axis_names)
    sum_N = jnp.sum(jnp.exp(logits_NV - max_N[:, None]), axis=-1)
    if axis_names:
        sum_N = lax.psum(sum_N, axis_names)
    return max_N + jnp.log(sum_N)


def _chunk_logprob(
    hidden_ND: jax.Array,
    targets_N: jax.Array,
    weight_VD: jax.Array,
    vocab_offset: jax.Array | int,
    *,
    vocab_size: int,
    temperature: float,
    axis_names: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    logits_NV = masked_logits(
        hidden_ND,
        weight_VD,
        vocab_size=vocab_size,
        vocab_offset=vocab_offset,
        temperature=temperature,
    )
    log_z_N = log_partition(logits_NV, axis_names)
    rows_N = targets_N - vocab_offset
    here_N = (rows_N >= 0) & (rows_N < weight_VD.shape[0])
    clipped_N = jnp.clip(rows_N, 0, weight_VD.shape[0] - 1)
    picked_N = jnp.take_along_axis(logits_NV, clipped_N[:, None], axis=-1)[:, 0]
    target_N = jnp.where(here_N, picked_N, 0.0)
    probs_NV = jnp.exp(logits_NV - log_z_N[:, None])
    # Not log_z - sum(p l): two numbers of the size of a logit, whose difference would keep the
    # rounding of sum(p) times that size.
    surprisal_NV = jnp.where(probs_NV > 0, log_z_N[:, None] - logits_NV, 0.0)
    entropy_N = jnp.sum(probs_NV * surprisal_NV, axis=-1)
    if axis_names:
        target_N, entropy_N = lax.psum((target_N, entropy_N), axis_names)
    return target_N - log_z_N, entropy_N


def linear_logprob(
    hidden_ND: jax.Array,
    weight_VD: jax.Array,
    targets_N: jax.Array,
    *,
    vocab_size: int,
    vocab_offset: jax.Array | int = 0,
    temperature: float = 1.0,
    token_chunk: int = 1024,
    num_wanted: jax.Array | None = None,
    axis_names: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of `targets` and entropy of the distribution that they are drawn from.

    With l = hidden @ weight.T / temperature:
    logprob[n] = l[n, y_n] - log sum_v exp l[n, v];  entropy[n] = sum_v p[n, v] (log sum_u
    exp l[n, u] - l[n, v]).

    Differentiable in `hidden_ND` and `weight_VD`. Inside `shard_map`, `axis_names` are the mesh
    axes that the vocabulary is split over; the results are then the same on all of them.

    Args:
      hidden_ND: hidden states [N, D], any float dtype; products accumulate in float32.
      weight_VD: the vocabulary rows held here [V, D].
      targets_N: token ids [N] in the whole vocabulary; an id outside it gives a meaningless number,
        not an error.
      vocab_size: number of real tokens; rows of the weight above it are padding.
      vocab_offset: token id of row 0 of `weight_VD`.
      temperature: positive divisor of the logits.
      token_chunk: rows of logits that exist at a time.
      num_wanted: how many tokens from the first one on are wanted, the same on all of `axis_names`;
        chunks behind them are not computed, and give 0. None: all.
      axis_names: mesh axes over which the vocabulary is split.

    Returns:
      (logprobs [N], entropy [N]), float32, entropy in nats.
    """
    num_tokens, embed_dim = hidden_ND.shape
    chunk = min(token_chunk, num_tokens)
    num_chunks = -(-num_tokens // chunk)
    compute = functools.partial(
        _chunk_logprob, vocab_size=vocab_size, temperature=temperature, axis_names=axis_names
    )
    if num_chunks == 1:
        return jax.checkpoint(compute)(hidden_ND, targets_N, weight_VD, vocab_offset)
    padding = num_chunks * chunk - num_tokens
    hidden_CND = jnp.pad(hidden_ND, ((0, padding), (0, 0))).reshape(num_chunks, chunk, embed_dim)
    targets_CN = jnp.pad(targets_N, (0, padding)).reshape(num_chunks, chunk)
    # Cast down in every chunk, so that the weight's gradient is summed over the chunks in float32:
    # a sum in bfloat16 forgets the smaller terms.
    weight32_VD = weight_VD.astype(jnp.float32)

    @jax.checkpoint
    def one_chunk(hidden_ND: jax.Array, targets_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        return compute(hidden_ND, targets_N, weight32_VD.astype(weight_VD.dtype), vocab_offset)

    def no_chunk(hidden_ND: jax.Array, targets_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        zeros_N = 0.0 * hidden_ND[:, 0].astype(jnp.float32)
        return zeros_N, zeros_N

    def wanted_chunk(
        args: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        start, *chunk = args
        if num_wanted is None:
            return one_chunk(*chunk)
        return lax.cond(start < num_wanted, one_chunk, no_chunk, *chunk)

    starts_C = jnp.arange(num_chunks) * chunk
    logprobs_CN, entropy_CN = lax.map(wanted_chunk, (starts_C, hidden_CND, targets_CN))
    return logprobs_CN.reshape(-1)[:num_tokens], entropy_CN.reshape(-1)[:num_tokens]
