"""1,000 steps of 8B PPO that grow from 32 to 1,024 GPUs: simulated.

python benchmarks/scale_1024/run.py --json=scale_1024.json --figure=scale_1024.png
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nereus_jax.control.policies import payback
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import Role
from nereus_jax.core.transition import TransitionGraph
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.length_traces import lognormal_shape, relative
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.simulator.ledger import RunResult, Spent
from nereus_jax.simulator.run import simulate
from nereus_jax.simulator.scenario import Rules, Scenario
from nereus_jax.simulator.setup import first_plan, make_scenario, settings_for
from nereus_jax.simulator.traces import DriftTrace, PoolChange

STEPS = 1000
NODES = (4, 8, 16, 32, 64, 128)
FIRST_TOKENS, LAST_TOKENS, CUT_TOKENS = 500.0, 8000.0, 16384
SIGMA = 1.2
CHECKPOINT_EVERY = 50


def make_problem() -> PlanProblem:
    """The job."""
    return PlanProblem(
        workflow=policy_gradient(
            "ppo", reward_model=True, reference=True, recompute_old_logprobs=True
        ),
        models=dict.fromkeys(Role, preset("llama3-8b")),
        workload=Workload(
            prompts=2048,
            prompt_lengths=LengthHistogram.constant(512),
            response_lengths=LengthHistogram.constant(CUT_TOKENS),
            max_response_tokens=CUT_TOKENS,
            minibatch_size=512,
        ),
        hardware=load_hardware("a100-80gb"),
        num_devices=8 * NODES[-1],
    )


def make_growing(steps: int, seed: int) -> Scenario:
    """The job and its trace."""
    changes = [
        PoolChange(at=round(i * steps / len(NODES)) + 0.5, nodes=NODES[i])
        for i in range(1, len(NODES))
    ]
    trace = DriftTrace(
        name="growth",
        mean_tokens=np.geomspace(FIRST_TOKENS, LAST_TOKENS, steps),
        shape=relative(lognormal_shape(SIGMA)),
        nodes=NODES[0],
        changes=tuple(changes),
    )
    problem = make_problem()
    return make_scenario(problem, trace, NODES[-1], seed, checkpoint_every=CHECKPOINT_EVERY)


def moves(run: RunResult) -> list[dict[str, Any]]:
    """The changes of plan that were admitted, with what they changed."""
    found: list[dict[str, Any]] = []
    for d in run.decisions:
        target: Mapping[str, Any] | None = d["target"]
        if target is None:
            continue
        degrees = [
            name
            for name, entry in target.items()
            if any(entry[k] != d["plan"][name][k] for k in ("pp", "tp"))
        ]
        found.append(
            {k: d[k] for k in ("step", "trigger", "verdict", "payback_steps", "reason")}
            | {"other_pp_or_tp": degrees}
        )
    return found


def moved_bytes(graph: TransitionGraph) -> int:
    """Over links between devices, by all operations of a transition."""
    links = [operation.link_bytes for operation in graph.operations]
    return sum(x.intra_node + x.inter_node for x in links)


def draw(path: Path, run: RunResult, changed: list[dict[str, Any]]) -> None:
    """Seconds of the steps, what they work on, and where the plan changed."""
    import matplotlib  # an extra of development

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [r.step for r in run.steps]
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(8, 5.4), sharex=True, height_ratios=(3, 1)
    )
    upper.plot(steps, [r.step_s for r in run.steps], color="tab:blue", linewidth=1.0)
    for move in changed:
        color = "tab:orange" if move["other_pp_or_tp"] else "grey"
        upper.axvline(move["step"], color=color, linewidth=0.8, alpha=0.8)
    upper.set(ylabel="seconds of a step", title="1,000 steps, 32 to 1,024 GPUs (simulated)")
    upper.set_ylim(bottom=0)
    upper.text(
        0.01,
        0.03,
        "orange: pp or tp of a model-stage changed",
        transform=upper.transAxes,
        fontsize=8,
    )
    lower.step(steps, [len(r.pool) for r in run.steps], where="post", color="k", label="GPUs")
    lower.set(xlabel="step", ylabel="GPUs", yscale="log", yticks=[32, 128, 512])
    lower.set_yticklabels(["32", "128", "512"])
    lower.minorticks_off()
    tokens = lower.twinx()
    tokens.plot(steps, [r.mean_tokens for r in run.steps], color="tab:green")
    tokens.set_ylabel("mean response, tokens", color="tab:green")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--figure", type=Path, help="where to draw it (needs matplotlib)")
    options = parser.parse_args()
    start, cpu = time.perf_counter(), time.process_time()
    made = make_growing(options.steps, options.seed)
    sizes: list[int] = []
    rules = Rules(name="payback", settings=settings_for(made, payback()))
    run = simulate(
        made, rules, first_plan(made), watch=lambda graph: sizes.append(moved_bytes(graph))
    )
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    seconds = [i.end_s - i.start_s for i in run.intervals if i.kind is Spent.TRANSITIONS]
    changed = moves(run)
    largest = int(np.argmax(seconds)) if seconds else 0
    result = {
        "simulated": True,
        "transitions": sum(bool(m["other_pp_or_tp"]) for m in changed),
        "transition_share": run.transition_share,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "steps": len(run.steps),
        "failure": run.failure,
        "moves": run.transitions,
        "replans": len(run.decisions),
        "oom": run.oom,
        "total_s": run.total_s,
        "largest_transition_s": max(seconds, default=0.0),
        "largest_transition_bytes": sizes[largest] if sizes else 0,
        "transition_s": seconds,
        "transition_bytes": sizes,
        "spent_s": {k.value: run.spent_s(k) for k in Spent},
        "changes": changed,
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        draw(options.figure, run, changed)


if __name__ == "__main__":
    main()
