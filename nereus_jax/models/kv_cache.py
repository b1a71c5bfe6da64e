"""Keys and values of the rows being decoded: a stretch for every slot, or pages by need.

A contiguous cache has room for every slot's longest row. A paged one is a pool of pages, handed
out as rows grow (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023). The table of pages is all that says which pages are in use; it is the
same on all devices of a replica, so that a page number means the same on each of them.

Positions lie beside each other in a head, as the products of attention read them.

Shapes: L layers held here, G groups of B slots, b rows that are written together, P prompt,
S cache, F pages of Z tokens, M pages of the longest row, C key/value heads held here, K head dim.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nereus_jax.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagePool:
    """The pages of a replica.

    Attributes:
      num_pages: at least as many as the longest row takes.
      page_tokens: positions of a page.
    """

    num_pages: int
    page_tokens: int

    def pages(self, tokens: int) -> int:
        """Pages that hold so many positions."""
        return -(-tokens // self.page_tokens)


class ContiguousCache(NamedTuple):
    """Keys and values [L, G, B, C, S, K]."""

    k: jax.Array
    v: jax.Array

    @property
    def length(self) -> int:
        """Positions of a slot."""
        return self.k.shape[4]

    def write_prompts(
        self, k_LbPCK: jax.Array, v_LbPCK: jax.Array, group_b: jax.Array, slot_b: jax.Array
    ) -> "ContiguousCache":
        """Writes prompts from position 0 on; group G writes nowhere."""
        where = (slice(None), group_b, slot_b, slice(None), slice(k_LbPCK.shape[2]))
        k_LbCPK, v_LbCPK = k_LbPCK.swapaxes(2, 3), v_LbPCK.swapaxes(2, 3)
        return ContiguousCache(
            self.k.at[where].set(k_LbCPK, mode="drop"), self.v.at[where].set(v_LbCPK, mode="drop")
        )

    def write_tokens(
        self,
        layer: jax.Array,
        group: jax.Array,
        k_BCK: jax.Array,
        v_BCK: jax.Array,
        positions_B: jax.Array,
        works_B: jax.Array,
    ) -> "ContiguousCache":
        """Writes one position of each slot of a group that works."""
        slots_B = jnp.arange(self.k.shape[2])
        write_B = jnp.where(works_B, positions_B, self.length)
        where = (layer, group, slots_B, slice(None), write_B)
        return ContiguousCache(
            self.k.at[where].set(k_BCK, mode="drop"), self.v.at[where].set(v_BCK, mode="drop")
        )

    def read(self, layer: jax.Array, group: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, C, size, K] of a group, from position 0 on."""
        _, _, num_slots, heads, _, head_dim = self.k.shape
        place, shape = (layer, group, 0, 0, 0, 0), (1, 1, num_slots, heads, size, head_dim)
        k, v = (lax.dynamic_slice(x, place, shape)[0, 0] for x in self)
        return k, v


