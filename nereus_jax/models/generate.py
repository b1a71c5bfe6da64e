"""Decode with a KV cache and continuous batching, under data, pipeline and tensor parallelism.

A replica decodes in slots. The first rows fill them; when a response ends, its slot is free, and
the next row that waits takes it (Yu et al., "Orca", OSDI 2022). Which slot a row gets, and when,
changes no token: draws are named by the row, and no row sees another.

The slots are split into pp groups. Tick t has rank r work on group (t - r) mod pp: the group that
leaves the last rank in tick t has its next tokens drawn and enters rank 0 in tick t + 1, so that
after the first pp - 1 ticks no rank idles. Free slots are filled when their group has left. With
pp = 1 this is a plain decode loop.

Runs inside a manual `shard_map` (without the check of replication, as some loop carries agree
between devices in ways that it cannot prove).

Shapes: N rows of a replica, G groups of B slots, R rows that enter together, P prompt, T response,
S = P + T cache, L layers held here, C key/value heads held here, K head dim, D embed.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nereus_jax.models.attention import cached_attention
from nereus_jax.models.decoder import Decoder
from nereus_jax.models.mesh_axes import axis_index, axis_size
from nereus_jax.models.pipeline import from_last_rank
from nereus_jax.models.prefill import KVCache, pick, prefill
from nereus_jax.models.sampling import SamplingConfig, row_keys, sample_tokens

CACHE_STEPS = 8
"""Attention reads a long cache in eighths, as far as the longest row of the group reaches."""

SHORT_CACHE = 64
"""No step is shorter: it would save less than the choice costs."""


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


class DecodeState(NamedTuple):
    """Carry of the decode loop.

    Attributes:
      tick: number of ticks done.
      head: rows that have been given a slot.
      moving: [B, 1, D] activations handed on by the rank before.
      cache: keys and values [L, G, B, S, C, K].
      slots: what sits where.
      out: the responses so far.
    """

    tick: jax.Array
    head: jax.Array
    moving: jax.Array
    cache: KVCache
    slots: Slots
    out: Responses


@dataclasses.dataclass(frozen=True)
class Generator:
    """The generation program of one device.

    Attributes:
      decoder: the shards that the device holds.
      sampling: how tokens are drawn.
      prefill_rows: most prompts that are in the layers at a time.
      num_slots: rows of a replica that are decoded at a time, a multiple of pp; at most N.
    """

    decoder: Decoder
    sampling: SamplingConfig
    prefill_rows: int
    num_slots: int

    def __call__(self, rows: Rows, seed: jax.Array) -> Responses:
        """Generates the responses of a replica's rows.

        Args:
          rows: N of them, at least as many as slots.
          seed: uint32 scalar.
        """
        state = self._begin(rows, seed)

        def unfinished(state: DecodeState) -> jax.Array:
            return self._agreed(jnp.any(state.slots.active) | (state.head < rows.lengths.shape[0]))

        state = lax.while_loop(unfinished, lambda s: self._tick(s, rows, seed), state)
        return state.out

    @property
    def _groups(self) -> int:
        return axis_size(self.decoder.axes.pp)

    def _agreed(self, flag: jax.Array) -> jax.Array:
        """Whether the flag is set; with a pipeline, on any replica.

        ppermute joins the replicas of all dp ranks, so that they must branch together.
        """
        if self._groups == 1:
            return flag
        return lax.pmax(flag.astype(jnp.int32), self.decoder.axes.dp) > 0

    def _begin(self, rows: Rows, seed: jax.Array) -> DecodeState:
        """The first rows in the slots, with their first tokens drawn."""
        num_rows, width = rows.tokens.shape
        groups, slots, max_tokens = self._groups, self.num_slots, self.sampling.max_tokens
        micro = largest_divisor(slots, self.prefill_rows)
        cache, hidden_nD = prefill(
            self.decoder, rows.tokens[:slots], rows.lengths[:slots], micro, width + max_tokens
        )
        layers, _, *rest = cache.k.shape
        shape = (layers, groups, slots // groups, *rest)
        embed_dim, dtype = hidden_nD.shape[1], self.decoder.layers.k.dtype
        empty = (groups, slots // groups)
        free = Slots(
            row=jnp.full(empty, num_rows, jnp.int32),
            position=jnp.zeros(empty, jnp.int32),
            count=jnp.zeros(empty, jnp.int32),
            active=jnp.zeros(empty, bool),
            entering=jnp.zeros((*empty, embed_dim), dtype),
        )
        state = DecodeState(
            tick=jnp.int32(0),
            head=jnp.int32(slots),
            moving=jnp.zeros((slots // groups, 1, embed_dim), dtype),
            cache=KVCache(cache.k.reshape(shape), cache.v.reshape(shape)),
            slots=free,
            out=Responses(
                tokens=jnp.full((num_rows, max_tokens), self.sampling.pad_id, jnp.int32),
                logprobs=jnp.zeros((num_rows, max_tokens), jnp.float32),
                lengths=jnp.zeros(num_rows, jnp.int32),
                finished=jnp.zeros(num_rows, bool),
            ),
        )
        places = jnp.arange(slots)
        return self._enter(
            state, rows, seed, hidden_nD, places, places // empty[1], places % empty[1]
        )

    def _enter(
        self,
        state: DecodeState,
        rows: Rows,
        seed: jax.Array,
        hidden_RD: jax.Array,
        row_R: jax.Array,
        group_R: jax.Array,
        slot_R: jax.Array,
    ) -> DecodeState:
        """Draws the first tokens of rows whose prompts are in the cache; row N means none."""
        num_rows, slots = rows.lengths.shape[0], state.slots
        lengths_R = jnp.take(rows.lengths, row_R, mode="fill", fill_value=0)
        real_R = lengths_R > 0
        tokens_R, logprobs_R = self._draw(
            hidden_RD,
            jnp.take(rows.samples, row_R, mode="fill", fill_value=0),
            jnp.zeros_like(row_R),
            seed,
        )
        stops_R = self._is_stop(tokens_R)
        goes_on_R = real_R & ~stops_R & (jnp.take(rows.limits, row_R, mode="clip") > 1)
        # What is no row writes nowhere.
        row_R = jnp.where(real_R, row_R, num_rows)
        group_R = jnp.where(real_R, group_R, slots.row.shape[0])
        where = (group_R, slot_R)
        return state._replace(
            slots=Slots(
                row=slots.row.at[where].set(row_R, mode="drop"),
                position=slots.position.at[where].set(lengths_R, mode="drop"),
                count=slots.count.at[where].set(1, mode="drop"),
                active=slots.active.at[where].set(goes_on_R, mode="drop"),
                entering=slots.entering.at[where].set(
                    self.decoder.embed_tokens(tokens_R[:, None])[:, 0], mode="drop"
                ),
            ),
            out=Responses(
                tokens=state.out.tokens.at[row_R, 0].set(tokens_R, mode="drop"),
                logprobs=state.out.logprobs.at[row_R, 0].set(logprobs_R, mode="drop"),
                lengths=state.out.lengths.at[row_R].set(1, mode="drop"),
                finished=state.out.finished.at[row_R].set(stops_R, mode="drop"),
            ),
        )

    def _draw(
        self,
        hidden_nD: jax.Array,
        samples_n: jax.Array,
        positions_n: jax.Array,
        seed: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        decoder = self.decoder
        return sample_tokens(
            decoder.normalize(hidden_nD[:, None, :])[:, 0],
            decoder.head_VD,
            row_keys(seed, samples_n, positions_n),
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

    def _tick(self, state: DecodeState, rows: Rows, seed: jax.Array) -> DecodeState:
        axes, groups = self.decoder.axes, self._groups
        since = state.tick - axis_index(axes.pp)
        group = since % groups
        here = jax.tree.map(lambda x: pick(x, group), state.slots)
        x = jnp.where(axis_index(axes.pp) == 0, here.entering[:, None, :], state.moving)
        # A slot without a row, or that the first group has not reached yet, writes nowhere.
        works_B = here.active & (since >= 0)
        x, cache = self._layers(x, state.cache, group, here.position, works_B)
        ring = [(r, (r + 1) % groups) for r in range(groups)]
        state = state._replace(
            tick=state.tick + 1,
            moving=lax.ppermute(x, axes.pp, ring) if groups > 1 else x,
            cache=cache,
        )
        leaving = state.tick - groups
        hidden_BD = from_last_rank(x[:, 0], axes)
        state = self._append(state, rows, seed, hidden_BD, leaving % groups, leaving >= 0)
        if rows.lengths.shape[0] == self.num_slots:
            return state
        return self._refill(state, rows, seed, leaving % groups)

    def _layers(
        self,
        x_B1D: jax.Array,
        cache: KVCache,
        group: jax.Array,
        positions_B: jax.Array,
        works_B: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """One token a slot of one group through the layers held here."""
        graphdef, stacked = nnx.split(self.decoder.layers)
        cos, sin = self.decoder.rope(positions_B[:, None])
        layers, _, num_slots, length, *heads = cache.k.shape
        slots_B = jnp.arange(num_slots)
        writes_B = jnp.where(works_B, positions_B, length)
        step = max(-(-length // CACHE_STEPS), min(SHORT_CACHE, length))
        sizes = [min(size, length) for size in range(step, length + step, step)]
        longest = jnp.max(jnp.where(works_B, positions_B, 0))

        def body(
            carry: tuple[jax.Array, KVCache], layer: tuple[nnx.State, jax.Array]
        ) -> tuple[tuple[jax.Array, KVCache], None]:
            x, cache = carry
            params, index = layer
            block = nnx.merge(graphdef, params)
            q, k, v = block.qkv(x, cos, sin)
            cache = KVCache(
                cache.k.at[index, group, slots_B, writes_B].set(k[:, 0], mode="drop"),
                cache.v.at[index, group, slots_B, writes_B].set(v[:, 0], mode="drop"),
            )

            def attend(size: int) -> jax.Array:
                place, shape = (index, group, 0, 0, 0, 0), (1, 1, num_slots, size, *heads)
                read = [lax.dynamic_slice(c, place, shape)[0, 0] for c in cache]
                return cached_attention(q[:, 0], *block.match_heads(q, *read), positions_B)

            attended = lax.switch(longest // step, [partial(attend, size) for size in sizes])
            return (block.output(x, attended), cache), None

        (x, cache), _ = lax.scan(body, (x_B1D, cache), (stacked, jnp.arange(layers)))
        return x, cache

    def _append(
        self,
        state: DecodeState,
        rows: Rows,
        seed: jax.Array,
        hidden_BD: jax.Array,
        group: jax.Array,
        has_left: jax.Array,
    ) -> DecodeState:
        """Draws the next tokens of the group that left the last rank."""
        slots, num_rows = state.slots, rows.lengths.shape[0]
        here = jax.tree.map(lambda x: pick(x, group), slots)
        goes_B = here.active & has_left
        tokens_B, logprobs_B = self._draw(
            hidden_BD,
            jnp.take(rows.samples, here.row, mode="fill", fill_value=0),
            here.count,
            seed,
        )
        stops_B = self._is_stop(tokens_B)
        limits_B = jnp.take(rows.limits, here.row, mode="fill", fill_value=0)
        goes_on_B = goes_B & ~stops_B & (here.count + 1 < limits_B)
        row_B = jnp.where(goes_B, here.row, num_rows)  # others write nowhere
        moved = goes_B.astype(jnp.int32)
        embedded_BD = self.decoder.embed_tokens(tokens_B[:, None])[:, 0]
        return state._replace(
            slots=Slots(
                row=slots.row,
                position=slots.position.at[group].add(moved),
                count=slots.count.at[group].add(moved),
                active=slots.active.at[group].set(jnp.where(has_left, goes_on_B, here.active)),
                entering=slots.entering.at[group].set(
                    jnp.where(goes_B[:, None], embedded_BD, here.entering)
                ),
            ),
            out=Responses(
                tokens=state.out.tokens.at[row_B, here.count].set(tokens_B, mode="drop"),
                logprobs=state.out.logprobs.at[row_B, here.count].set(logprobs_B, mode="drop"),
                lengths=state.out.lengths.at[row_B].add(1, mode="drop"),
                finished=state.out.finished.at[row_B].set(stops_B, mode="drop"),
            ),
        )

    def _refill(
        self, state: DecodeState, rows: Rows, seed: jax.Array, group: jax.Array
    ) -> DecodeState:
        """Gives free slots of a group to rows that wait, as soon as enough of them can enter.

        Prompts enter together, so that a pass through the layers is not spent on one of them.
        """
        num_rows, num_slots = rows.lengths.shape[0], state.slots.row.shape[1]
        together = largest_divisor(num_slots, max(min(self.prefill_rows, num_slots // 8), 1))
        num_free = jnp.sum(~pick(state.slots.active, group))
        waiting = num_rows - state.head
        enough = (waiting > 0) & (num_free >= jnp.minimum(together, waiting))

        def enter(state: DecodeState) -> DecodeState:
            # The free slots first; a replica that joins others without need enters nothing.
            slot_R = jnp.argsort(pick(state.slots.active, group), stable=True)[:together]
            order_R = jnp.arange(together)
            enters_R = enough & (order_R < jnp.minimum(num_free, waiting))
            row_R = jnp.where(enters_R, state.head + order_R, num_rows)
            tokens_RP = jnp.take(rows.tokens, row_R, axis=0, mode="fill", fill_value=0)
            lengths_R = jnp.take(rows.lengths, row_R, mode="fill", fill_value=0)
            width = tokens_RP.shape[1]
            new, hidden_RD = prefill(self.decoder, tokens_RP, lengths_R, together, width)
            place_R = jnp.where(enters_R, slot_R, num_slots)
            cache = KVCache(
                *(
                    old.at[:, group, place_R, :width].set(block, mode="drop")
                    for old, block in zip(state.cache, new, strict=True)
                )
            )
            state = state._replace(cache=cache, head=state.head + jnp.sum(enters_R))
            groups_R = jnp.full(together, group, jnp.int32)
            return self._enter(state, rows, seed, hidden_RD, row_R, groups_R, slot_R)

        return lax.cond(self._agreed(enough), enter, lambda s: s, state)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(d for d in range(1, max(min(number, limit), 1) + 1) if number % d == 0)
