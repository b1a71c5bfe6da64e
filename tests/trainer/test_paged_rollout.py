"""A run whose rollouts come from a KV cache in pages is the run that has room for every row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_jax.config import parse_config
from nereus_jax.runtime.world import form_world
from nereus_jax.testing import tiny_run_config
from nereus_jax.trainer.job import read_inputs
from nereus_jax.trainer.loop import train

SAME = ("reward_mean", "success_rate", "response_length_mean", "kl", "policy_loss")


def run(workdir: Path, kv_cache_tokens: int) -> list[dict[str, Any]]:
    config = tiny_run_config()
    config.emulated_devices = 8
    config.plan["actor-GENERATE"] = "dp=2,pp=2,tp=1"
    config.rollout.max_num_seqs = 4
    config.rollout.kv_page_tokens = 4
    config.rollout.kv_cache_tokens = kv_cache_tokens
    checked = parse_config(config)
    train(checked, read_inputs(checked), form_world(emulated_devices=8), workdir)
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_with_one_row_of_pages_makes_the_same_steps(tmp_path: Path) -> None:
    config = tiny_run_config()
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    least = -(-longest // 4) * 4
    contiguous, paged = run(tmp_path / "contiguous", 0), run(tmp_path / "paged", least)
    assert len(contiguous) == len(paged) > 0
    for expected, got in zip(contiguous, paged, strict=True):
        for name in SAME:
            if name in expected:
                np.testing.assert_allclose(got[name], expected[name], atol=1e-5, err_msg=name)
    assert sum(name in row for row in contiguous for name in SAME) >= len(SAME)
