"""The plan search: seconds, memory, and whether it finds the optimum.

python benchmarks/planner/run.py --json=planner.json
"""

import argparse
import json
import platform
import statistics
import time
import tracemalloc
from pathlib import Path
from typing import Any

import exhaustive
import numpy as np

from nereus_jax.core.presets import preset
from nereus_jax.core.roles import Role
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.search import find_best
from nereus_jax.planning.search_plans import find_plans
from nereus_jax.planning.search_problem import PlanProblem, Pricer, stage_candidates
from nereus_jax.planning.search_waves import Wave
from nereus_jax.planning.workload import LengthHistogram, Workload

INSTANCES = 40
REPEATS = 21
CASES = {
    "1024": ("llama3-8b", 1024),
    "32": ("llama3-8b", 32),
    "1024 of 70B": ("llama3-70b", 1024),
    "64 of 70B": ("llama3-70b", 64),
}


def problem(name: str, devices: int) -> PlanProblem:
    """PPO with a reward model: seven model-stages, 1,024 rows of up to 2,048 tokens."""
    return PlanProblem(
        workflow=policy_gradient(
            "ppo", reward_model=True, reference=True, recompute_old_logprobs=True
        ),
        models=dict.fromkeys(Role, preset(name)),
        workload=Workload(
            prompts=1024,
            prompt_lengths=LengthHistogram.constant(1024),
            response_lengths=LengthHistogram(lengths=(256, 512, 1024), weights=(0.4, 0.4, 0.2)),
            max_response_tokens=1024,
            minibatch_size=512,
        ),
        hardware=load_hardware("h100"),
        num_devices=devices,
    )


def measure(name: str, devices: int, repeats: int) -> dict[str, Any]:
    """Seconds of the whole and of its parts, and the peak of Python's and numpy's allocations."""
    job = problem(name, devices)
    whole: list[float] = []
    processor: list[float] = []
    parts: dict[str, list[float]] = {"price_s": [], "search_s": []}
    for _ in range(repeats):
        start_s, used_s = time.perf_counter(), time.process_time()
        find_plans(job, top=1)
        whole.append(time.perf_counter() - start_s)
        processor.append(time.process_time() - used_s)
        start_s = time.perf_counter()
        node, limit = job.hardware.devices_per_node, job.limit_bytes
        pricer = Pricer(job, limit)
        options = [[pricer.price(stage).options for stage in wave] for wave in job.waves()]
        priced_s = time.perf_counter()
        find_best([Wave(wave, devices, node, limit) for wave in options], limit)
        parts["price_s"].append(priced_s - start_s)
        parts["search_s"].append(time.perf_counter() - priced_s)
    tracemalloc.start()
    found = find_plans(job, top=5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    start_s = time.perf_counter()
    find_plans(job, top=5)
    return {
        "seconds_min": min(whole),
        "seconds_median": statistics.median(whole),
        "processor_s_min": min(processor),
        "five_plans_s": time.perf_counter() - start_s,
        **{key: min(values) for key, values in parts.items()},
        "candidates": sum(
            len(stage_candidates(job, stage)) for wave in job.waves() for stage in wave
        ),
        "peak_bytes": peak,
        "step_s": found.plans[0].step_s if found.plans else None,
    }


def optimal(seed: int) -> dict[str, Any]:
    """The search against every combination, on one random instance."""
    job = exhaustive.random_problem(seed)
    waves = exhaustive.sampled_options(job, seed)
    node, limit = job.hardware.devices_per_node, job.limit_bytes
    best_s = exhaustive.best_seconds(waves, job.num_devices, node, limit)
    made = [Wave(wave, job.num_devices, node, limit) for wave in waves]
    free = [Wave(wave, job.num_devices, node, np.inf) for wave in waves]
    found, without_limit = find_best(made, limit), find_best(free, np.inf)
    found_s = np.inf if found is None else found.seconds
    assert without_limit is not None
    return {
        "seed": seed,
        "devices": job.num_devices,
        "best_s": best_s if np.isfinite(best_s) else None,
        "found_s": found_s if np.isfinite(found_s) else None,
        "equal": bool(found_s == best_s or abs(found_s - best_s) <= 1e-9 * best_s),
        "memory_costs_seconds": bool(np.isfinite(best_s) and best_s > without_limit.seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="few repeats and instances")
    arguments = parser.parse_args()
    repeats, instances = (2, 3) if arguments.quick else (REPEATS, INSTANCES)
    cases = {key: measure(*case, repeats) for key, case in CASES.items()}
    checked = [optimal(seed) for seed in range(instances)]
    report = {
        "search_s_1024": cases["1024"]["seconds_min"],
        "search_s_32": cases["32"]["seconds_min"],
        "optimal_fraction": sum(c["equal"] for c in checked) / len(checked),
        "peak_bytes_1024": cases["1024"]["peak_bytes"],
        "detail": {
            "cases": cases,
            "instances": checked,
            "infeasible": sum(c["best_s"] is None for c in checked),
            "memory_costs_seconds": sum(c["memory_costs_seconds"] for c in checked),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print({key: value for key, value in report.items() if key != "detail"})
    for key, case in cases.items():
        print(key, {k: round(v, 4) if isinstance(v, float) else v for k, v in case.items()})


if __name__ == "__main__":
    main()
