"""What SCORE and TRAIN compute: outputs at wanted places of packed rows, inside `shard_map`.

Shapes: M microbatches of one pipeline flush, B rows of one, W width of a row, K = M * B * W places
of a flush, D embed.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nereus_jax.models.decoder import Decoder
from nereus_jax.models.pipeline import from_last_rank, run_pipeline
from nereus_kernels.linear_logprob.reference import linear_logprob


class PackedFlush(NamedTuple):
    """The rows of a pipeline flush, each with one sequence or several, and what is wanted of them.

    Attributes:
      tokens: [M, B, W].
      positions: [M, B, W], of a token in its sequence.
      segments: [M, B, W], which sequence of its row a token belongs to.
      index: [K] places in the flush, row by row, whose hidden states are wanted; those first.
      count: how many are wanted.
      active: microbatches that hold anything, the first ones.
    """

    tokens: jax.Array
    positions: jax.Array
    segments: jax.Array
    index: jax.Array
    count: jax.Array
    active: jax.Array


Layers = Sequence[Mapping[str, jax.Array]]


def _hidden(
    decoder: Decoder, flush: PackedFlush, span: int, remat: bool, unroll: int, layers: Layers | None
) -> jax.Array:
    """Normalized hidden states [K, D] at the wanted places; right on the last pp rank only."""
    microbatches, rows, width = flush.tokens.shape
    x_BWD = decoder.embed_tokens(flush.tokens.reshape(microbatches * rows, width))
    x_MBWD = x_BWD.reshape(microbatches, rows, width, -1)

    def run(x_BWD: jax.Array, index: jax.Array) -> jax.Array:
        positions, segments = flush.positions[index], flush.segments[index]
        return decoder.run_layers(
            x_BWD, positions, segments, span=span, remat=remat, unroll=unroll, layers=layers
        )

    out_MBWD = run_pipeline(run, x_MBWD, flush.active, decoder.axes)
    out_KD = out_MBWD.reshape(microbatches * rows * width, -1)[flush.index]
    return decoder.normalize(out_KD[None])[0]


def wanted_logprobs(
    decoder: Decoder,
    flush: PackedFlush,
    *,
    span: int,
    temperature: float,
    token_chunk: int,
    remat: bool = False,
    unroll: int = 1,
    layers: Layers | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of the token after every wanted place, and entropy of its distribution.

    Only wanted places pass through the vocabulary projection, `token_chunk` at a time.

    Args:
      decoder: the shards that the device holds.
      flush: the rows; a wanted place has its sequence's next token behind it.
      span: longest sequence.
      temperature: divides the logits.
      token_chunk: tokens whose logits exist at a time.
      remat: recompute the activations of a layer in the backward pass.
      unroll, layers: see `Decoder.run_layers`.

    Returns:
      (logprobs [K], entropy [K]), float32, the same on all pp and tp ranks; arbitrary finite
      numbers behind the count.
    """
    hidden_KD = from_last_rank(_hidden(decoder, flush, span, remat, unroll, layers), decoder.axes)
    tokens_K = flush.tokens.reshape(-1)
    targets_K = tokens_K[jnp.minimum(flush.index + 1, tokens_K.shape[0] - 1)]
    return linear_logprob(
        hidden_KD,
        decoder.head_VD,
        targets_K,
        vocab_size=decoder.config.vocab_size,
        vocab_offset=decoder.vocab_offset,
        temperature=temperature,
        token_chunk=token_chunk,
        num_wanted=flush.count,
        axis_names=decoder.axes.vocab,
    )


def wanted_scalars(
    decoder: Decoder,
    flush: PackedFlush,
    *,
    span: int,
    remat: bool = False,
    unroll: int = 1,
    layers: Layers | None = None,
) -> jax.Array:
    """The scalar head's output [K] at every wanted place: a critic's values before response tokens,
    a reward model's scores at last tokens."""
    hidden_KD = _hidden(decoder, flush, span, remat, unroll, layers)
    return from_last_rank(decoder.scalars(hidden_KD), decoder.axes)
