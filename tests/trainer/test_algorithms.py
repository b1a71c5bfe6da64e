"""GRPO, RLOO, REINFORCE++ and ReMax through the whole trainer, and their batches by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_jax.config import parse_config
from nereus_jax.core.errors import ConfigError
from nereus_jax.runtime.world import form_world
from nereus_jax.testing import tiny_run_config
from nereus_jax.trainer.job import read_inputs
from nereus_jax.trainer.loop import train
from nereus_jax.trainer.train_batch import prepare


def config_of(algorithm: str, prompts: int, count: int) -> Any:
    config = tiny_run_config()
    config.algorithm.name = algorithm
    config.rollout.batch_size = prompts
    config.rollout.samples_per_prompt = count
    if algorithm != "ppo":
        del config.plan["critic-TRAIN"]
    return config


CASES = [
    ("remax", 2),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("grpo", 4), ("rloo", 2), ("reinforce_pp", 1), ("reinforce_pp", 2))
    ),
]


@pytest.mark.parametrize(("algorithm", "count"), CASES)
def test_two_steps(algorithm: str, count: int, tmp_path: Path) -> None:
    config = config_of(algorithm, 16 // count, count)
    config.emulated_devices = 8
    config.plan["actor-TRAIN"] = "dp=2,pp=1,tp=1"
    config.plan["actor-GENERATE"] = "dp=3,pp=1,tp=1"
    checked = parse_config(config)
    train(checked, read_inputs(checked), form_world(emulated_devices=8), tmp_path)
    rows = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1]
    assert all(np.isfinite(r["policy_loss"]) and "value_loss" not in r for r in rows)
    assert ("actor-GENERATE greedy" in rows[0]["stage_s"]) == (algorithm == "remax")
    samples = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert next(s["sample"] for s in samples if s["step"] == 1) == 16
    first = [s["prompt"] for s in samples if s["step"] == 0][:count]
    assert len(set(first)) == 1  # the responses to a prompt follow each other


MASK = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]], bool)
ZEROS = np.zeros(MASK.shape, np.float32)
REWARDS = np.array([1.0, 3.0, 5.0, 5.0], np.float32)


def advantages(config: Any, **more: Any) -> np.ndarray:
    checked = parse_config(config)
    found = prepare(checked, REWARDS, ZEROS, ZEROS, MASK, 0.0, **more)
    return found["advantages"]


def test_scores_less_their_baseline_reach_every_token() -> None:
    def of(per_row: list[float]) -> np.ndarray:
        return np.array(per_row, np.float32)[:, None] * MASK

    root = float(np.sqrt(2.0)) + 1e-6
    grpo = config_of("grpo", 2, 2)
    grpo.algorithm.minibatch_size = grpo.train.microbatch_size = 4
    np.testing.assert_allclose(advantages(grpo), of([-1 / root, 1 / root, 0, 0]), rtol=1e-6)
    grpo.algorithm.group_std = False
    np.testing.assert_allclose(advantages(grpo), of([-1, 1, 0, 0]))
    rloo = config_of("rloo", 2, 2)
    rloo.algorithm.minibatch_size = rloo.train.microbatch_size = 4
    np.testing.assert_allclose(advantages(rloo), of([-2, 2, 0, 0]))
    remax = config_of("remax", 2, 2)
    remax.algorithm.minibatch_size = remax.train.microbatch_size = 4
    greedy = np.array([2.0, 5.5], np.float32)
    got = advantages(remax, greedy_rewards=greedy)
    np.testing.assert_allclose(got, of([-1, 1, -0.5, -0.5]))
    remax.reward.clip = 2.0
    got = advantages(remax, greedy_rewards=greedy)
    np.testing.assert_allclose(got, of([-1, 0, 0, 0]))


def test_reinforce_pp_normalizes_over_the_tokens_of_the_batch() -> None:
    config = config_of("reinforce_pp", 4, 1)
    config.algorithm.minibatch_size = config.train.microbatch_size = 4
    per_token = (REWARDS[:, None] * MASK)[MASK]
    wanted = (per_token - per_token.mean()) / per_token.std()
    np.testing.assert_allclose(advantages(config)[MASK], wanted, rtol=1e-5)


def test_the_kl_penalty_is_to_come_at_every_token() -> None:
    config = config_of("rloo", 2, 2)
    config.algorithm.minibatch_size = config.train.microbatch_size = 4
    logprobs = np.full(MASK.shape, 0.5, np.float32)
    checked = parse_config(config)
    found = prepare(checked, REWARDS, logprobs, ZEROS, MASK, 0.1)["advantages"]
    np.testing.assert_allclose(found[2], [-0.15, -0.10, -0.05], rtol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "key", "value", "words"),
    [
        ("grpo", "rollout.samples_per_prompt", 1, "set it to at least 2"),
        ("rloo", "plan.critic-TRAIN", "dp=1,pp=1,tp=1", "has no critic; drop the entry"),
        ("ppo", "rollout.samples_per_prompt", 3, r"batch_size=16 \* rollout.samples_per_prompt=3"),
    ],
)
def test_what_does_not_fit_is_refused(algorithm: str, key: str, value: Any, words: str) -> None:
    config = config_of(algorithm, 16, 1 if algorithm == "ppo" else 2)
    section, name = key.split(".", 1)
    config[section][name] = value
    config.algorithm.minibatch_size = 7 if algorithm == "ppo" else 8
    with pytest.raises(ConfigError, match=words):
        parse_config(config)


def test_a_recording_holds_no_greedy_responses(tmp_path: Path) -> None:
    config = config_of("remax", 16, 1)
    config.rollout.source, config.rollout.recorded_dir = "recorded", str(tmp_path)
    with pytest.raises(ConfigError, match="which a recording does not hold"):
        parse_config(config)
