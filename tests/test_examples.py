"""The examples run as they stand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_generate_prints_the_same_tokens_for_both_layouts() -> None:
    run = subprocess.run(
        [sys.executable, "examples/generate.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )
    assert run.returncode == 0, run.stderr
    one, other = (line.split(": ")[1] for line in run.stdout.splitlines())
    assert one == other
    assert [len(row) for row in json.loads(one)] == [8, 8]
