"""nereus_jax at the work, through `trainer.loop.train`: the loop of `nereus train`.

python ours.py WORKDIR PLAN --sizes=full --steps=6 --devices=8
"""

import argparse
import json
from pathlib import Path
from typing import Any

import work

MICROBATCH_SIZE = 8
"""Rows of a replica in the layers at a time; the gradients of a minibatch add up. Activations of
fewer rows need less memory, and so fewer pages that the system has to clear."""
TOKEN_CHUNK = 256
"""Tokens whose logits exist at a time. Two of three tokens of a microbatch are of responses; chunks
without any are not computed."""


def write_inputs(directory: Path, sizes: work.Sizes, steps: int) -> None:
    """A tokenizer whose words are the tokens' numbers, and prompts in JSONL."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {str(i): i for i in range(sizes.vocab_size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": str(work.FIRST_PROMPT_TOKEN)},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"pad_token": str(work.PAD), "eos_token": str(work.EOS)}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with (directory / "prompts.jsonl").open("w") as file:
        for prompt in work.prompts(sizes, steps):
            file.write(json.dumps({"prompt": " ".join(map(str, prompt))}) + "\n")


def configure(
    directory: Path, sizes: work.Sizes, steps: int, devices: int, plan: dict[str, str]
) -> Any:
    """The run's configuration."""
    from nereus_jax.config import default_config, parse_config, parse_plan_entry

    config = default_config()
    config.num_steps = steps
    config.emulated_devices = devices
    for name in ("num_layers", "embed_dim", "num_heads", "head_dim", "mlp_dim", "vocab_size"):
        config.model[name] = getattr(sizes, name)
    config.model.num_kv_heads = sizes.num_heads
    config.model.tie_embeddings = False
    config.tokenizer.kind = "huggingface"
    config.tokenizer.path = str(directory)
    config.data.train = config.data.eval = str(directory / "prompts.jsonl")
    config.data.answer_field = ""
    config.data.max_prompt_length = sizes.prompt_length
    config.reward.function = "clocked_reward.low_tokens"
    config.rollout.batch_size = sizes.batch_size
    config.rollout.max_response_length = sizes.response_length
    config.rollout.ignore_eos = True
    config.algorithm.epochs = sizes.epochs
    config.algorithm.minibatch_size = sizes.batch_size
    config.algorithm.gamma = work.GAMMA
    config.algorithm.gae_lambda = work.GAE_LAMBDA
    config.algorithm.clip = work.CLIP
    config.algorithm.value_clip = work.VALUE_CLIP
    config.algorithm.kl.coef = work.KL_COEF
    for optimizer in (config.actor_optimizer, config.critic_optimizer):  # optax.adamw's defaults
        optimizer.learning_rate = work.LEARNING_RATE
        optimizer.b2 = 0.999
        optimizer.weight_decay = 1e-4
        optimizer.max_grad_norm = 0.0
    replicas = max(parse_plan_entry(layout).dp for layout in plan.values())
    config.train.microbatch_size = min(MICROBATCH_SIZE, sizes.batch_size // replicas)
    config.train.unroll_layers = 0
    config.rollout.unroll_layers = True
    config.score.token_chunk = TOKEN_CHUNK
    config.report.tensorboard = False
    for stage, layout in plan.items():
        config.plan[stage] = layout
    return parse_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("plan", type=json.loads, help="JSON: model-stage -> layout")
    parser.add_argument("--sizes", default="full")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    sizes = work.sizes_of(arguments.sizes)
    write_inputs(arguments.workdir / "inputs", sizes, arguments.steps)

    from nereus_jax.runtime.world import form_world
    from nereus_jax.trainer.job import read_inputs
    from nereus_jax.trainer.loop import train

    config = configure(
        arguments.workdir / "inputs", sizes, arguments.steps, arguments.devices, arguments.plan
    )
    world = form_world(emulated_devices=arguments.devices)
    train(config, read_inputs(config), world, arguments.workdir)


if __name__ == "__main__":
    main()
