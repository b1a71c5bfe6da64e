"""What SCORE and TRAIN compute: response-aligned outputs of a batch of whole rows, inside
`shard_map`.

Shapes: M microbatches of one pipeline flush, B rows of one, N = M * B, S sequence, T response,
D embed. Rows are right padded: prompt, response, padding.
"""

import jax
import jax.numpy as jnp

from nereus_jax.models.decoder import Decoder
from nereus_jax.models.pipeline import from_last_rank, run_pipeline
from nereus_kernels.linear_logprob.reference import linear_logprob


def _hidden(
    decoder: Decoder, tokens_MBS: jax.Array, columns_NT: jax.Array, remat: bool
) -> jax.Array:
    """Normalized hidden states [N, T, D] at the given columns; right on the last pp rank only."""
    microbatches, rows, length = tokens_MBS.shape
    x_BSD = decoder.embed_tokens(tokens_MBS.reshape(microbatches * rows, length))
    x_MBSD = x_BSD.reshape(microbatches, rows, length, -1)
    out_MBSD = run_pipeline(lambda x: decoder.run_layers(x, remat=remat), x_MBSD, decoder.axes)
    out_NSD = out_MBSD.reshape(microbatches * rows, length, -1)
    picked_NTD = jnp.take_along_axis(out_NSD, columns_NT[:, :, None], axis=1)
    return decoder.normalize(picked_NTD)


def _response_columns(prompt_lengths_N: jax.Array, width: int, length: int) -> jax.Array:
    """Columns [N, T] of the response tokens, clipped to the row."""
    columns = prompt_lengths_N[:, None] + jnp.arange(width)[None, :]
    return jnp.clip(columns, 0, length - 1)


def response_logprobs(
    decoder: Decoder,
    tokens_MBS: jax.Array,
    prompt_lengths_MB: jax.Array,
    *,
    width: int,
    temperature: float,
    token_chunk: int,
    remat: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every response token and entropy of its distribution.

    Only the response's positions pass through the vocabulary projection, `token_chunk` at a time.

    Returns:
      (logprobs [N, T], entropy [N, T]), float32, the same on all pp and tp ranks; arbitrary finite
      numbers behind the end of a response.
    """
    prompt_lengths_N = prompt_lengths_MB.reshape(-1)
    length = tokens_MBS.shape[2]
    columns_NT = _response_columns(prompt_lengths_N, width, length)
    before_NT = jnp.maximum(columns_NT - 1, 0)
    hidden_NTD = from_last_rank(_hidden(decoder, tokens_MBS, before_NT, remat), decoder.axes)
    targets_NT = jnp.take_along_axis(tokens_MBS.reshape(-1, length), columns_NT, axis=1)
    logprobs, entropy = linear_logprob(
        hidden_NTD.reshape(-1, hidden_NTD.shape[-1]),
        decoder.head_VD,
        targets_NT.reshape(-1),
        vocab_size=decoder.config.vocab_size,
        vocab_offset=decoder.vocab_offset,
        temperature=temperature,
        token_chunk=token_chunk,
        axis_names=decoder.axes.vocab,
    )
    return logprobs.reshape(columns_NT.shape), entropy.reshape(columns_NT.shape)


def response_values(
    decoder: Decoder,
    tokens_MBS: jax.Array,
    prompt_lengths_MB: jax.Array,
    *,
    width: int,
    remat: bool = False,
) -> jax.Array:
    """The scalar head's output [N, T] before every response token: a critic's values."""
    columns_NT = _response_columns(prompt_lengths_MB.reshape(-1), width, tokens_MBS.shape[2])
    hidden_NTD = _hidden(decoder, tokens_MBS, jnp.maximum(columns_NT - 1, 0), remat)
    return from_last_rank(decoder.scalars(hidden_NTD), decoder.axes)


def final_scores(decoder: Decoder, tokens_MBS: jax.Array, total_lengths_MB: jax.Array) -> jax.Array:
    """The scalar head's output [N] at every row's last token: a reward model's score."""
    columns_N1 = jnp.maximum(total_lengths_MB.reshape(-1, 1) - 1, 0)
    hidden_N1D = _hidden(decoder, tokens_MBS, columns_N1, remat=False)
    return from_last_rank(decoder.scalars(hidden_N1D), decoder.axes)[:, 0]
