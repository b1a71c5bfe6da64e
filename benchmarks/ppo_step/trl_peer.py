"""TRL (trl 1.12.0, the last release with a PPO trainer) at the work; needs an interpreter with it.

TRL_PYTHON trl_peer.py --sizes=full --steps=6 --threads=2

It has no reward functions for PPO: it runs a reward model. Its `get_reward` is replaced for that
model by the work's reward; nothing else of it is changed. It keeps the log-probabilities of its
generation pass, and has one optimizer for actor and critic together.
"""

import argparse
import os
import warnings
from typing import Any

import clock
import work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="full")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
    }
    warnings.filterwarnings("ignore")
    train(work.sizes_of(arguments.sizes), arguments.steps, arguments.threads)


def train(sizes: work.Sizes, steps: int, threads: int) -> None:
    import torch
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    policy, reference, value = make_models(sizes)
    give_rewards(sizes)
    rows = Dataset.from_list([{"input_ids": row} for row in work.prompts(sizes, steps)])
    config = PPOConfig(
        output_dir="trl_output",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=sizes.batch_size,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=sizes.batch_size,
        num_ppo_epochs=sizes.epochs,
        total_episodes=sizes.batch_size * steps,
        response_length=sizes.response_length,
        temperature=1.0,
        learning_rate=work.LEARNING_RATE,
        kl_coef=work.KL_COEF,
        cliprange=work.CLIP,
        cliprange_value=work.VALUE_CLIP,
        vf_coef=1.0,
        gamma=work.GAMMA,
        lam=work.GAE_LAMBDA,
        num_sample_generations=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=10**6,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=make_tokenizer(sizes),
        model=policy,
        ref_model=reference,
        reward_model=stand_in(),
        value_model=value,
        train_dataset=rows,
        eval_dataset=rows.select(range(sizes.batch_size)),
    )
    trainer.train()


def make_tokenizer(sizes: work.Sizes) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {str(i): i for i in range(sizes.vocab_size)}
    words = models.WordLevel(vocab, unk_token=str(work.FIRST_PROMPT_TOKEN))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words),
        pad_token=str(work.PAD),
        bos_token=str(work.BOS),
        eos_token=str(work.EOS),
    )


def make_models(sizes: work.Sizes) -> tuple[Any, Any, Any]:
    """Policy, reference (a copy) and critic (a copy with a scalar head)."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    shared: dict[str, Any] = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.embed_dim,
        "intermediate_size": sizes.mlp_dim,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "pad_token_id": work.PAD,
        "bos_token_id": work.BOS,
        "eos_token_id": None,  # no token ends a response
    }
    policy = LlamaForCausalLM(LlamaConfig(**shared))
    reference = LlamaForCausalLM(LlamaConfig(**shared))
    reference.load_state_dict(policy.state_dict())
    value = LlamaForSequenceClassification(LlamaConfig(**shared, num_labels=1))
    value.model.load_state_dict(policy.model.state_dict())
    return policy, reference, value


def stand_in() -> Any:
    """A module in the place of the reward model."""
    import torch

    module = torch.nn.Module()
    module.base_model_prefix = ""
    module.is_work_reward = True
    return module


def give_rewards(sizes: work.Sizes) -> None:
    """Replaces `get_reward` for the stand-in of the reward model."""
    import torch
    from trl.experimental.ppo import ppo_trainer

    original = ppo_trainer.get_reward

    def get_reward(model: Any, rows: Any, pad_token_id: int, context_length: int) -> Any:
        if not hasattr(model, "is_work_reward"):
            return original(model, rows, pad_token_id, context_length)
        responses = rows[:, context_length:].tolist()
        work.check_responses(sizes, responses)
        rewards = [float(work.reward(sizes, response)) for response in responses]
        clock.tick(reward=sum(rewards) / len(rewards))
        return None, torch.tensor(rewards), None

    ppo_trainer.get_reward = get_reward


if __name__ == "__main__":
    main()
