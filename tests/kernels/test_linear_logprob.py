"""The chunked log-probability against the full log-softmax in float64, and its gradients.

Shapes: N tokens, D embed, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from nereus_kernels.linear_logprob.reference import MASKED_LOGIT, linear_logprob, masked_logits

N, D, V = 13, 6, 51
PADDED = 56  # V up to a multiple of 8


def problem(seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(N, D)).astype(np.float32)
    weight = np.zeros((PADDED, D), np.float32)
    weight[:V] = rng.normal(size=(V, D))
    targets = rng.integers(0, V, N).astype(np.int32)
    return jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(targets)


def expected(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """In float64 numpy, from full logits of the real vocabulary."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64)[:V].T / temperature
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logprobs[np.arange(N), np.asarray(targets)], -(np.exp(logprobs) * logprobs).sum(axis=1)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("temperature", [0.3, 2.0])
@pytest.mark.parametrize("token_chunk", [1, 4, 13, 1000])
def test_values_for_every_chunk_and_temperature(token_chunk: int, temperature: float):
    hidden, weight, targets = problem()
    options = {"vocab_size": V, "token_chunk": token_chunk, "temperature": temperature}
    got = jax.jit(functools.partial(linear_logprob, **options))(hidden, weight, targets)
    for ours, right in zip(got, expected(hidden, weight, targets, temperature), strict=True):
        assert ours.dtype == jnp.float32
        assert ours.shape == (N,)
        np.testing.assert_allclose(ours, right, atol=2e-5)


def combined(hidden, weight, targets, coefficients, **options) -> jax.Array:
    """One scalar whose gradient goes through both outputs."""
    logprobs, entropy = linear_logprob(hidden, weight, targets, vocab_size=V, **options)
    return jnp.sum(coefficients[0] * logprobs) + jnp.sum(coefficients[1] * entropy)


def gradients(function, hidden, weight, targets, **options) -> tuple[jax.Array, jax.Array]:
    loss = functools.partial(function, coefficients=coefficients(), **options)
    return jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, weight, targets)


def full(hidden, weight, targets, coefficients, temperature) -> jax.Array:
    logits = hidden @ weight[:V].T / temperature
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0]
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return jnp.sum(coefficients[0] * picked) + jnp.sum(coefficients[1] * entropy)


def coefficients() -> np.ndarray:
    return np.random.default_rng(9).normal(size=(2, N)).astype(np.float32)


@pytest.mark.parametrize("token_chunk", [4, 1000])
def test_gradients_are_those_of_the_full_softmax(token_chunk: int):
    hidden, weight, targets = problem()
    options = {"token_chunk": token_chunk, "temperature": 0.7}
    ours = gradients(combined, hidden, weight, targets, **options)
    right = gradients(full, hidden, weight, targets, temperature=0.7)
    for got, want in zip(ours, right, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert not np.asarray(ours[1])[V:].any(), "padding rows get no gradient at all"


def test_sharp_distributions_stay_finite():
    hidden, weight, targets = problem()
    for scale in (0.0, 1e3, 1e5):
        logprobs, entropy = linear_logprob(scale * hidden, weight, targets, vocab_size=V)
        right = expected(scale * hidden, weight, targets)
        np.testing.assert_allclose(logprobs, right[0], rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(entropy, right[1], atol=1e-3)
        for gradient in gradients(combined, scale * hidden, weight, targets):
            assert np.isfinite(gradient).all()


def test_padding_rows_take_no_probability_whatever_they_hold():
    hidden, weight, targets = problem()
    junk = weight.at[V:].set(100.0)
    logits = masked_logits(hidden, junk, vocab_size=V)
    assert (np.asarray(logits)[:, V:] == MASKED_LOGIT).all()
    for got, want in zip(
        linear_logprob(hidden, junk, targets, vocab_size=V),
        linear_logprob(hidden, weight, targets, vocab_size=V),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def sharded(function):
    """`function(hidden, weight, targets)` with the vocabulary over 8 devices."""
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("a", "b"))

    def local(hidden, weight, targets):
        offset = jax.lax.axis_index(("a", "b")) * weight.shape[0]
        return function(
            hidden, weight, targets, vocab_offset=offset, axis_names=("a", "b"), token_chunk=4
        )

    specs = (PartitionSpec(), PartitionSpec(("a", "b")), PartitionSpec())
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))


def test_a_split_vocabulary_gives_the_same_values_and_gradients():
    hidden, weight, targets = problem()
    options = {"vocab_size": V, "temperature": 0.7}
    got = sharded(functools.partial(linear_logprob, **options))(hidden, weight, targets)
    for ours, right in zip(got, expected(hidden, weight, targets, 0.7), strict=True):
        np.testing.assert_allclose(ours, right, atol=2e-5)

    def loss(hidden, weight, targets, **options):
        return combined(hidden, weight, targets, coefficients(), temperature=0.7, **options)

    ours = jax.jit(jax.grad(sharded(loss), argnums=(0, 1)))(hidden, weight, targets)
    right = gradients(full, hidden, weight, targets, temperature=0.7)
    for got, want in zip(ours, right, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert not np.asarray(ours[1])[V:].any()


def test_bf16_inputs_accumulate_in_f32():
    hidden, weight, targets = problem()
    low = hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    got = linear_logprob(*low, targets, vocab_size=V, token_chunk=4)
    right = expected(*low, targets)
    for ours, want in zip(got, right, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, want, atol=2e-5)
    low_gradients = gradients(combined, *low, targets, token_chunk=4)
    exact = gradients(full, hidden, weight, targets, temperature=1.0)
    for ours, want in zip(low_gradients, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        difference = np.linalg.norm(ours.astype(np.float32) - want)
        assert difference < 0.03 * np.linalg.norm(want)


def test_the_gradient_of_a_bf16_weight_is_summed_over_chunks_in_f32():
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(2048, D)) + 1.0, jnp.bfloat16)  # terms of one sign
    weight = problem()[1].astype(jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, V, 2048))

    def loss(weight: jax.Array, token_chunk: int) -> jax.Array:
        logprobs, _ = linear_logprob(hidden, weight, targets, vocab_size=V, token_chunk=token_chunk)
        return jnp.sum(logprobs)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    one, many = (np.asarray(gradient(weight, n), np.float32) for n in (2048, 4))
    error = np.linalg.norm(one - many) / np.linalg.norm(one)
    print(f"512 chunks against one: {error:.1e}")
    assert error < 5e-3


@pytest.mark.parametrize("wanted", [0, 3, 8, N])
def test_chunks_behind_the_wanted_tokens_are_left_out(wanted: int):
    hidden, weight, targets = problem()
    count = jnp.int32(wanted)
    got = linear_logprob(hidden, weight, targets, vocab_size=V, token_chunk=4, num_wanted=count)
    done = -(-wanted // 4) * 4
    for ours, right in zip(got, expected(hidden, weight, targets), strict=True):
        np.testing.assert_allclose(ours[:wanted], right[:wanted], atol=2e-5)
        assert not np.asarray(ours)[done:].any()
    mask = np.arange(N) < wanted

    def loss(hidden: jax.Array, weight: jax.Array, **options: Any) -> jax.Array:
        logprobs, _ = linear_logprob(hidden, weight, targets, vocab_size=V, **options)
        return jnp.sum(mask * logprobs)

    some, whole = (
        jax.grad(functools.partial(loss, **o), argnums=(0, 1))(hidden, weight)
        for o in ({"token_chunk": 4, "num_wanted": count}, {"token_chunk": 1000})
    )
    for ours, right in zip(some, whole, strict=True):
        np.testing.assert_allclose(ours, right, atol=2e-5)
