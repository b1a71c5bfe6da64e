"""A job that really ran, played again under other policies."""

import json
from pathlib import Path

import pytest

from nereus_jax.cli import main
from tests.trainer.test_live_controller import live_config, run


@pytest.mark.slow
def test_what_if_a_run_had_another_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lengths, its pool and its first plan; the fit's error is told, whatever it is."""
    lost = {"step": 3, "event": "lost", "devices": ["0:7"]}
    joined = {"step": 5, "event": "joined", "devices": ["0:7"]}
    workdir, figures = tmp_path / "run", tmp_path / "figures.json"
    run(live_config(tmp_path / "trace.jsonl", lost, joined), workdir)
    arguments = [f"--from={workdir}", "--policy=static,payback,oracle", f"--json={figures}"]
    assert main(["simulate", *arguments]) == 0
    assert "recorded (measured): dp_only, 7 steps" in capsys.readouterr().out
    data = json.loads(figures.read_text())
    assert data["recorded"]["simulated"] is False and data["recorded"]["fit"]["steps"] >= 1
    for figure in data["policies"].values():
        assert 0.0 < figure["mean_step_s"] < 1e4
