"""The simulated cluster's seconds beside those of real RL runs, and of published training steps.

python benchmarks/truth/run.py --logs=DIRECTORY [--published=FILE] [--json=FILE]
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from rl_runs import FIRST, NAMES, error_after, logged_stages
from training_steps import errors, read_cases

from nereus_jax.core.roles import Stage
from nereus_jax.simulator.curves import Truth, load_truth

LAST = 1000


def measure(logs: Path, published: Path | None, first: int, last: int) -> dict[str, Any]:
    """All figures."""
    truth = load_truth()
    stages: list[dict[str, Any]] = []
    for stage in logged_stages(logs, truth, last):
        overheads = stage.fitted(first)
        row = {
            "log": NAMES[stage.setup.name],
            "stage": str(stage.stage),
            "iterations": len(stage.rows) - first,
            **error_after(stage, overheads, first),
            "simulated_spread": _simulated_spread(truth, stage.stage.stage),
            "factor": overheads.factor,
            "decode_step_s": overheads.decode_step_s,
            "decode_row_s": overheads.decode_row_s,
        }
        stages.append(row)
        print(
            f"{row['log']:8} {row['stage']:16} error {row['error']:6.2%}, spread of the log "
            f"{row['spread']:6.2%}, of the simulated cluster {row['simulated_spread']:6.2%}",
            flush=True,
        )
    generate = [s["error"] for s in stages if s["stage"].endswith("GENERATE")]
    others = [s["error"] for s in stages if not s["stage"].endswith("GENERATE")]
    result: dict[str, Any] = {
        "score_train_error_max": max(others),
        "generate_error_max": max(generate),
        "stages": stages,
    }
    if published is not None:
        result["training_steps"] = errors(read_cases(published), truth)
        for name, row in result["training_steps"].items():
            print(
                f"{name[:46]:46} error {row['error']:6.1%} with a factor of {row['factor']:.2f} "
                f"(constant utilization {row['constant_error']:.1%}), {row['steps']:.0f} steps"
            )
    return result


def _simulated_spread(truth: Truth, stage: Stage) -> float:
    """Of a model-stage's seconds from step to step on one node of 8 devices.

    Its noise, and the slowest of the devices that wait for each other.
    """
    scatter = truth.scatter
    own = {
        Stage.SCORE: scatter.score_std,
        Stage.TRAIN: scatter.train_std,
        Stage.GENERATE: scatter.generate_std,
    }[stage]
    draws = np.random.default_rng(0).standard_normal((1 << 14, 8)).max(axis=1)
    return math.hypot(own, scatter.device_std * float(draws.std()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, required=True, help="directory of the logs' CSV files")
    parser.add_argument("--published", type=Path, help="table of published training steps")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--first", type=int, default=FIRST, help="iterations that are fitted")
    parser.add_argument("--last", type=int, default=LAST, help="last iteration that counts")
    options = parser.parse_args()
    result = measure(options.logs, options.published, options.first, options.last)
    marks = {k: result[k] for k in ("score_train_error_max", "generate_error_max")}
    print(json.dumps(marks, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
