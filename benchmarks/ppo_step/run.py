"""One PPO step of nereus_jax, Tunix and TRL on the same work: CPU seconds, wall, memory.

python benchmarks/ppo_step/run.py --json=ppo_step.json [--tunix-python=PATH] [--trl-python=PATH]

Everything is measured in a fresh process of its own. The runs rotate over what is measured, so that
a machine that slows down slows down all of it; figures are medians over the runs.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clock
import clocked_reward
import work

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NUM_DEVICES = 8
UNSTEADY = 2
"""Steps at the start that do not count: they compile."""

OURS_SINGLE = {"actor-TRAIN": "dp=1", "critic-TRAIN": "dp=1"}
OURS_LAYOUTS: dict[str, dict[str, str]] = {
    "dp8": {"actor-TRAIN": "dp=8", "critic-TRAIN": "dp=8"},
    "dp4_tp2": {"actor-TRAIN": "dp=4,tp=2", "critic-TRAIN": "dp=4,tp=2"},
    "dp2_tp4": {"actor-TRAIN": "dp=2,tp=4", "critic-TRAIN": "dp=2,tp=4"},
    "apart": {
        "actor-TRAIN": "dp=2,tp=2,devices=0-3",
        "critic-TRAIN": "dp=2,tp=2,devices=4-7",
    },
}
"""All 8 devices are used in TRAIN; other model-stages live where their model is trained."""

TUNIX_LAYOUTS = ("colo_fsdp", "colo_f4t2", "roll_tp", "disagg_all")
TUNIX_MICRO_BATCHES = {"single": 0, "single_micro8": 8}
"""On one device, rows that it trains on at a time (0: the batch); of each figure its better one
counts."""
XLA_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
)
"""A busy machine lets emulated devices wait for each other longer than XLA expects."""


def run_child(python: str, script: str, arguments: Sequence[str], sizes: str, scratch: Path) -> Any:
    """Runs a script; returns the lines of its clock and its standard output."""
    ticks = scratch / "clock.jsonl"
    ticks.unlink(missing_ok=True)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": XLA_FLAGS,
        clock.CLOCK_FILE: str(ticks),
        clocked_reward.SIZES: sizes,
    }
    if python == sys.executable:
        paths = [str(HERE), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    else:  # it has packages of its own
        environment.pop("PYTHONPATH", None)
    command = [python, str(HERE / script), *arguments]
    child = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{(child.stdout + child.stderr)[-3000:]}")
    lines = ticks.read_text().splitlines() if ticks.exists() else []
    return [json.loads(line) for line in lines], child.stdout


def steady(ticks: Sequence[dict[str, float]]) -> dict[str, Any]:
    """A run's steady step: medians over the steps that do not compile.

    Args:
      ticks: one a step, all at the same point of it.
    """
    pairs = list(itertools.pairwise(ticks))
    steps = {name: [b[name] - a[name] for a, b in pairs] for name in ("wall_s", "cpu_s")}
    return {
        **{name: statistics.median(values[UNSTEADY:]) for name, values in steps.items()},
        "peak_rss_bytes": ticks[-1]["peak_rss_bytes"],
        "steps": steps,
        "rewards": [tick["reward"] for tick in ticks],
    }


class Measured:
    """What is measured, each by its name: how to measure it once.

    Args:
      arguments: of the command line.
      scratch: a directory for everybody's files.
    """

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self._sizes = "quick" if arguments.quick else "full"
        self._steps = arguments.steps
        self._tunix, self._trl = arguments.tunix_python, arguments.trl_python
        self._scratch = scratch
        self._serial = 0
        ours, tunix = list(OURS_LAYOUTS), list(TUNIX_LAYOUTS)
        if arguments.quick:
            ours, tunix = ours[:1], tunix[:1]
        if arguments.one_device:
            ours, tunix = [], []
        self.names = ["matmul peak", "ours single"]
        self.names += [f"tunix {name}" for name in TUNIX_MICRO_BATCHES] if self._tunix else []
        self.names += ["trl"] if self._trl else []
        self.names += [f"ours {layout}" for layout in ours]
        self.names += [f"tunix {layout}" for layout in tunix] if self._tunix else []

    def measure(self, name: str) -> dict[str, Any]:
        """Measures one thing once, in a process of its own."""
        if name == "matmul peak":
            return json.loads(self._child(sys.executable, "matmul_peak.py", [])[1])
        program, _, layout = name.partition(" ")
        devices = 1 if layout in ("", *TUNIX_MICRO_BATCHES) else NUM_DEVICES
        options = [f"--sizes={self._sizes}", f"--steps={self._steps}"]
        if program == "trl":
            return steady(self._child(self._trl, "trl_peer.py", options)[0])
        options.append(f"--devices={devices}")
        if program == "tunix":
            options.append(f"--micro-batch={TUNIX_MICRO_BATCHES.get(layout, 0)}")
            layout = "single" if layout in TUNIX_MICRO_BATCHES else layout
            return steady(self._child(self._tunix, "tunix_peer.py", [layout, *options])[0])
        self._serial += 1
        workdir = self._scratch / f"ours_{self._serial}"
        plan = json.dumps(OURS_LAYOUTS.get(layout, OURS_SINGLE))
        found = steady(self._child(sys.executable, "ours.py", [str(workdir), plan, *options])[0])
        rows = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
        stages = [row["stage_s"] for row in rows[UNSTEADY:]]
        return found | {"stage_s": {s: statistics.median(x[s] for x in stages) for s in stages[0]}}

    def _child(self, python: str, script: str, options: Sequence[str]) -> Any:
        return run_child(python, script, options, self._sizes, self._scratch)


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median over the runs of every plain number, and of every stage's seconds."""
    found = {
        name: statistics.median(run[name] for run in runs)
        for name, value in runs[0].items()
        if isinstance(value, int | float)
    }
    for stage in runs[0].get("stage_s", {}):
        found[f"{stage} s"] = statistics.median(run["stage_s"][stage] for run in runs)
    return found


