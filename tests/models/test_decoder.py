"""The decoder: its leaves, masks, positions, head matching, blocked attention, FLOP formula.

Shapes: B rows, S sequence, H query heads, G key/value heads, K head dim.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.layout import KV, KVR, ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.presets import PRESETS
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.models import attention
from nereus_jax.models.decoder import (
    Decoder,
    apply_rope,
    bind,
    decoder_graphdef,
    flat_params,
    rms_norm,
    rope_tables,
)
from nereus_jax.models.mesh_axes import UNSHARDED, MeshAxes
from nereus_jax.runtime import emu, host
from nereus_jax.runtime.world import take_stock

CONFIG = DecoderConfig(
    num_layers=3,
    embed_dim=24,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=20,
    vocab_size=29,
)
B, S = 3, 9
HEADS = pytest.mark.parametrize("head", list(Head), ids=str)
VARIANTS = (
    {},
    {"tie_embeddings": False},
    {"qkv_bias": True},
    {"qk_norm": True},
    {"qkv_bias": True, "qk_norm": True, "tie_embeddings": False},
)


@functools.cache
def graph(head: Head) -> nnx.GraphDef:
    return decoder_graphdef(CONFIG, head, UNSHARDED)


@functools.cache
def params(head: Head) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        leaf.name: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32)
        for leaf in CONFIG.spec(head)
    }


@functools.partial(jax.jit, static_argnums=0)
def run(head: Head, values: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return bind(graph(head), values)(tokens)


def rows(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (B, S))


def held_leaves(config: DecoderConfig, head: Head) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> shape and dtype of what a module has, which is parameters and nothing else."""
    module = nnx.eval_shape(lambda: Decoder(config, head, dtype="bfloat16", rngs=nnx.Rngs(0)))
    held = {
        ".".join(str(p) for p in path): leaf.get_value()
        for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }
    assert not nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param))), "no state but parameters"
    return {name: (x.shape, str(x.dtype)) for name, x in held.items()}


@HEADS
@pytest.mark.parametrize(
    "config",
    [
        *(dataclasses.replace(CONFIG, **change) for change in VARIANTS),
        *(pytest.param(config, id=name) for name, config in PRESETS.items()),
    ],
)
def test_the_leaf_table_is_what_the_module_holds(head: Head, config: DecoderConfig):
    spec = config.spec(head, "bfloat16")
    assert held_leaves(config, head) == {leaf.name: (leaf.shape, leaf.dtype) for leaf in spec}


@HEADS
def test_bind_and_flat_params_are_inverse(head: Head):
    bound = flat_params(bind(graph(head), params(head)))
    assert bound.keys() == params(head).keys()
    for name, value in params(head).items():
        assert bound[name] is value or np.array_equal(bound[name], value)


def test_every_layer_of_a_fresh_module_has_draws_of_its_own():
    values = flat_params(jax.jit(lambda: Decoder(CONFIG, Head.LM, rngs=nnx.Rngs(3)))())
    layers = np.asarray(values["layers.q"])
    assert not np.array_equal(layers[0], layers[1])
    assert not np.array_equal(values["layers.gate"], values["layers.up"])


@HEADS
def test_initial_values_are_the_same_on_every_mesh(head: Head):
    world = take_stock()
    spec = CONFIG.spec(head)
    reference: dict[str, np.ndarray] = {}
    for layout in (ParallelLayout(1, 1, 1), ParallelLayout(2, 2, 2), ParallelLayout(1, 2, 3)):
        placement = Placement(layout=layout, devices=world.pool.devices[: layout.num_devices])
        site = emu.make_site(world, ACTOR_TRAIN, placement, CONFIG.num_kv_heads)
        arrays = emu.initialize(CONFIG, head, site, "float32", seed=7)
        for leaf in spec:
            assert arrays[leaf.name].sharding == site.leaf_sharding(leaf, spec.rules)
        got = {name: x.copy() for name, x in host.fetch(arrays).items()}
        for leaf in spec:
            inside = tuple(slice(0, n) for n in leaf.shape)
            values = got[leaf.name][inside].copy()
            got[leaf.name][inside] = 0
            assert not got[leaf.name].any(), "padding is zero"
            first = reference.setdefault(leaf.name, values)
            np.testing.assert_allclose(values, first, rtol=1e-6, err_msg=leaf.name)
    assert reference["layers.attn_norm"].min() == 1.0
    assert reference["embed"].std() == pytest.approx(0.02, rel=0.1)
    assert not np.array_equal(reference["layers.gate"], reference["layers.up"])


