"""PPO of an 8B Llama 3 on 16 H100s of two nodes: a recipe, checked by its shapes and bytes.

With weights, on GPUs (two processes of 8 GPUs; see the README):

    nereus train --config=configs/ppo_llama8b_h100.py:models/Meta-Llama-3-8B-Instruct \\
        --workdir=runs/8b

Without either, on a laptop, what it would take:

    nereus train --config=configs/ppo_llama8b_h100.py --config.emulated_devices=16 --dry-run

Actor and critic train on 16 GPUs with tp inside a node, float32 master weights and Adam's moments
cut over the replicas (ZeRO-1); generation and scoring share the GPUs with them, in turn.
"""

from typing import Any

from nereus_jax.config import default_config


def get_config(model_path: str = "") -> Any:
    """The run; without `model_path` a random model of the same sizes and a task made up here."""
    config = default_config()
    config.num_steps = 500
    config.device_memory_gib = 80.0

    config.model.path = model_path
    config.model.preset = "" if model_path else "llama3-8b"
    config.model.compute_dtype = "bfloat16"
    if model_path:
        config.tokenizer.kind = "huggingface"
        config.data.chat_template = True
    config.data.train = config.data.eval = "task:two_steps"
    config.data.train_size = 100_000
    config.data.eval_size = 256
    config.data.max_prompt_length = 512
    config.reward.function = "nereus_jax.rl.rewards.gsm8k"

    config.rollout.batch_size = 512
    config.rollout.max_response_length = 1024
    config.rollout.max_num_seqs = 64
    config.algorithm.minibatch_size = 128
    config.algorithm.gae_lambda = 1.0
    config.algorithm.kl.coef = 0.01
    config.actor_optimizer.learning_rate = 1e-6
    config.actor_optimizer.warmup_steps = 20
    config.critic_optimizer.learning_rate = 5e-6
    config.train.microbatch_size = 2
    config.train.remat = "layer"
    config.train.zero1 = True
    config.score.microbatch_size = 8

    config.plan["actor-TRAIN"] = "dp=2,pp=1,tp=8"
    config.plan["critic-TRAIN"] = "dp=2,pp=1,tp=8"
    config.plan["actor-GENERATE"] = "dp=4,pp=1,tp=4"
    config.plan["reference-SCORE"] = "dp=2,pp=1,tp=8"
    config.plan["critic-SCORE"] = "dp=2,pp=1,tp=8"

    config.checkpoint.every = 50
    config.eval.every = 50
    config.eval.num_prompts = 256
    return config
