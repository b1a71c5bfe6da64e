"""Sampling: noise that only (seed, sample, position, token) decides, distributions, truncation,
stopping.

Shapes: B rows, V vocabulary, D embed.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.models.decode_state import Rows
from nereus_jax.models.decoder import bind, decoder_graphdef
from nereus_jax.models.generate import Generator
from nereus_jax.models.mesh_axes import UNSHARDED, MeshAxes
from nereus_jax.models.sampling import SamplingConfig, gumbel_noise, row_keys, sample_tokens

V, PADDED = 51, 56
SHARDED_VOCAB = MeshAxes(pp=("a",), kv=("b",))


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def keys(num_rows: int, seed: int = 0, position: int = 0) -> jax.Array:
    indices = jnp.arange(num_rows, dtype=jnp.uint32)
    return row_keys(jnp.uint32(seed), indices, jnp.full(num_rows, position, jnp.int32))


# --- noise --------------------------------------------------------------------------------------


def test_noise_of_a_slice_is_a_slice_of_the_noise():
    whole = gumbel_noise(keys(4), jnp.arange(PADDED))
    for start in range(0, PADDED, 7):
        part = gumbel_noise(keys(4), start + jnp.arange(7))
        np.testing.assert_array_equal(part, whole[:, start : start + 7])
    np.testing.assert_array_equal(gumbel_noise(keys(4)[2:3], jnp.arange(PADDED))[0], whole[2])


def test_keys_depend_on_seed_sample_and_position_only():
    samples = jnp.array([5, 9, 2**32 - 1], jnp.uint32)
    positions = jnp.array([0, 3, 2])
    together = row_keys(jnp.uint32(1), samples, positions)
    for i in range(3):
        alone = row_keys(jnp.uint32(1), samples[i : i + 1], positions[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])
    grid = [
        tuple(np.asarray(row_keys(jnp.uint32(s), jnp.uint32([n]), jnp.int32([p]))[0]))
        for s in (0, 1, 2**32 - 1)
        for n in (0, 1, 7)
        for p in (0, 1, 2)
    ]
    assert len(set(grid)) == len(grid), "a swap of two of them must not give the same draws"


def test_noise_is_standard_gumbel():
    noise = np.asarray(gumbel_noise(keys(400), jnp.arange(500)), np.float64).ravel()
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 6, rel=0.02)
    for x in (-1.0, 0.0, 2.0):
        assert (noise < x).mean() == pytest.approx(np.exp(-np.exp(-x)), abs=0.005)
    rows = noise.reshape(400, 500)
    assert abs(np.corrcoef(rows[0], rows[1])[0, 1]) < 0.15
    assert abs(np.corrcoef(rows[:, 0], rows[:, 1])[0, 1]) < 0.15


# --- one draw -----------------------------------------------------------------------------------


def draw(
    logits_BV: np.ndarray, config: SamplingConfig, *, split: bool, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Draws from given logits, the vocabulary whole or over 8 devices, padded with zero rows."""
    head_VD = np.zeros((PADDED, V), np.float32)
    head_VD[:V] = np.eye(V)
    draw_fn = _draw_split if split else _draw_whole
    tokens, logprobs = draw_fn(config, jnp.asarray(logits_BV), head_VD, keys(len(logits_BV), seed))
    return np.asarray(tokens), np.asarray(logprobs)


@functools.partial(jax.jit, static_argnums=0)
def _draw_whole(config, hidden_BD, head_VD, keys_B2):
    return sample_tokens(
        hidden_BD,
        head_VD,
        keys_B2,
        config=config,
        vocab_size=V,
        vocab_offset=0,
        axes=UNSHARDED,
    )


@functools.partial(jax.jit, static_argnums=0)
def _draw_split(config, hidden_BD, head_VD, keys_B2):
    def local(hidden_BD, head_VD, keys_B2):
        offset = jax.lax.axis_index(("a", "b")) * head_VD.shape[0]
        return sample_tokens(
            hidden_BD,
            head_VD,
            keys_B2,
            config=config,
            vocab_size=V,
            vocab_offset=offset,
            axes=SHARDED_VOCAB,
        )

    mesh = Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("a", "b"))
    whole, rows = PartitionSpec(), PartitionSpec(("a", "b"))
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(whole, rows, whole), out_specs=whole, check_vma=False
    )
    return mapped(hidden_BD, head_VD, keys_B2)


both = pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])


