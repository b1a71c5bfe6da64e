"""The benchmarks of the cost model, on small tables that are made here with known efficiencies."""

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from nereus_jax.planning.calibration import Efficiencies, OperationClass

ROOT = Path(__file__).parents[2]
TRUTH = Efficiencies.prior().replace(
    {
        OperationClass.GEMM: 0.55,
        OperationClass.ATTENTION: 0.4,
        OperationClass.MEMORY: 0.5,
        OperationClass.DECODE_MEMORY: 0.8,
        OperationClass.ALL_REDUCE_INTRA: 0.4,
    }
)
COLUMNS = (
    *("category", "hardware", "n_gpus", "model", "params_b", "precision", "dp", "tp", "pp"),
    *("shard", "act_ckpt", "gen_tp", "mbs", "gbs", "seq_len", "prompt_len", "resp_len"),
    *("step_time_s", "tokens_per_s_per_gpu", "tokens_per_s_total", "mfu_pct"),
    *("quality", "notes", "source"),
)
OPA = "A100-80GB (8/node, NVLink; 4x100Gb OPA/node)"
LAYOUTS = ((4, 8, 12), (8, 8, 6), (8, 4, 12), (16, 2, 12), (24, 8, 2), (8, 2, 24), (6, 8, 8))


def load(folder: str, name: str) -> ModuleType:
    """A module of a benchmark, under a name of its own."""
    spec = importlib.util.spec_from_file_location(
        f"{folder}_{name}", ROOT / "benchmarks" / folder / f"{name}.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(folder: str, *options: str) -> dict[str, Any]:
    output = options[-1].removeprefix("--json=")
    command = [sys.executable, f"benchmarks/{folder}/run.py", *options]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(Path(output).read_text())


def bloom_row(dp: int, tp: int, pp: int, micro: int, seconds: float) -> dict[str, object]:
    return {
        "category": "train_step",
        "hardware": OPA,
        "n_gpus": dp * tp * pp,
        "model": "GPT-177B",
        "params_b": 177,
        "precision": "fp16",
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "shard": "ZeRO-1",
        "mbs": micro,
        "gbs": 2016,
        "seq_len": 2048,
        "step_time_s": seconds,
        "notes": "hidden 12288 layers 96; heads 96",
        "source": "bigscience-workshop/bigscience tr11",
    }


def mpt_row(model: str, micro: int, seq: int, remat: bool, seconds: float) -> dict[str, object]:
    return {
        "category": "train_step",
        "hardware": "A100-40GB",
        "n_gpus": 8,
        "model": model,
        "precision": "bf16",
        "shard": "FULL_SHARD",
        "act_ckpt": str(remat),
        "mbs": micro,
        "gbs": micro * 32,
        "seq_len": seq,
        "step_time_s": seconds,
        "source": "mosaicml/llm-foundry README",
    }


def rollout_row(prompt: int, response: int, tp: int, rate: float) -> dict[str, object]:
    return {
        "category": "generate",
        "hardware": "H100-80GB-SXM",
        "model": "Llama-3.1-8B",
        "precision": "fp8",
        "gen_tp": tp,
        "prompt_len": prompt,
        "resp_len": response,
        "tokens_per_s_total": rate,
        "source": "NVIDIA/TensorRT-LLM docs",
    }


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)


def published(path: Path) -> None:
    """A table whose numbers are the model's own, with `TRUTH`."""
    mpt = [("MPT-1b", 4, 2048), ("MPT-3b", 2, 4096), ("MPT-7b", 1, 8192), ("MPT-760m", 16, 512)]
    steps = [bloom_row(*layout, micro, 1.0) for layout in LAYOUTS for micro in (1, 4)]
    steps += [mpt_row(*shape, remat, 1.0) for shape in mpt for remat in (False, True)]
    lengths = ((128, 128), (128, 2048), (2048, 128), (2048, 2048), (5000, 500))
    rollouts = [rollout_row(*pair, tp, 1.0) for pair in lengths for tp in (1, 2)]
    write(path, steps + rollouts)
    training = load("cost_model", "training").training_cases(path)
    generation = load("cost_model", "generation").generation_cases(path)
    for row, case in zip(steps, training, strict=True):
        row["step_time_s"] = float(case.cost(TRUTH).total_s[0])
    for row, case in zip(rollouts, generation, strict=True):
        row["tokens_per_s_total"] = case.measured_s / float(case.cost(TRUTH).total_s[0])
    excluded = bloom_row(8, 8, 6, 2, 1e-3) | {"quality": "SUSPECT"}
    oom = bloom_row(48, 8, 1, 1, 0.0) | {"step_time_s": ""}
    write(path, [*steps, *rollouts, excluded, oom])


def test_known_efficiencies_are_found_in_published_numbers(tmp_path: Path) -> None:
    published(tmp_path / "published.csv")
    result = run(
        "cost_model",
        f"--published={tmp_path / 'published.csv'}",
        "--splits=2",
        f"--json={tmp_path / 'result.json'}",
    )
    assert result["mape_train"] < 0.04
    assert result["mape_train_over_constant"] < 0.5
    assert result["mape_generate"] < 0.06
    assert result["rank_correlation"] > 0.9
    assert result["mape_live"] is None
    assert {row["of"]: row["rows"] for row in result["training"]} == {
        "BLOOM": 14,
        "llm-foundry": 8,
        "A100-40GB": 8,
        OPA: 14,
    }


def test_sizes_of_published_models_are_theirs() -> None:
    """Parameters as the tables state them, in 1e9."""
    training, generation = load("cost_model", "training"), load("cost_model", "generation")
    for name, stated in {"MPT-125m": 0.125, "MPT-7b": 6.659, "MPT-70b": 64.862}.items():
        width, layers, heads = training.MPT[name]
        sizes = training._sizes(width, layers, heads, training.MPT_VOCAB)
        assert sizes.params / 1e9 == pytest.approx(stated, rel=0.02)
    for name, stated in {"Llama-3.1-8B": 8.03, "LLaMA-70B": 69.0, "GPT-J-6B": 6.05}.items():
        assert generation._sizes(name).params / 1e9 == pytest.approx(stated, rel=0.01)


def rl_log(logs: ModuleType, setup: Any, path: Path, iterations: int) -> None:
    """A log of shrinking responses whose seconds are the model's own, with a slow first one."""
    run_module = load("rl_logs", "run")
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    for iteration in range(iterations):
        mean = 200.0 - iteration + rng.uniform(-5, 5)
        row: dict[str, Any] = {
            "iter": iteration + 1,
            "response_length_mean": mean,
            "response_length_max": int(rng.integers(380, 512)),
            "prompt_length_mean": 90.0,
        }
        for column, stage in logs.COLUMNS.items():
            text = {k: str(v) for k, v in row.items()}
            series = run_module.Series(
                setup=setup, stage=stage, iterations=[1], rows=[text], measured_s=[1.0]
            )
            seconds = sum(series.seconds(0, TRUTH).values())
            row[column] = seconds * (5.0 if iteration == 0 else 1.0)
        rows.append(row)
    with path.open("w", newline="") as file:
        file.write("# made here\n")
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_known_efficiencies_are_found_in_rl_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "rl_logs")
    logs = load("rl_logs", "logs")
    for setup in logs.SETUPS:
        rl_log(logs, setup, tmp_path / f"{setup.name}.csv", 16)
    result = run("rl_logs", f"--logs={tmp_path}", "--first=8", f"--json={tmp_path / 'result.json'}")
    assert len(result["stages"]) == 3 * 6
    assert result["score_train_error_max"] < 0.02
    assert result["generate_online_error_max"] < 0.05
