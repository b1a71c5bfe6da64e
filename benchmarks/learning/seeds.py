"""Whether a job learns alike in two ways of running it, from the same seeds: here under two
policies that meet the same changes of the pool.

python benchmarks/learning/seeds.py --json=seeds.json [--seeds=5] [--steps=20]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from live_runs import ROOT, Row, rows_of, train_command, write_report  # pyright: ignore

LAST_STEPS = 10
"""Whose success is compared."""
ALWAYS = {"eval.every": 0, "report.tensorboard": False}
POOL = (
    (0.25, {"event": "lost", "devices": 4}),
    (0.5, {"event": "joined", "devices": 4}),
    (0.75, {"event": "revoke", "devices": 2, "deadline_s": 30}),
)
"""Share of the steps -> what happens to the 8 devices then."""


def train(workdir: Path, settings: Mapping[str, Any]) -> list[Row]:
    """Runs configs/ppo_tiny.py as a user runs it; returns the rows of its metrics."""
    command = train_command("configs/ppo_tiny.py", workdir, {**ALWAYS, **settings})
    subprocess.run(command, cwd=ROOT, check=True)
    return rows_of(workdir, "metrics")


def success(rows: Sequence[Row]) -> float:
    """Mean success of the last steps."""
    found = [row["success_rate"] for row in rows if "success_rate" in row]
    return statistics.fmean(found[-LAST_STEPS:])


def compare(
    scratch: Path, seeds: int, way: Mapping[str, Any], reference: Mapping[str, Any]
) -> dict[str, Any]:
    """Runs a job in two ways, from the same seeds.

    Args:
      scratch: for the runs.
      seeds: of each way.
      way: settings of the one.
      reference: of the other, whose spread over seeds is the measure.
    """
    rates: dict[str, list[float]] = {"way": [], "reference": []}
    changes: dict[str, list[int]] = {"way": [], "reference": []}
    for seed in range(seeds):
        for name, settings in (("way", way), ("reference", reference)):
            common = {"seed": seed, "compilation_cache_dir": scratch / "compiled"}
            rows = train(scratch / f"{name}-{seed}", common | dict(settings))
            rates[name].append(success(rows))
            changes[name].append(sum("transition_s" in row for row in rows))
            print(seed, name, rates[name][-1], changes[name][-1], flush=True)
    error = statistics.stdev(rates["reference"]) / seeds**0.5 if seeds > 1 else float("nan")
    difference = statistics.fmean(rates["way"]) - statistics.fmean(rates["reference"])
    return {
        "success": rates["way"],
        "success_reference": rates["reference"],
        "changes_of_plan": changes["way"],
        "changes_of_plan_reference": changes["reference"],
        "difference": difference,
        "standard_error_reference": error,
        "within_two_standard_errors": abs(difference) <= 2 * error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "pool.jsonl"
        events = [{"step": round(share * options.steps), **event} for share, event in POOL]
        trace.write_text("".join(json.dumps(event) + "\n" for event in events))
        common = {
            "num_steps": options.steps,
            "control.pool_trace": trace,
            "checkpoint.every": 4,
        }
        found = compare(
            Path(scratch),
            options.seeds,
            common | {"control.policy": "payback"},
            common | {"control.policy": "static"},
        )
    marks = {
        "difference": found.pop("difference"),
        "standard_error": found.pop("standard_error_reference"),
    }
    write_report(options.json, marks, found | {"steps": options.steps})


if __name__ == "__main__":
    main()
