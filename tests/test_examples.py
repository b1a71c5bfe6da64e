"""The examples run as they stand."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
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


def test_elastic_optax_trains_as_it_does_without_a_change() -> None:
    losses, moved = [], []
    for arguments in ([], ["--static"]):
        run = subprocess.run(
            [sys.executable, "examples/elastic_optax.py", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        )
        assert run.returncode == 0, run.stderr
        lines = run.stdout.splitlines()
        losses.append([float(x.split("loss ")[1]) for x in lines if "loss" in x])
        moved.append([int(x.split()[1]) for x in lines if x.startswith("moved")])
    changed, static = losses
    assert len(changed) == 30
    np.testing.assert_allclose(changed, static, rtol=1e-4)
    assert min(changed[20:]) < changed[0]
    # On fewer devices each lacks a part of the weights and moments.
    assert moved[0][0] > 0 and moved[1] == [0]
