"""Training with biases of q, k, v and norms of q and k: every layout has the gradients of one
device, and padding stays zero.

One model has both, which no published one has: its leaves are cut and summed in every way there is.

Shapes: B rows, S sequence, T response.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nereus_jax.config import OptimizerConfig
from nereus_jax.core.architectures import DecoderConfig, Head, Llama3Rope
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.models.decoder import Decoder, bind
from nereus_jax.rl.objectives import SupervisedObjective
from nereus_jax.runtime import emu, host
from nereus_jax.runtime.engines.train import TrainEngine, TrainState
from nereus_jax.runtime.optimizers import make_optimizer
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import take_stock

CONFIG = DecoderConfig(
    num_layers=3,
    embed_dim=20,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    mlp_dim=22,
    vocab_size=31,
    rope_theta=100.0,
    rope_scaling=Llama3Rope(
        factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16
    ),
    qkv_bias=True,
    qk_norm=True,
)
NEW_LEAVES = {f"layers.{x}" for x in ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm")}
B, S, P = 4, 10, 4
T = S - P
# tp above the key/value heads; padded layers, and replicas that gather what ZeRO-1 scattered;
# padded layers with tp that does not divide the key/value heads.
LAYOUTS = [
    ((1, 1, 6), False),
    ((2, 2, 1), True),
    pytest.param((1, 2, 2), False, marks=pytest.mark.slow),
]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)


@functools.cache
def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {}
    for leaf in CONFIG.spec(Head.LM):
        normal = rng.normal(size=leaf.shape).astype(np.float32)
        scale = leaf.shape[-2] ** -0.5 if len(leaf.shape) == 3 else 0.4
        made[leaf.name] = 1 + 0.2 * normal if leaf.name.endswith("norm") else scale * normal
    return {name: np.asarray(x, np.float32) for name, x in made.items()}


@functools.cache
def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 31, (B, S)).astype(np.int32), rng.random((B, T)).astype(np.float32) / B


@functools.cache
def plain_gradients() -> dict[str, np.ndarray]:
    """jax.grad through the full logits on one device."""
    graph = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, Head.LM, rngs=nnx.Rngs(0))))[0]
    tokens_BS, weights_BT = (jnp.asarray(x) for x in batch())

    @jax.jit
    @jax.grad
    def gradients(params: emu.Params) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            logits_BSV = bind(graph, params)(tokens_BS)
        logprobs_BTV = jax.nn.log_softmax(logits_BSV[:, P - 1 : S - 1], axis=-1)
        picked = jnp.take_along_axis(logprobs_BTV, tokens_BS[:, P:, None], axis=2)[:, :, 0]
        return -jnp.sum(weights_BT * picked)

    return host.fetch(gradients({k: jnp.asarray(v) for k, v in values().items()}))


def engine_on(layout: tuple[int, int, int], zero1: bool) -> TrainEngine:
    world, parallel = take_stock(), ParallelLayout(*layout)
    placement = Placement(layout=parallel, devices=world.pool.devices[: parallel.num_devices])
    return TrainEngine(
        config=CONFIG,
        head=Head.LM,
        site=emu.make_site(world, ACTOR_TRAIN, placement, CONFIG.num_kv_heads),
        param_dtype="float32",
        compute_dtype="float32",
        precision="highest",
        microbatch_size=1,
        flush_microbatches=2,
        remat=False,
        zero1=zero1,
        temperature=1.0,
        token_chunk=8,
        objective=SupervisedObjective(),
        optimizer=make_optimizer(OPTIMIZER, 10),
        optimizer_key=OPTIMIZER,
        programs=ProgramCache(),
    )


def check_padding(engine: TrainEngine, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays without their padding, which is zero to the last bit."""
    cut = {}
    for leaf in engine.spec:
        inside = tuple(slice(0, n) for n in leaf.shape)
        outside = arrays[leaf.name].copy()
        outside[inside] = 0
        assert not outside.any(), f"padding of {leaf.name}"
        cut[leaf.name] = arrays[leaf.name][inside]
    return cut


def train(engine: TrainEngine, num_updates: int) -> tuple[TrainState, dict[str, np.ndarray]]:
    """The state after some updates, and the first moment after the first one."""
    params = emu.load(engine.spec, engine.site, lambda name, index: values()[name][index])
    state, (tokens_BS, weights_BT) = engine.init(params), batch()
    prompts_B, totals_B = np.full(B, P), np.full(B, S)
    first: dict[str, np.ndarray] = {}
    for _ in range(num_updates):
        arrays = {"weights": weights_BT}
        state, _ = engine.dispatch(state, tokens_BS, prompts_B, totals_B, arrays, {})
        first = first or moments(state)[0]
    return state, first


def moments(state: TrainState) -> list[dict[str, np.ndarray]]:
    found = jax.tree.leaves(state.opt_state, is_leaf=lambda node: isinstance(node, dict))
    return [host.fetch(x) for x in found if isinstance(x, dict)]


@pytest.mark.parametrize(("layout", "zero1"), LAYOUTS, ids=str)
def test_gradients_are_those_of_one_device_and_padding_stays_zero(
    layout: tuple[int, int, int], zero1: bool
):
    engine, wanted = engine_on(layout, zero1), plain_gradients()
    state, first = train(engine, 3)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in wanted.values()))
    scale = (1 - OPTIMIZER.b1) * min(1.0, OPTIMIZER.max_grad_norm / norm)
    got = check_padding(engine, first)
    assert wanted.keys() > NEW_LEAVES
    for name, gradient in wanted.items():
        assert np.linalg.norm(gradient) > 1e-3, f"{name} is trained"
        error = np.linalg.norm(got[name] / scale - gradient) / np.linalg.norm(gradient)
        assert error < 1e-4, (name, error)
    params = check_padding(engine, host.fetch(state.params))
    for moment in moments(state):
        check_padding(engine, moment)
    for name in NEW_LEAVES:
        assert np.abs(params[name] - values()[name]).max() > 1e-3, f"{name} moved"
