"""Small things to test with: a tiny model and configuration, a pool of devices without a backend.

Public: embedders may build their own tests on them.
"""

from typing import Any

from nereus_jax.config import default_config
from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.devices import DevicePool
from nereus_jax.data.tokenizers import CharacterTokenizer


def tiny_decoder(**changes: Any) -> DecoderConfig:
    """A decoder of a few thousand parameters whose sizes divide by little.

    Five layers, six key/value heads, an odd vocabulary: pp=2, tp=4 and most other layouts have to
    pad or to replicate.
    """
    sizes: dict[str, Any] = {
        "num_layers": 5,
        "embed_dim": 32,
        "num_heads": 12,
        "num_kv_heads": 6,
        "head_dim": 8,
        "mlp_dim": 50,
        "vocab_size": 51,
    }
    return DecoderConfig(**(sizes | changes))


def toy_tokenizer() -> CharacterTokenizer:
    """One token a character: digits and signs of arithmetic."""
    return CharacterTokenizer("0123456789+-= ")


def fake_pool(num_hosts: int = 2, devices_per_host: int = 8, kind: str = "h100") -> DevicePool:
    """A pool of devices that no backend has, for what works on values alone."""
    return DevicePool.uniform(num_hosts, devices_per_host, kind)


def tiny_run_config() -> Any:
    """A configuration (ConfigDict) that trains for two short steps on one device."""
    config = default_config()
    config.num_steps = 2
    config.model.num_layers = 2
    config.model.embed_dim = 32
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 8
    config.model.mlp_dim = 64
    config.tokenizer.characters = "0123456789="
    config.data.train = config.data.eval = "task:reverse_digits"
    config.data.train_size = config.data.eval_size = 1000
    config.data.max_prompt_length = 6
    config.reward.function = "nereus_jax.rl.rewards.digit_match"
    config.rollout.batch_size = 16
    config.rollout.max_response_length = 4
    config.algorithm.minibatch_size = 8
    config.actor_optimizer.learning_rate = 1e-3
    config.critic_optimizer.learning_rate = 1e-3
    config.train.microbatch_size = 4
    config.plan["actor-TRAIN"] = "dp=1,pp=1,tp=1"
    config.plan["critic-TRAIN"] = "dp=1,pp=1,tp=1"
    return config
