"""PPO that adapts: on 16 emulated devices responses grow, memory is short, and devices come and go.

    nereus train --config=configs/ppo_adaptive.py --workdir=runs/adaptive

The lengths of responses follow a trace (`rollout.length_trace`), so that minutes show what takes
days elsewhere; every token is generated, scored and trained on. `device_memory_gib` is a budget: a
program that exceeds it is refused as a full device refuses it.
"""

from typing import Any

from nereus_jax.config import default_config


def get_config() -> Any:
    """The run; every key can be set on the command line."""
    config = default_config()
    config.num_steps = 200
    config.emulated_devices = 16

    config.model.num_layers = 2
    config.model.embed_dim = 64
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 16
    config.model.mlp_dim = 192

    config.tokenizer.characters = "0123456789="
    config.data.train = config.data.eval = "task:reverse_digits"
    config.data.train_size = 100_000
    config.data.eval_size = 64
    config.data.task_options.digits = 4
    config.data.max_prompt_length = 8
    config.reward.function = "nereus_jax.rl.rewards.digit_match"

    config.rollout.batch_size = 64
    config.rollout.max_response_length = 192
    config.rollout.first_room = 32
    config.rollout.length_trace = "12:80:200"
    config.rollout.length_shape = "lognormal=0.3"
    config.algorithm.epochs = 1
    config.algorithm.minibatch_size = 32
    config.train.microbatch_size = 1
    config.score.token_chunk = 256

    config.plan["actor-TRAIN"] = "dp=8,pp=1,tp=2"
    config.plan["critic-TRAIN"] = "dp=8,pp=1,tp=2"
    config.plan["actor-GENERATE"] = "dp=16,pp=1,tp=1"
    config.plan["reference-SCORE"] = "dp=16,pp=1,tp=1"
    config.plan["critic-SCORE"] = "dp=16,pp=1,tp=1"

    config.control.policy = "payback=0.5"
    config.checkpoint.every = 10
    config.report.tensorboard = False
    return config
