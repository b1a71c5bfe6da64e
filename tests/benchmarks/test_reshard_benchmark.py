"""The resharding benchmark runs, and its own reader of compiled programs finds no byte too many."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "wire_over_min_max",
    "wire_over_min_median",
    "xla_wire_over_min_max",
    "host_time_over_device_put_geomean",
    "collective_time_over_device_put_geomean",
    "speedup_vs_tunix_geomean",
    "speedup_vs_orbax_geomean",
    "peak_over_tree_max",
    "detail",
}


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    output = tmp_path / "reshard.json"
    run = subprocess.run(
        [sys.executable, "benchmarks/reshard/run.py", "--quick", f"--json={output}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(output.read_text())
    assert set(report) == NAMES
    assert report["wire_over_min_max"] == 1.0
    wire = report["detail"]["wire"]
    assert wire["above_minimum"] == wire["sent_though_nothing_lacks"] == []
    assert wire["not_as_planned"] == []
    assert wire["not_bit_equal"]["collective"] == wire["not_bit_equal"]["host"] == []
    assert report["speedup_vs_tunix_geomean"] is None
