"""Policies in running jobs: what each makes of the same lengths and the same pool, measured.

python benchmarks/adaptive_live/run.py --json=adaptive_live.json [--steps=200] [--repeats=3]
    [--traces=memory,ripple,pool] [--workdir=DIR]
"""

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from live_runs import (  # pyright: ignore
    ROOT,
    Row,
    children_cpu_s,
    rows_of,
    train_command,
    write_report,
)

POLICIES = ("static", "dp_only", "any_gain", "every_k=3", "payback")
PAYBACK = "payback"
MEMORY_GIB = 0.0047
"""Of a device, on the trace `memory`: the plan at the start has room for 72 tokens, not for 112."""
RIPPLE_STEPS = 8
"""From one turn of the lengths of `ripple` to the next."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What all policies meet.

    Attributes:
      settings: of the configuration.
      lengths: step -> mean; written to a file if there are any.
      pool: events of the pool.
    """

    settings: Mapping[str, Any]
    lengths: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float])
    pool: Sequence[Mapping[str, Any]] = ()


def traces(steps: int) -> dict[str, Trace]:
    """The three traces, for so many steps."""
    ripple = {step: 24.0 * (1.5 if step // RIPPLE_STEPS % 2 else 1.0) for step in range(steps)}
    events = (
        (0.2, {"event": "lost", "devices": 8}),
        (0.4, {"event": "joined", "devices": 8}),
        (0.6, {"event": "revoke", "devices": 4, "deadline_s": 60}),
        (0.8, {"event": "joined", "devices": 4}),
    )
    return {
        "memory": Trace(
            settings={
                "rollout.length_trace": f"12:80:{steps}",
                "device_memory_gib": MEMORY_GIB,
            }
        ),
        "ripple": Trace(settings={}, lengths=ripple),
        "pool": Trace(
            settings={"rollout.length_trace": f"24:36:{steps}", "checkpoint.every": 5},
            pool=[{"step": round(share * steps), **event} for share, event in events],
        ),
    }


def run(trace: Trace, policy: str, steps: int, workdir: Path) -> Row:
    """One job, as a user runs it."""
    workdir.mkdir(parents=True)
    settings = dict(trace.settings) | {
        "num_steps": steps,
        "control.policy": policy,
        "compilation_cache_dir": workdir.parents[1] / "compiled",
    }
    if trace.lengths:
        lines = [f"{step},{mean}" for step, mean in trace.lengths.items()]
        path = workdir / "lengths.csv"
        path.write_text("step,mean_response_length\n" + "\n".join(lines) + "\n")
        settings["rollout.length_trace"] = path
    if trace.pool:
        path = workdir / "pool.jsonl"
        path.write_text("".join(json.dumps(event) + "\n" for event in trace.pool))
        settings["control.pool_trace"] = path
    command = train_command("configs/ppo_adaptive.py", workdir / "run", settings)
    start_s, start_cpu_s = time.perf_counter(), children_cpu_s()
    with (workdir / "log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)
    wall_s, cpu_s = time.perf_counter() - start_s, children_cpu_s() - start_cpu_s
    said = (workdir / "log").read_text()
    return figures(rows_of(workdir / "run", "metrics"), rows_of(workdir / "run", "decisions")) | {
        "exit_code": done.returncode,
        "oom": int("memory" in said.splitlines()[-1] and done.returncode != 0),
        "last_words": said.splitlines()[-1],
        "process_s": wall_s,
        "process_cpu_s": cpu_s,
        "samples_once": samples_once(rows_of(workdir / "run", "metrics"), steps),
    }


def figures(rows: Sequence[Row], decisions: Sequence[Row]) -> Row:
    """Seconds of a run, and how far they were from what the controller had said.

    The first step is left out: it has the compiler of the first plan's programs in it, or finds
    them in the cache that an earlier run has left.
    """
    every = [row for row in rows if "step_s" in row]
    changes = [row for row in rows if "transition_s" in row]
    if len(every) < 2:
        return {"steps": len(every)}
    first, steps = every[0], every[1:]
    steps_s = sum(row["step_s"] for row in steps)
    changes_s = sum(row["transition_s"] for row in changes)
    waited_s = sum(row["transition_compile_s"] for row in changes)
    # Programs for longer rows are compiled in the step that first has such rows.
    compiled_s = steps[-1]["compile_s"]["exposed"] - first["compile_s"]["exposed"]
    compile_s = max(compiled_s, waited_s)
    moves = [d for d in decisions if d["verdict"] in ("admit", "urgent")]
    errors: list[float] = []
    for decision in decisions:
        near = [r["step_s"] for r in steps if 0 <= r["step"] - decision["step"] < 5]
        if near and decision["verdict"] in ("keep", "reject"):
            errors.append(decision["step_s_predicted"] / statistics.median(near) - 1)
    return {
        "steps": len(every),
        "mean_step_s": (steps_s + changes_s) / len(steps),
        "mean_step_s_without_compile": (steps_s + changes_s - compile_s) / len(steps),
        "median_step_s": statistics.median(row["step_s"] for row in steps),
        "transitions": len(changes),
        "transition_s": changes_s - waited_s,
        "compile_s": compile_s,
        "replans": len(decisions),
        "controller_cpu_s": steps[-1].get("controller_cpu_s", 0.0),
        "optional_moves": sum(d["verdict"] == "admit" for d in moves),
        "urgent_moves": sum(d["verdict"] == "urgent" for d in moves),
        "prediction_error_median": statistics.median(map(abs, errors)) if errors else None,
    }


def samples_once(rows: Sequence[Row], steps: int) -> bool:
    """Whether every step that is there came once, in order, after the same updates as ever."""
    found = [row for row in rows if "step_s" in row]
    numbers = [row["step"] for row in found]
    versions = [row["policy_version"] for row in found]
    per_step = versions[1] if len(versions) > 1 else 0
    return numbers == list(range(len(numbers))) and versions == [n * per_step for n in numbers]


def marks(found: Mapping[str, Mapping[str, Row]]) -> dict[str, float | int | None]:
    """The benchmark's names, of trace -> policy -> figures."""
    losses: list[float] = []
    for by_policy in found.values():
        own = by_policy[PAYBACK]
        done = [x for name, x in by_policy.items() if name != PAYBACK and not x["exit_code"]]
        if done and not own["exit_code"] and not own.get("failed"):
            key = "mean_step_s_without_compile"
            losses.append(own[key] / min(x[key] for x in done) - 1)
        elif done:
            losses.append(math.inf)
    return {
        "worst_vs_other": max(losses) if losses else None,
        "oom_payback": sum(by_policy[PAYBACK]["oom"] for by_policy in found.values()),
        "moves_when_nothing_pays": found.get("ripple", {}).get(PAYBACK, {}).get("optional_moves"),
    }


def least_disturbed(runs: Sequence[Row]) -> Row:
    """Of runs of one policy the fastest of those that went furthest, with the most of what must not
    be and all their seconds."""
    done = [r for r in runs if not r["exit_code"]] or runs
    chosen = min(done, key=lambda r: (-r["steps"], r.get("mean_step_s_without_compile", math.inf)))
    return chosen | {
        "failed": sum(r["exit_code"] != 0 for r in runs),
        "oom": max(r["oom"] for r in runs),
        "optional_moves": max(r.get("optional_moves", 0) for r in runs),
        "samples_once": all(r["samples_once"] for r in runs),
        "mean_step_s_of_repeats": [r.get("mean_step_s_without_compile") for r in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--workdir", type=Path, help="keep the runs here")
    parser.add_argument("--repeats", type=int, default=1, help="of each run; the fastest counts")
    parser.add_argument("--traces", default="memory,ripple,pool", help="which")
    options = parser.parse_args()
    found: dict[str, dict[str, Row]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = options.workdir or Path(scratch)
        every = traces(options.steps)
        names = options.traces.split(",")
        if unknown := set(names) - set(every):
            parser.error(f"--traces: {', '.join(sorted(unknown))}; there are {', '.join(every)}")
        for name in names:
            repeats: dict[str, list[Row]] = {}
            # In turn, so that a slow spell of the machine does not meet one policy alone.
            for repeat, policy in itertools.product(range(options.repeats), POLICIES):
                workdir = root / name / f"{policy}{f'-{repeat}' if repeat else ''}"
                row = run(every[name], policy, options.steps, workdir)
                repeats.setdefault(policy.partition("=")[0], []).append(row)
                print(name, policy, json.dumps(row), flush=True)
            found[name] = {policy: least_disturbed(rows) for policy, rows in repeats.items()}
    write_report(options.json, marks(found), {"runs": found, "steps": options.steps})


if __name__ == "__main__":
    main()
