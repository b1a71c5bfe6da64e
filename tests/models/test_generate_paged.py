"""Generation on one device: widths of prompts, pages that run out, and what it took.

A row that makes way for others begins anew; its draws are named by the row, so that it ends with
the same tokens.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.models import prefill
from nereus_jax.models.decode_state import Effort, Responses, Rows
from nereus_jax.models.decoder import UNSHARDED, bind, decoder_graphdef
from nereus_jax.models.generate import Generator
from nereus_jax.models.kv_cache import PagePool
from nereus_jax.models.sampling import SamplingConfig

CONFIG = DecoderConfig(
    num_layers=2,
    embed_dim=12,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=16,
    vocab_size=11,
)
ROWS, SLOTS, P, T = 14, 6, 40, 20
SAMPLING = SamplingConfig(max_tokens=T, pad_id=9)
SMALLEST = PagePool(num_pages=30, page_tokens=2)  # one row's 60 positions
Generate = Callable[[Rows, int], tuple[Responses, Effort]]


@functools.cache
def params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        leaf.name: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32)
        for leaf in CONFIG.spec(Head.LM)
    }


def make(slots: int, pool: PagePool | None) -> Generate:
    graphdef = decoder_graphdef(CONFIG, Head.LM, UNSHARDED)

    @jax.jit
    def generate(arrays: dict[str, jax.Array], rows: Rows, seed: jax.Array):
        return Generator(bind(graphdef, arrays), SAMPLING, 3, slots, pool)(rows, seed)

    def on_host(rows: Rows, seed: int) -> tuple[Responses, Effort]:
        return jax.tree.map(np.asarray, generate(params(), rows, jnp.uint32(seed)))

    return on_host


@pytest.fixture(scope="module")
def plain() -> Generate:
    """All rows at once, every prompt at the whole width, a contiguous cache."""
    generate = make(ROWS, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "MOST_WIDTHS", 1)
        generate(rows_of(0), 0)
    return generate


def rows_of(seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, np.where(np.arange(ROWS) < 4, P, 8) + 1)
    lengths[-2:] = 0  # only fill up
    return Rows(
        tokens=jnp.asarray(rng.integers(0, CONFIG.vocab_size, (ROWS, P))),
        lengths=jnp.asarray(lengths),
        samples=jnp.asarray(rng.permutation(1000)[:ROWS], jnp.uint32),
        limits=jnp.asarray(rng.choice([1, T, T], ROWS)),
    )


def check(got: Responses, expected: Responses) -> None:
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)


def test_rows_that_make_way_end_with_the_same_tokens(plain: Generate) -> None:
    paged = make(SLOTS, SMALLEST)
    restarts = 0
    for seed in range(8):
        rows = rows_of(seed)
        responses, effort = paged(rows, seed)
        expected, needed = plain(rows, seed)
        check(responses, expected)
        assert (responses.lengths[:-2] > 0).all()
        assert (responses.lengths[-2:] == 0).all()
        restarts += int(effort.restarts)
        more = int(effort.row_tokens) - int(needed.row_tokens)
        assert (more > 0) <= (effort.restarts > 0), "only who begins anew draws twice"
        assert int(effort.prompt_tokens) >= int(needed.prompt_tokens)
    assert restarts > 10


def test_prompts_at_their_own_widths_give_the_same_tokens(plain: Generate) -> None:
    bucketed = make(SLOTS, None)
    for seed in range(3):
        rows = rows_of(seed)
        (responses, effort), (expected, whole) = bucketed(rows, seed), plain(rows, seed)
        check(responses, expected)
        assert effort.prompt_tokens == whole.prompt_tokens == rows.lengths.sum()
        assert effort.prefill_tokens < whole.prefill_tokens
        assert effort.row_tokens == whole.row_tokens == (expected.lengths[:-2] - 1).sum()
        assert effort.decode_tokens >= effort.row_tokens
        assert effort.restarts == 0


def test_positions_computed_for_prompts() -> None:
    lengths = jnp.array([0, 0, 5, 16, 17, 3, 100, 1])
    # Pairs, at 0, 16, 32 and 128 of the widths 16, 32, 64 and 128.
    assert prefill.prefill_tokens(lengths, 2, 128) == 2 * (0 + 16 + 32 + 128)
    # Widths 16 and 24.
    assert prefill.prefill_tokens(jnp.array([16, 17]), 1, 24) == 16 + 24
    # One width only.
    assert prefill.prefill_tokens(jnp.array([1, 0, 2]), 1, 5) == 5 + 5
    # Five widths at most: 64, 128, 256, 512, 1024.
    assert prefill.prefill_tokens(jnp.array([1, 65]), 1, 1024) == 64 + 128


def test_what_is_behind_an_end_is_cut() -> None:
    out = Responses(
        tokens=jnp.array([[5, 6, 7], [1, 2, 3]]),
        logprobs=jnp.full((2, 3), -1.0),
        lengths=jnp.array([2, 3]),
        finished=jnp.array([True, False]),
    ).cut(9)
    assert out.tokens.tolist() == [[5, 6, 9], [1, 2, 3]]
    assert out.logprobs.tolist() == [[-1, -1, 0], [-1, -1, -1]]
