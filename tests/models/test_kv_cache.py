"""The paged KV cache against a model of who has which page, and against a contiguous one."""

import jax.numpy as jnp
import numpy as np
import pytest

from nereus_jax.models.kv_cache import ContiguousCache, PagedCache, PagePool, prefix_sizes

LAYERS, GROUPS, SLOTS, PAGES, PAGE, HEADS, DIM = 2, 2, 3, 13, 4, 2, 3
LENGTH = 18  # five pages, the last of them half used
NONE = PAGES


def empty_paged() -> PagedCache:
    pool = PagePool(num_pages=PAGES, page_tokens=PAGE)
    keys = jnp.zeros((LAYERS, PAGES, HEADS, PAGE, DIM))
    table = jnp.full((GROUPS, SLOTS, pool.pages(LENGTH)), NONE, jnp.int32)
    return PagedCache(keys, keys, table)


def taken(cache: PagedCache) -> list[int]:
    return [int(p) for p in np.asarray(cache.table).reshape(-1) if p != NONE]


def test_pages_are_handed_out_once_and_come_back() -> None:
    rng = np.random.default_rng(0)
    cache, has = empty_paged(), np.zeros((GROUPS, SLOTS), int)
    grown = ended = 0
    for _ in range(60):
        group = int(rng.integers(GROUPS))
        ids, free = cache.free_pages()
        assert int(free) == PAGES - has.sum()
        assert sorted(taken(cache) + np.asarray(ids)[: int(free)].tolist()) == list(range(PAGES))
        stays = rng.random((GROUPS, SLOTS)) < 0.8
        ended += int((has > 0)[~stays].sum())
        cache, has = cache.keep(jnp.asarray(stays)), has * stays
        # Every slot of the group that has pages and room to grow asks for one, while there are any.
        asks = (has[group] > 0) & (has[group] < 5)
        lacking = cache.lacking(jnp.int32(group), jnp.asarray(has[group] * PAGE))
        np.testing.assert_array_equal(np.asarray(lacking)[asks], True)
        asks &= np.cumsum(asks) <= PAGES - has.sum()
        cache = cache.grow(jnp.int32(group), jnp.asarray(has[group] * PAGE), jnp.asarray(asks))
        has[group] += asks
        grown += int(asks.sum())
        # Then free slots get pages, or none.
        count = np.where(has[group] == 0, rng.integers(0, 4, SLOTS), 0)
        count *= np.cumsum(count) <= PAGES - has.sum()
        groups = jnp.where(count > 0, group, GROUPS)
        cache = cache.hand_out(jnp.asarray(count), groups, jnp.arange(SLOTS))
        has[group] += count
        assert len(set(taken(cache))) == len(taken(cache)) == has.sum()
        np.testing.assert_array_equal((np.asarray(cache.table) != NONE).sum(axis=2), has)
    assert grown > 10
    assert ended > 10


def test_a_paged_cache_reads_what_a_contiguous_one_does() -> None:
    rng = np.random.default_rng(1)
    paged = empty_paged()
    zeros = jnp.zeros((LAYERS, GROUPS, SLOTS, HEADS, LENGTH, DIM))
    plain = ContiguousCache(zeros, zeros)
    # Four prompts of six columns, one of them nowhere; pages are left for three tokens more.
    group, slot = jnp.array([0, 1, GROUPS, 1]), jnp.array([2, 0, 1, 1])
    lengths = np.array([6, 1, 5, 4])
    paged = paged.hand_out(jnp.asarray((lengths + 2) // PAGE + 1), group, slot)
    k, v = (jnp.asarray(rng.normal(size=(LAYERS, 4, 6, HEADS, DIM)), jnp.float32) for _ in "kv")
    paged, plain = (c.write_prompts(k, v, group, slot) for c in (paged, plain))
    at = np.zeros((GROUPS, SLOTS), int)
    at[0, 2], at[1, 0], at[1, 1] = 6, 1, 4
    for _ in range(3):
        for g in range(GROUPS):
            works, positions = jnp.asarray(at[g] > 0), jnp.asarray(at[g])
            for layer in range(LAYERS):
                k, v = (
                    jnp.asarray(rng.normal(size=(SLOTS, HEADS, DIM)), jnp.float32) for _ in "kv"
                )
                where = (jnp.int32(layer), jnp.int32(g))
                paged = paged.write_tokens(*where, k, v, positions, works)
                plain = plain.write_tokens(*where, k, v, positions, works)
            at[g] += np.asarray(works)
    compared = 0
    for g in range(GROUPS):
        for layer in range(LAYERS):
            for size in (5, 12, LENGTH):
                where = (jnp.int32(layer), jnp.int32(g), size)
                inside = np.arange(size)[None, :] < at[g][:, None]
                for got, expected in zip(paged.read(*where), plain.read(*where), strict=True):
                    assert got.shape == (SLOTS, HEADS, -(-size // PAGE) * PAGE, DIM)
                    got, expected = (np.asarray(x).swapaxes(1, 2) for x in (got, expected))
                    got = got[:, :size]
                    np.testing.assert_array_equal(got[inside], expected[inside])
                    compared += int(inside.sum())
    assert compared > 100
    assert np.asarray(plain.k).any(axis=(0, 3, 4, 5)).sum() == 3, "the fourth prompt is nowhere"


@pytest.mark.parametrize(
    ("length", "count", "shortest", "sizes"),
    [
        (100, 4, 10, [25, 50, 75, 100]),
        (90, 4, 40, [40, 80, 90]),
        (7, 8, 64, [7]),
        (33, 2, 1, [17, 33]),
    ],
)
def test_prefix_sizes(length: int, count: int, shortest: int, sizes: list[int]) -> None:
    assert prefix_sizes(length, count, shortest) == sizes


def test_pages_of_a_pool() -> None:
    pool = PagePool(num_pages=3, page_tokens=16)
    assert [pool.pages(n) for n in (1, 16, 17, 48)] == [1, 1, 2, 3]