def summarize(found: dict[str, dict[str, float]], sizes: work.Sizes) -> dict[str, float | None]:
    """The ratios that the benchmark is for; null where a peer was not measured."""

    def best_wall_s(program: str) -> float | None:
        """Of its layouts on all devices."""
        layouts = [n for n in found if n.startswith(f"{program} ") and " single" not in n]
        return min((found[n]["wall_s"] for n in layouts), default=None)

    def over(name: str, *peers: str) -> float | None:
        values = [found[peer][name] for peer in peers if peer in found]
        return found["ours single"][name] / min(values) if values else None

    tunix_single = [f"tunix {name}" for name in TUNIX_MICRO_BATCHES]
    ours8_s, tunix8_s = best_wall_s("ours"), best_wall_s("tunix")
    ours = found["ours single"]
    train_s = ours["actor-TRAIN s"] + ours["critic-TRAIN s"]
    peak = found["matmul peak"]["flops_per_s"]
    return {
        "cpu_s_over_tunix": over("cpu_s", *tunix_single),
        "cpu_s_over_trl": over("cpu_s", "trl"),
        "wall_s_over_tunix_best8": ours8_s / tunix8_s if ours8_s and tunix8_s else None,
        "peak_memory_over_tunix": over("peak_rss_bytes", *tunix_single),
        "train_matmul_peak_share": work.train_flops(sizes) / train_s / peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--tunix-python", help="interpreter that has google-tunix; it is measured")
    parser.add_argument("--trl-python", help="interpreter that has trl; it is measured")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one-device", action="store_true", help="nothing on 8 devices")
    parser.add_argument("--quick", action="store_true", help="small: a minute, for a test")
    arguments = parser.parse_args()
    if arguments.steps < UNSTEADY + 2:
        parser.error(f"--steps: at least {UNSTEADY + 2}, got {arguments.steps}")
    with tempfile.TemporaryDirectory() as name:
        measured = Measured(arguments, Path(name))
        runs: dict[str, list[dict[str, Any]]] = {n: [] for n in measured.names}
        for run in range(arguments.runs):
            first = run % len(measured.names)
            for what in measured.names[first:] + measured.names[:first]:
                runs[what].append(measured.measure(what))
                print(f"run {run + 1}: {what}: {medians(runs[what][-1:])}", flush=True)
    found = {what: medians(results) for what, results in runs.items()}
    sizes = work.QUICK if arguments.quick else work.FULL
    report: dict[str, Any] = dict(summarize(found, sizes))
    print(json.dumps(report, indent=2))
    report["detail"] = {
        "medians": found,
        "runs": runs,
        "train_flops": work.train_flops(sizes),
        "ours_layouts": OURS_LAYOUTS,
        "machine": {
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "load": os.getloadavg(),
        },
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