@HEADS
def test_a_later_token_changes_no_earlier_output(head: Head):
    tokens = rows()
    changed = tokens.copy()
    changed[:, 5] = (changed[:, 5] + 1) % CONFIG.vocab_size
    before, after = (np.asarray(run(head, params(head), jnp.asarray(x))) for x in (tokens, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    moved = np.abs(before - after).reshape(B, S, -1).max(axis=-1)
    assert (moved[:, 5:] > 1e-4).all(), "and it does change every later one"


@HEADS
def test_rows_and_right_padding_do_not_matter(head: Head):
    tokens = rows()
    short = run(head, params(head), jnp.asarray(tokens[1:2, :6]))
    np.testing.assert_allclose(
        run(head, params(head), jnp.asarray(tokens))[1, :6], short[0], atol=1e-5
    )


def test_only_differences_of_positions_matter_to_attention():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))
    frequencies = [1.0, 0.3, 0.1, 0.03]

    def score(q_position: int, k_position: int) -> float:
        q_tables, k_tables = (
            rope_tables(jnp.full((1, 1), p), frequencies) for p in (q_position, k_position)
        )
        return float(jnp.sum(apply_rope(q, *q_tables) * apply_rope(k, *k_tables)))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


def test_rope_rotates_complex_numbers():
    rng = np.random.default_rng(0)
    head_dim, theta = 8, 500.0
    x = rng.normal(size=(2, 5, 3, head_dim)).astype(np.float32)
    positions = rng.integers(0, 300, (2, 5))
    numbers = x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]
    angles = positions[:, :, None, None] * theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    expected = numbers * np.exp(1j * angles)
    config = dataclasses.replace(CONFIG, head_dim=head_dim, rope_theta=theta)
    tables = rope_tables(jnp.asarray(positions), config.rope_frequencies())
    got = apply_rope(jnp.asarray(x), *tables)
    both = np.concatenate([expected.real, expected.imag], axis=-1)
    np.testing.assert_allclose(got, both, atol=2e-4)


def test_rms_norm_by_hand():
    # mean(3^2, 4^2) = 12.5
    x = jnp.array([[[3.0, 4.0]]])
    got = rms_norm(x, jnp.array([2.0, 1.0]), 0.0)
    np.testing.assert_allclose(got, [[[6 / 12.5**0.5, 4 / 12.5**0.5]]], rtol=1e-6)
    assert rms_norm(x.astype(jnp.bfloat16), jnp.ones(2), 1e-5).dtype == jnp.bfloat16
    heads = jnp.tile(x[:, :, None, :], (1, 1, 3, 1))
    each = rms_norm(heads, jnp.array([2.0, 1.0]), 0.0)
    np.testing.assert_array_equal(each, jnp.tile(got[:, :, None, :], (1, 1, 3, 1)))


@pytest.mark.parametrize("query_block", [1, 4, 5])
def test_blocks_of_queries_change_nothing(query_block: int):
    rng = np.random.default_rng(0)
    shapes = [(2, 11, 6, 4), (2, 11, 3, 4), (2, 11, 3, 4)]
    args = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    weight = jnp.asarray(rng.normal(size=shapes[0]), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def outputs_and_gradients(block: int, q: jax.Array, k: jax.Array, v: jax.Array):
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = attention.causal_attention(q, k, v, block)
            return jnp.sum(weight * out), out

        with jax.default_matmul_precision("highest"):
            return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    q, k, v = args
    whole, blocked = (outputs_and_gradients(b, q, k, v) for b in (11, query_block))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, blocked)


def test_causal_attention_against_a_loop():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 4, 4, 2)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, 4, 2, 2)).astype(np.float32)
    expected = np.zeros_like(q)
    for s in range(4):
        for h in range(4):
            scores = k[0, : s + 1, h // 2] @ q[0, s, h] / np.sqrt(2)
            weights = np.exp(scores) / np.exp(scores).sum()
            expected[0, s, h] = weights @ v[0, : s + 1, h // 2]
    with jax.default_matmul_precision("highest"):
        got = attention.causal_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v))
        one = attention.cached_attention(
            jnp.asarray(q[:, 2]),
            jnp.asarray(k.swapaxes(1, 2)),
            jnp.asarray(v.swapaxes(1, 2)),
            jnp.array([2]),
        )
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(one[:, 0], expected[:, 2], atol=1e-5)