def random_logits(num_rows: int, scale: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(4)
    return (scale * rng.normal(size=(num_rows, V))).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def kept_by_huggingface(logits: np.ndarray, config: SamplingConfig) -> np.ndarray:
    """Which tokens may be drawn [V]: temperature, then top-k, then top-p of what is left."""
    logits = logits.astype(np.float64) / config.temperature
    kept = np.ones(V, bool)
    if config.top_k:
        kept &= logits >= np.sort(logits)[::-1][min(config.top_k, V) - 1]
    if config.top_p < 1:
        probs = softmax(np.where(kept, logits, -np.inf))
        ascending = np.argsort(probs, kind="stable")
        removed = np.cumsum(probs[ascending]) <= 1 - config.top_p
        removed[-1] = False
        kept[ascending[removed]] = False
    return kept


TRUNCATIONS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.5, top_k=5),
    SamplingConfig(temperature=2.0, top_p=0.7),
    SamplingConfig(temperature=1.5, top_k=9, top_p=0.8),
    SamplingConfig(top_k=1),
    SamplingConfig(top_p=1e-6),
    SamplingConfig(top_k=1000),
]


@both
@pytest.mark.parametrize("config", TRUNCATIONS, ids=str)
def test_frequencies_are_those_of_the_truncated_softmax(config: SamplingConfig, split: bool):
    num_draws = 4000
    logits = random_logits(1)[0]
    tokens, logprobs = draw(np.tile(logits, (num_draws, 1)), config, split=split)
    kept = kept_by_huggingface(logits, config)
    assert kept[tokens].all(), "only tokens that top-k and top-p leave in"
    scaled = logits / config.temperature
    expected = softmax(np.where(kept, scaled, -1e30)) * num_draws
    counts = np.bincount(tokens, minlength=V)
    rare = expected < 5  # pooled, as the chi-square statistic wants
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    statistic = ((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
    freedom = len(wanted) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 1
    # The log-probability is that of the whole softmax, before the truncation.
    np.testing.assert_allclose(logprobs, np.log(softmax(scaled))[tokens], atol=1e-4)


@pytest.mark.parametrize("config", TRUNCATIONS, ids=str)
def test_a_split_vocabulary_draws_the_same_tokens(config: SamplingConfig):
    logits = random_logits(64)
    for whole, split in zip(
        draw(logits, config, split=False), draw(logits, config, split=True), strict=True
    ):
        np.testing.assert_allclose(whole, split, atol=1e-5)


@both
def test_every_row_keeps_its_own_nucleus(split: bool):
    config = SamplingConfig(temperature=0.9, top_k=12, top_p=0.6)
    logits = random_logits(200, scale=2.0)
    for seed in range(5):
        tokens, _ = draw(logits, config, split=split, seed=seed)
        for row, token in enumerate(tokens):
            assert kept_by_huggingface(logits[row], config)[token]


@both
def test_temperature_zero_takes_the_likeliest_token(split: bool):
    logits = random_logits(40)
    tokens, logprobs = draw(logits, SamplingConfig(temperature=0.0, top_k=3), split=split)
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    np.testing.assert_allclose(logprobs, np.log(softmax(logits).max(axis=1)), atol=1e-5)
    tied = np.zeros((3, V), np.float32)
    tied[:, [13, 40]] = 2.0
    assert (draw(tied, SamplingConfig(temperature=0.0), split=split)[0] == 13).all()


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_drawn(split: bool, temperature: float):
    # The padded rows have logit 0 before the mask: far above all real ones here.
    logits = np.full((2000, V), -60.0, np.float32)
    tokens, logprobs = draw(logits, SamplingConfig(temperature=temperature), split=split)
    assert tokens.max() < V
    np.testing.assert_allclose(logprobs, -np.log(V), atol=1e-4)
    if temperature:
        assert len(set(tokens)) == V, "and every real token is"


# --- whole responses ----------------------------------------------------------------------------

CONFIG = DecoderConfig(
    num_layers=2,
    embed_dim=12,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=16,
    vocab_size=11,
)
P = 4
PREFILL_ROWS = 4  # 6 rows are prefilled as two times 3
BASE = SamplingConfig(max_tokens=7, pad_id=9)


@functools.cache
def decoder_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        leaf.name: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32)
        for leaf in CONFIG.spec(Head.LM)
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _generate(sampling: SamplingConfig, slots: int, params, tokens, lengths, samples, limits, seed):
    graphdef = decoder_graphdef(CONFIG, Head.LM, UNSHARDED)
    generator = Generator(bind(graphdef, params), sampling, PREFILL_ROWS, slots or len(lengths))
    return generator(Rows(tokens, lengths, samples, limits), seed)[0]


def generate(
    sampling: SamplingConfig,
    tokens: np.ndarray,
    lengths: np.ndarray,
    samples: np.ndarray,
    seed: int = 0,
    slots: int = 0,
    limits: np.ndarray | None = None,
) -> list[np.ndarray]:
    if limits is None:
        limits = np.full(len(lengths), sampling.max_tokens)
    arrays = jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(samples, jnp.uint32)
    more = jnp.asarray(limits), jnp.uint32(seed)
    outputs = _generate(sampling, slots, decoder_params(), *arrays, *more)
    return [np.asarray(x) for x in outputs]


def prompts(num_rows: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, CONFIG.vocab_size, (num_rows, P))
    return tokens, rng.integers(1, P + 1, num_rows), 100 + np.arange(num_rows)


def test_stop_tokens_end_rows_and_belong_to_them():
    free_tokens, free_logprobs, free_lengths, free_finished = generate(BASE, *prompts())
    assert (free_lengths == 7).all()
    assert not free_finished.any()
    sampling = dataclasses.replace(BASE, stop_ids=(3, 5))
    tokens, logprobs, lengths, finished = generate(sampling, *prompts())
    for row in range(6):
        stops = np.flatnonzero(np.isin(free_tokens[row], (3, 5)))
        length = stops[0] + 1 if stops.size else 7
        assert lengths[row] == length
        assert finished[row] == bool(stops.size)
        np.testing.assert_array_equal(tokens[row, :length], free_tokens[row, :length])
        np.testing.assert_allclose(logprobs[row, :length], free_logprobs[row, :length], atol=1e-6)
        assert (tokens[row, length:] == 9).all()
        assert (logprobs[row, length:] == 0).all()
    assert finished.sum() > 0
    assert len(set(lengths)) > 1


def test_a_row_that_stops_at_the_limit_is_finished():
    one = dataclasses.replace(BASE, max_tokens=1, stop_ids=tuple(range(CONFIG.vocab_size)))
    tokens, _, lengths, finished = generate(one, *prompts())
    assert tokens.shape == (6, 1)
    assert (lengths == 1).all()
    assert finished.all()


def test_draws_do_not_depend_on_the_batch():
    tokens, lengths, samples = prompts()
    whole = generate(BASE, tokens, lengths, samples)
    order = np.array([4, 0, 5, 2, 1, 3])
    permuted = generate(BASE, tokens[order], lengths[order], samples[order])
    few = generate(BASE, tokens[2:4], lengths[2:4], samples[2:4])
    for all_rows, shuffled, two in zip(whole, permuted, few, strict=True):
        np.testing.assert_allclose(shuffled, all_rows[order], atol=1e-5)
        np.testing.assert_allclose(two, all_rows[2:4], atol=1e-5)
    same_prompt = np.tile(tokens[:1], (6, 1)), np.full(6, lengths[0])
    drawn = generate(BASE, *same_prompt, samples)[0]
    assert len({tuple(row) for row in drawn}) > 1, "another sample index, another response"
    assert not np.array_equal(generate(BASE, tokens, lengths, samples, seed=1)[0], whole[0])


def test_junk_behind_a_prompt_does_not_matter():
    tokens, lengths, samples = prompts()
    junk = np.where(np.arange(P) < lengths[:, None], tokens, 10 - tokens)
    for clean, dirty in zip(
        generate(BASE, tokens, lengths, samples),
        generate(BASE, junk, lengths, samples),
        strict=True,
    ):
        np.testing.assert_array_equal(clean, dirty)


def test_rows_that_fill_up_the_batch_stay_empty():
    tokens, lengths, samples = prompts()
    lengths[3:] = 0
    drawn, logprobs, counts, finished = generate(BASE, tokens, lengths, samples)
    assert (counts[3:] == 0).all()
    assert not finished.any()
    assert (drawn[3:] == 9).all()
    assert (logprobs[3:] == 0).all()


def test_generation_ends_when_every_row_has_stopped():
    # 100,000 steps over a cache of 100,000 positions would take minutes.
    sampling = SamplingConfig(max_tokens=100_000, stop_ids=tuple(range(0, CONFIG.vocab_size, 2)))
    tokens, lengths, samples = prompts()
    lengths[5:] = 0  # nor does a row that only fills up keep the others waiting
    generate(sampling, tokens, lengths, samples)  # compiles
    start_s = time.perf_counter()
    _, _, counts, finished = generate(sampling, tokens, lengths, samples)
    assert time.perf_counter() - start_s < 20
    assert finished[:5].all()
    assert counts.max() < 50


@pytest.mark.parametrize("slots", [1, 2, 6])
def test_rows_that_wait_for_a_slot_get_the_tokens_of_rows_that_do_not(slots: int) -> None:
    tokens, lengths, samples = prompts(13)
    lengths = lengths.copy()
    lengths[[0, 5, 12]] = 0  # rows that only fill up a batch: first, in the queue, last
    limits = np.random.default_rng(7).integers(1, 8, 13)
    sampling = dataclasses.replace(BASE, stop_ids=(3,))
    wanted = generate(sampling, tokens, lengths, samples, limits=limits)
    got = generate(sampling, tokens, lengths, samples, slots=slots, limits=limits)
    for x, y in zip((got[0], got[2], got[3]), (wanted[0], wanted[2], wanted[3]), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose(got[1], wanted[1], atol=1e-6)
    real = lengths > 0
    assert (wanted[2][real] >= 1).all() and (wanted[2] <= limits).all()
    assert not wanted[2][~real].any() and not wanted[3][~real].any()
    assert wanted[3].any() and (wanted[2] == limits).any()  # both kinds of end came up
