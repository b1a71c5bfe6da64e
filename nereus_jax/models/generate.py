"""Prefill and decode of a batch with a KV cache, under data, pipeline and tensor parallelism.

The rows of a replica are split into pp groups. In prefill the prompts pass through the pipeline in
microbatches. In decode, tick t has rank r work on group (t - r) mod pp: the group that leaves the
last rank in tick t has its next token drawn and enters rank 0 in tick t + 1, so that after the
first pp - 1 ticks no rank idles. With pp = 1 this is a plain decode loop.

Runs inside a manual `shard_map` (without the check of replication, as some loop carries agree
between devices in ways that it cannot prove).

Shapes: N rows of a replica = G groups of B rows = M microbatches of b rows in prefill, P prompt, T
response, S = P + T cache, L layers held here, H query heads and C key/value heads held here, K head
dim, D embed.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nereus_jax.models.attention import cached_attention
from nereus_jax.models.decoder import Decoder
from nereus_jax.models.mesh_axes import axis_index, axis_size
from nereus_jax.models.pipeline import from_last_rank
from nereus_jax.models.sampling import SamplingConfig, row_keys, sample_tokens


class KVCache(NamedTuple):
    """Keys and values [L, G, B, S, C, K] of the layers and heads held here."""

    k: jax.Array
    v: jax.Array


class DecodeState(NamedTuple):
    """Carry of the decode loop.

    Attributes:
      tick: number of ticks done.
      moving: [B, 1, D] activations handed on by the rank before.
      entering: [G, B, D] embedding of each group's newest token.
      cache: the KV cache.
      tokens: [G, B, T] responses so far.
      logprobs: [G, B, T] their log-probabilities.
      lengths: [G, B] response lengths so far.
      done: [G, B] whether a stop token was drawn.
    """

    tick: jax.Array
    moving: jax.Array
    entering: jax.Array
    cache: KVCache
    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array
    done: jax.Array


@dataclasses.dataclass(frozen=True)
class Generator:
    """The generation program of one device.

    Attributes:
      decoder: the shards that the device holds.
      sampling: how tokens are drawn.
      prefill_rows: most prompts that are in the layers at a time.
    """

    decoder: Decoder
    sampling: SamplingConfig
    prefill_rows: int

    def __call__(
        self,
        tokens_NP: jax.Array,
        prompt_lengths_N: jax.Array,
        sample_indices_N: jax.Array,
        seed: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Generates responses for the rows of this replica.

        Args:
          tokens_NP: right-padded prompts; N is a multiple of pp.
          prompt_lengths_N: their lengths; 0 marks a row that only fills up the batch.
          sample_indices_N: global sample counters: with `seed` they name the draws.
          seed: uint32 scalar.

        Returns:
          (tokens [N, T], logprobs [N, T], lengths [N], finished [N] by a stop token).
        """
        groups = axis_size(self.decoder.axes.pp)
        num_rows, width = tokens_NP.shape
        tokens_GBP = tokens_NP.reshape(groups, num_rows // groups, width)
        lengths_GB = prompt_lengths_N.reshape(groups, -1)
        samples_GB = sample_indices_N.reshape(groups, -1)
        cache, hidden_GBD = self._prefill(tokens_GBP, lengths_GB)
        state = self._first_tokens(cache, hidden_GBD, lengths_GB, samples_GB, seed)
        last_tick = (self.sampling.max_tokens - 1) * groups + groups - 1

        def unfinished(state: DecodeState) -> jax.Array:
            waiting = jnp.any(~state.done)
            if groups > 1:
                # ppermute joins the replicas of all dp ranks, so that they must stop together.
                waiting = lax.pmax(waiting.astype(jnp.int32), self.decoder.axes.dp) > 0
            return (state.tick < last_tick) & waiting

        def step(state: DecodeState) -> DecodeState:
            return self._tick(state, lengths_GB, samples_GB, seed)

        state = lax.while_loop(unfinished, step, state)
        flat = (num_rows, self.sampling.max_tokens)
        return (
            state.tokens.reshape(flat),
            state.logprobs.reshape(flat),
            state.lengths.reshape(num_rows),
            (state.done & (lengths_GB > 0)).reshape(num_rows),
        )

    def _prefill(self, tokens_GBP: jax.Array, lengths_GB: jax.Array) -> tuple[KVCache, jax.Array]:
        """Fills the cache with the prompts; returns it and the last hidden states [G, B, D].

        Microbatches of at most `prefill_rows` rows pass through the pipeline, so that activations
        are those of one microbatch.
        """
        decoder, axes = self.decoder, self.decoder.axes
        groups, rows, width = tokens_GBP.shape
        micro = largest_divisor(rows, self.prefill_rows)
        tokens_MbP = tokens_GBP.reshape(-1, micro, width)
        lengths_Mb = lengths_GB.reshape(-1, micro)
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
            entering = decoder.embed_tokens(_pick(tokens_MbP, jnp.minimum(t, num_micro - 1)))
            out, (k, v) = lax.scan(layer, jnp.where(rank == 0, entering, received), stacked)
            index = t - rank
            cache = KVCache(_store(cache.k, k, index), _store(cache.v, v, index))
            last_b = jnp.maximum(_pick(lengths_Mb, jnp.clip(index, 0, num_micro - 1)) - 1, 0)
            hidden_bD = jnp.take_along_axis(out, last_b[:, None, None], axis=1)[:, 0]
            moved = lax.ppermute(out, axes.pp, ring) if groups > 1 else out
            return (moved, cache), hidden_bD

        embed_dim, dtype = decoder.config.embed_dim, decoder.layers.k.dtype
        start = jnp.zeros((micro, width, embed_dim), dtype)
        carry = (start, self._empty_cache(groups * rows, width))
        (_, cache), hidden = lax.scan(tick, carry, jnp.arange(num_micro + groups - 1))
        hidden_GBD = hidden[groups - 1 :].reshape(groups, rows, embed_dim)
        grouped = (cache.k.shape[0], groups, rows, *cache.k.shape[2:])
        cache = KVCache(cache.k.reshape(grouped), cache.v.reshape(grouped))
        return cache, from_last_rank(hidden_GBD, axes)

    def _empty_cache(self, num_rows: int, prompt_width: int) -> KVCache:
        layers, _, kv_width = self.decoder.layers.k.shape
        head_dim = self.decoder.config.head_dim
        length = prompt_width + self.sampling.max_tokens
        shape = (layers, num_rows, length, kv_width // head_dim, head_dim)
        empty = jnp.zeros(shape, self.decoder.layers.k.dtype)
        return KVCache(empty, empty)

    def _draw(
        self,
        hidden_ND: jax.Array,
        sample_indices_N: jax.Array,
        positions_N: jax.Array,
        seed: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        decoder = self.decoder
        return sample_tokens(
            decoder.normalize(hidden_ND[:, None, :])[:, 0],
            decoder.head_VD,
            row_keys(seed, sample_indices_N, positions_N),
            config=self.sampling,
            vocab_size=decoder.config.vocab_size,
            vocab_offset=decoder.vocab_offset,
            axes=decoder.axes,
        )

    def _is_stop(self, tokens: jax.Array) -> jax.Array:
        stop = jnp.zeros(tokens.shape, bool)
        for token_id in self.sampling.stop_ids:
            stop |= tokens == token_id
        return stop

    def _first_tokens(
        self,
        cache: KVCache,
        hidden_GBD: jax.Array,
        lengths_GB: jax.Array,
        samples_GB: jax.Array,
        seed: jax.Array,
    ) -> DecodeState:
        """Draws every row's first token, and the state before the first decode tick."""
        groups, rows, embed_dim = hidden_GBD.shape
        tokens_N, logprobs_N = self._draw(
            hidden_GBD.reshape(groups * rows, embed_dim),
            samples_GB.reshape(-1),
            jnp.zeros(groups * rows, jnp.int32),
            seed,
        )
        real_GB = lengths_GB > 0
        first_GB = jnp.where(real_GB, tokens_N.reshape(groups, rows), self.sampling.pad_id)
        shape = (groups, rows, self.sampling.max_tokens)
        tokens = jnp.full(shape, self.sampling.pad_id, jnp.int32).at[:, :, 0].set(first_GB)
        logprobs_GB = jnp.where(real_GB, logprobs_N.reshape(groups, rows), 0.0)
        entering = self.decoder.embed_tokens(first_GB)
        return DecodeState(
            tick=jnp.int32(0),
            moving=jnp.zeros((rows, 1, embed_dim), entering.dtype),
            entering=entering,
            cache=cache,
            tokens=tokens,
            logprobs=jnp.zeros(shape, jnp.float32).at[:, :, 0].set(logprobs_GB),
            lengths=real_GB.astype(jnp.int32),
            done=~real_GB | self._is_stop(first_GB),
        )

    def _tick(
        self, state: DecodeState, lengths_GB: jax.Array, samples_GB: jax.Array, seed: jax.Array
    ) -> DecodeState:
        axes = self.decoder.axes
        groups = state.tokens.shape[0]
        since = state.tick - axis_index(axes.pp)
        group = since % groups
        entering = lax.dynamic_index_in_dim(state.entering, group, keepdims=False)
        x = jnp.where(axis_index(axes.pp) == 0, entering[:, None, :], state.moving)
        positions_B = _pick(lengths_GB, group) + since // groups
        # A rank that the first group has not reached yet writes nowhere.
        positions_B = jnp.where(since >= 0, positions_B, state.cache.k.shape[3])
        x, cache = self._layers(x, state.cache, group, positions_B)
        ring = [(r, (r + 1) % groups) for r in range(groups)]
        state = state._replace(
            tick=state.tick + 1,
            moving=lax.ppermute(x, axes.pp, ring) if groups > 1 else x,
            cache=cache,
        )
        hidden_BD = from_last_rank(x[:, 0], axes)
        return self._append(state, hidden_BD, state.tick - groups, samples_GB, seed)

    def _layers(
        self, x_B1D: jax.Array, cache: KVCache, group: jax.Array, positions_B: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """One token a row of one group through the layers held here."""
        graphdef, stacked = nnx.split(self.decoder.layers)
        cos, sin = self.decoder.rope(positions_B[:, None])
        rows_B = jnp.arange(positions_B.shape[0])

        def body(
            carry: tuple[jax.Array, KVCache], layer: tuple[nnx.State, jax.Array]
        ) -> tuple[tuple[jax.Array, KVCache], None]:
            x, cache = carry
            params, index = layer
            block = nnx.merge(graphdef, params)
            q, k, v = block.qkv(x, cos, sin)
            cache = KVCache(
                cache.k.at[index, group, rows_B, positions_B].set(k[:, 0], mode="drop"),
                cache.v.at[index, group, rows_B, positions_B].set(v[:, 0], mode="drop"),
            )
            keys, values = block.match_heads(q, cache.k[index, group], cache.v[index, group])
            attended = cached_attention(q[:, 0], keys, values, positions_B)
            return (block.output(x, attended), cache), None

        num_layers = cache.k.shape[0]
        (x, cache), _ = lax.scan(body, (x_B1D, cache), (stacked, jnp.arange(num_layers)))
        return x, cache

    def _append(
        self,
        state: DecodeState,
        hidden_BD: jax.Array,
        since: jax.Array,
        samples_GB: jax.Array,
        seed: jax.Array,
    ) -> DecodeState:
        """Draws the next token of the group that left the last rank, `since` ticks after its
        first."""
        groups, _, max_tokens = state.tokens.shape
        group = since % groups
        index = since // groups + 1
        was_done_B = _pick(state.done, group) | (since < 0) | (index >= max_tokens)
        index_B = jnp.full(was_done_B.shape, index, jnp.int32)
        tokens_B, logprobs_B = self._draw(hidden_BD, _pick(samples_GB, group), index_B, seed)
        # Rows that are done write nowhere.
        column_B = jnp.where(was_done_B, max_tokens, index_B)
        rows_B = jnp.arange(tokens_B.shape[0])
        embedded_BD = self.decoder.embed_tokens(tokens_B[:, None])[:, 0]
        entered_BD = jnp.where(was_done_B[:, None], _pick(state.entering, group), embedded_BD)
        done_B = _pick(state.done, group) | (~was_done_B & self._is_stop(tokens_B))
        return state._replace(
            entering=state.entering.at[group].set(entered_BD),
            tokens=state.tokens.at[group, rows_B, column_B].set(tokens_B, mode="drop"),
            logprobs=state.logprobs.at[group, rows_B, column_B].set(logprobs_B, mode="drop"),
            lengths=state.lengths.at[group].add((~was_done_B).astype(jnp.int32)),
            done=state.done.at[group].set(done_B),
        )


def _pick(x_GB: jax.Array, group: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x_GB, group, keepdims=False)


def _store(cache: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    """Writes keys or values [L, b, P, C, K] of microbatch `index` into [L, N, S, C, K].

    An index outside the N / b microbatches writes nowhere.
    """
    micro = new.shape[1]
    num_micro = cache.shape[1] // micro
    place = (0, jnp.clip(index, 0, num_micro - 1) * micro, 0, 0, 0)
    old = lax.dynamic_slice(cache, place, new.shape)
    kept = jnp.where((index >= 0) & (index < num_micro), new, old)
    return lax.dynamic_update_slice(cache, kept, place)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(d for d in range(1, max(min(number, limit), 1) + 1) if number % d == 0)
