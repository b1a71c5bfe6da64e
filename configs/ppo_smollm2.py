"""PPO on SmolLM2-135M-Instruct: a real language model learns to add numbers, on a laptop's CPU.

The model is a Hugging Face directory, given as the argument of this file (or as
`--config.model.path=...`):

    nereus train --config=configs/ppo_smollm2.py:models/SmolLM2-135M-Instruct --workdir=runs/add

The same run on three emulated devices, with another layout for every kind of work (9 query heads,
3 key/value heads and 30 layers divide by 3):

    nereus train --config=configs/ppo_smollm2.py:models/SmolLM2-135M-Instruct \\
        --workdir=runs/add3 --config.emulated_devices=3 \\
        --config.plan.actor-TRAIN=dp=1,pp=1,tp=3 --config.plan.critic-TRAIN=dp=1,pp=1,tp=3 \\
        --config.plan.actor-GENERATE=dp=3,pp=1,tp=1 --config.plan.reference-SCORE=dp=1,pp=3,tp=1
"""

from typing import Any

from nereus_jax.config import default_config


def get_config(model_path: str = "") -> Any:
    """The run on one device; `model_path` is a directory with weights and tokenizer."""
    config = default_config()
    config.num_steps = 32

    config.model.path = model_path
    config.tokenizer.kind = "huggingface"
    config.data.train = config.data.eval = "task:addition"
    config.data.train_size = 8_000
    config.data.distinct = True  # there are 9,002, and 996 for evaluation
    config.data.eval_size = 990  # nearly all, as in training: as few with small numbers as there
    config.data.task_options.digits = 2
    config.data.task_options.min_digits = 1
    config.data.task_options.style = "sentence"
    config.data.chat_template = True
    config.data.max_prompt_length = 40
    config.reward.function = "nereus_jax.rl.rewards.arithmetic_answer"

    config.rollout.batch_size = 64
    config.rollout.max_response_length = 12
    config.algorithm.minibatch_size = 32
    config.algorithm.gae_lambda = 1.0
    config.algorithm.kl.coef = 0.01
    config.actor_optimizer.learning_rate = 3e-5
    config.critic_optimizer.learning_rate = 5e-5
    config.train.microbatch_size = 16

    config.plan["actor-TRAIN"] = "dp=1,pp=1,tp=1"
    config.plan["critic-TRAIN"] = "dp=1,pp=1,tp=1"

    config.eval.every = 8
    config.eval.num_prompts = 200
    config.eval.greedy = True
    return config
