"""The benchmark of the forecast runs on made-up curves, and judges alarms as it says."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "forecast"


@pytest.mark.slow
def test_made_up_curves(tmp_path: Path) -> None:
    output = tmp_path / "forecast.json"
    run = subprocess.run(
        [sys.executable, "benchmarks/forecast/run.py", "--synthetic", f"--json={output}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(output.read_text())
    assert {"caught", "false_alarms_per_100_steps", "tuned", "held_out"} <= set(report)
    simple = report["simple_rule"]
    assert report["violations"] >= 20 and simple["missed"] > 10  # the curves are no gift
    assert report["missed"] < 0.1 * report["violations"] and report["caught"] > simple["caught"]


def test_files_are_asked_for() -> None:
    run = subprocess.run(
        [sys.executable, "benchmarks/forecast/run.py", "--lengths=/nowhere"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2 and "give --lengths and --requests" in run.stderr


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("forecast_benchmark_run", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def alarms_at(*steps: int):
    """Foresees the cap of those steps, once each."""
    left = list(steps)

    def foresees(means, longest, cap) -> bool:
        due = len(longest) - 1 in left
        if due:
            left.remove(len(longest) - 1)
        return due

    return foresees


@pytest.mark.parametrize(
    ("alarms", "peak", "outcome"),
    [
        ((5,), 1.4, {"in_time": 1}),  # it exceeds 1.2 at step 8: three steps ahead
        ((6,), 1.4, {"late": 1}),
        ((), 1.4, {"missed": 1}),
        ((2, 6), 1.6, {"in_time": 1, "late": 1}),  # the first leaves 1.2, the second 1.5
        ((40,), 1.4, {"missed": 1, "false": 1}),
    ],
)
def test_alarms_are_judged_by_the_cap_that_they_leave(bench, alarms, peak, outcome) -> None:
    longest = [1.0] * 8 + [peak] + [1.0] * 60
    score = bench.play(longest, longest, alarms_at(*alarms), 1.2)
    marks = {"in_time": 0, "late": 0, "missed": 0, "false": 0, "too_early": 0, **outcome}
    assert {name: getattr(score, name) for name in marks} == marks


def test_what_nobody_could_foresee_counts_apart(bench) -> None:
    longest = [1.0, 1.0, 1.6] + [1.0] * 60
    score = bench.play(longest, longest, alarms_at(), 1.2)
    assert (score.too_early, score.missed) == (1, 0)
