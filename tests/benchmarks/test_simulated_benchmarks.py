"""The simulated benchmarks run, on made-up traces and few steps."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHANGES = [16, 8, 12, 16, 4, 16, 12, 16, 8, 16, 12, 16]
NAMES = {
    "supply": (
        "availability_16-node_aws-08-27-2023_us-east-2b_v100_1.json",
        "availability_16-node_aws-08-27-2023_us-west-2a_v100_1.json",
    ),
    "lengths": ("length_orz-7b.csv", "length_dapo_qwen2.5-32b.csv", "length_orz-32b.csv"),
    "requests": ("servegen_deepseek-r1_output_tokens_hist.csv",),
}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Files of the names and formats of the real ones."""
    counts = [n for n in CHANGES for _ in range(10)]
    contents = {
        "supply": json.dumps({"metadata": {"gap_seconds": 300}, "data": counts}),
        "lengths": "step,mean_response_length\n0,400\n100,900\n",
        "requests": "lo_tokens,hi_tokens,probability\n0,100,0.5\n100,300,0.3\n300,900,0.2\n",
    }
    for folder, names in NAMES.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(contents[folder])
    return tmp_path


def run(script: str, *arguments: str, output: Path) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, f"benchmarks/{script}/run.py", *arguments, f"--json={output}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(output.read_text())


@pytest.mark.slow
def test_drift_policies(traces: Path, tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    data = run(
        "drift_policies",
        f"--traces={traces}",
        "--seeds=1",
        f"--figure={figure}",
        output=tmp_path / "out.json",
    )
    assert data["simulated"] is True and set(data["traces"]) == {"A", "B", "C"}
    for mark in ("vs_dp_only", "vs_any_gain", "vs_every_k", "gap_to_oracle", "oracle_gain_share"):
        assert -5.0 < data[mark] < 5.0
    for found in data["traces"].values():
        figures = found["policies"]
        for name, parts in found["gap_parts_per_step"].items():
            gap = figures[name]["mean_step_s"] - figures["oracle"]["mean_step_s"]
            assert sum(parts.values()) == pytest.approx(gap)
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_scale_1024(tmp_path: Path) -> None:
    data = run("scale_1024", "--steps=30", output=tmp_path / "out.json")
    assert data["simulated"] is True and data["steps"] == 30 and not data["failure"]
    assert data["moves"] == len(data["transition_s"]) == len(data["transition_bytes"])
    # What the last step decided is not carried out any more.
    assert data["transitions"] <= data["moves"] + 1 and 0.0 < data["transition_share"] < 1.0
