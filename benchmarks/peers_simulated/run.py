"""Our plans beside plans like those of other systems, on one simulated machine.

python benchmarks/peers_simulated/run.py --json=peers_simulated.json --figure=peers.png
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import Role
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.length_traces import lognormal_shape, relative
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.simulator.compare import run_policy
from nereus_jax.simulator.scenario import Scenario
from nereus_jax.simulator.setup import first_plan, make_scenario
from nereus_jax.simulator.traces import DriftTrace

CLUSTERS = ("a100-80gb", "h100")
BUDGETS = {"llama3-8b": (32, 64, 128, 256, 512, 1024), "llama3-70b": (256, 512, 1024)}
MARKED = "llama3-8b"
SYSTEMS = ("payback", "openrlhf_like", "verl_like")
STEPS, SIGMA, CUT_TOKENS = 20, 1.2, 8192
TOKENS = (800.0, 1600.0)


def make_cell(model: str, cluster: str, devices: int, seed: int) -> Scenario:
    """A job on a cluster that stays as it is."""
    hardware = load_hardware(cluster)
    problem = PlanProblem(
        workflow=policy_gradient(
            "ppo", reward_model=True, reference=True, recompute_old_logprobs=True
        ),
        models=dict.fromkeys(Role, preset(model)),
        workload=Workload(
            prompts=1024,
            prompt_lengths=LengthHistogram.constant(512),
            response_lengths=LengthHistogram.constant(CUT_TOKENS),
            max_response_tokens=CUT_TOKENS,
            minibatch_size=256,
        ),
        hardware=hardware,
        num_devices=devices,
    )
    nodes = devices // hardware.devices_per_node
    trace = DriftTrace(
        name="still",
        mean_tokens=np.geomspace(*TOKENS, STEPS),
        shape=relative(lognormal_shape(SIGMA)),
        nodes=nodes,
    )
    return make_scenario(problem, trace, nodes, seed)


def run_cell(model: str, cluster: str, devices: int, seed: int) -> dict[str, Any]:
    """Seconds a step of each system; null where its plan does not fit."""
    made = make_cell(model, cluster, devices, seed)
    row: dict[str, Any] = {"model": model, "cluster": cluster, "devices": devices}
    for name in SYSTEMS:
        try:
            run = run_policy(made, name, first_plan(made))
        except InfeasiblePlanError as error:
            row[name] = None
            row[f"{name}_why"] = str(error)
            continue
        row[name] = None if run.failure else run.mean_step_s
        row[f"{name}_oom"] = run.oom
        if run.failure:
            row[f"{name}_why"] = run.failure
    for name in SYSTEMS[1:]:
        both = row[name] is not None and row["payback"] is not None
        row[f"vs_{name}"] = row[name] / row["payback"] if both else None
    return row


def shown(value: float | None, width: int, digits: int) -> str:
    """A number, or a dash."""
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Seconds a step over the number of GPUs, a panel for each kind of them."""
    import matplotlib  # an extra of development

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CLUSTERS), figsize=(9, 4), sharey=True)
    for cluster, axis in zip(CLUSTERS, axes, strict=True):
        for model, style in zip(BUDGETS, ("-o", "--s"), strict=True):
            cells = [r for r in rows if r["model"] == model and r["cluster"] == cluster]
            for name, color in zip(SYSTEMS, ("tab:blue", "tab:orange", "tab:green"), strict=True):
                found = [(r["devices"], r[name]) for r in cells if r[name] is not None]
                if found:
                    label = f"{name}, {model.removeprefix('llama3-')}"
                    axis.plot(*zip(*found, strict=True), style, color=color, label=label)
        axis.set(xscale="log", yscale="log", xlabel="GPUs", title=f"{cluster} (simulated)")
        axis.set_xticks(BUDGETS[MARKED], [str(n) for n in BUDGETS[MARKED]])
        axis.minorticks_off()
    axes[0].set_ylabel("seconds a step")
    ticks = (50, 100, 200, 400)
    axes[0].set_yticks(ticks, [str(n) for n in ticks])
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--figure", type=Path, help="where to draw it (needs matplotlib)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("seconds a step, simulated; and theirs over ours")
    for model, budgets in BUDGETS.items():
        for cluster in CLUSTERS:
            for devices in budgets:
                row = run_cell(model, cluster, devices, options.seed)
                rows.append(row)
                print(
                    f"{model:10} {cluster:9} {devices:5}"
                    + "".join(f" {n} {shown(row[n], 7, 1)}" for n in SYSTEMS)
                    + "".join(f" {shown(row[f'vs_{n}'], 6, 2)}" for n in SYSTEMS[1:]),
                    flush=True,
                )
    result: dict[str, Any] = {"simulated": True}
    for name in SYSTEMS[1:]:
        found = [r[f"vs_{name}"] for r in rows if r["model"] == MARKED and r[f"vs_{name}"]]
        result |= {
            f"median_vs_{name}": statistics.median(found) if found else None,
            f"range_vs_{name}": [min(found), max(found)] if found else None,
            f"cells_vs_{name}": len(found),
        }
    result["cells"] = rows
    print(json.dumps({k: v for k, v in result.items() if k != "cells"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        draw(options.figure, rows)


if __name__ == "__main__":
    main()
