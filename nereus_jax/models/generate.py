"""Decode with a KV cache and continuous batching, under data, pipeline and tensor parallelism.

A replica decodes in slots. The first rows fill them; when a response ends, its slot is free, and
the next row that waits takes it (Yu et al., "Orca", OSDI 2022). Which slot a row gets, and when,
changes no token: draws are named by the row, and no row sees another.

The slots are split into pp groups. Tick t has rank r work on group (t - r) mod pp: the group that
leaves the last rank in tick t has its next tokens drawn and enters rank 0 in tick t + 1, so that
after the first pp - 1 ticks no rank idles. Free slots are filled when their group has left. With
pp = 1 this is a plain decode loop.

With a paged cache a row enters when there are pages for its prompt and one more for each row that
is under way. When the pages run out all the same, the last rows in the order of the batch give
theirs up and wait again: started anew, they draw the same tokens. The first row that is not done
never makes way, and one row always fits, so that every row is done some time.

Runs inside a manual `shard_map` (without the check of replication, as some loop carries agree
between devices in ways that it cannot prove).

Shapes: N rows of a replica, G groups of B slots, R rows that enter together, P prompt, T response,
S = P + T cache, L layers held here, C key/value heads held here, K head dim, D embed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from nereus_jax.models.attention import cached_attention
from nereus_jax.models.decode_state import DecodeState, Effort, Responses, Rows, Slots
from nereus_jax.models.decoder import Decoder, Layer
from nereus_jax.models.kv_cache import Cache, PagedCache, PagePool, empty_cache, prefix_sizes
from nereus_jax.models.mesh_axes import axis_index, axis_size
from nereus_jax.models.pipeline import from_last_rank
from nereus_jax.models.prefill import pick, prefill, prefill_tokens
from nereus_jax.models.sampling import SamplingConfig, row_keys, sample_tokens

CACHE_STEPS = 8
"""Attention reads a long cache in eighths, as far as the longest row of the group reaches."""

SHORT_CACHE = 64
"""No step is shorter: it would save less than the choice costs."""


@dataclasses.dataclass(frozen=True)
class Generator:
    """The generation program of one device.

    Attributes:
      decoder: the shards that the device holds.
      sampling: how tokens are drawn.
      prefill_rows: most prompts that are in the layers at a time.
      num_slots: rows of a replica that are decoded at a time, a multiple of pp; at most N.
      pool: the pages of the KV cache; None for room for every slot's longest row.
      layers: the decoder's, unstacked before the loop, so that no tick copies a layer's weights out
        of the stack; None: a loop takes them from it.
    """

    decoder: Decoder
    sampling: SamplingConfig
    prefill_rows: int
    num_slots: int
    pool: PagePool | None = None
    layers: Sequence[Mapping[str, jax.Array]] | None = None

    def __call__(self, rows: Rows, seed: jax.Array) -> tuple[Responses, Effort]:
        """Generates the responses of a replica's rows.

        Args:
          rows: N of them, at least as many as slots; those of like prompt length together.
          seed: uint32 scalar.
        """
        state = self._begin(rows, seed)

        def unfinished(state: DecodeState) -> jax.Array:
            return self._agreed(jnp.any(state.slots.active) | jnp.any(state.waiting))

        state = lax.while_loop(unfinished, lambda s: self._tick(s, rows, seed), state)
        return state.out.cut(self.sampling.pad_id), state.effort

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
        groups, max_tokens = self._groups, self.sampling.max_tokens
        per_group = self.num_slots // groups
        embed_dim, dtype = self.decoder.config.embed_dim, self.decoder.layers.k.dtype
        state = DecodeState(
            tick=jnp.int32(0),
            waiting=rows.lengths > 0,
            moving=jnp.zeros((per_group, 1, embed_dim), dtype),
            cache=empty_cache(self.decoder, groups, per_group, width + max_tokens, self.pool),
            slots=Slots.free(groups, per_group, num_rows, embed_dim, dtype),
            out=Responses.none(num_rows, max_tokens, self.sampling.pad_id),
            effort=Effort(*(jnp.int32(0) for _ in Effort._fields)),
        )
        places = jnp.arange(self.num_slots)
        first = jnp.where(self._fits(state, rows, places), places, num_rows)
        micro = largest_divisor(self.num_slots, self.prefill_rows)
        where = (places // per_group, places % per_group)
        return self._enter(state, rows, seed, first, where, micro)

    def _fits(self, state: DecodeState, rows: Rows, row_R: jax.Array) -> jax.Array:
        """Which of these rows, one after the other, there are pages for; row N is none."""
        lengths_R = jnp.take(rows.lengths, row_R, mode="fill", fill_value=0)
        real_R = lengths_R > 0
        if not isinstance(state.cache, PagedCache):
            return real_R
        # One page more for each row, so that none has to make way for the next one to grow.
        needs_R = jnp.where(real_R, self._pages(lengths_R) + 1, 0)
        under_way = jnp.sum(state.slots.active)
        _, free = state.cache.free_pages()
        fits_R = jnp.cumsum(needs_R) <= free - under_way
        alone_R = (under_way == 0) & (jnp.cumsum(real_R) == 1)
        return real_R & (fits_R | alone_R)

    def _pages(self, lengths: jax.Array) -> jax.Array:
        """Pages of a prompt and of its first token."""
        assert self.pool is not None
        return lengths // self.pool.page_tokens + 1

    def _enter(
        self,
        state: DecodeState,
        rows: Rows,
        seed: jax.Array,
        row_R: jax.Array,
        place_R: tuple[jax.Array, jax.Array],
        micro: int,
    ) -> DecodeState:
        """Rows into free slots: their prompts into the cache, and their first tokens drawn.

        Args:
          state: of the loop.
          rows: all of them.
          seed: of the draws.
          row_R: which rows; N for none.
          place_R: their groups and slots.
          micro: rows of a prefill microbatch.
        """
        num_rows, slots, cache = rows.lengths.shape[0], state.slots, state.cache
        tokens_RP, lengths_R, samples_R, limits_R = (
            jnp.take(x, row_R, axis=0, mode="fill", fill_value=0) for x in rows
        )
        real_R = lengths_R > 0
        # What is no row writes nowhere.
        row_R = jnp.where(real_R, row_R, num_rows)
        where = (jnp.where(real_R, place_R[0], slots.row.shape[0]), place_R[1])
        if isinstance(cache, PagedCache):
            cache = cache.hand_out(jnp.where(real_R, self._pages(lengths_R), 0), *where)
        cache, hidden_RD = prefill(self.decoder, tokens_RP, lengths_R, where, micro, cache)
        computed = prefill_tokens(lengths_R, micro, tokens_RP.shape[1])
        tokens_R, logprobs_R = self._draw(hidden_RD, samples_R, jnp.zeros_like(row_R), seed)
        stops_R = self._is_stop(tokens_R)
        goes_on_R = real_R & ~stops_R & (limits_R > 1)
        return state._replace(
            waiting=state.waiting.at[row_R].set(False, mode="drop"),
            cache=cache,
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
            effort=state.effort._replace(
                prefill_tokens=state.effort.prefill_tokens + computed,
                prompt_tokens=state.effort.prompt_tokens + jnp.sum(lengths_R),
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
        if isinstance(state.cache, PagedCache):
            state = self._grow(state, leaving % groups)
        elif rows.lengths.shape[0] == self.num_slots:
            return state
        return self._refill(state, rows, seed, leaving % groups)

    def _layers(
        self,
        x_B1D: jax.Array,
        cache: Cache,
        group: jax.Array,
        positions_B: jax.Array,
        works_B: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """One token a slot of one group through the layers held here."""
        graphdef, stacked = nnx.split(self.decoder.layers)
        cos, sin = self.decoder.rope(positions_B[:, None])
        sizes = prefix_sizes(cache.length, CACHE_STEPS, SHORT_CACHE)
        longest = jnp.max(jnp.where(works_B, positions_B, 0))

        def body(
            carry: tuple[jax.Array, Cache], layer: tuple[Layer, jax.Array]
        ) -> tuple[tuple[jax.Array, Cache], None]:
            x, cache = carry
            params, index = layer
            block = nnx.merge(graphdef, params)
            q, k, v = block.qkv(x, cos, sin)
            cache = cache.write_tokens(index, group, k[:, 0], v[:, 0], positions_B, works_B)

            def attend(size: int) -> jax.Array:
                read = cache.read(index, group, size)
                return cached_attention(q[:, 0], *block.match_heads(q, *read, dim=1), positions_B)

            attended = lax.switch(longest // sizes[0], [partial(attend, size) for size in sizes])
            return (block.output(x, attended), cache), None

        if self.layers is not None:
            carry = x_B1D, cache
            for index, layer in enumerate(self.layers):
                carry, _ = body(carry, (layer, jnp.int32(index)))
            return carry
        index_L = jnp.arange(stacked.k[...].shape[0])
        (x, cache), _ = lax.scan(body, (x_B1D, cache), (stacked, index_L))
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
            effort=state.effort._replace(
                decode_tokens=state.effort.decode_tokens + has_left * goes_B.shape[0],
                row_tokens=state.effort.row_tokens + jnp.sum(goes_B),
            ),
        )

    def _grow(self, state: DecodeState, group: jax.Array) -> DecodeState:
        """Gives pages to the rows of a group that need one for their next token.

        When there are too few, rows make way, the last ones first. A row that is on its way through
        the pipeline may be among them: from now on it writes nowhere.
        """
        cache, slots = state.cache, state.slots
        assert isinstance(cache, PagedCache)
        position_B = pick(slots.position, group)
        lacking_B = cache.lacking(group, position_B)

        def needs(active_GB: jax.Array) -> jax.Array:
            return lacking_B & pick(active_GB, group)

        def too_few(active_GB: jax.Array) -> jax.Array:
            return jnp.sum(needs(active_GB)) > cache.keep(active_GB).free_pages()[1]

        def without_last(active_GB: jax.Array) -> jax.Array:
            last = jnp.argmax(jnp.where(active_GB, slots.row, -1))
            return active_GB & (jnp.arange(active_GB.size).reshape(active_GB.shape) != last)

        stays_GB = lax.while_loop(too_few, without_last, slots.active)
        makes_way_GB = slots.active & ~stays_GB
        row_GB = jnp.where(makes_way_GB, slots.row, state.waiting.shape[0])
        return state._replace(
            waiting=state.waiting.at[row_GB].set(True, mode="drop"),
            cache=cache.keep(stays_GB).grow(group, position_B, needs(stays_GB)),
            slots=slots._replace(active=stays_GB),
            effort=state.effort._replace(
                restarts=state.effort.restarts + jnp.sum(makes_way_GB),
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
        active_B = pick(state.slots.active, group)
        row_R = jnp.nonzero(state.waiting, size=together, fill_value=num_rows)[0]
        has_slot_R = jnp.arange(together) < jnp.sum(~active_B)
        row_R = jnp.where(has_slot_R & self._fits(state, rows, row_R), row_R, num_rows)
        entering = jnp.sum(row_R < num_rows)
        all_that_can = jnp.minimum(together, jnp.sum(state.waiting))
        enough = (entering > 0) & ((entering == all_that_can) | ~jnp.any(state.slots.active))

        def enter(state: DecodeState) -> DecodeState:
            # The free slots first; a replica that joins others without need enters nothing.
            slot_R = jnp.argsort(active_B, stable=True)[:together]
            place_R = (jnp.full(together, group, jnp.int32), slot_R)
            entering_R = jnp.where(enough, row_R, num_rows)
            return self._enter(state, rows, seed, entering_R, place_R, together)

        return lax.cond(self._agreed(enough), enter, lambda s: s, state)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(d for d in range(1, max(min(number, limit), 1) + 1) if number % d == 0)
