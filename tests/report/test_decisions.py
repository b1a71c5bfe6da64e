"""decisions.jsonl: one object a replan, with what was measured when it is known."""

from pathlib import Path
from typing import Any

from nereus_jax.report.decisions import DecisionsWriter
from nereus_jax.report.jsonl import read_jsonl


def decision(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "verdict": "admit", "target": {"actor-TRAIN": {}}, **more}


def rows(workdir: Path) -> list[dict[str, Any]]:
    return read_jsonl(workdir / "decisions.jsonl")


def test_a_move_has_its_seconds_and_those_of_the_second_step_after_it(tmp_path: Path) -> None:
    with DecisionsWriter(tmp_path) as writer:
        writer.append(decision(3))
        writer.step_measured(9.0)  # under the old plan: the move waits for its programs
        writer.transition_measured(2.0)
        writer.step_measured(8.0)
        assert "step_s_measured" not in rows(tmp_path)[0]
        writer.step_measured(4.0)
        writer.step_measured(5.0)
    (row,) = rows(tmp_path)
    assert row == decision(3, transition_s_measured=2.0, step_s_measured=4.0)


def test_where_nothing_moves_the_plan_that_goes_on_is_measured(tmp_path: Path) -> None:
    with DecisionsWriter(tmp_path) as writer:
        writer.append(decision(1, target=None, verdict="reject"))
        writer.transition_measured(2.0)  # of no decision
        writer.step_measured(8.0)
        writer.step_measured(7.0)
        writer.append(decision(5))
        writer.transition_failed("no memory")
        for seconds in (6.0, 5.0):
            writer.step_measured(seconds)
    first, second = rows(tmp_path)
    assert first == decision(1, target=None, verdict="reject", step_s_measured=7.0)
    assert second == decision(5, transition_error="no memory", step_s_measured=5.0)


def test_outcomes_are_of_the_newest_decision_and_come_once(tmp_path: Path) -> None:
    with DecisionsWriter(tmp_path) as writer:
        writer.append(decision(1))
        writer.append(decision(2))
        writer.transition_measured(2.0)
        writer.transition_measured(3.0)
    assert rows(tmp_path) == [decision(1), decision(2, transition_s_measured=2.0)]


def test_a_run_that_goes_back_in_its_process_keeps_what_it_decided(tmp_path: Path) -> None:
    with DecisionsWriter(tmp_path) as writer:
        writer.append(decision(1))
        writer.append(decision(6))
    with DecisionsWriter(tmp_path, keep_through=10**9) as writer:
        writer.transition_measured(4.0)
        for seconds in (3.0, 2.0):  # steps 4 and 5, once more
            writer.step_measured(seconds)
    assert rows(tmp_path) == [
        decision(1),
        decision(6, transition_s_measured=4.0, step_s_measured=2.0),
    ]
    DecisionsWriter(tmp_path, keep_through=3).close()
    assert rows(tmp_path) == [decision(1)]
