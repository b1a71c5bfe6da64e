"""Batches and gradients that are not the usual ones, on several devices.

Shapes: B rows, P prompt, T response.
"""

import functools

import jax
import numpy as np
import pytest

from nereus_jax.config import OptimizerConfig
from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.models.sampling import SamplingConfig
from nereus_jax.rl.objectives import SupervisedObjective
from nereus_jax.runtime import emu, host
from nereus_jax.runtime.emu import Site
from nereus_jax.runtime.engines.generate import GenerateEngine
from nereus_jax.runtime.engines.train import TrainEngine, TrainState
from nereus_jax.runtime.optimizers import make_optimizer
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import take_stock

CONFIG = DecoderConfig(
    num_layers=2,
    embed_dim=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    mlp_dim=10,
    vocab_size=13,
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2)
P, T = 3, 24


def site_of(*degrees: int) -> Site:
    world = take_stock()
    layout = ParallelLayout(*degrees)
    placement = Placement(layout=layout, devices=world.pool.devices[: layout.num_devices])
    return emu.make_site(world, ACTOR_TRAIN, placement, CONFIG.num_kv_heads)


@functools.cache
def generated(layout: tuple[int, int, int], num_rows: int) -> dict[str, np.ndarray]:
    site = site_of(*layout)
    engine = GenerateEngine(
        config=CONFIG,
        site=site,
        dtype="float32",
        prefill_rows=8,
        precision="highest",
        programs=ProgramCache(),
    )
    params = emu.initialize(CONFIG, Head.LM, site, "float32", seed=0)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, P))[:num_rows]
    sampling = SamplingConfig(stop_ids=(1, 2), max_tokens=T)
    outputs = engine.dispatch(
        params, tokens, np.full(num_rows, P), np.arange(num_rows), 3, sampling
    )
    return {name: x[:num_rows] for name, x in host.fetch(outputs).items()}


@pytest.mark.parametrize(
    "layout", [pytest.param((4, 1, 2), marks=pytest.mark.slow), (2, 2, 2)], ids=str
)
def test_replicas_may_stop_at_different_times(layout: tuple[int, int, int]):
    expected, got = generated((1, 1, 1), 4), generated(layout, 4)
    assert len(set(expected["lengths"])) >= 3, "the replicas run other numbers of steps"
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(got[name], expected[name])
    np.testing.assert_allclose(got["logprobs"], expected["logprobs"], atol=1e-5)


def test_fewer_rows_than_replicas():
    whole, one = generated((1, 1, 1), 4), generated((4, 1, 2), 1)
    np.testing.assert_array_equal(one["tokens"], whole["tokens"][:1])
    np.testing.assert_array_equal(one["lengths"], whole["lengths"][:1])


def make_engine(site: Site) -> TrainEngine:
    return TrainEngine(
        config=CONFIG,
        head=Head.LM,
        site=site,
        param_dtype="float32",
        compute_dtype="float32",
        precision="highest",
        microbatch_size=2,
        flush_microbatches=0,
        remat=False,
        zero1=True,
        temperature=1.0,
        token_chunk=4,
        objective=SupervisedObjective(),
        optimizer=make_optimizer(OPTIMIZER, 10),
        optimizer_key=OPTIMIZER,
        programs=ProgramCache(),
    )


def arrays_of(state: TrainState) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def test_an_update_with_a_gradient_that_is_not_finite_changes_nothing():
    engine = make_engine(site_of(2, 2, 2))
    state = engine.init(emu.initialize(CONFIG, Head.LM, engine.site, "float32", seed=0))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, (3, 8))
    prompts, totals = np.array([3, 2, 3]), np.array([8, 5, 6])
    weights = (np.arange(5) < (totals - prompts)[:, None]) / 11
    state, metrics = engine.dispatch(state, tokens, prompts, totals, {"weights": weights}, {})
    assert float(metrics["finite"]) == 1.0
    before = arrays_of(state)
    broken = {"weights": np.where(np.arange(3)[:, None] == 1, np.inf, weights)}
    state, metrics = engine.dispatch(state, tokens, prompts, totals, broken, {})
    assert float(metrics["finite"]) == 0.0
    for old, new in zip(before, arrays_of(state), strict=True):
        np.testing.assert_array_equal(old, new)
    state, metrics = engine.dispatch(state, tokens, prompts, totals, {"weights": weights}, {})
    assert float(metrics["finite"]) == 1.0
    assert any(not np.array_equal(a, b) for a, b in zip(before, arrays_of(state), strict=True))
