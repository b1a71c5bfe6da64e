"""A running job with a controller: devices go and come, and it moves by itself."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from configs.ppo_tiny import get_config
from nereus_jax.config import parse_config
from nereus_jax.core.errors import ConfigError
from nereus_jax.report.page.command import make_page
from nereus_jax.runtime.checkpoint_files import finished_steps
from nereus_jax.runtime.world import form_world
from nereus_jax.testing import tiny_run_config
from nereus_jax.trainer.job import read_inputs
from nereus_jax.trainer.loop import train

NAMES = (
    *("step", "trigger", "policy", "plan", "target", "step_s_predicted", "step_s_target_predicted"),
    *("transition_s_predicted", "payback_steps", "gamma", "horizon_steps", "verdict", "reason"),
    "candidates",
)


def live_config(trace: Path, *lines: dict[str, Any]) -> Any:
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = get_config()
    config.num_steps = 7
    config.warmup.num_steps = 0
    config.rollout.batch_size, config.algorithm.minibatch_size = 32, 16
    config.train.microbatch_size = 4
    config.eval.every, config.report.tensorboard = 0, False
    config.checkpoint.every, config.checkpoint.keep = 1, 2
    config.control.policy = "dp_only"  # nothing but the pool makes it look for a plan
    config.control.pool_trace = str(trace)
    return config


def run(config: Any, workdir: Path) -> None:
    checked = parse_config(copy.deepcopy(config))
    train(checked, read_inputs(checked), form_world(emulated_devices=8), workdir)


def rows_of(workdir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_job_follows_its_pool(tmp_path: Path) -> None:
    lost = {"step": 3, "event": "lost", "devices": ["0:7"]}
    joined = {"step": 5, "event": "joined", "devices": ["0:7"]}
    workdir = tmp_path / "run"
    run(live_config(tmp_path / "trace.jsonl", lost, joined), workdir)
    rows = rows_of(workdir, "metrics")
    steps = [row for row in rows if "policy_loss" in row]
    assert [row["step"] for row in steps] == list(range(7))
    versions = [row["policy_version"] for row in steps]
    assert versions == [n * versions[1] for n in range(7)], "every update once"
    samples = [row["sample"] for row in rows_of(workdir, "samples")]
    assert len(set(samples)) == len(samples), "no sample twice"
    decisions = rows_of(workdir, "decisions")
    assert decisions[0]["step"] == 3 and decisions[0]["verdict"] == "urgent"
    plans = rows_of(workdir, "plans")
    assert [row["step"] for row in plans][:2] == [0, 3]
    assert plans[1]["plan"] == decisions[0]["target"]
    assert [row["devices"] for row in steps] == [8, 8, 8, 7, 7, 8, 8]
    for decision in decisions:
        assert decision.keys() >= set(NAMES)
        assert decision["trigger"] == "pool" and decision["policy"] == "dp_only"
        assert decision["verdict"] in ("urgent", "admit", "keep", "reject")
        if decision["verdict"] == "urgent":  # not there if the job went back to a checkpoint
            for entry in decision["target"].values():
                assert "0:7" not in entry["devices"] and not entry["devices"].endswith("-7")
    assert finished_steps(workdir / "checkpoints")[-1] == 7
    page = make_page(workdir)
    assert "Measured on 8 emulated CPU devices" in page
    moved = any(row["step"] == 3 for row in rows if "transition_s" in row)
    assert moved or "through a checkpoint" in page


def test_what_a_controller_cannot_be_told() -> None:
    config = tiny_run_config()
    config.control.pool_trace = "trace.jsonl"
    with pytest.raises(ConfigError, match=r"control\.pool_trace is given, but no control\.policy"):
        parse_config(config)
    config = tiny_run_config()
    config.checkpoint.every, config.checkpoint.keep = 1, 2
    config.control.policy = "payback"
    config.plan_changes["1"] = {"actor-TRAIN": "dp=1,pp=1,tp=1"}
    with pytest.raises(ConfigError, match=r"control\.policy='payback'.*plan_changes"):
        parse_config(config)
