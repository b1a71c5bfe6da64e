"""A KV cache in pages under layouts: the same tokens, in less memory, or a refusal."""

import functools

import jax
import numpy as np
import pytest

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_GENERATE
from nereus_jax.models.sampling import SamplingConfig
from nereus_jax.runtime import emu, host
from nereus_jax.runtime.emu import Site
from nereus_jax.runtime.engines.generate import GenerateEngine, deal
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import take_stock

CONFIG = DecoderConfig(
    num_layers=3,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=32,
    vocab_size=13,
)
ROWS, WIDTH, LONGEST, PAGE = 22, 20, 26, 5
ONE_ROW = 50  # the positions of one row, 46, in whole pages
SAMPLING = SamplingConfig(max_tokens=LONGEST, stop_ids=(4,), pad_id=1)


def site_of(layout: ParallelLayout, config: DecoderConfig) -> Site:
    world = take_stock()
    placement = Placement(layout=layout, devices=world.pool.devices[: layout.num_devices])
    return emu.make_site(world, ACTOR_GENERATE, placement, config.num_kv_heads)


def make_engine(
    layout: ParallelLayout, max_num_seqs: int, kv_cache_tokens: int, config: DecoderConfig = CONFIG
) -> GenerateEngine:
    return GenerateEngine(
        config=config,
        site=site_of(layout, config),
        dtype="float32",
        prefill_rows=2,
        precision="highest",
        max_num_seqs=max_num_seqs,
        kv_cache_tokens=kv_cache_tokens,
        kv_page_tokens=PAGE,
        programs=ProgramCache(),
    )


@functools.cache
def generate(degrees: tuple[int, int, int], max_num_seqs: int, kv_cache_tokens: int):
    engine = make_engine(ParallelLayout(*degrees), max_num_seqs, kv_cache_tokens)
    params = emu.initialize(CONFIG, Head.LM, engine.site, "float32", seed=3)
    rng = np.random.default_rng(1)
    tokens_BP = rng.integers(0, CONFIG.vocab_size, (ROWS, WIDTH))
    lengths_B = np.where(np.arange(ROWS) % 4, rng.integers(1, 7, ROWS), WIDTH)
    limits_B = rng.choice([1, LONGEST, LONGEST], ROWS)
    samples_B = np.arange(ROWS)
    arrays = engine.dispatch(params, tokens_BP, lengths_B, samples_B, 5, SAMPLING, limits_B)
    jax.block_until_ready(arrays)
    return host.fetch(arrays)


@pytest.mark.parametrize(
    ("degrees", "max_num_seqs"),
    [
        ((1, 2, 2), 8),  # rows make way while they are in the pipeline
        pytest.param((2, 1, 2), 0, marks=pytest.mark.slow),
        pytest.param((1, 1, 1), 0, marks=pytest.mark.slow),
        pytest.param((1, 3, 1), 9, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), 6, marks=pytest.mark.slow),  # replicas wait for each other
        pytest.param((2, 2, 2), 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_tokens_are_those_of_a_contiguous_cache(
    degrees: tuple[int, int, int], max_num_seqs: int
) -> None:
    expected, got = generate((1, 1, 1), 0, 0), generate(degrees, max_num_seqs, ONE_ROW)
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(got[name][:ROWS], expected[name][:ROWS], err_msg=name)
    np.testing.assert_allclose(got["logprobs"][:ROWS], expected["logprobs"][:ROWS], atol=1e-5)
    assert got["restarts"].shape == (degrees[0],)
    assert got["restarts"].sum() > 0, "rows have made way"
    assert expected["restarts"].sum() == 0


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_the_program_takes_less_memory(degrees: tuple[int, int, int]) -> None:
    """The pool, and one layer's keys and values of all slots of a group as they are read."""
    config = DecoderConfig(
        num_layers=8,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=32,
        vocab_size=32,
    )
    layout, slots, prompt, response = ParallelLayout(*degrees), 32, 16, 240
    sampling = SamplingConfig(max_tokens=response)
    tokens = slots * (prompt + response)
    temp_bytes = {}
    for kept in (tokens, tokens // 4):
        engine = make_engine(layout, slots, kept, config)
        temp_bytes[kept] = engine.program(2 * slots, prompt, sampling).temp_bytes
    position_bytes = 2 * 4 * 32 * 2 // layout.tp  # keys and values of one layer
    layers = config.num_layers // layout.pp
    saved = layers * position_bytes * (tokens - tokens // 4)
    read = position_bytes * tokens // layout.pp
    print(f"{degrees}: {temp_bytes}, {saved} saved, {read} read at a time")
    assert temp_bytes[tokens] > layers * position_bytes * tokens, "the contiguous cache is there"
    assert temp_bytes[tokens // 4] < temp_bytes[tokens] - saved + read


def test_a_cache_that_holds_no_row_is_refused() -> None:
    engine = make_engine(ParallelLayout(1, 1, 1), 4, ONE_ROW - 1)
    with pytest.raises(InfeasiblePlanError) as raised:
        engine.program(8, WIDTH, SAMPLING)
    for part in ("49 tokens", "9 pages of 5", "46 tokens takes 10", "at least 50"):
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_cache_with_room_for_all_is_contiguous() -> None:
    layout = ParallelLayout(1, 1, 1)
    assert make_engine(layout, 4, 4 * 46).page_pool(4, 46) is None
    assert make_engine(layout, 4, 0).page_pool(4, 46) is None
    pool = make_engine(layout, 4, 4 * 46 - 1).page_pool(4, 46)
    assert pool is not None
    assert (pool.num_pages, pool.page_tokens) == (36, 5)


def test_rows_are_dealt_by_length() -> None:
    lengths = np.array([3, 9, 1, 7, 0, 5, 8, 0, 2])
    order = deal(lengths, 3)
    # 9 8 7, back 2 3 5, there again 1 0 0.
    assert lengths[order].reshape(3, 3).tolist() == [[9, 2, 1], [8, 3, 0], [7, 5, 0]]
    np.testing.assert_array_equal(np.sort(order), np.arange(9))
    np.testing.assert_array_equal(deal(np.array([2, 2, 2]), 1), [0, 1, 2])
