"""The benchmark of the simulated cluster finds again what made-up logs were made with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MAKE = """
import csv, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, "benchmarks/truth")
from rl_runs import COLUMNS, NAMES, SETUPS, logged_stages
from nereus_jax.core.roles import Stage
from nereus_jax.simulator.curves import load_truth
from nereus_jax.simulator.stage_run import EngineOverheads

directory, iterations = Path(sys.argv[1]), 24
rng = np.random.default_rng(0)
for setup in SETUPS:
    if setup.name not in NAMES:
        continue
    grpo = setup.samples > 1
    names = [c for c in COLUMNS if not (grpo and c in ("t_values", "t_update_critic"))]
    rows = []
    for i in range(iterations):
        longest = int(rng.integers(300, setup.max_response + 1))
        rows.append({
            "iter": i + 1, "response_length_mean": float(rng.uniform(120, 200)),
            "response_length_max": longest, "response_length_clip_ratio": 0.001,
            "prompt_length_mean": 82.0, **dict.fromkeys(names, 1.0),
        })
    path = directory / f"{setup.name}.csv"
    def write():
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    write()
for stage in logged_stages(directory, load_truth(), iterations):
    generate = stage.stage.stage is Stage.GENERATE
    made = EngineOverheads(factor=1.7)
    if generate:
        made = EngineOverheads(decode_step_s=0.02, decode_row_s=1e-4)
    column = next(c for c, s in COLUMNS.items() if s == stage.stage)
    path = directory / f"{stage.setup.name}.csv"
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for i, row in enumerate(rows):
        row[column] = stage.seconds(i, made)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
"""


def run(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_what_logs_were_made_with_is_found_again(tmp_path: Path) -> None:
    run("-c", MAKE, str(tmp_path))
    output = tmp_path / "truth.json"
    run(
        "benchmarks/truth/run.py",
        f"--logs={tmp_path}",
        f"--json={output}",
        "--first=14",
        "--last=24",
    )
    report = json.loads(output.read_text())
    assert report["score_train_error_max"] < 1e-6
    assert report["generate_error_max"] < 0.01
    for row in report["stages"]:
        if row["stage"].endswith("GENERATE"):
            assert row["decode_step_s"] == pytest.approx(0.02, rel=0.1)
            assert row["decode_row_s"] == pytest.approx(1e-4, rel=0.1)
        else:
            assert row["factor"] == pytest.approx(1.7)
        assert row["spread"] < 0.01 < row["simulated_spread"]


def test_a_directory_without_logs_is_refused(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "benchmarks/truth/run.py", f"--logs={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1
    assert "does not exist; give the directory of the logs" in result.stderr
