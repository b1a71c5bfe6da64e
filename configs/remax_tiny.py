"""ReMax on 8 emulated devices: the task of ppo_tiny, with a greedy response as the baseline."""

from typing import Any

from nereus_jax.config import default_config


def get_config() -> Any:
    """The run; every key can be set on the command line."""
    config = default_config()
    config.num_steps = 144
    config.emulated_devices = 8

    config.model.num_layers = 3
    config.model.embed_dim = 96
    config.model.num_heads = 8
    config.model.num_kv_heads = 4
    config.model.head_dim = 16
    config.model.mlp_dim = 256

    config.tokenizer.characters = "0123456789="
    config.data.train = config.data.eval = "task:reverse_digits"
    config.data.train_size = 100_000
    config.data.eval_size = 256
    config.data.task_options.digits = 4
    config.data.max_prompt_length = 8
    config.reward.function = "nereus_jax.rl.rewards.digit_match"

    config.warmup.num_steps = 48
    config.warmup.batch_size = 128
    config.warmup.learning_rate = 2e-3

    config.rollout.batch_size = 512
    config.rollout.max_response_length = 6
    config.algorithm.name = "remax"
    config.algorithm.epochs = 2
    config.algorithm.minibatch_size = 128
    config.algorithm.kl.place = "loss"
    config.algorithm.kl.estimator = "k3"
    config.algorithm.kl.coef = 0.001
    config.actor_optimizer.learning_rate = 7e-4
    config.actor_optimizer.schedule = "linear"
    config.train.microbatch_size = 32

    config.plan["actor-TRAIN"] = "dp=4,pp=1,tp=2"
    config.plan["actor-GENERATE"] = "dp=8,pp=1,tp=1"
    config.plan["reference-SCORE"] = "dp=8,pp=1,tp=1"

    config.eval.every = 24
    config.eval.num_prompts = 256
    return config
