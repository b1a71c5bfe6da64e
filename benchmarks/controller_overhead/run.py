"""What deciding costs a run: CPU seconds of the controller over those of the process.

python benchmarks/controller_overhead/run.py --json=controller_overhead.json [--steps=60]
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from live_runs import (  # pyright: ignore
    ROOT,
    Row,
    children_cpu_s,
    rows_of,
    train_command,
    write_report,
)

LEAST_S = 0.01
"""Less is no compilation: a look at a queue."""
MEMORY_GIB = 0.0047
"""Of a device: the plan at the start does not suffice to the end."""


def run(steps: int, workdir: Path) -> tuple[list[Row], float, int]:
    """A job, as a user runs it.

    Returns:
      Its rows of metrics, the CPU seconds of its process, and how many replans there were.
    """
    settings = {
        "num_steps": steps,
        "rollout.length_trace": f"12:80:{steps}",
        "device_memory_gib": MEMORY_GIB,
    }
    command = train_command("configs/ppo_adaptive.py", workdir, settings)
    before_s = children_cpu_s()
    subprocess.run(command, cwd=ROOT, check=True)
    cpu_s = children_cpu_s() - before_s
    rows = [row for row in rows_of(workdir, "metrics") if "step_s" in row]
    return rows, cpu_s, len(rows_of(workdir, "decisions"))


def shares(rows: Sequence[Row], process_cpu_s: float) -> Row:
    """The marks.

    Args:
      rows: of the steps.
      process_cpu_s: of the whole process.
    """
    controller_s = rows[-1]["controller_cpu_s"]
    quiet: dict[int, list[float]] = {}
    beside: dict[int, list[float]] = {}
    for before, row in itertools.pairwise(rows):
        if row["compile_s"]["exposed"] - before["compile_s"]["exposed"] > LEAST_S:
            continue  # it waited for a compiler
        compiled = row["compile_s"]["hidden"] - before["compile_s"]["hidden"] > LEAST_S
        (beside if compiled else quiet).setdefault(row["response_room"], []).append(row["step_s"])
    ratios = [
        step_s / statistics.median(quiet[room])
        for room, steps in beside.items()
        if room in quiet
        for step_s in steps
    ]
    steps_s = sum(sum(steps) for steps in (*quiet.values(), *beside.values()))
    return {
        "cpu_share": controller_s / process_cpu_s,
        "cpu_share_of_steps": controller_s / steps_s if steps_s else None,
        "background_slowdown": statistics.median(ratios) if ratios else None,
        "controller_cpu_s": controller_s,
        "process_cpu_s": process_cpu_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows, cpu_s, replans = run(options.steps, Path(scratch) / "run")
    found = shares(rows, cpu_s)
    marks = {"cpu_share": found.pop("cpu_share")}
    write_report(options.json, marks, found | {"steps": len(rows), "replans": replans})


if __name__ == "__main__":
    main()
