"""Published models: their parameter counts, and their rotary frequencies by hand."""

import dataclasses
import math

import pytest

from nereus_jax.core.architectures import DecoderConfig, Head, LinearRope, Llama3Rope
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.presets import PRESETS, preset

# From the models' pages and, where those round, the sizes of their files.
PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}
LLAMA31 = Llama3Rope(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)


def test_parameter_counts_are_the_published_ones():
    assert {name: preset(name).num_params(Head.LM) for name in PRESETS} == PUBLISHED


def test_there_is_no_other_preset():
    with pytest.raises(ConfigError, match=r"no model is called 'llama4'; there are llama3-8b, ll"):
        preset("llama4")


def test_flops_of_a_token_are_twice_the_elements_of_its_matrices():
    """Embeddings, norms and biases multiply no matrix."""
    for name, config in PRESETS.items():
        vectors = (2 * config.num_layers + 1) * config.embed_dim
        if config.qkv_bias:
            heads = config.num_heads + 2 * config.num_kv_heads
            vectors += config.num_layers * heads * config.head_dim
        if config.qk_norm:
            vectors += config.num_layers * 2 * config.head_dim
        embeddings = config.vocab_size * config.embed_dim * (1 if config.tie_embeddings else 2)
        matrices = config.num_params(Head.LM) - embeddings - vectors
        assert config.forward_flops(1, 0.0, 0) == 2.0 * matrices, name


def test_short_waves_stay_and_long_ones_are_stretched():
    def wave(positions: float) -> float:
        return LLAMA31.scale(2 * math.pi / positions) / (2 * math.pi / positions)

    assert wave(100) == wave(2047) == 1.0
    assert wave(8193) == wave(1e9) == pytest.approx(1 / 8)
    # 8192 / 3277 = 2.5 waves in a row, half way from 1 to 4: the mean of 1 and 1 / 8
    assert wave(8192 / 2.5) == pytest.approx(0.5 * (1 + 1 / 8))
    assert LinearRope(factor=4.0).scale(0.5) == 0.125


def test_rope_frequencies_of_a_config():
    config = dataclasses.replace(PRESETS["llama3-8b"], head_dim=4, rope_theta=100.0)
    assert config.rope_frequencies() == pytest.approx((1.0, 0.1))
    linear = dataclasses.replace(config, rope_scaling=LinearRope(factor=2.0))
    assert linear.rope_frequencies() == pytest.approx((0.5, 0.05))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: LinearRope(factor=0.0), "factor must be positive, got 0.0"),
        (lambda: dataclasses.replace(LLAMA31, factor=-1.0), "factor must be positive"),
        (
            lambda: dataclasses.replace(LLAMA31, high_freq_factor=1.0),
            "high_freq_factor must be above low_freq_factor 1.0, got 1.0",
        ),
    ],
)
def test_rope_scalings_that_make_no_sense(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


def test_new_leaves_are_cut_like_the_heads_they_belong_to():
    config: DecoderConfig = dataclasses.replace(PRESETS["qwen2.5-0.5b"], qk_norm=True)
    spec = config.spec(Head.SCALAR)
    mesh = (1, 2, 2, 7)  # 14 heads on tp 14, 2 key/value heads on its major axis
    local = {leaf.name: leaf.local_shape(spec.rules, mesh) for leaf in spec}
    assert local["layers.q_bias"] == (12, 64)
    assert local["layers.k_bias"] == local["layers.v_bias"] == (12, 64)
    assert local["layers.q_norm"] == local["layers.k_norm"] == (12, 64)
    assert spec["layers.k_bias"].logical_axes == ("layers", "kv_heads")
    assert spec["layers.q_norm"].logical_axes == ("layers", None)
