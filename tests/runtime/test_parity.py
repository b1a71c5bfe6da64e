"""Every layout computes what one device computes: draws, tokens, log-probabilities, gradients.

The reference is the plain `Decoder.__call__` on one device, with full logits, a full softmax and
`jax.grad` over it: it shares no sharding, pipeline, cache, chunking or remat with the engines. The
one-device engines are a layout like the others. Weights are large enough that attention is peaked
and logits spread by several nats, so that a wrong head or position cannot hide in the tolerance.

Shapes: B rows, P prompt, T response, S = P + T sequence, V vocabulary.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nereus_jax.config import OptimizerConfig
from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.models.decoder import Decoder, bind
from nereus_jax.models.sampling import SamplingConfig, gumbel_noise, row_keys
from nereus_jax.rl.losses import token_weights
from nereus_jax.rl.objectives import Objective, PolicyObjective, ValueObjective
from nereus_jax.runtime import emu, host
from nereus_jax.runtime.emu import Site
from nereus_jax.runtime.engines.generate import GenerateEngine
from nereus_jax.runtime.engines.score import ScoreEngine, ScoreKind
from nereus_jax.runtime.engines.train import TrainEngine
from nereus_jax.runtime.optimizers import make_optimizer
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import take_stock

B, P, T = 7, 5, 6
S = P + T
SEED, TEMPERATURE = 5, 0.8
STOP_IDS = (2, 7, 11, 30, 41)
NEAR_TIE = 1e-4  # two perturbed logits closer than this may swap between layouts
MAX_GRAD_NORM = 0.5

# 5 layers divide no pp but 5; 50 and 51 are padded by most tp; 26 is divided by few dp.
GROUPED = DecoderConfig(
    num_layers=5,
    embed_dim=26,
    num_heads=12,
    num_kv_heads=6,
    head_dim=4,
    mlp_dim=50,
    vocab_size=51,
)
FEW_KV = dataclasses.replace(
    GROUPED, num_layers=3, num_heads=8, num_kv_heads=2, tie_embeddings=False, rope_theta=100.0
)
OPTIMIZER = OptimizerConfig(
    # A large epsilon: Adam with a small one turns rounding of a gradient near 0 into a full step.
    learning_rate=1e-2,
    b1=0.5,
    eps=1e-3,
    weight_decay=0.1,
    max_grad_norm=MAX_GRAD_NORM,
)
POLICY = PolicyObjective(clip=0.2, entropy_coef=0.02, kl_estimator="k3")
VALUE = ValueObjective(value_clip=0.2)
SCALARS = {"kl_coef": 0.3}


class Case(NamedTuple):
    layout: tuple[int, int, int]
    config: DecoderConfig = GROUPED
    zero1: bool = False
    remat: bool = False
    flush: int = 2

    def __str__(self) -> str:
        name = "dp{}pp{}tp{}".format(*self.layout)
        options = [f"kv{self.config.num_kv_heads}"]
        options += [o for o in ("zero1", "remat") if getattr(self, o)]
        return "-".join([name, *options])


CASES = [
    Case((1, 1, 1)),
    # 8 devices
    Case((2, 2, 2), zero1=True, remat=True),
    Case((1, 2, 4)),  # tp 4 neither divides 6 key/value heads nor is divided by them
    Case((1, 1, 8), FEW_KV),  # tp above 2 key/value heads
    # 6 devices
    Case((3, 2, 1), zero1=True),
    Case((1, 3, 2), remat=True, flush=1),
]
SLOW_CASES = [
    Case((8, 1, 1), zero1=True),
    Case((1, 8, 1), flush=0),  # more pipeline ranks than layers
    Case((4, 1, 2), zero1=True),
    Case((4, 2, 1), remat=True),
    Case((2, 1, 4), FEW_KV, zero1=True),
    Case((2, 1, 3)),
    Case((1, 1, 6)),
    Case((1, 1, 1), FEW_KV, remat=True),
    Case((8, 1, 1)),
    Case((1, 4, 2), flush=3),
    Case((2, 4, 1), zero1=True),
    Case((1, 2, 4), FEW_KV, remat=True),
    Case((2, 2, 2), FEW_KV, zero1=True),
    Case((1, 2, 3), remat=True),
    Case((6, 1, 1), zero1=True),
    Case((1, 6, 1)),
    Case((2, 3, 1), zero1=True, flush=0),
    Case((1, 1, 4), remat=True),
    Case((2, 1, 4), zero1=True),
]
CRITIC_CASES = [
    Case((1, 1, 1)),
    Case((2, 2, 2), zero1=True, remat=True),
    Case((1, 2, 4)),
    Case((3, 2, 1), zero1=True),
]
every_case = pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW_CASES)], ids=str
)


@pytest.fixture(scope="module")
def programs() -> ProgramCache:
    return ProgramCache()


def site_of(case: Case) -> Site:
    world = take_stock()
    layout = ParallelLayout(*case.layout)
    placement = Placement(layout=layout, devices=world.pool.devices[: layout.num_devices])
    return emu.make_site(world, ACTOR_TRAIN, placement, case.config.num_kv_heads)


@functools.cache
def values_of(config: DecoderConfig, head: Head) -> dict[str, np.ndarray]:
    """Weights with logits and attention scores of several nats."""
    rng = np.random.default_rng(0)
    values = {}
    for leaf in config.spec(head):
        normal = rng.normal(size=leaf.shape).astype(np.float32)
        fan_in = leaf.shape[-2] if leaf.name.startswith("layers.") else leaf.shape[-1]
        if leaf.name.endswith("norm"):
            values[leaf.name] = 1 + 0.2 * normal
        elif leaf.name in ("embed", "lm_head"):
            values[leaf.name] = 0.4 * normal
        elif leaf.name == "scalar_head":
            values[leaf.name] = 0.2 * normal
        else:
            gain = 1.6 if leaf.name in ("layers.q", "layers.k") else 0.8
            values[leaf.name] = normal * np.float32(gain / math.sqrt(fan_in))
    return values


def place(spec: EmuSpec, site: Site, head: Head, config: DecoderConfig) -> emu.Params:
    values = values_of(config, head)
    return emu.load(spec, site, lambda name, index: values[name][index])


def ragged_rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Right-padded rows [B, S] with lengths; tokens behind the end are junk on purpose."""
    rng = np.random.default_rng(1)
    prompt_lengths = np.array([5, 2, 4, 1, 5, 3, 2])
    response_lengths = np.array([6, 1, 4, 6, 2, 5, 3])
    return rng.integers(0, GROUPED.vocab_size, (B, S)), prompt_lengths, response_lengths


