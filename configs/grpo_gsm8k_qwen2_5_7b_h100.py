"""GRPO of Qwen2.5-7B on GSM8K, on 8 H100s: a recipe, checked by its shapes and bytes.

With weights and data (GSM8K as Parquet or JSONL, with the fields question and answer):

    nereus train --config=configs/grpo_gsm8k_qwen2_5_7b_h100.py:models/Qwen2.5-7B-Instruct \\
        --config.data.train=data/gsm8k/train.parquet --config.data.eval=data/gsm8k/test.parquet \\
        --workdir=runs/gsm8k

Without them, on a laptop, what it would take:

    nereus train --config=configs/grpo_gsm8k_qwen2_5_7b_h100.py \\
        --config.emulated_devices=8 --dry-run

8 responses to each of 128 prompts; no critic. The 28 query and 4 key/value heads make tp=4 the
natural degree.
"""

from typing import Any

from nereus_jax.config import default_config


def get_config(model_path: str = "") -> Any:
    """The run; without `model_path` a random model of the same sizes and a task made up here."""
    config = default_config()
    config.num_steps = 200
    config.device_memory_gib = 80.0

    config.model.path = model_path
    config.model.preset = "" if model_path else "qwen2.5-7b"
    config.model.compute_dtype = "bfloat16"
    if model_path:
        config.tokenizer.kind = "huggingface"
        config.data.chat_template = True
        config.data.prompt_field, config.data.answer_field = "question", "answer"
    config.data.train = config.data.eval = "task:two_steps"
    config.data.train_size = 100_000
    config.data.eval_size = 256
    config.data.max_prompt_length = 512
    config.reward.function = "nereus_jax.rl.rewards.gsm8k"

    config.rollout.batch_size = 128
    config.rollout.samples_per_prompt = 8
    config.rollout.max_response_length = 1024
    config.rollout.max_num_seqs = 128
    config.algorithm.name = "grpo"
    config.algorithm.minibatch_size = 256
    config.algorithm.aggregation = "sequence"
    config.algorithm.kl.place = "loss"
    config.algorithm.kl.estimator = "k3"
    config.algorithm.kl.coef = 0.001
    config.actor_optimizer.learning_rate = 1e-6
    config.actor_optimizer.warmup_steps = 10
    config.train.microbatch_size = 2
    config.train.remat = "layer"
    config.train.zero1 = True
    config.score.microbatch_size = 8

    config.plan["actor-TRAIN"] = "dp=2,pp=1,tp=4"
    config.plan["actor-GENERATE"] = "dp=2,pp=1,tp=4"
    config.plan["reference-SCORE"] = "dp=2,pp=1,tp=4"

    config.checkpoint.every = 20
    config.eval.every = 20
    config.eval.num_prompts = 256
    return config
