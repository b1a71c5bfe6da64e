"""The job and the three drift traces of README.md, for this benchmark and others on them."""

import itertools
from pathlib import Path

from nereus_jax.core.presets import preset
from nereus_jax.core.roles import Role
from nereus_jax.core.workflow import ALGORITHMS, policy_gradient
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.length_traces import read_lengths, read_shape
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.simulator.scenario import Scenario
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
STEPS, ROWS, SAMPLES = 50, 512, 8
GAP_S = 300.0
NODES = 4
HOP = 10
"""Samples from one window that is looked at to the next."""
LEAST_SHARE, MOST_EMPTY, LEAST_CHANGES = 0.5, 0.10, 4


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


def make_problem(algorithm: str = "ppo") -> PlanProblem:
    """The job; algorithms that compare responses to a prompt have eight to each."""
    samples = SAMPLES if ALGORITHMS[algorithm].grouped else 1
    return PlanProblem(
        workflow=policy_gradient(
            algorithm, reward_model=True, reference=True, recompute_old_logprobs=True
        ),
        models=dict.fromkeys(Role, preset("llama3-8b")),
        workload=Workload(
            prompts=ROWS // samples,
            samples_per_prompt=samples,
            prompt_lengths=LengthHistogram.constant(512),
            response_lengths=LengthHistogram.constant(8192),
            max_response_tokens=8192,
            minibatch_size=128,
        ),
        hardware=load_hardware("a100-80gb"),
        num_devices=8 * NODES,
    )


def make_trace(directory: Path, name: str, notice_s: float = 0.0) -> DriftTrace:
    """One of the three traces.

    Args:
      directory: has supply/, lengths/ and requests/ with the files that `FILES` names.
      name: one of them.
      notice_s: before a node is lost.
    """
    supply_file, window, length_file = FILES[name]
    supply = windows(read_supply(directory / supply_file))[window]
    return drift_trace(
        supply.scaled(NODES).at_least(1),
        read_lengths(directory / length_file),
        read_shape(directory / TAIL),
        steps=STEPS,
        name=name,
        seconds_per_step=GAP_S,
        notice_s=notice_s,
    )


def scenario(trace: DriftTrace, seed: int, algorithm: str = "ppo") -> Scenario:
    """The job on four nodes, through a trace."""
    return make_scenario(make_problem(algorithm), trace, NODES, seed)
