"""Tunix (google-tunix 0.1.7) at the work; needs an interpreter that has it.

TUNIX_PYTHON tunix_peer.py LAYOUT --sizes=full --steps=6 --devices=8

Two things of that release have to be mended from outside for PPO to run at all: its Llama refuses
the argument `segment_ids` that its scorer passes, and its guard against transfers stops its own
weight synchronization between meshes on CPU devices. Nothing else of it is changed. Its MLPs start
at zero, which is no work for nobody, so all matrices are drawn again.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import clock
import work

LAYOUTS = ("single", "colo_fsdp", "roll_tp", "colo_f4t2", "disagg_all")


class NumberTokenizer:
    """Words are the tokens' numbers; no token ends a text."""

    def pad_id(self) -> int:
        return work.PAD

    def bos_id(self) -> int:
        return work.BOS

    def eos_id(self) -> int:
        return -1

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(i)) for i in ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--sizes", default="full")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=0, help="rows; 0: the whole batch")
    arguments = parser.parse_args()
    count = f"--xla_force_host_platform_device_count={arguments.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.filterwarnings("ignore")
    logging.getLogger("absl").setLevel(logging.ERROR)
    sizes = work.sizes_of(arguments.sizes)
    train(sizes, arguments.layout, arguments.steps, arguments.micro_batch)


def train(sizes: work.Sizes, layout: str, steps: int, micro_batch: int) -> None:
    import numpy as np
    import optax
    from tunix.rl import rl_cluster
    from tunix.rl import utils as rl_utils
    from tunix.rl.ppo import ppo_learner
    from tunix.rl.rollout import base_rollout

    allow_transfers()
    actor, reference = make_model(sizes, seed=0), make_model(sizes, seed=0)
    never = 10**9
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(work.LEARNING_RATE),
        critic_optimizer=optax.adamw(work.LEARNING_RATE),
        eval_every_n_steps=never,
        max_steps=never,
        mini_batch_size=sizes.batch_size,
        train_micro_batch_size=micro_batch or sizes.batch_size,
        rollout_micro_batch_size=sizes.batch_size,
        compute_logps_micro_batch_size=sizes.batch_size,
    )
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=sizes.response_length,
        max_prompt_length=sizes.prompt_length,
        kv_cache_size=sizes.row_length,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        eos_tokens=[-1],
    )
    cluster = rl_cluster.RLCluster(
        actor=actor,
        critic=rl_utils.create_critic_model(actor),
        reference=reference,
        tokenizer=NumberTokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=role_to_mesh(layout),
            rollout_engine="vanilla",
            training_config=training,
            rollout_config=rollout,
        ),
    )

    def rewards(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        responses = [[int(word) for word in text.split()] for text in completions]
        work.check_responses(sizes, responses)
        found = [float(work.reward(sizes, response)) for response in responses]
        clock.tick(reward=sum(found) / len(found))
        return found

    def batches() -> Iterator[dict[str, Any]]:
        rows = work.prompts(sizes, steps)
        for step in range(steps):
            # Without a seed of its own every call of its sampler would draw the same.
            cluster.cluster_config.rollout_config.seed = step
            batch = rows[step * sizes.batch_size : (step + 1) * sizes.batch_size]
            # Its sampler puts BOS in front itself.
            yield {"prompts": np.array([" ".join(map(str, row[1:])) for row in batch])}

    learner = ppo_learner.PPOLearner(
        rl_cluster=cluster,
        reward_fns=rewards,
        ppo_config=ppo_learner.PPOConfig(
            num_iterations=sizes.epochs,
            beta=work.KL_COEF,
            gamma=work.GAMMA,
            gae_lambda=work.GAE_LAMBDA,
            epsilon=work.CLIP,
            clip_range_value=work.VALUE_CLIP,
            kl_method="kl",
        ),
    )
    learner.train(batches())


def make_model(sizes: work.Sizes, seed: int) -> Any:
    """Its Llama 3 with all matrices drawn from normal(0, 0.02)."""
    import jax
    from flax import nnx
    from tunix.models.llama3 import model as llama

    class Llama(llama.Llama3):
        def __call__(
            self,
            input_tokens: Any,
            positions: Any,
            cache: Any,
            attention_mask: Any,
            segment_ids: Any = None,
        ) -> Any:
            del segment_ids  # rows hold one sequence each
            return super().__call__(input_tokens, positions, cache, attention_mask)

    config = llama.ModelConfig(
        num_layers=sizes.num_layers,
        vocab_size=sizes.vocab_size,
        embed_dim=sizes.embed_dim,
        hidden_dim=sizes.mlp_dim,
        num_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        num_kv_heads=sizes.num_heads,
        rope_theta=10_000,
        norm_eps=1e-5,
        weight_tying=False,
    )
    model = Llama(config, rngs=nnx.Rngs(seed))
    state = nnx.state(model, nnx.Param)
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        0.02 * jax.random.normal(key, x.shape) if x.ndim > 1 else x
        for key, x in zip(keys, leaves, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(structure, drawn))
    return model


def role_to_mesh(layout: str) -> dict[Any, Any]:
    """Its meshes (fsdp, tp) of every role.

    single: one device; colo_fsdp: all roles on fsdp = all; colo_f4t2: all on (all/2, 2); roll_tp:
    trained on fsdp = all, generated on tp = all; disagg_all: the actor is trained on one half of
    the devices, everything else is on the other.
    """
    import jax
    import numpy as np
    from tunix.rl.rl_cluster import Role

    devices = np.array(jax.devices())
    half = len(devices) // 2

    def mesh(chosen: Any, *shape: int) -> Any:
        return jax.sharding.Mesh(chosen.reshape(shape), ("fsdp", "tp"))

    if layout == "disagg_all":
        train, rest = mesh(devices[:half], half, 1), mesh(devices[half:], 1, half)
        actor, others, rollout = train, rest, rest
    elif layout == "colo_f4t2":
        actor = others = rollout = mesh(devices, half, 2)
    else:
        actor = others = rollout = mesh(devices, len(devices), 1)
        if layout == "roll_tp":
            rollout = mesh(devices, 1, len(devices))
    return {
        Role.ACTOR: actor,
        Role.CRITIC: others,
        Role.REFERENCE: others,
        Role.ROLLOUT: rollout,
        Role.REWARD: actor,
    }


def allow_transfers() -> None:
    """Lets its resharding make the host copies that `jax.device_put` needs on CPU devices."""
    import jax
    from tunix.rl import reshard

    original = reshard._get_reshard_fn_jax_device_put

    def patched(**options: Any) -> Any:
        function = original(**options)

        def allowed(source: Any, target: Any) -> Any:
            with jax.transfer_guard("allow"):
                return function(source, target)

        return allowed

    reshard._get_reshard_fn_jax_device_put = patched


if __name__ == "__main__":
    main()