def mask_of(response_lengths: np.ndarray) -> np.ndarray:
    return np.arange(T)[None, :] < response_lengths[:, None]


# --- the reference: one device, full logits ------------------------------------------------------


@functools.cache
def graph_of(config: DecoderConfig, head: Head) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, head, rngs=nnx.Rngs(0))))[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def plain_forward(
    config: DecoderConfig, head: Head, params: emu.Params, tokens_BS: jax.Array
) -> jax.Array:
    """Logits / temperature [B, S, V] or values [B, S]."""
    with jax.default_matmul_precision("highest"):
        outputs = bind(graph_of(config, head), params)(tokens_BS)
        return outputs / TEMPERATURE if head is Head.LM else outputs


def plain_outputs(
    config: DecoderConfig, head: Head, params: emu.Params, tokens_BS: np.ndarray
) -> dict[str, jax.Array]:
    """Response-aligned outputs [B, T] by indexing full arrays [B, S(, V)]."""
    _, prompt_lengths, _ = ragged_rows()
    columns_BT = np.minimum(prompt_lengths[:, None] + np.arange(T), S - 1)
    rows_B1 = np.arange(B)[:, None]
    picked = plain_forward(config, head, params, jnp.asarray(tokens_BS))[rows_B1, columns_BT - 1]
    if head is Head.SCALAR:
        return {"values": picked}
    logprobs_BTV = jax.nn.log_softmax(picked, axis=-1)
    entropy_BT = -jnp.sum(jnp.exp(logprobs_BTV) * logprobs_BTV, axis=-1)
    targets_BT = tokens_BS[rows_B1, columns_BT]
    logprobs_BT = logprobs_BTV[rows_B1, np.arange(T)[None, :], targets_BT]
    return {"logprobs": logprobs_BT, "entropy": entropy_BT}


class Drawn(NamedTuple):
    tokens: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    finished: np.ndarray
    comparable: np.ndarray  # [B] positions before the first near tie


@functools.cache
def plain_generation(config: DecoderConfig) -> Drawn:
    """Draws by hand: argmax of full logits / temperature + Gumbel noise, one full pass a token."""
    tokens_BS, prompt_lengths, _ = ragged_rows()
    tokens_BS = tokens_BS * (np.arange(S) < prompt_lengths[:, None])
    params = {k: jnp.asarray(v) for k, v in values_of(config, Head.LM).items()}
    rows = np.arange(B)
    tokens, logprobs = np.zeros((B, T), int), np.zeros((B, T), np.float32)
    lengths, finished, comparable = np.zeros(B, int), np.zeros(B, bool), np.full(B, T)
    for t in range(T):
        logits_BSV = plain_forward(config, Head.LM, params, jnp.asarray(tokens_BS))
        logits_BV = logits_BSV[rows, prompt_lengths + t - 1]
        keys = row_keys(jnp.uint32(SEED), jnp.asarray(samples()), jnp.full(B, t, jnp.int32))
        noise_BV = gumbel_noise(keys, jnp.arange(config.vocab_size))
        perturbed = np.asarray(logits_BV + noise_BV)
        best_two = np.sort(perturbed, axis=1)[:, -2:]
        close = best_two[:, 1] - best_two[:, 0] < NEAR_TIE
        comparable = np.where(close & ~finished, np.minimum(comparable, t), comparable)
        drawn = perturbed.argmax(axis=1)
        tokens[~finished, t] = drawn[~finished]
        tokens_BS[rows, prompt_lengths + t] = tokens[:, t]
        logprobs[:, t] = np.where(finished, 0, jax.nn.log_softmax(logits_BV)[rows, drawn])
        lengths += ~finished
        finished |= np.isin(drawn, STOP_IDS)
    return Drawn(tokens, logprobs, lengths, finished, comparable)


def samples() -> np.ndarray:
    return np.array([3, 1, 4, 15, 9, 2, 2**32 - 1], np.uint32)


def batch_arrays(config: DecoderConfig) -> dict[str, np.ndarray]:
    """What both objectives read; log-ratios on both sides of the clip, NaN where masked."""
    rng = np.random.default_rng(2)
    _, _, response_lengths = ragged_rows()
    mask = mask_of(response_lengths)
    normal = rng.normal(size=(6, B, T)).astype(np.float32)
    arrays = {
        "old_logprobs": reference_scores(config)["logprobs"] + 0.3 * normal[0],
        "ref_logprobs": reference_scores(config)["logprobs"] + 0.3 * normal[1],
        "advantages": normal[2],
        "old_values": normal[3],
        "returns": normal[4],
    }
    arrays = {name: np.where(mask, x, np.nan) for name, x in arrays.items()}
    return {**arrays, "weights": token_weights(mask, "sequence")}


@functools.cache
def reference_scores(config: DecoderConfig) -> dict[str, np.ndarray]:
    params = {k: jnp.asarray(v) for k, v in values_of(config, Head.LM).items()}
    return host.fetch(plain_outputs(config, Head.LM, params, ragged_rows()[0]))


class Update(NamedTuple):
    metrics: dict[str, float]
    gradients: dict[str, np.ndarray]
    params: dict[str, np.ndarray]


@functools.cache
def plain_update(config: DecoderConfig, head: Head) -> Update:
    """Loss, jax.grad through the full logits, and one optimizer update, all on one device."""
    tokens, _, _ = ragged_rows()
    objective = POLICY if head is Head.LM else VALUE
    optimizer = make_optimizer(OPTIMIZER, 10)
    arrays = {k: jnp.asarray(v) for k, v in batch_arrays(config).items()}
    scalars = {k: jnp.float32(v) for k, v in SCALARS.items()}
    params = {k: jnp.asarray(v) for k, v in values_of(config, head).items()}

    def loss(params: emu.Params) -> tuple[jax.Array, dict[str, jax.Array]]:
        return objective(plain_outputs(config, head, params, tokens), arrays, scalars)

    @jax.jit
    def update(params: emu.Params) -> tuple[Any, ...]:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return value, metrics, grads, optax.apply_updates(params, updates)

    value, metrics, grads, new = update(params)
    norm = math.sqrt(sum(float(jnp.sum(jnp.square(g))) for g in grads.values()))
    values = {"loss": float(value), "grad_norm": norm, "finite": 1.0}
    values |= {name: float(x) for name, x in metrics.items()}
    return Update(values, host.fetch(grads), host.fetch(new))


# --- the engines --------------------------------------------------------------------------------


def train_engine(case: Case, head: Head, programs: ProgramCache, dtype: str) -> TrainEngine:
    objective: Objective = POLICY if head is Head.LM else VALUE
    return TrainEngine(
        config=case.config,
        head=head,
        site=site_of(case),
        param_dtype="float32",
        compute_dtype=dtype,
        precision="highest",
        microbatch_size=2,
        flush_microbatches=case.flush,
        remat=case.remat,
        zero1=case.zero1,
        temperature=TEMPERATURE,
        token_chunk=5,
        objective=objective,
        optimizer=make_optimizer(OPTIMIZER, 10),
        optimizer_key=OPTIMIZER,
        programs=programs,
    )


def logical(spec: EmuSpec, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays without their padding, which must be exactly zero."""
    cut = {}
    for leaf in spec:
        inside = tuple(slice(0, n) for n in leaf.shape)
        cut[leaf.name] = arrays[leaf.name][inside].copy()
        outside = arrays[leaf.name].copy()
        outside[inside] = 0
        assert not outside.any(), f"padding of {leaf.name} is not zero"
    return cut


def moments_of(opt_state: object) -> list[dict[str, np.ndarray]]:
    """The dicts of parameter-shaped arrays in an optimizer's state: mu, then nu."""
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=lambda n: isinstance(n, dict))]
    return [host.fetch(x) for x in found if isinstance(x, dict)]


