"""The benchmark of coordination runs, and its ledger refuses what does not fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    output = tmp_path / "coordination.json"
    run = subprocess.run(
        [sys.executable, "benchmarks/coordination/run.py", f"--json={output}", "--trials=4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(output.read_text())
    assert set(report) == {"success_rate", "success_rate_uncoordinated", "detail"}
    assert report["success_rate"] == 1.0
    assert report["success_rate_uncoordinated"] <= 0.7
    kinds = report["detail"]["kinds"]
    assert len(kinds) == 3 and report["detail"]["devices"] == 32
    for found in kinds.values():
        assert found["success_rate"] == 1.0 and found["operations_mean"] > 5
        failed = found["failures_uncoordinated"]
        assert len(failed) == round(4 * (1 - found["success_rate_uncoordinated"]))
        assert all("bytes on" in reason for reason in failed)
