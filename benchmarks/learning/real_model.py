"""Draws the learning curve of a finished run of configs/ppo_smollm2.py.

python benchmarks/learning/real_model.py WORKDIR --json=real_model.json --figure=docs/smollm2.png
"""

import argparse
import json
from pathlib import Path
from typing import Any


def read(workdir: Path) -> dict[str, Any]:
    """Success in training and on held-out problems, from the run's metrics."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [r for r in rows if "eval_step" in r]
    steps = [r for r in rows if "reward_mean" in r]
    if not evaluations or not steps:
        raise SystemExit(f"{workdir}: no run with evaluations (eval.every) is there")
    return {
        "eval_step": [r["eval_step"] for r in evaluations],
        "eval_success_rate": [r["eval_success_rate"] for r in evaluations],
        "eval_success_rate_greedy": [r.get("eval_success_rate_greedy") for r in evaluations],
        "success_rate": [r["success_rate"] for r in steps],
        "kl": [r["kl"] for r in steps],
        "steps_s": sum(r["step_s"] for r in steps),
        "step_s_median": sorted(r["step_s"] for r in steps)[len(steps) // 2],
    }


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), constrained_layout=True)
    axes.plot(
        [i + 1 for i in range(len(result["success_rate"]))],
        result["success_rate"],
        color="C0",
        alpha=0.35,
        linewidth=1,
        label="training batches of 64, T = 1",
    )
    axes.plot(
        result["eval_step"],
        result["eval_success_rate"],
        "o-",
        color="C0",
        label="200 held-out problems, T = 1",
    )
    if None not in result["eval_success_rate_greedy"]:
        axes.plot(
            result["eval_step"],
            result["eval_success_rate_greedy"],
            "s--",
            color="C1",
            label="200 held-out problems, greedy",
        )
    axes.set_xlabel("RL step")
    axes.set_ylabel("success")
    axes.set_ylim(0, 1)
    axes.set_title("PPO of SmolLM2-135M-Instruct: sums of one and two digits", fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path, help="of the run")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--figure", type=Path, help="where the picture goes (needs matplotlib)")
    arguments = parser.parse_args()
    result = read(arguments.workdir)
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, list)}))
    for name in ("eval_step", "eval_success_rate", "eval_success_rate_greedy"):
        print(f"{name}: {result[name]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.figure:
        draw(result, arguments.figure)


if __name__ == "__main__":
    main()