class PagedCache(NamedTuple):
    """Keys and values [L, F, C, Z, K] of all pages, and the table [G, B, M] of who has which.

    Entry m of a slot's row in the table is the page of positions m Z to (m + 1) Z - 1, F where
    there is none.
    """

    k: jax.Array
    v: jax.Array
    table: jax.Array

    @property
    def length(self) -> int:
        """Positions that a slot can have: S rounded up to whole pages."""
        return self.table.shape[2] * self.page_tokens

    @property
    def num_pages(self) -> int:
        """F."""
        return self.k.shape[1]

    @property
    def page_tokens(self) -> int:
        """Z."""
        return self.k.shape[3]

    def write_prompts(
        self, k_LbPCK: jax.Array, v_LbPCK: jax.Array, group_b: jax.Array, slot_b: jax.Array
    ) -> "PagedCache":
        """Writes prompts to the pages that their slots have; group G writes nowhere."""
        width = k_LbPCK.shape[2]
        pages = -(-width // self.page_tokens)
        table_bM = self.table.at[group_b, slot_b].get(mode="fill", fill_value=self.num_pages)
        where = (slice(None), table_bM[:, :pages])

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            padding = pages * self.page_tokens - width
            padded = jnp.pad(new, ((0, 0), (0, 0), (0, padding), (0, 0), (0, 0)))
            cut = padded.reshape(*new.shape[:2], pages, self.page_tokens, *new.shape[3:])
            return old.at[where].set(cut.swapaxes(3, 4), mode="drop")

        return self._replace(k=write(self.k, k_LbPCK), v=write(self.v, v_LbPCK))

    def write_tokens(
        self,
        layer: jax.Array,
        group: jax.Array,
        k_BCK: jax.Array,
        v_BCK: jax.Array,
        positions_B: jax.Array,
        works_B: jax.Array,
    ) -> "PagedCache":
        """Writes one position of each slot of a group that works."""
        page_B = jnp.where(works_B, self._page(group, positions_B), self.num_pages)
        where = (layer, page_B, slice(None), positions_B % self.page_tokens)
        return self._replace(
            k=self.k.at[where].set(k_BCK, mode="drop"), v=self.v.at[where].set(v_BCK, mode="drop")
        )

    def read(self, layer: jax.Array, group: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, C, size rounded up to pages, K] of a group, from position 0 on.

        Where a slot has no page, it is some other page's: behind the row's own positions.
        """
        table_Bm = self._group(group)[:, : -(-size // self.page_tokens)]
        num_slots, pages = table_Bm.shape
        _, _, heads, _, head_dim = self.k.shape
        shape = (num_slots, heads, pages * self.page_tokens, head_dim)

        def gather(x: jax.Array) -> jax.Array:
            return x.at[layer, table_Bm].get(mode="clip").swapaxes(1, 2).reshape(shape)

        return gather(self.k), gather(self.v)

    def free_pages(self) -> tuple[jax.Array, jax.Array]:
        """The pages that nobody has, first in an array [F] that F fills up, and their number."""
        pages_F = jnp.arange(self.num_pages)
        free_F = jnp.ones(self.num_pages, bool).at[self.table.reshape(-1)].set(False, mode="drop")
        order_F = jnp.where(free_F, jnp.cumsum(free_F) - 1, self.num_pages)
        ids_F = jnp.full(self.num_pages, self.num_pages).at[order_F].set(pages_F, mode="drop")
        return ids_F, jnp.sum(free_F)

    def keep(self, active_GB: jax.Array) -> "PagedCache":
        """Takes their pages from the slots that are not active."""
        return self._replace(table=jnp.where(active_GB[:, :, None], self.table, self.num_pages))

    def lacking(self, group: jax.Array, positions_B: jax.Array) -> jax.Array:
        """Whether a group's slots have no page [B] for these positions."""
        return self._page(group, positions_B) == self.num_pages

    def grow(self, group: jax.Array, positions_B: jax.Array, grows_B: jax.Array) -> "PagedCache":
        """Gives a page for the position to each slot that grows; there must be as many."""
        ids_F, _ = self.free_pages()
        page_B = jnp.take(ids_F, jnp.cumsum(grows_B) - 1, mode="clip")
        column_B = jnp.where(grows_B, positions_B // self.page_tokens, self.table.shape[2])
        where = (group, jnp.arange(grows_B.shape[0]), column_B)
        return self._replace(table=self.table.at[where].set(page_B, mode="drop"))

    def hand_out(self, count_b: jax.Array, group_b: jax.Array, slot_b: jax.Array) -> "PagedCache":
        """Gives so many pages to the slots, in place of what they had; group G has none."""
        ids_F, _ = self.free_pages()
        column_M = jnp.arange(self.table.shape[2])
        index_bM = (jnp.cumsum(count_b) - count_b)[:, None] + column_M[None, :]
        has_bM = column_M[None, :] < count_b[:, None]
        page_bM = jnp.where(has_bM, jnp.take(ids_F, index_bM, mode="clip"), self.num_pages)
        return self._replace(table=self.table.at[group_b, slot_b].set(page_bM, mode="drop"))

    def _group(self, group: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(self.table, group, keepdims=False)

    def _page(self, group: jax.Array, positions_B: jax.Array) -> jax.Array:
        column_B = positions_B // self.page_tokens
        return jnp.take_along_axis(
            self._group(group), column_B[:, None], axis=1, mode="fill", fill_value=self.num_pages
        )[:, 0]


Cache = ContiguousCache | PagedCache


def empty_cache(
    decoder: Decoder, groups: int, num_slots: int, length: int, pool: PagePool | None
) -> Cache:
    """A cache of zeros for groups of slots.

    Args:
      decoder: the shards that the device holds.
      groups: G.
      num_slots: B, of a group.
      length: S, positions of the longest row.
      pool: the pages of a paged cache; None for a contiguous one.
    """
    layers, _, kv_width = decoder.layers.k.shape
    head_dim, dtype = decoder.config.head_dim, decoder.layers.k.dtype
    heads = kv_width // head_dim
    if pool is None:
        empty = jnp.zeros((layers, groups, num_slots, heads, length, head_dim), dtype)
        return ContiguousCache(empty, empty)
    empty = jnp.zeros((layers, pool.num_pages, heads, pool.page_tokens, head_dim), dtype)
    nothing = jnp.full((groups, num_slots, pool.pages(length)), pool.num_pages, jnp.int32)
    return PagedCache(empty, empty, nothing)


def prefix_sizes(length: int, count: int, shortest: int) -> list[int]:
    """About `count` sizes in equal steps up to `length`, none but the last below `shortest`."""
    step = max(-(-length // count), min(shortest, length))
    return [min(size, length) for size in range(step, length + step, step)]
