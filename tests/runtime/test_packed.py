"""Packed rows: a sequence gives the same numbers wherever it lies, whatever lies beside it.

Shapes: B sequences, S longest sequence, T response.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_jax.config import OptimizerConfig
from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.models.decoder import bind, decoder_graphdef
from nereus_jax.models.mesh_axes import UNSHARDED
from nereus_jax.rl.objectives import SupervisedObjective
from nereus_jax.rl.packed_forms import PackedForm, packed_forms
from nereus_jax.runtime import emu, host
from nereus_jax.runtime.emu import Site
from nereus_jax.runtime.engines.packed import PackedBatch, pack_batch
from nereus_jax.runtime.engines.score import ScoreEngine, ScoreKind
from nereus_jax.runtime.engines.train import TrainEngine
from nereus_jax.runtime.optimizers import make_optimizer
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import take_stock

CONFIG = DecoderConfig(
    num_layers=3,
    embed_dim=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=10,
    vocab_size=17,
)
S, T = 12, 9
LONG_S = 512
"""Long enough for short rows."""
SHORT = [(3, 5), (2, 4), (3, 6), (1, 3), (2, 2), (3, 4), (1, 2), (2, 5)]
"""(prompt, total) lengths: several to a narrow row."""
MIDDLE = [(3, 8), (2, 7), (3, 7), (1, 7), (2, 7), (3, 7)] * 2
"""No two fit into a narrow row of 12."""
MIXED = [(505, 512), (420, 429), (70, 78), (60, 66), (3, 11), (20, 24)]
"""Two long rows and short ones."""


def longest(pairs: list[tuple[int, int]]) -> int:
    return LONG_S if pairs is MIXED else S


def site_of(*degrees: int) -> Site:
    world = take_stock()
    layout = ParallelLayout(*degrees)
    placement = Placement(layout=layout, devices=world.pool.devices[: layout.num_devices])
    return emu.make_site(world, ACTOR_TRAIN, placement, CONFIG.num_kv_heads)


def batch_of(
    pairs: list[tuple[int, int]], length: int = S
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    prompts_B, totals_B = np.array(pairs, np.int32).T
    tokens_BS = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (len(pairs), length))
    return tokens_BS, prompts_B, totals_B


def mask_of(prompts_B: np.ndarray, totals_B: np.ndarray) -> np.ndarray:
    return np.arange(T)[None, :] < (totals_B - prompts_B)[:, None]


def score_engine(site: Site, kind: ScoreKind, microbatch_size: int) -> ScoreEngine:
    return ScoreEngine(
        config=CONFIG,
        kind=kind,
        site=site,
        dtype="float32",
        precision="highest",
        microbatch_size=microbatch_size,
        temperature=1.0,
        token_chunk=16,
        programs=ProgramCache(),
    )


def train_engine(site: Site, microbatch_size: int, flush: int = 0) -> TrainEngine:
    return TrainEngine(
        config=CONFIG,
        head=Head.LM,
        site=site,
        param_dtype="float32",
        compute_dtype="float32",
        precision="highest",
        microbatch_size=microbatch_size,
        flush_microbatches=flush,
        remat=False,
        zero1=False,
        temperature=1.0,
        token_chunk=16,
        objective=SupervisedObjective(),
        optimizer=make_optimizer(OptimizerConfig(learning_rate=1e-2), 10),
        optimizer_key="adam",
        unroll=0,
        programs=ProgramCache(),
    )


@settings(max_examples=100, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 8)).map(
            lambda x: (x[0], x[0] + (x[1] if x[0] else 0))
        ),
        min_size=1,
        max_size=20,
    ),
    dp=st.integers(1, 3),
    pp=st.integers(1, 2),
    size=st.integers(1, 5),
    flush=st.integers(0, 3),
)
def test_what_is_placed_comes_back(
    pairs: list[tuple[int, int]], dp: int, pp: int, size: int, flush: int
):
    check_the_way_back(pairs, packed_forms(len(pairs), S, ParallelLayout(dp, pp, 1), size, flush))


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.integers(1, 120) | st.integers(1, LONG_S - T), st.integers(0, T)).map(
            lambda x: (x[0], x[0] + x[1])
        ),
        min_size=1,
        max_size=20,
    ),
    dp=st.integers(1, 3),
    pp=st.integers(1, 2),
    flush=st.integers(0, 3),
)
def test_what_is_placed_comes_back_from_long_and_short_rows(
    pairs: list[tuple[int, int]], dp: int, pp: int, flush: int
):
    *others, mixed = packed_forms(len(pairs), LONG_S, ParallelLayout(dp, pp, 1), 2, flush)
    assert [s.width for s in mixed] == [LONG_S, LONG_S // 4]
    check_the_way_back(pairs, [mixed, others[0]], LONG_S)


def check_the_way_back(
    pairs: list[tuple[int, int]], forms: Sequence[PackedForm], length: int = S
) -> None:
    tokens_BS, prompts_B, totals_B = batch_of(pairs, length)
    for n in range(len(forms)):
        # The last form may not be able to hold the batch: the others are behind it.
        batch = pack_batch(forms[n:], totals_B, prompts_B - 1, totals_B - prompts_B)
        shapes = batch.form
        for shape, count in zip(shapes, batch.fit.microbatches, strict=True):
            assert count <= shape.flushes * shape.microbatches
        values_BT = np.where(
            mask_of(prompts_B, totals_B), np.random.default_rng(0).random((len(pairs), T)), 0
        )
        arrays = batch.arrays(
            tokens_BS,
            totals_B,
            {
                "values": values_BT,
                "seen": tokens_BS[np.arange(len(pairs))[:, None], _columns(prompts_B, length)],
            },
        )
        dp = shapes[0].dp
        outputs_DX = np.concatenate([x["values"].reshape(dp, -1) for x in arrays], axis=1)
        np.testing.assert_array_equal(batch.take(outputs_DX, T), values_BT)
        assert sum((x["segments"] > 0).sum() for x in arrays) == batch.tokens
        assert batch.tokens == totals_B[totals_B > prompts_B].sum()
        for part in arrays:
            flat_FX = part["tokens"].reshape(len(part["count"]), -1)
            for f, count in enumerate(part["count"]):
                index = part["index"][f, :count]
                assert (np.diff(index) > 0).all()
                np.testing.assert_array_equal(flat_FX[f, index + 1], part["seen"][f, :count])


def _columns(prompts_B: np.ndarray, length: int = S) -> np.ndarray:
    return np.minimum(prompts_B[:, None] + np.arange(T)[None, :], length - 1)


def test_padding_share_by_hand():
    form = packed_forms(4, 10, ParallelLayout(2, 1, 1), 1)[0]
    lengths_B = np.array([10, 6, 4, 9])
    batch = pack_batch([form], lengths_B, lengths_B - 1, np.ones_like(lengths_B))
    # Rows: 10, 9, 6 + 4, and one to give both replicas two: 29 of 40 tokens.
    assert batch.microbatches.tolist() == [2]
    assert batch.padding_share == pytest.approx(1 - 29 / 40)


def plain(head: Head, params: dict[str, np.ndarray], tokens_BS: np.ndarray) -> np.ndarray:
    module = bind(decoder_graphdef(CONFIG, head, UNSHARDED), jax.tree.map(jnp.asarray, params))
    with jax.default_matmul_precision("highest"):
        return np.asarray(module(jnp.asarray(tokens_BS)))


def check_packing(packed: PackedBatch, pairs: list[tuple[int, int]]) -> None:
    """Several sequences share a row, and there are short rows where there should be."""
    assert len(packed.parts) == (2 if pairs is MIXED else 1)
    assert sum(part.packing.num_rows for part in packed.parts) < len(pairs)
    assert all((part.packing.rows_B >= 0).any() for part in packed.parts)


LAYOUTS = [(1, 1, 1), (2, 2, 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("pairs", [SHORT, MIDDLE, MIXED], ids=["narrow", "wide", "mixed"])
def test_packed_logprobs_are_those_of_each_sequence_alone(
    layout: tuple[int, int, int], pairs: list[tuple[int, int]]
):
    site = site_of(*layout)
    length = longest(pairs)
    tokens_BS, prompts_B, totals_B = batch_of(pairs, length)
    engine = score_engine(site, ScoreKind.LOGPROBS, 4)
    packed = engine.pack(length, prompts_B, totals_B)
    check_packing(packed, pairs)
    params = emu.initialize(CONFIG, Head.LM, site, "float32", seed=0)
    outputs = host.fetch(engine.dispatch(params, tokens_BS, prompts_B, totals_B))
    got = engine.unpack(outputs, length, prompts_B, totals_B, T)
    one = emu.initialize(CONFIG, Head.LM, site_of(1, 1, 1), "float32", seed=0)
    logits_BSV = plain(Head.LM, host.fetch(one), tokens_BS)
    logprobs_BSV = np.asarray(jax.nn.log_softmax(logits_BSV))
    mask_BT = mask_of(prompts_B, totals_B)
    for b, t in np.argwhere(mask_BT):
        column = prompts_B[b] + t
        expected = logprobs_BSV[b, column - 1, tokens_BS[b, column]]
        assert abs(got["logprobs"][b, t] - expected) < 1e-5
    assert not got["logprobs"][~mask_BT].any()


@pytest.mark.parametrize("pairs", [SHORT, MIDDLE], ids=["narrow", "wide"])
def test_packed_rewards_are_those_of_last_tokens(pairs: list[tuple[int, int]]):
    site = site_of(2, 1, 1)
    tokens_BS, prompts_B, totals_B = batch_of(pairs)
    engine = score_engine(site, ScoreKind.REWARDS, 4)
    params = emu.initialize(CONFIG, Head.SCALAR, site, "float32", seed=0)
    rng = np.random.default_rng(2)
    head = rng.normal(size=(CONFIG.embed_dim, 1)).astype(np.float32)
    params["scalar_head"] = host.put(head, site.sharding())
    outputs = host.fetch(engine.dispatch(params, tokens_BS, prompts_B, totals_B))
    got_B = engine.unpack(outputs, S, prompts_B, totals_B, 1)["rewards"]
    scalars_BS = plain(Head.SCALAR, host.fetch(params), tokens_BS)
    np.testing.assert_allclose(got_B, scalars_BS[np.arange(len(pairs)), totals_B - 1], atol=1e-5)


@pytest.mark.parametrize(
    "layout", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2, 2)], ids=str
)
@pytest.mark.parametrize("pairs", [SHORT, MIDDLE, MIXED], ids=["narrow", "wide", "mixed"])
def test_an_update_does_not_depend_on_the_packing(
    layout: tuple[int, int, int], pairs: list[tuple[int, int]]
):
    length = longest(pairs)
    tokens_BS, prompts_B, totals_B = batch_of(pairs, length)
    mask_BT = mask_of(prompts_B, totals_B)
    weights_BT = np.where(mask_BT, np.random.default_rng(3).random(mask_BT.shape), 0)
    engine = train_engine(site_of(*layout), 4, flush=2)
    check_packing(engine.pack(length, prompts_B, totals_B), pairs)
    state = engine.init(emu.initialize(CONFIG, Head.LM, engine.site, "float32", seed=0))
    arrays = {"weights": weights_BT}
    state, metrics = engine.dispatch(state, tokens_BS, prompts_B, totals_B, arrays, {})

    start = emu.initialize(CONFIG, Head.LM, site_of(1, 1, 1), "float32", seed=0)
    params = jax.tree.map(jnp.asarray, host.fetch(start))
    graphdef = decoder_graphdef(CONFIG, Head.LM, UNSHARDED)
    columns_BT = _columns(prompts_B, length)
    targets_BT = np.take_along_axis(tokens_BS, columns_BT, axis=1)

    def plain_loss(params: dict[str, jax.Array]) -> jax.Array:
        logprobs_BSV = jax.nn.log_softmax(bind(graphdef, params)(jnp.asarray(tokens_BS)))
        rows_B1 = np.arange(len(pairs))[:, None]
        return -jnp.sum(weights_BT * logprobs_BSV[rows_B1, columns_BT - 1, targets_BT])

    with jax.default_matmul_precision("highest"):
        loss, grads = jax.value_and_grad(plain_loss)(params)
    updates: Any = engine.optimizer.update(grads, engine.optimizer.init(params), params)[0]
    assert abs(float(metrics["loss"]) - float(loss)) < 1e-4
    got = host.fetch(state.params)
    for leaf in engine.spec:
        value = got[leaf.name][tuple(slice(0, n) for n in leaf.shape)]
        expected = params[leaf.name] + updates[leaf.name]
        np.testing.assert_allclose(value, expected, atol=5e-5, err_msg=leaf.name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_short_rows_take_no_memory_of_their_own(layout: tuple[int, int, int]):
    """They run after the long ones, in their place: what both need is what the long ones need."""
    site = site_of(*layout)
    for engine in (score_engine(site, ScoreKind.LOGPROBS, 1), train_engine(site, 1)):
        usual, mixed = engine.forms(8, LONG_S)
        assert engine.program(mixed).temp_bytes < 1.05 * engine.program(usual).temp_bytes
