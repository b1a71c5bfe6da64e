"""Transitions of plans that share devices: with the global graph, and without it.

python benchmarks/coordination/run.py --json=coordination.json [--trials=100] [--slack=0.7]
"""

import argparse
import json
import os
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import trials

from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.hardware import Hardware
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.runtime.world import World, take_stock

PUBLISHED_UNCOORDINATED = {
    "one_model_across_stages": 0.62,
    "models_in_one_stage": 0.56,
    "both": 0.34,
}
"""Nereus, arXiv 2609.34645, Table 5; its coordinated transitions all succeed."""


def run_kind(
    world: World, hardware: Hardware, kind: str, count: int, slack: float
) -> dict[str, Any]:
    """All trials of one kind of overlap."""
    reasons: dict[str, list[str]] = {"coordinated": [], "uncoordinated": []}
    ways: Counter[str] = Counter()
    operations: list[int] = []
    for seed in range(count):
        trial = trials.make_trial(kind, seed, world.pool.devices, slack)
        try:
            graph = trials.plan_trial(trial, hardware)
        except InfeasiblePlanError as error:
            for found in reasons.values():
                found.append(str(error))
            continue
        operations.append(len(graph.operations))
        ways.update(str(choice.way) for choice in graph.choices.values())
        other = trials.uncoordinated(graph, seed)
        for name, order in (("coordinated", graph), ("uncoordinated", other)):
            reasons[name].append(trials.carry_out(world, trial, order))
    rates = {name: found.count("") / count for name, found in reasons.items()}
    return {
        "success_rate": rates["coordinated"],
        "success_rate_uncoordinated": rates["uncoordinated"],
        "published_success_rate_uncoordinated": PUBLISHED_UNCOORDINATED[kind],
        "operations_mean": sum(operations) / max(len(operations), 1),
        "ways": dict(ways),
        "failures_coordinated": [x for x in reasons["coordinated"] if x][:5],
        "failures_uncoordinated": [x for x in reasons["uncoordinated"] if x][:5],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=100, help="of each kind of overlap")
    parser.add_argument("--slack", type=float, default=0.7, help="see trials.make_trial")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", trials.NUM_DEVICES)
    world, hardware = take_stock(), load_hardware("h200")
    start_s = time.perf_counter()
    kinds = {
        kind: run_kind(world, hardware, kind, options.trials, options.slack)
        for kind in trials.KINDS
    }
    report = {
        "success_rate": min(found["success_rate"] for found in kinds.values()),
        "success_rate_uncoordinated": max(
            found["success_rate_uncoordinated"] for found in kinds.values()
        ),
        "detail": {
            "kinds": kinds,
            "trials_of_each": options.trials,
            "slack": options.slack,
            "devices": len(world.pool),
            "wall_s": time.perf_counter() - start_s,
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, jax {jax.__version__}",
        },
    }
    options.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: x for name, x in report.items() if name != "detail"}))


if __name__ == "__main__":
    main()
