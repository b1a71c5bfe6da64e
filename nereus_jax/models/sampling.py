"""Sampling one token a row from hidden states, with the vocabulary split over devices.

A draw is the argmax of perturbed logits (the Gumbel-max trick). The noise of vocabulary entry v is
a function of (seed, sample index, response position, v) alone, evaluated with the threefry counter
hash at exactly the entries that a device holds: no layout, batch size or batch order changes it.

Shapes: B rows, D embed, V vocabulary rows held here, K kept entries.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32

from nereus_jax.models.mesh_axes import MeshAxes
from nereus_kernels.linear_logprob.reference import MASKED_LOGIT, log_partition, masked_logits

BITS_BELOW_ONE = 23


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: only the k likeliest tokens may be drawn; 0 for all.
      top_p: only the smallest set of likeliest tokens whose probability reaches top_p; 1 for all.
      stop_ids: tokens that end a response (and belong to it).
      pad_id: fills rows behind their end.
      max_tokens: longest response.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    pad_id: int = 0
    max_tokens: int = 128


def row_keys(seed: jax.Array, sample_indices_B: jax.Array, positions_B: jax.Array) -> jax.Array:
    """Threefry keys [B, 2] of (seed, sample index, response position)."""

    def one(sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), sample_index)
        return jax.random.key_data(jax.random.fold_in(key, position))

    return jax.vmap(one)(sample_indices_B, positions_B)


def gumbel_noise(keys_B2: jax.Array, vocab_ids_V: jax.Array) -> jax.Array:
    """Standard Gumbel noise [B, V] for the given vocabulary entries, float32."""
    counters_V = vocab_ids_V.astype(jnp.uint32)
    pairs = jnp.concatenate([jnp.zeros_like(counters_V), counters_V])

    def one(key: jax.Array) -> jax.Array:
        high, low = jnp.split(threefry_2x32(key, pairs), 2)
        return high ^ low

    bits_BV = jax.vmap(one)(keys_B2)
    # The midpoints of 2^23 equal cells: never 0 nor 1, so both logarithms are finite.
    uniform = ((bits_BV >> (32 - BITS_BELOW_ONE)).astype(jnp.float32) + 0.5) / 2**BITS_BELOW_ONE
    return -jnp.log(-jnp.log(uniform))


def _over_vocab(x_BV: jax.Array, axes: MeshAxes) -> jax.Array:
    return lax.all_gather(x_BV, axes.vocab, axis=1, tiled=True) if axes.vocab else x_BV


def truncation_threshold(logits_BV: jax.Array, config: SamplingConfig, axes: MeshAxes) -> jax.Array:
    """The smallest logit [B] that top-k and then top-p leave in (ties are kept)."""
    threshold_B = jnp.full(logits_BV.shape[:1], MASKED_LOGIT, jnp.float32)
    if config.top_k:
        best = lax.top_k(logits_BV, min(config.top_k, logits_BV.shape[1]))[0]
        best = _over_vocab(best, axes)
        threshold_B = lax.top_k(best, min(config.top_k, best.shape[1]))[0][:, -1]
    if config.top_p < 1.0:
        whole = _over_vocab(logits_BV, axes)
        kept = jnp.where(whole >= threshold_B[:, None], whole, MASKED_LOGIT)
        descending = -jnp.sort(-kept, axis=-1)
        probs = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        in_nucleus = (before < config.top_p) & (descending > MASKED_LOGIT / 2)
        lowest_B = jnp.min(jnp.where(in_nucleus, descending, jnp.inf), axis=-1)
        threshold_B = jnp.maximum(threshold_B, lowest_B)
    return threshold_B


def sample_tokens(
    hidden_BD: jax.Array,
    head_VD: jax.Array,
    keys_B2: jax.Array,
    *,
    config: SamplingConfig,
    vocab_size: int,
    vocab_offset: jax.Array | int,
    axes: MeshAxes,
) -> tuple[jax.Array, jax.Array]:
    """Draws a token for each row.

    Args:
      hidden_BD: normalized hidden state of the row's last token.
      head_VD: vocabulary rows held here.
      keys_B2: from `row_keys`.
      config: how to draw.
      vocab_size: real tokens in the whole vocabulary.
      vocab_offset: token id of row 0 of `head_VD`.
      axes: mesh axes in use.

    Returns:
      (tokens [B] int32, logprobs [B] float32): the log-probability is that of
      softmax(logits / temperature) over the whole vocabulary, before top-k and top-p, as SCORE
      computes it; at temperature 0 that of softmax(logits).
    """
    greedy = config.temperature == 0.0
    logits_BV = masked_logits(
        hidden_BD,
        head_VD,
        vocab_size=vocab_size,
        vocab_offset=vocab_offset,
        temperature=1.0 if greedy else config.temperature,
    )
    ids_V = vocab_offset + jnp.arange(head_VD.shape[0], dtype=jnp.int32)
    perturbed_BV = logits_BV
    if not greedy:
        threshold_B = truncation_threshold(logits_BV, config, axes)
        kept_BV = jnp.where(logits_BV >= threshold_B[:, None], logits_BV, MASKED_LOGIT)
        noise_BV = gumbel_noise(keys_B2, ids_V)
        perturbed_BV = jnp.where(kept_BV > MASKED_LOGIT / 2, kept_BV + noise_BV, MASKED_LOGIT)
    best_B = jnp.max(perturbed_BV, axis=-1)
    best_ids_B = ids_V[jnp.argmax(perturbed_BV, axis=-1)]
    picked_B = jnp.take_along_axis(logits_BV, (best_ids_B - vocab_offset)[:, None], axis=1)[:, 0]
    if axes.vocab:
        winner_B = lax.pmax(best_B, axes.vocab)
        candidates_B = jnp.where(best_B == winner_B, best_ids_B, jnp.iinfo(jnp.int32).max)
        token_B = lax.pmin(candidates_B, axes.vocab)
        picked_B = lax.psum(jnp.where(best_ids_B == token_B, picked_B, 0.0), axes.vocab)
        best_ids_B = token_B
    return best_ids_B, picked_B - log_partition(logits_BV, axes.vocab)
