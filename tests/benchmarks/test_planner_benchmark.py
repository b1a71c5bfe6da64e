"""The planner's benchmark runs, and its exhaustive search is one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(path: str, *arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, path, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stderr


def test_quick_run(tmp_path: Path) -> None:
    output = tmp_path / "planner.json"
    run("benchmarks/planner/run.py", "--quick", f"--json={output}")
    report = json.loads(output.read_text())
    assert {"search_s_1024", "search_s_32", "optimal_fraction"} <= set(report)
    assert report["optimal_fraction"] == 1.0
    assert report["peak_bytes_1024"] < 100e6
    assert report["search_s_1024"] > 0


CSV = """category,hardware,n_gpus,model,params_b,workload,precision,dp,tp,pp,cp,shard,act_ckpt,\
mbs,gbs,seq_len,mem_gb,notes,source
train_step,A100-80GB,384,GPT-176B,176,x,bf16,8,4,12,,ZeRO-1,True,2,2048,2048,60,hidden 14336 \
layers 70; heads 112; NHIDDEN,bigscience
train_step,A100-80GB,384,GPT-176B,176,x,bf16,8,4,12,,ZeRO-1,True,4,2048,2048,70,hidden 14336 \
layers 70; heads 112; NHIDDEN,bigscience
train_step,A100-80GB,8,GPT-176B,176,x,bf16,1,8,1,,ZeRO-1,True,1,8,2048,OOM,hidden 14336 \
layers 70; heads 112; NHIDDEN,bigscience
train_step,A100-80GB,8,Unknown-9B,9,x,bf16,1,8,1,,ZeRO-1,True,1,8,2048,50,,bigscience
train_step,A100-80GB,8,Llama-3.1-8B,8,x,bf16,8,1,1,,FSDP,True,1,8,2048,,,torchtitan
"""


def test_published_rows_are_read_and_judged(tmp_path: Path) -> None:
    """A row without memory and one of an unknown model are left out; 176B on 8 cards does not
    fit."""
    path = tmp_path / "rows.csv"
    path.write_text(CSV)
    code = (
        "import sys, json; sys.path.insert(0, 'benchmarks/memory_model'); "
        "from pathlib import Path; from published import compare, read_rows; "
        f"print(json.dumps(compare(read_rows(Path({str(path)!r})))))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert len(report["rows"]) == 3
    assert report["oom_rows"] == 1 and report["oom_rows_caught"] == 1.0
    assert report["false_infeasible_share"] == 0.0
    first, second = report["rows"][:2]
    assert first["learned_from"] and not second["learned_from"]
    assert abs(first["error"]) < 1e-2, "what the engine takes beside is learned from this row"
    # Twice the microbatch keeps 2 bytes more for each token, hidden unit and layer, and works with
    # one layer more: by hand 2 x 2048 x 14336 x (2 x 72 + (34 + 80) / 4) bytes.
    grown = second["modelled_gib"] - first["modelled_gib"]
    assert grown == pytest.approx(4096 * 14336 * (2 * 72 + 114 / 4) / 2**30, abs=0.1)


@pytest.mark.slow
def test_quick_run_of_the_memory_benchmark(tmp_path: Path) -> None:
    output, rows = tmp_path / "memory.json", tmp_path / "rows.csv"
    rows.write_text(CSV)
    run(
        "benchmarks/memory_model/run.py",
        "--quick",
        f"--json={output}",
        f"--published={rows}",
    )
    report = json.loads(output.read_text())
    names = {"temp_median_error", "temp_max_error", "oom_rows_caught", "false_infeasible_share"}
    assert names <= set(report)
    cpu = report["detail"]["cpu"]
    assert cpu["programs"] == cpu["arguments_exact"] == 3
    assert report["temp_max_error"] < 0.25


@pytest.mark.slow
def test_quick_run_on_emulated_devices(tmp_path: Path) -> None:
    output = tmp_path / "live.json"
    run("benchmarks/cost_model/live.py", "--quick", f"--json={output}")
    report = json.loads(output.read_text())
    assert report["points"] == len(report["rows"]) == 12
    assert report["mape_live_least"] <= report["mape_live"] <= report["mape_live_most"]
    assert set(report["by_stage"]) == {"actor-GENERATE", "reference-SCORE", "actor-TRAIN"}
    assert all(row["measured_s"] > 0 for row in report["rows"])
    # With few splits some group is never held out, and its points have no error.
    assert sum(row["error"] is not None for row in report["rows"]) >= 6
    assert report["mape_live"] < 1.0, "a model that has learned is not off by a factor of two"
