"""The benchmark of transition planning runs, and finds what its README names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    output = tmp_path / "transition_dag.json"
    run = subprocess.run(
        [sys.executable, "benchmarks/transition_dag/run.py", "--quick", f"--json={output}"],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(output.read_text())
    assert figures["plan_s_1024"] > 0
    assert len(figures["gap_instances"]) == 3
    for row in figures["gap_instances"]:
        assert row["gap"] > -1e-4  # durations are rounded to microseconds for the solver
    assert figures["gap_max"] <= 0.069
    for cases in (figures["doubling"], figures["resharding"]):
        for name, row in cases.items():
            wires = [
                row[way]["intra_node_bytes"] + row[way]["inter_node_bytes"]
                for way in ("direct", "composed")
            ]
            assert 0 < wires[0] <= wires[1], name
            assert row["direct"]["modelled_s"] > 0
    assert f"| {next(iter(figures['doubling']))} | " in run.stdout
