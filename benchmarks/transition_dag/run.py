"""Planning of transitions: how long it takes, how far from the best, what the paper's cases cost.

Nothing is moved: seconds of planning are measured, seconds of transitions are modelled.
"""

import argparse
import dataclasses
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from instances import NODE, llama_8b, random_pair, tight_budget
from optimum import optimal_seconds

from nereus_jax.core.devices import DevicePool
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_SCORE, CRITIC_TRAIN
from nereus_jax.core.transition import Way
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.transition_graph import plan_transition
from nereus_jax.planning.transition_inputs import TransitionBudget, decoder_states

SEED = 2026
SLACKS = (0.2, 0.4, 0.6, 0.8)
GAP_DEVICES = (16, 24, 32)
Figures = dict[str, Any]


def plan_seconds(count: int, repeats: int, devices: int) -> Figures:
    """CPU seconds of planning random pairs of plans; each pair counts with its fastest call."""
    hardware, rng = load_hardware("h200"), random.Random(SEED)
    figures: Figures = {}
    for name, weight_edges in (("", False), ("_weight_edges", True)):
        states = llama_8b(weight_edges=weight_edges)
        fastest: list[float] = []
        first: list[float] = []
        objects: list[float] = []
        operations: list[int] = []
        for _ in range(count):
            plans = random_pair(rng, devices, degrees=(1, 2, 4, 8), least_train=4)
            seconds: list[float] = []
            for _ in range(repeats):
                begin = time.process_time()
                graph = plan_transition(states, *plans, hardware=hardware)
                seconds.append(time.process_time() - begin)
            fastest.append(min(seconds))
            first.append(seconds[0])
            begin = time.process_time()
            operations.append(len(graph.operations))  # they are made here, when first looked at
            objects.append(time.process_time() - begin)
        figures |= {
            f"plan_s_{devices}{name}": statistics.median(fastest),
            f"plan_first_s_{devices}{name}": statistics.median(first),
            f"plan_max_s_{devices}{name}": max(fastest),
            f"operations_s_{devices}{name}": statistics.median(objects),
            f"operations_{devices}{name}": {
                "median": statistics.median(operations),
                "max": max(operations),
            },
        }
    return figures


def gaps(count: int, limit_s: float) -> Figures:
    """How much longer our schedules take than the best ones of the same operations."""
    hardware, states, rng = load_hardware("h200"), llama_8b(), random.Random(SEED)
    rows: list[Figures] = []
    unproven = infeasible = 0
    while len(rows) < count:
        devices = rng.choice(GAP_DEVICES)
        plans = random_pair(rng, devices, degrees=(1, 2, 3, 4, 8), least_train=2)
        budget = tight_budget(states, plans, rng.choice(SLACKS))
        try:
            graph = plan_transition(states, *plans, hardware=hardware, budget=budget)
        except InfeasiblePlanError:
            infeasible += 1
            continue
        best_s = optimal_seconds(graph, limit_s, workers=2)
        if best_s is None:
            unproven += 1
            continue
        if best_s == 0.0:
            continue  # only releases: nothing to be slower at
        rows.append(
            {
                "devices": devices,
                "operations": len(graph.operations),
                "resource_edges": sum(map(len, graph.resource_edges)),
                "seconds": graph.transition_s,
                "optimal_s": best_s,
                "gap": graph.transition_s / best_s - 1.0,
            }
        )
    found = [row["gap"] for row in rows]
    return {
        "gap_mean": statistics.mean(found),
        "gap_max": max(found),
        "gap_unproven": unproven,
        "gap_infeasible": infeasible,
        "gap_instances": rows,
    }


def tables() -> Figures:
    """The paper's doubling of GPUs and its TP/PP resharding, modelled for 8B on H200."""
    stages = (ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_SCORE, CRITIC_TRAIN)
    states = decoder_states(preset("llama3-8b"), stages)
    hardware = load_hardware("h200")
    doubling = {
        f"{n} -> {2 * n}": (_plan(n, pp=1, tp=4), _plan(2 * n, pp=1, tp=4)) for n in (4, 8, 16, 32)
    }
    layouts = {
        "tp 4 -> 8": ((1, 4), (1, 8)),
        "tp 8 -> 4": ((1, 8), (1, 4)),
        "pp 2 -> 4": ((2, 4), (4, 4)),
        "pp 4 -> 2": ((4, 4), (2, 4)),
        "pp 2, tp 4 -> pp 4, tp 2": ((2, 4), (4, 2)),
    }
    resharding = {
        name: (_plan(64, pp=a[0], tp=a[1]), _plan(64, pp=b[0], tp=b[1]))
        for name, (a, b) in layouts.items()
    }
    figures: Figures = {}
    for title, cases in (("doubling", doubling), ("resharding", resharding)):
        figures[title] = {}
        for name, plans in cases.items():
            row: Figures = {}
            for way in (Way.COMPOSED, Way.DIRECT):
                budget = dataclasses.replace(TransitionBudget(), ways=frozenset({way}))
                graph = plan_transition(states, *plans, hardware=hardware, budget=budget)
                links = graph.link_bytes
                row[str(way)] = {
                    "modelled_s": graph.transition_s,
                    "intra_node_bytes": links.intra_node,
                    "inter_node_bytes": links.inter_node,
                    "peak_bytes": max(graph.peak_bytes),
                    "operations": len(graph.operations),
                }
            figures[title][name] = row
    return figures


def _plan(num_devices: int, *, pp: int, tp: int) -> Plan:
    """All four model-stages of actor and critic on all devices."""
    hosts = max(num_devices // NODE, 1)
    devices = DevicePool.uniform(hosts, NODE).devices[:num_devices]
    layout = ParallelLayout(num_devices // (pp * tp), pp, tp)
    where = Placement(layout=layout, devices=devices)
    stages = (ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_SCORE, CRITIC_TRAIN)
    return Plan(placements=dict.fromkeys(stages, where))


def markdown(figures: Figures) -> str:
    """The tables of the README."""
    lines: list[str] = []
    for title in ("doubling", "resharding"):
        lines += [
            f"| {title} | composed: s | GB in, between nodes | peak GB | direct: s "
            "| GB in, between nodes | peak GB |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, row in figures[title].items():
            cells = [name]
            for way in ("composed", "direct"):
                x = row[way]
                sizes = [x[f"{link}_node_bytes"] / 1e9 for link in ("intra", "inter")]
                cells += [
                    f"{x['modelled_s']:.2f}",
                    f"{sizes[0]:.0f}, {sizes[1]:.0f}",
                    f"{x['peak_bytes'] / 1e9:.0f}",
                ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="small: seconds, for a test")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for one proof by CP-SAT")
    arguments = parser.parse_args()
    count, repeats = (3, 1) if arguments.quick else (50, 3)
    figures: Figures = {"load_average": os.getloadavg()[0]}
    figures |= plan_seconds(count, repeats, 1024)
    figures |= gaps(count, arguments.limit_s)
    figures |= tables()
    print(markdown(figures))
    print(
        json.dumps({k: v for k, v in figures.items() if not isinstance(v, dict | list)}, indent=2)
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
