"""The benchmarks of running jobs with a controller: their figures are worked out by hand."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.core.layout import ParallelLayout

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> Any:
    path = ROOT / "benchmarks" / name / "run.py"
    spec = importlib.util.spec_from_file_location(f"{name}_run", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(number: int, step_s: float, exposed: float) -> dict[str, Any]:
    return {
        "step": number,
        "step_s": step_s,
        "policy_version": 2 * number,
        "compile_s": {"exposed": exposed, "hidden": 0.0},
    }


def test_figures_by_hand() -> None:
    benchmark = load("adaptive_live")
    change = {"step": 2, "transition_s": 4.0, "transition_compile_s": 3.0}
    rows = [step(0, 1.0, 9.0), step(1, 1.0, 9.0), change, step(2, 2.0, 12.5), step(3, 1.0, 12.5)]
    decisions = [
        {"step": 1, "verdict": "reject", "step_s_predicted": 2.0},
        {"step": 2, "verdict": "urgent", "step_s_predicted": 9.0},
    ]
    found = benchmark.figures(rows, decisions)
    assert found["steps"] == 4 and found["transitions"] == 1 and found["replans"] == 2
    assert found["mean_step_s"] == (4.0 + 4.0) / 3  # without the first step
    # 3.5 s were waited for a compiler after the first step, 3 of them at the change.
    assert found["mean_step_s_without_compile"] == (8.0 - 3.5) / 3
    assert found["optional_moves"] == 0 and found["urgent_moves"] == 1
    assert found["prediction_error_median"] == 1.0  # 2 predicted, the median of 1, 2, 1 measured
    assert benchmark.samples_once(rows, 4)
    assert not benchmark.samples_once([*rows, step(3, 1.0, 12.5)], 4)
    assert benchmark.figures([], []) == {"steps": 0}


def test_marks_by_hand() -> None:
    benchmark = load("adaptive_live")

    def run(mean_s: float, code: int = 0, oom: int = 0, moves: int = 0) -> dict[str, Any]:
        return {
            "mean_step_s_without_compile": mean_s,
            "exit_code": code,
            "oom": oom,
            "optional_moves": moves,
        }

    found = {
        "memory": {"payback": run(1.1), "static": run(0.5, code=1, oom=1), "any_gain": run(1.0)},
        "ripple": {"payback": run(1.0, moves=2), "static": run(1.25)},
        "pool": {"payback": run(2.0), "static": run(4.0)},
    }
    marks = benchmark.marks(found)
    assert marks["worst_vs_other"] == pytest.approx(0.1)  # a run that ended early is no measure
    assert marks["oom_payback"] == 0 and marks["moves_when_nothing_pays"] == 2
    found["pool"]["payback"] = run(1.0, code=1, oom=1)
    assert benchmark.marks(found)["worst_vs_other"] == math.inf
    assert benchmark.marks(found)["oom_payback"] == 1


def test_the_least_disturbed_of_repeats() -> None:
    benchmark = load("adaptive_live")
    rows = [
        {"steps": 9, "exit_code": 3, "oom": 1, "samples_once": True},
        {"steps": 20, "exit_code": 0, "oom": 0, "samples_once": True, "optional_moves": 2}
        | {"mean_step_s_without_compile": 1.5},
        {"steps": 20, "exit_code": 0, "oom": 0, "samples_once": True, "optional_moves": 0}
        | {"mean_step_s_without_compile": 1.25},
    ]
    found = benchmark.least_disturbed(rows)
    assert found["mean_step_s_without_compile"] == 1.25 and found["exit_code"] == 0
    # One run that ends for want of memory, or moves, is one too many.
    assert found["oom"] == 1 and found["optional_moves"] == 2 and found["samples_once"]
    assert found["mean_step_s_of_repeats"] == [None, 1.5, 1.25]
    assert found["failed"] == 1
    marks = benchmark.marks({"ripple": {"payback": found, "static": rows[1]}})
    assert marks["worst_vs_other"] == math.inf and marks["oom_payback"] == 1


def test_traces_have_what_their_names_say() -> None:
    traces = load("adaptive_live").traces(200)
    assert set(traces) == {"memory", "ripple", "pool"}
    assert set(traces["ripple"].lengths.values()) == {24.0, 36.0}
    assert [event["step"] for event in traces["pool"].pool] == [40, 80, 120, 160]


def test_choices_by_hand() -> None:
    benchmark = load("plan_choice")
    measured = {"a": {12: 1.0}, "b": {12: 1.25}, "c": {12: 2.0}}
    predicted = {"a": {12: 1.5}, "b": {12: 1.0}, "c": {12: 3.0}}
    found = benchmark.choices(measured, predicted, 12)
    assert found["chosen"] == "b" and found["best"] == "a"
    assert found["regret"] == pytest.approx(0.25) and found["regret_of_worst"] == 1.0
    assert found["prediction_error_mean"] == pytest.approx((0.5 + 0.2 + 0.5) / 3)
    assert ParallelLayout(1, 2, 3) in benchmark.layouts(6, 4, 2)
    assert ParallelLayout(1, 1, 6) not in benchmark.layouts(6, 4, 2)  # more than there are heads


def test_overhead_by_hand() -> None:
    def row(step_s: float, exposed: float, hidden: float, room: int, cpu_s: float) -> Any:
        compiled = {"exposed": exposed, "hidden": hidden}
        values = {"step_s": step_s, "compile_s": compiled, "response_room": room}
        return values | {"controller_cpu_s": cpu_s}

    rows = [
        row(9.0, 5.0, 0.0, 8, 0.0),  # the first step compiles
        row(1.0, 5.0, 0.0, 8, 0.1),
        row(1.5, 5.0, 2.0, 8, 0.2),
        row(7.0, 8.0, 2.0, 16, 0.3),  # it waited
        row(2.0, 8.0, 3.0, 16, 0.5),  # at its room nothing was quiet
    ]
    found = load("controller_overhead").shares(rows, 50.0)
    assert found["cpu_share"] == pytest.approx(0.01)
    assert found["cpu_share_of_steps"] == pytest.approx(0.5 / 4.5)
    assert found["background_slowdown"] == pytest.approx(1.5)
