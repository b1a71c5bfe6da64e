"""Policies on three drift traces, on a simulated cluster.

python benchmarks/drift_policies/run.py --traces=DIRECTORY --json=drift_policies.json

DIRECTORY has supply/, lengths/ and requests/ with the files that `FILES` names; README.md says
where they come from.
"""

import argparse
import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereus_jax.core.presets import preset
from nereus_jax.core.roles import Role
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.length_traces import read_lengths, read_shape
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.simulator.compare import ALL, Comparison, compare
from nereus_jax.simulator.setup import make_scenario
from nereus_jax.simulator.supply import Supply, read_supply
from nereus_jax.simulator.traces import DriftTrace, drift_trace

EAST = "supply/availability_16-node_aws-08-27-2023_us-east-2b_v100_1.json"
WEST = "supply/availability_16-node_aws-08-27-2023_us-west-2a_v100_1.json"
TAIL = "requests/servegen_deepseek-r1_output_tokens_hist.csv"
FILES = {
    "A": (EAST, 0, "lengths/length_orz-7b.csv"),
    "B": (WEST, 0, "lengths/length_dapo_qwen2.5-32b.csv"),
    "C": (EAST, 1, "lengths/length_orz-32b.csv"),
}
"""Supply, which of its windows, and length curve of each trace."""
STEPS = 50
GAP_S = 300.0
NODES = 4
HOP = 10
"""Samples from one window that is looked at to the next."""
LEAST_SHARE, MOST_EMPTY, LEAST_CHANGES = 0.5, 0.05, 4
OTHERS = {"vs_dp_only": "dp_only", "vs_any_gain": "any_gain", "vs_every_k": "every_k"}


def windows(supply: Supply) -> list[Supply]:
    """Those that the README's rule takes, none of which overlaps the one before."""
    found: list[Supply] = []
    first, last = 0, int(supply.end_s // GAP_S) - STEPS
    while first <= last:
        counts = [supply.at((first + i) * GAP_S) for i in range(STEPS)]
        changes = sum(a != b for a, b in itertools.pairwise(counts))
        empty = sum(n == 0 for n in counts) / STEPS
        taken = counts[0] >= LEAST_SHARE * supply.most
        if taken and empty <= MOST_EMPTY and changes >= LEAST_CHANGES:
            found.append(supply.cut(first * GAP_S, (first + STEPS) * GAP_S))
            first += STEPS
        else:
            first += HOP
    return found


def make_problem() -> PlanProblem:
    """The job."""
    return PlanProblem(
        workflow=policy_gradient(
            "ppo", reward_model=True, reference=True, recompute_old_logprobs=True
        ),
        models=dict.fromkeys(Role, preset("llama3-8b")),
        workload=Workload(
            prompts=512,
            prompt_lengths=LengthHistogram.constant(512),
            response_lengths=LengthHistogram.constant(8192),
            max_response_tokens=8192,
            minibatch_size=128,
        ),
        hardware=load_hardware("a100-80gb"),
        num_devices=8 * NODES,
    )


def make_trace(directory: Path, name: str) -> DriftTrace:
    """One of the three traces."""
    supply_file, window, length_file = FILES[name]
    supply = windows(read_supply(directory / supply_file))[window]
    return drift_trace(
        supply.scaled(NODES).at_least(1),
        read_lengths(directory / length_file),
        read_shape(directory / TAIL),
        steps=STEPS,
        name=name,
        seconds_per_step=GAP_S,
    )


def marks(compared: Mapping[str, Comparison]) -> dict[str, float]:
    """The worst of the traces."""
    figures = {name: c.figures() for name, c in compared.items()}

    def mean(trace: str, policy: str) -> float:
        value = figures[trace][policy]["mean_step_s"]
        assert value is not None
        return value

    found = {
        mark: min(1.0 - mean(t, "payback") / mean(t, other) for t in figures)
        for mark, other in OTHERS.items()
    }
    found["gap_to_oracle"] = max(mean(t, "payback") / mean(t, "oracle") - 1.0 for t in figures)
    found["oracle_gain_share"] = min(
        (mean(t, "dp_only") - mean(t, "payback")) / (mean(t, "dp_only") - mean(t, "oracle"))
        for t in figures
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each policy")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    compared: dict[str, Comparison] = {}
    wall_s: dict[str, float] = {}
    for name in FILES:
        trace = make_trace(options.traces, name)
        start = time.perf_counter()
        compared[name] = compare(
            lambda seed, trace=trace: make_scenario(make_problem(), trace, NODES, seed),
            ALL,
            range(options.seeds),
        )
        wall_s[name] = (time.perf_counter() - start) / options.seeds
        print(f"trace {name}: nodes {[c.nodes for c in trace.changes]}")
        print(compared[name].table(), flush=True)
    result: dict[str, Any] = {
        "simulated": True,
        **marks(compared),
        "wall_s_per_seed": wall_s,
        "traces": {name: c.to_json() for name, c in compared.items()},
    }
    print(json.dumps({k: v for k, v in result.items() if k != "traces"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
