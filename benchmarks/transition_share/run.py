"""What changes of plan cost a running job, and whether it learns as one that changes nothing.

python benchmarks/transition_share/run.py --json=transition_share.json [--steps=200] [--seeds=5]
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))
from live_runs import Row, write_report  # pyright: ignore
from seeds import compare, train  # pyright: ignore

HALF = {
    "actor-TRAIN": "dp=1,pp=2,tp=2,devices=4-7",
    "critic-TRAIN": "dp=2,pp=1,tp=2,devices=0-3",
    "actor-GENERATE": "dp=2,pp=1,tp=2,devices=0-3",
    "reference-SCORE": "dp=2,pp=1,tp=1,devices=1-2",
    "critic-SCORE": "dp=1,pp=1,tp=2,devices=6-7",
}
FULL = {
    "actor-TRAIN": "dp=2,pp=2,tp=2",
    "critic-TRAIN": "dp=4,pp=1,tp=2",
    "actor-GENERATE": "dp=4,pp=1,tp=2",
    "reference-SCORE": "dp=4,pp=1,tp=1,devices=0-3",
    "critic-SCORE": "dp=2,pp=1,tp=2,devices=4-7",
}
OTHER_TP_AND_PP = {
    "actor-TRAIN": "dp=2,pp=1,tp=4",
    "critic-TRAIN": "dp=1,pp=2,tp=4",
    "actor-GENERATE": "dp=2,pp=2,tp=2",
    "reference-SCORE": "dp=1,pp=2,tp=2,devices=0-3",
    "critic-SCORE": "dp=1,pp=1,tp=4,devices=4-7",
}
NO_POWER_OF_TWO = {
    "actor-TRAIN": "dp=1,pp=3,tp=2,devices=1-6",
    "critic-TRAIN": "dp=3,pp=1,tp=2,devices=2-7",
    "actor-GENERATE": "dp=3,pp=1,tp=2,devices=0-5",
    "reference-SCORE": "dp=3,pp=1,tp=1,devices=0-2",
    "critic-SCORE": "dp=5,pp=1,tp=1,devices=3-7",
}
SIX = (HALF, FULL, OTHER_TP_AND_PP, NO_POWER_OF_TWO, FULL, HALF)
FOUR = (HALF, FULL, OTHER_TP_AND_PP, NO_POWER_OF_TWO)
"""Plans after each change; the job starts under that of the configuration, which is FULL."""
QUICK = {
    "warmup.num_steps": 2,
    "warmup.batch_size": 32,
    "rollout.batch_size": 32,
    "algorithm.minibatch_size": 16,
    "train.microbatch_size": 4,
}


def with_changes(steps: int, plans: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Settings of a run whose changes of plan are spread evenly."""
    settings: dict[str, Any] = {"num_steps": steps}
    for number, plan in enumerate(plans, 1):
        step = number * steps // (len(plans) + 1)
        settings |= {f"plan_changes.{step}.{stage}": text for stage, text in plan.items()}
    return settings


def shares(rows: Sequence[Row]) -> dict[str, Any]:
    """Seconds of steps, of changes of plan, and of compilation that was waited for."""
    steps = [row for row in rows if "step_s" in row]
    changes = [row for row in rows if "transition_s" in row]
    waited_s = [row["transition_compile_s"] for row in changes]
    steps_s = sum(row["step_s"] for row in steps)
    changes_s = sum(row["transition_s"] for row in changes)
    exposed_s = changes_s - sum(waited_s)
    # Programs for longer rows are compiled in the step that first has such rows.
    compiled_s = steps[-1]["compile_s"]["exposed"] - steps[0]["compile_s"]["exposed"]
    total_s = steps_s + changes_s
    return {
        "exposed_share": exposed_s / total_s,
        "compile_share": max(compiled_s, sum(waited_s)) / total_s,
        "total_s": total_s,
        "transitions": [
            {
                "step": row["step"],
                "seconds": row["transition_s"] - row["transition_compile_s"],
                "compile_waited_s": row["transition_compile_s"],
                "modelled_s": row["transition_modelled_s"],
                "wire_bytes": row["transition_wire_bytes"],
                "ways": row["transition_ways"],
            }
            for row in changes
        ],
        "hidden_compile_s": steps[-1]["compile_s"]["hidden"] - steps[0]["compile_s"]["hidden"],
        "step_s_median": statistics.median(row["step_s"] for row in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--steps", type=int, default=200, help="of the run with six changes; 0: none"
    )
    parser.add_argument("--seeds", type=int, default=0, help="of the comparison; 0: none")
    parser.add_argument("--learning-steps", type=int, default=20, help="of each of its runs")
    parser.add_argument("--quick", action="store_true", help="fewer rows, to prove that it runs")
    options = parser.parse_args()
    settings: dict[str, Any] = QUICK if options.quick else {}
    with tempfile.TemporaryDirectory() as scratch:
        found: dict[str, Any] = {"exposed_share": None, "compile_share": None}
        if options.steps:
            start_s = time.perf_counter()
            rows = train(Path(scratch) / "share", with_changes(options.steps, SIX) | settings)
            found = shares(rows) | {"wall_s": time.perf_counter() - start_s}
        learning = None
        if options.seeds:
            steps = options.learning_steps
            changed = with_changes(steps, FOUR) | settings
            kept = with_changes(steps, ()) | settings
            learning = compare(Path(scratch), options.seeds, changed, kept)
    marks = {name: found.pop(name) for name in ("exposed_share", "compile_share")}
    more = {"steps": options.steps, "quick": options.quick, "learning": learning}
    write_report(options.json, marks, found | more)


if __name__ == "__main__":
    main()
