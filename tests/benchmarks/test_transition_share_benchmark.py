"""The benchmark of what changes of plan cost runs, and its shares are worked out by hand."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    path = ROOT / "benchmarks" / "transition_share" / "run.py"
    spec = importlib.util.spec_from_file_location("transition_share_run", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(number: int, step_s: float, exposed: float, hidden: float) -> dict[str, Any]:
    return {
        "step": number,
        "step_s": step_s,
        "success_rate": number / 10,
        "compile_s": {"exposed": exposed, "hidden": hidden},
    }


def test_shares_by_hand(benchmark: Any) -> None:
    change = {
        "step": 1,
        "transition_s": 3.0,
        "transition_compile_s": 2.0,
        "transition_modelled_s": 0.1,
        "transition_wire_bytes": 10,
        "transition_ways": {},
    }
    rows = [step(0, 4.0, 5.0, 0.0), change, step(1, 9.0, 8.0, 6.0), step(2, 4.0, 8.0, 6.0)]
    found = benchmark.shares(rows)
    assert found["total_s"] == 20.0
    assert found["exposed_share"] == 1.0 / 20.0
    assert found["compile_share"] == 3.0 / 20.0  # one second of it in the step after the change
    assert found["hidden_compile_s"] == 6.0


def test_learning_by_hand(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = sys.modules["seeds"]
    assert seeds.success([step(i, 1.0, 0.0, 0.0) for i in range(20)]) == pytest.approx(1.45)
    assert [n for n in benchmark.with_changes(20, benchmark.FOUR) if n.endswith("actor-TRAIN")] == [
        f"plan_changes.{n}.actor-TRAIN" for n in (4, 8, 12, 16)
    ]

    def runs(workdir: Path, settings: Any) -> list[dict[str, Any]]:
        rows = [{"success_rate": settings["base"] + settings["seed"]}]
        return rows + [{"transition_s": 1.0}] * settings["moves"]

    monkeypatch.setattr(seeds, "train", runs)
    found = seeds.compare(tmp_path, 3, {"base": 1.5, "moves": 2}, {"base": 0.0, "moves": 0})
    assert found["success"] == [1.5, 2.5, 3.5] and found["success_reference"] == [0, 1, 2]
    assert found["changes_of_plan"] == [2, 2, 2]
    assert found["difference"] == 1.5
    assert found["standard_error_reference"] == pytest.approx(3**-0.5)
    assert not found["within_two_standard_errors"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quick_run(tmp_path: Path) -> None:
    output = tmp_path / "share.json"
    command = [sys.executable, "benchmarks/transition_share/run.py", f"--json={output}"]
    run = subprocess.run(
        [*command, "--steps=7", "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=1700
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(output.read_text())
    assert set(report) == {"exposed_share", "compile_share", "detail"}
    assert 0 < report["exposed_share"] < 1 and 0 < report["compile_share"] < 1
    changes = report["detail"]["transitions"]
    assert [change["step"] for change in changes] == [1, 2, 3, 4, 5, 6]
    assert all(change["wire_bytes"] > 0 for change in changes[1:-1])