@pytest.mark.parametrize(("query_block", "span"), [(3, 5), (4, 7), (4, None), (64, 5), (64, None)])
def test_segments_attend_to_themselves_alone(query_block: int, span: int | None):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 17, 4, 2)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, 2, 17, 2, 2)), jnp.float32)
    lengths = [[5, 1, 4, 3, 4], [2, 5, 5, 5]]
    segments = jnp.asarray([np.repeat(np.arange(len(n)), n) for n in lengths])

    def packed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention.causal_attention(q, k, v, query_block, segments_BS=segments, span=span)

    def alone(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        rows = []
        for row, cut in enumerate(lengths):
            ends = np.cumsum(cut)
            parts = [slice(end - n, end) for end, n in zip(ends, cut, strict=True)]
            one = [
                attention.causal_attention(q[row, None, p], k[row, None, p], v[row, None, p])
                for p in parts
            ]
            rows.append(jnp.concatenate(one, axis=1))
        return jnp.concatenate(rows)

    weight = jnp.asarray(rng.normal(size=q.shape), jnp.float32)

    def loss(function: Callable[..., jax.Array], *x: jax.Array) -> jax.Array:
        return jnp.sum(weight * function(*x))

    with jax.default_matmul_precision("highest"):
        for function in (packed, alone):
            assert function(q, k, v).shape == q.shape
        np.testing.assert_allclose(packed(q, k, v), alone(q, k, v), atol=1e-5)
        got, expected = (
            jax.grad(functools.partial(loss, f), argnums=(0, 1, 2))(q, k, v)
            for f in (packed, alone)
        )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def heads_found(num_heads: int, num_kv_heads: int, tp: int) -> jax.Array:
    """[tp, 2, groups]: which global key (and value) head each rank's `match_heads` returns."""
    config = dataclasses.replace(CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads)
    _, _, kv, kvr = ParallelLayout(1, 1, tp).mesh_shape(num_kv_heads)
    held, axes = num_kv_heads // kv, MeshAxes(kv=(KV,), kvr=(KVR,))

    def one(kv_rank: jax.Array, _: jax.Array) -> jax.Array:
        ids_BSGK = (kv_rank * held + jnp.arange(held))[None, None, :, None]
        keys, values = attention.match_heads(
            num_heads // tp, ids_BSGK, ids_BSGK + 100, config, axes
        )
        return jnp.stack([keys[0, 0, :, 0], values[0, 0, :, 0] - 100])

    ranks = jax.vmap(jax.vmap(one, (None, 0), axis_name=KVR), (0, None), axis_name=KV)
    return ranks(jnp.arange(kv), jnp.arange(kvr)).reshape(tp, 2, -1)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize("num_heads", [6, 8, 12])
def test_every_query_head_finds_its_key_value_head(num_heads: int):
    cases = [(g, tp) for g in divisors(num_heads) for tp in divisors(num_heads)]
    found = jax.jit(lambda: [heads_found(num_heads, g, tp) for g, tp in cases])()
    for (num_kv_heads, tp), ids in zip(cases, found, strict=True):
        here, groups = num_heads // tp, ids.shape[2]
        assert here % groups == 0
        for head in range(num_heads):
            # `_attend` gives query head i held here the key i // (heads / groups).
            index = (head % here) // (here // groups)
            right = head * num_kv_heads // num_heads
            assert (ids[head // here, :, index] == right).all(), (num_kv_heads, tp, head)


@pytest.mark.parametrize("head", [Head.LM, Head.SCALAR], ids=str)
def test_flops_formula_against_xla(head: Head):
    config = dataclasses.replace(
        CONFIG, num_layers=1, embed_dim=64, num_heads=8, head_dim=16, mlp_dim=160, vocab_size=256
    )
    graphdef = decoder_graphdef(config, head, UNSHARDED)
    abstract = {x.name: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in config.spec(head)}
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    compiled = jax.jit(lambda p, t: bind(graphdef, p)(t)).lower(abstract, tokens).compile()
    analysis = compiled.cost_analysis()
    assert analysis is not None
    counted = analysis["flops"]
    # XLA computes all scores and masks half of them: every token attends to 64 positions.
    head_tokens = 128 if head is Head.LM else 0
    formula = config.forward_flops(num_tokens=128, mean_context=64.0, head_tokens=head_tokens)
    print(f"{head}: XLA / formula = {counted / formula:.3f}")
    assert counted == pytest.approx(formula, rel=0.1)
