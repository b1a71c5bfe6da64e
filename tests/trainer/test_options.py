"""Options of a run that the default configuration does not take, each through the whole trainer."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nereus_jax.config import parse_config
from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.models.decoder import UNSHARDED, bind, decoder_graphdef
from nereus_jax.models.huggingface import export_model
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime.world import form_world
from nereus_jax.testing import tiny_run_config
from nereus_jax.trainer.job import read_inputs
from nereus_jax.trainer.loop import train

# What users and other tools read: these names must stay.
STEP_NAMES = {
    "step",
    "reward_mean",
    "success_rate",
    "kl",
    "entropy",
    "policy_loss",
    "value_loss",
    "response_length_mean",
    "response_length_p95",
    "response_length_max",
    "tokens",
    "step_s",
    "stage_s",
    "peak_memory_bytes",
    "rollout_train_logp_diff",
}


def run(config: Any, workdir: Path) -> list[dict[str, Any]]:
    checked = parse_config(config)
    world = form_world(emulated_devices=checked.emulated_devices)
    train(checked, read_inputs(checked), world, workdir)
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_bfloat16_corrected_zero1_remat_and_an_adaptive_kl_in_the_loss(tmp_path: Path) -> None:
    config = tiny_run_config()
    config.emulated_devices = 8
    config.model.compute_dtype = "bfloat16"
    config.algorithm.old_logprobs = "corrected"
    config.algorithm.kl.place = "loss"
    config.algorithm.kl.estimator = "k3"
    config.algorithm.kl.controller = "adaptive"
    config.algorithm.kl.target = 1e-6
    config.algorithm.aggregation = "sequence"
    config.algorithm.epochs = 2
    config.train.zero1 = True
    config.train.remat = "layer"
    config.train.microbatch_size = 2
    config.plan["actor-GENERATE"] = "dp=2,pp=1,tp=4"
    config.plan["actor-TRAIN"] = "dp=2,pp=2,tp=2"
    config.plan["critic-TRAIN"] = "dp=4,pp=1,tp=2"
    rows = run(config, tmp_path)
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert set(row) >= STEP_NAMES
        assert all(np.isfinite(row[name]) for name in STEP_NAMES - {"stage_s"})
        # bfloat16 samples under another layout than it scores: the difference is there and small.
        assert 0 < row["rollout_train_logp_diff"] < 0.2
    assert set(rows[0]["stage_s"]) == {
        "actor-GENERATE",
        "actor-SCORE",
        "reference-SCORE",
        "critic-SCORE",
        "actor-TRAIN",
        "critic-TRAIN",
    }
    assert rows[0]["kl"] == 0.0  # the reference is the actor until the first update
    assert rows[1]["kl"] != 0.0
    # 16 samples of a horizon of 10,000 and an error clipped to 0.2 (Ziegler et al. 2019).
    assert rows[1]["kl_coef"] == 0.05 * (1 - 0.2 * 16 / 10_000)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["actor-TRAIN"] == {
        "dp": 2,
        "pp": 2,
        "tp": 2,
        "devices": [f"0:{i}" for i in range(8)],
        "microbatch_size": 2,
        "microbatches": 0,
        "remat": True,
        "zero1": True,
        "parked": False,
    }


@pytest.mark.slow
def test_a_reward_model_scores_the_last_token(tmp_path: Path) -> None:
    model = DecoderConfig(
        num_layers=3,
        embed_dim=24,
        num_heads=6,
        num_kv_heads=3,
        head_dim=4,
        mlp_dim=40,
        vocab_size=14,
        tie_embeddings=True,
    )
    generator = np.random.default_rng(0)
    leaves = {
        leaf.name: generator.normal(size=leaf.shape).astype(np.float32) * 0.2
        for leaf in model.spec(Head.SCALAR)
    }
    export_model(tmp_path / "reward", model, leaves, head=Head.SCALAR)
    config = tiny_run_config()
    config.emulated_devices = 8
    config.num_steps = 1
    config.reward.function = ""
    config.reward.model_path = str(tmp_path / "reward")
    config.algorithm.kl.place = "none"
    config.rollout.record = True
    config.eval.every = 1
    config.eval.num_prompts = 10  # a short batch
    config.plan["reward-SCORE"] = "dp=2,pp=1,tp=3"
    rows = run(config, tmp_path / "run")
    step = next(row for row in rows if "reward_mean" in row)
    assert "reference-SCORE" not in step["stage_s"]
    assert [row["eval_step"] for row in rows if "eval_step" in row] == [0, 1]

    rollout = Rollout.load(tmp_path / "run" / "rollouts" / "step_00000000.npz")
    decoder = bind(
        decoder_graphdef(model, Head.SCALAR, UNSHARDED),
        {name: jnp.asarray(x) for name, x in leaves.items()},
    )
    with jax.default_matmul_precision("highest"):
        scores_BS = np.asarray(decoder(jnp.asarray(rollout.tokens_BS)))
    last_B = rollout.lengths_B - 1
    expected = scores_BS[np.arange(rollout.num_rows), last_B].mean()
    assert abs(step["reward_mean"] - expected) < 1e-5
