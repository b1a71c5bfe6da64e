"""The recipes for GPUs: their plans fit, and their bytes are those of a sum by hand."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.config import parse_config
from nereus_jax.core.errors import ConfigError, InfeasiblePlanError
from nereus_jax.runtime.world import form_world
from nereus_jax.trainer.footprint import check_memory, stage_bytes
from nereus_jax.trainer.job import Job, make_job, read_inputs

ROOT = Path(__file__).parents[2]


def config_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def job_of(config: Any) -> Job:
    config.emulated_devices = 8
    checked = parse_config(config)
    return make_job(checked, read_inputs(checked), form_world(emulated_devices=8))


def test_the_bytes_of_grpo_on_qwen2_5_7b_by_hand() -> None:
    job = job_of(config_of("grpo_gsm8k_qwen2_5_7b_h100"))
    needs = {str(stage): need for stage, need in stage_bytes(job).items()}
    parameters = 7_615_616_512
    train = needs["actor-TRAIN"]
    # float32 weights over tp = 4; two moments over tp = 4 and dp = 2; the rest bfloat16 over tp.
    assert train.parameters == pytest.approx(4 * parameters / 4, rel=0.01)
    assert train.optimizer == pytest.approx(2 * 4 * parameters / 8, rel=0.01)
    assert needs["actor-GENERATE"].parameters == pytest.approx(2 * parameters / 4, rel=0.01)
    assert needs["reference-SCORE"].parameters == pytest.approx(2 * parameters / 4, rel=0.01)
    assert "critic-TRAIN" not in needs


def test_a_plan_that_the_budget_cannot_hold_is_refused() -> None:
    config = config_of("grpo_gsm8k_qwen2_5_7b_h100")
    config.device_memory_gib = 20.0
    job = job_of(config)
    with pytest.raises(InfeasiblePlanError, match=r"device_memory_gib allows 20.00 GiB"):
        check_memory(job, stage_bytes(job), dry_run=True)
    fits = config_of("grpo_gsm8k_qwen2_5_7b_h100")
    job = job_of(fits)
    check_memory(job, stage_bytes(job), dry_run=True)
    with pytest.raises(InfeasiblePlanError, match="this host has"):
        check_memory(job, stage_bytes(job))  # to train it here would still take the host's memory


def test_an_unknown_preset_names_those_there_are() -> None:
    config = config_of("ppo_llama8b_h100")
    config.model.preset = "llama3-9b"
    with pytest.raises(ConfigError, match="llama3-8b"):
        parse_config(config)


@pytest.mark.slow
def test_the_dry_run_of_the_8b_recipe() -> None:
    command = [sys.executable, "-m", "nereus_jax.cli", "train", "--dry-run"]
    command += ["--config=configs/ppo_llama8b_h100.py", "--config.emulated_devices=16"]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
    assert run.returncode == 0, run.stderr
    cells = {line.split()[0]: line.split() for line in run.stdout.splitlines() if "dp=" in line}
    gib, parameters = 2**30, 8_030_261_248
    row = cells["actor-TRAIN"]
    assert float(row[3]) == pytest.approx(4 * parameters / 8 / gib, rel=0.05)
    assert float(row[5]) == pytest.approx(2 * 4 * parameters / 16 / gib, rel=0.05)
    assert float(cells["actor-GENERATE"][3]) == pytest.approx(2 * parameters / 4 / gib, rel=0.05)
    assert "each may have 80.00 GiB" in run.stdout
