"""The files of simulated runs: what `nereus report` and other readers find in their directory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nereus_jax.control.decisions import plan_json
from nereus_jax.core.errors import StorageError
from nereus_jax.simulator.ledger import RunResult, Spent


def write_runs(directory: Path, figures: str, runs: Sequence[RunResult]) -> None:
    """Writes figures.json, and for every run POLICY-SEED/steps.jsonl and decisions.jsonl.

    Args:
      directory: is made if it is not there.
      figures: of all of them, as JSON.
      runs: each in a directory of its own.

    Raises:
      StorageError: a file cannot be written.
    """
    write_text(directory / "figures.json", figures)
    for run in runs:
        own = directory / f"{run.policy}-{run.seed}"
        write_text(own / "decisions.jsonl", _lines(run.decisions))
        write_text(own / "steps.jsonl", _lines(step_rows(run)))


def step_rows(run: RunResult) -> list[dict[str, Any]]:
    """A row a step that counted.

    `plan` is in the rows of the steps that are the first under one; `before_s`, what the run did
    since the step before, by kind, and `out_of_memory`, attempts at the step that did not fit, are
    where there was anything.
    """
    before: dict[int, dict[str, float]] = {}
    for spent in run.intervals:
        if spent.kind is not Spent.STEPS:
            own = before.setdefault(spent.step, {})
            own[spent.kind.value] = own.get(spent.kind.value, 0.0) + spent.end_s - spent.start_s
    rows: list[dict[str, Any]] = []
    plan = None
    for step in run.steps:
        row: dict[str, Any] = {
            "simulated": True,
            "step": step.step,
            "start_s": step.start_s,
            "step_s": step.step_s,
            "stage_s": dict(step.stage_s),
            "response_tokens_mean": step.mean_tokens,
            "response_tokens_p95": step.p95_tokens,
            "response_tokens_longest": step.longest_tokens,
            "peak_memory_bytes": step.peak_bytes,
            "devices": len(step.pool),
            "samples": step.samples,
        }
        if step.plan != plan:
            plan = step.plan
            row["plan"] = plan_json(plan)
        if step.step in before:
            row["before_s"] = before[step.step]
        failed = sum(oom.step == step.step for oom in run.out_of_memory)
        if failed:
            row["out_of_memory"] = failed
        rows.append(row)
    return rows


def _lines(rows: Sequence[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_text(path: Path, text: str) -> None:
    """Writes a file, and the directories that it lies in.

    Raises:
      StorageError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}; name another place"
        ) from error