def run_update(engine: TrainEngine, case: Case) -> Update:
    """One update by the engine; gradients are read off the first moment, (1 - b1) * clipped."""
    tokens, prompt_lengths, response_lengths = ragged_rows()
    state = engine.init(place(engine.spec, engine.site, engine.head, case.config))
    arrays, totals = batch_arrays(case.config), prompt_lengths + response_lengths
    state, metrics = engine.dispatch(state, tokens, prompt_lengths, totals, arrays, SCALARS)
    values = {name: float(x) for name, x in host.fetch(metrics).items()}
    params = logical(engine.spec, host.fetch(state.params))
    mu, _ = moments_of(state.opt_state)
    scale = max(1.0, values["grad_norm"] / MAX_GRAD_NORM) / (1 - OPTIMIZER.b1)
    gradients = {name: x * scale for name, x in logical(engine.spec, mu).items()}
    state, _ = engine.dispatch(state, tokens, prompt_lengths, totals, arrays, SCALARS)
    logical(engine.spec, host.fetch(state.params))
    for moment in moments_of(state.opt_state):
        logical(engine.spec, moment)
    return Update(values, gradients, params)


def relative_error(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest relative L2 error of a leaf."""
    return max(
        float(np.linalg.norm(got[n] - expected[n]) / np.linalg.norm(expected[n])) for n in expected
    )


def check_update(got: Update, expected: Update, label: str) -> None:
    gradient_error = relative_error(got.gradients, expected.gradients)
    differences = {n: abs(got.metrics[n] - x) for n, x in expected.metrics.items()}
    moved = max(float(np.abs(got.params[n] - x).max()) for n, x in expected.params.items())
    print(
        f"{label}: loss {differences['loss']:.1e}, gradient {gradient_error:.1e}, "
        f"parameter {moved:.1e}"
    )
    assert got.metrics.keys() >= differences.keys()
    assert all(x < 1e-4 for x in differences.values()), differences
    assert differences["loss"] < 1e-5
    assert gradient_error < 1e-4
    assert moved < 1e-5


def test_the_reference_tells_wrong_from_right():
    """Large effects of what the layouts must get right, so that the tolerances mean something."""
    tokens, _, response_lengths = ragged_rows()
    mask = mask_of(response_lengths)
    params = {k: jnp.asarray(v) for k, v in values_of(GROUPED, Head.LM).items()}
    right = reference_scores(GROUPED)["logprobs"]
    swapped = params["layers.k"].reshape(5, 26, 6, 4)[:, :, np.array([1, 0, 2, 3, 4, 5])]
    wrong_head = {**params, "layers.k": swapped.reshape(5, 26, 24)}
    no_last_layer = {**params, "layers.o": params["layers.o"].at[4].set(0.0)}
    for changed in (wrong_head, no_last_layer):
        wrong = plain_outputs(GROUPED, Head.LM, changed, tokens)["logprobs"]
        assert np.abs(wrong - right)[mask].max() > 0.1
    expected = plain_update(GROUPED, Head.LM)
    assert 0.05 < expected.metrics["clip_fraction"] < 0.95
    assert expected.metrics["grad_norm"] > MAX_GRAD_NORM
    generated = plain_generation(GROUPED)
    assert 1 <= generated.finished.sum() < B, "some rows end early, some do not"
    assert (generated.comparable == T).mean() > 0.5


@every_case
def test_generated_tokens_and_logprobs(case: Case, programs: ProgramCache):
    tokens, prompt_lengths, _ = ragged_rows()
    expected = plain_generation(case.config)
    site = site_of(case)
    engine = GenerateEngine(
        prefill_rows=2,
        config=case.config,
        site=site,
        dtype="float32",
        precision="highest",
        programs=programs,
    )
    params = place(case.config.spec(Head.LM), site, Head.LM, case.config)
    sampling = SamplingConfig(temperature=TEMPERATURE, stop_ids=STOP_IDS, max_tokens=T)
    outputs = engine.dispatch(params, tokens[:, :P], prompt_lengths, samples(), SEED, sampling)
    got = {name: x[:B] for name, x in host.fetch(outputs).items()}
    compared = mask_of(np.minimum(expected.comparable, T))
    worst = np.abs((got["logprobs"] - expected.logprobs)[compared]).max()
    print(f"{case}: log-probability {worst:.1e} over {compared.sum()} positions")
    np.testing.assert_array_equal(got["tokens"][compared], expected.tokens[compared])
    assert worst < 1e-4
    whole = expected.comparable == T
    np.testing.assert_array_equal(got["lengths"][whole], expected.lengths[whole])
    np.testing.assert_array_equal(got["finished"][whole], expected.finished[whole])


@every_case
def test_scored_logprobs_and_entropy(case: Case, programs: ProgramCache):
    got = score(case, ScoreKind.LOGPROBS, "float32", programs)
    check_scores(case, got, reference_scores(case.config))


@every_case
def test_actor_update(case: Case, programs: ProgramCache):
    engine = train_engine(case, Head.LM, programs, "float32")
    check_update(run_update(engine, case), plain_update(case.config, Head.LM), str(case))


@pytest.mark.parametrize("case", CRITIC_CASES, ids=str)
def test_critic_update(case: Case, programs: ProgramCache):
    engine = train_engine(case, Head.SCALAR, programs, "float32")
    check_update(run_update(engine, case), plain_update(case.config, Head.SCALAR), str(case))


@pytest.mark.parametrize("case", CRITIC_CASES, ids=str)
@pytest.mark.parametrize("kind", [ScoreKind.VALUES, ScoreKind.REWARDS])
def test_scored_values_and_rewards(case: Case, kind: ScoreKind, programs: ProgramCache):
    tokens, prompt_lengths, response_lengths = ragged_rows()
    params = {k: jnp.asarray(v) for k, v in values_of(case.config, Head.SCALAR).items()}
    if kind is ScoreKind.REWARDS:
        values_BS = plain_forward(case.config, Head.SCALAR, params, jnp.asarray(tokens))
        last = np.asarray(values_BS)[np.arange(B), prompt_lengths + response_lengths - 1]
        got = score(case, kind, "float32", programs)["rewards"]
        np.testing.assert_allclose(got, last, atol=1e-4)
    else:
        values = plain_outputs(case.config, Head.SCALAR, params, tokens)
        check_scores(case, score(case, kind, "float32", programs), host.fetch(values))


def score(case: Case, kind: ScoreKind, dtype: str, programs: ProgramCache) -> dict[str, np.ndarray]:
    tokens, prompt_lengths, response_lengths = ragged_rows()
    site = site_of(case)
    engine = ScoreEngine(
        config=case.config,
        kind=kind,
        site=site,
        dtype=dtype,
        precision="highest",
        microbatch_size=2,
        temperature=TEMPERATURE,
        token_chunk=5,
        programs=programs,
    )
    params = place(case.config.spec(engine.head, dtype), site, engine.head, case.config)
    totals = prompt_lengths + response_lengths
    outputs = host.fetch(engine.dispatch(params, tokens, prompt_lengths, totals))
    return engine.unpack(outputs, tokens.shape[1], prompt_lengths, totals, T)


def check_scores(case: Case, got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    _, _, response_lengths = ragged_rows()
    mask = mask_of(response_lengths)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert np.isfinite(got[name]).all(), "also behind the end of a response"
        worst = np.abs(got[name] - values)[mask].max()
        print(f"{case}: {name} {worst:.1e}")
        assert worst < 1e-4


BF16_CASES = [Case((1, 1, 1)), Case((2, 2, 2)), Case((1, 2, 4))]


def test_bf16_logprobs_differ_little_between_layouts_and_from_f32(programs: ProgramCache):
    _, _, response_lengths = ragged_rows()
    mask = mask_of(response_lengths)
    exact = reference_scores(GROUPED)["logprobs"][mask]
    by_layout = {
        str(case): score(case, ScoreKind.LOGPROBS, "bfloat16", programs)["logprobs"][mask]
        for case in BF16_CASES
    }
    one_device = by_layout[str(BF16_CASES[0])]
    for name, logprobs in by_layout.items():
        for against, reference in (("f32", exact), ("one device", one_device)):
            difference = np.abs(logprobs - reference)
            quantiles = np.quantile(difference, [0.5, 0.9, 1.0])
            print(f"bf16 {name} against {against}: median, 90 %, max", quantiles.round(4))
            assert quantiles[0] < 0.05
            assert quantiles[2] < 0.5


def test_bf16_update_is_near_the_f32_one(programs: ProgramCache):
    case = Case((1, 2, 2), remat=True)
    got = run_update(train_engine(case, Head.LM, programs, "bfloat16"), case)
    expected = plain_update(GROUPED, Head.LM)
    error = relative_error(got.gradients, expected.gradients)
    loss = abs(got.metrics["loss"] - expected.metrics["loss"])
    print(f"bf16 {case}: loss {loss:.1e}, gradient {error:.1e}")
    assert loss < 0.05
    assert error < 0.3
