"""What a replica's decode loop starts from, carries along and returns.

Shapes: N rows of a replica, G groups of B slots, P prompt, T response, D embed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nereus_jax.models.kv_cache import Cache


class Rows(NamedTuple):
    """What is to be generated, the same on all devices of a replica.

    Attributes:
      tokens: [N, P] right-padded prompts.
      lengths: [N] of the prompts; 0 marks a row that only fills up the batch.
      samples: [N] what names the draws, with the seed.
      limits: [N] most tokens of each response, 1 to T.
    """

    tokens: jax.Array
    lengths: jax.Array
    samples: jax.Array
    limits: jax.Array


class Responses(NamedTuple):
    """tokens [N, T], logprobs [N, T], lengths [N], and whether a stop token ended it [N]."""

    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array
    finished: jax.Array

    @classmethod
    def none(cls, num_rows: int, max_tokens: int, pad_id: int) -> "Responses":
        """No tokens yet."""
        return cls(
            tokens=jnp.full((num_rows, max_tokens), pad_id, jnp.int32),
            logprobs=jnp.zeros((num_rows, max_tokens), jnp.float32),
            lengths=jnp.zeros(num_rows, jnp.int32),
            finished=jnp.zeros(num_rows, bool),
        )

    def cut(self, pad_id: int) -> "Responses":
        """Without what is behind a row's end: a row that made way may have got further before."""
        inside = jnp.arange(self.tokens.shape[1])[None, :] < self.lengths[:, None]
        return self._replace(
            tokens=jnp.where(inside, self.tokens, pad_id),
            logprobs=jnp.where(inside, self.logprobs, 0.0),
        )


class Effort(NamedTuple):
    """Counters of a replica: what its tokens took.

    Attributes:
      prefill_tokens: positions computed for prompts, padding included.
      prompt_tokens: those of them that held a token.
      decode_tokens: positions computed one at a time, in slots with and without a row.
      row_tokens: those of them that went on with a row.
      restarts: times that a row made way for others and began anew.
    """

    prefill_tokens: jax.Array
    prompt_tokens: jax.Array
    decode_tokens: jax.Array
    row_tokens: jax.Array
    restarts: jax.Array


class Slots(NamedTuple):
    """What sits in the slots [G, B].

    Attributes:
      row: index of the row, N where there is none.
      position: cache position of the newest token.
      count: tokens generated so far.
      active: whether the row goes on.
      entering: [G, B, D] embedding of the newest token.
    """

    row: jax.Array
    position: jax.Array
    count: jax.Array
    active: jax.Array
    entering: jax.Array

    @classmethod
    def free(
        cls, groups: int, num_slots: int, num_rows: int, embed_dim: int, dtype: jnp.dtype
    ) -> "Slots":
        """Slots without rows."""
        shape = (groups, num_slots)
        return cls(
            row=jnp.full(shape, num_rows, jnp.int32),
            position=jnp.zeros(shape, jnp.int32),
            count=jnp.zeros(shape, jnp.int32),
            active=jnp.zeros(shape, bool),
            entering=jnp.zeros((*shape, embed_dim), dtype),
        )


class DecodeState(NamedTuple):
    """Carry of the decode loop.

    Attributes:
      tick: number of ticks done.
      waiting: [N] rows that still have to be given a slot.
      moving: [B, 1, D] activations handed on by the rank before.
      cache: keys and values.
      slots: what sits where.
      out: the responses so far.
      effort: what they took.
    """

    tick: jax.Array
    waiting: jax.Array
    moving: jax.Array
    cache: Cache
    slots: Slots
    out: Responses
    effort: Effort
