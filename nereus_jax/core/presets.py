"""Published models by name, with the sizes of their config.json: what a planner can price without
any file.
"""

from collections.abc import Mapping

from nereus_jax.core.architectures import DecoderConfig, Llama3Rope
from nereus_jax.core.errors import ConfigError

PRESETS: Mapping[str, DecoderConfig] = {
    "llama3-8b": DecoderConfig(
        num_layers=32,
        embed_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=14336,
        vocab_size=128256,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        tie_embeddings=False,
        max_positions=8192,
    ),
    "llama3-70b": DecoderConfig(
        num_layers=80,
        embed_dim=8192,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=28672,
        vocab_size=128256,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        tie_embeddings=False,
        max_positions=8192,
    ),
    "llama3.2-1b": DecoderConfig(
        num_layers=16,
        embed_dim=2048,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_dim=8192,
        vocab_size=128256,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        tie_embeddings=True,
        max_positions=131072,
        rope_scaling=Llama3Rope(
            factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
        ),
    ),
    "qwen2.5-0.5b": DecoderConfig(
        num_layers=24,
        embed_dim=896,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        mlp_dim=4864,
        vocab_size=151936,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tie_embeddings=True,
        max_positions=32768,
        qkv_bias=True,
    ),
    "qwen2.5-7b": DecoderConfig(
        num_layers=28,
        embed_dim=3584,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        mlp_dim=18944,
        vocab_size=152064,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tie_embeddings=False,
        max_positions=131072,
        qkv_bias=True,
    ),
    "qwen3-8b": DecoderConfig(
        num_layers=36,
        embed_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=12288,
        vocab_size=151936,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tie_embeddings=False,
        max_positions=40960,
        qk_norm=True,
    ),
    "smollm2-135m": DecoderConfig(
        num_layers=30,
        embed_dim=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        mlp_dim=1536,
        vocab_size=49152,
        rope_theta=100_000.0,
        norm_eps=1e-5,
        tie_embeddings=True,
        max_positions=8192,
    ),
}


def preset(name: str) -> DecoderConfig:
    """The sizes of a published model.

    Raises:
      ConfigError: there is none of this name.
    """
    if name not in PRESETS:
        raise ConfigError(f"no model is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
