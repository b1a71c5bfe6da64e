"""Runs configs/ppo_tiny.py under three plans and reports held-out success and seconds."""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLANS: dict[str, dict[str, str]] = {
    "mixed (as configured)": {},
    "data parallel": {
        "plan.actor-TRAIN": "dp=8,pp=1,tp=1",
        "plan.critic-TRAIN": "dp=8,pp=1,tp=1",
        "plan.actor-GENERATE": "dp=8,pp=1,tp=1",
        "plan.reference-SCORE": "dp=8,pp=1,tp=1",
        "plan.critic-SCORE": "dp=8,pp=1,tp=1",
        "train.microbatch_size": "16",  # a minibatch of 128 rows is 16 for each of 8 replicas
    },
    "pipeline and tensor": {
        "plan.actor-TRAIN": "dp=1,pp=2,tp=4",
        "plan.critic-TRAIN": "dp=2,pp=2,tp=2",
        "plan.actor-GENERATE": "dp=4,pp=1,tp=2",
        "plan.reference-SCORE": "dp=1,pp=1,tp=4,devices=0-3",
        "plan.critic-SCORE": "dp=1,pp=2,tp=2,devices=4-7",
    },
}


def train(overrides: dict[str, str], workdir: Path, extra: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "nereus_jax.cli", "train", "--config=configs/ppo_tiny.py"]
    command += [f"--workdir={workdir}", *extra]
    command += [f"--config.{key}={value}" for key, value in overrides.items()]
    start_s = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True)
    wall_s = time.perf_counter() - start_s
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [r for r in rows if "eval_step" in r]
    steps = [r for r in rows if "reward_mean" in r]
    return {
        "plan": json.loads((workdir / "plan.json").read_text()),
        "wall_s": wall_s,
        "eval_step": [r["eval_step"] for r in evaluations],
        "eval_success_rate": [r["eval_success_rate"] for r in evaluations],
        "success_rate": [r["success_rate"] for r in steps],
        "step_s_median": sorted(r["step_s"] for r in steps)[len(steps) // 2],
    }


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), constrained_layout=True)
    for index, (name, result) in enumerate(results.items()):
        color = f"C{index}"
        axes.plot(result["success_rate"], color=color, alpha=0.35, linewidth=1)
        axes.plot(
            result["eval_step"],
            result["eval_success_rate"],
            color=color,
            marker="o",
            label=f"{name}, {result['wall_s']:.0f} s",
        )
    axes.set_xlabel("RL step")
    axes.set_ylabel("success, sampled at T = 1")
    axes.set_ylim(0, 1)
    axes.set_title("PPO on 8 emulated devices: held-out (points) and training (lines)", fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one plan, three steps")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--figure", type=Path, help="draw the curves (needs matplotlib)")
    arguments = parser.parse_args()
    plans = dict(list(PLANS.items())[:1]) if arguments.quick else PLANS
    extra = ["--config.num_steps=3", "--config.eval.num_prompts=32"] if arguments.quick else []
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for index, (name, plan) in enumerate(plans.items()):
            results[name] = train(plan, Path(scratch) / str(index), extra)
    report = {
        "marks": {
            "success_before_max": max(r["eval_success_rate"][0] for r in results.values()),
            "success_after_min": min(r["eval_success_rate"][-1] for r in results.values()),
            "wall_s_max": max(r["wall_s"] for r in results.values()),
        },
        "plans": results,
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "versions": {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "flax", "optax")}
        | {"python": platform.python_version()},
    }
    print(json.dumps(report["marks"], indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.figure:
        draw(results, arguments.figure)


if __name__ == "__main__":
    main()
