"""The controller's choice of a plan against every plan, executed.

python benchmarks/plan_choice/run.py --json=plan_choice.json
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.ppo_adaptive import get_config
from nereus_jax.config import parse_config
from nereus_jax.control.costs import Beliefs
from nereus_jax.control.planner_costs import PlannerCosts
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.layout import ParallelLayout, divisors
from nereus_jax.planning.calibration import Efficiencies
from nereus_jax.planning.calibration_record import load_efficiencies, software_versions
from nereus_jax.planning.hardware import CPU_EMULATED, load_hardware
from nereus_jax.planning.length_traces import LengthTrace, parse_curve, parse_shape
from nereus_jax.runtime.world import World, form_world
from nereus_jax.trainer.job import Job, make_job, read_inputs
from nereus_jax.trainer.loop import train
from nereus_jax.trainer.problem import measured_workload, plan_problem

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from live_runs import write_report  # pyright: ignore

DEVICES = (2, 4, 6, 8)
LENGTHS = (12, 40, 120)
"""Mean response lengths, tokens."""
STEPS = 5
"""Of each length; the first is not counted."""
STAGES = ("actor-TRAIN", "critic-TRAIN", "actor-GENERATE", "reference-SCORE", "critic-SCORE")
Seconds = dict[int, float]
"""Mean length -> seconds of a step."""


def layouts(devices: int, heads: int, layers: int) -> list[ParallelLayout]:
    """All that put every model-stage on all of the devices."""
    return [
        ParallelLayout(devices // (pp * tp), pp, tp)
        for pp in divisors(devices)
        for tp in divisors(devices // pp)
        if pp <= layers and tp <= heads
    ]


def configuration(devices: int, layout: ParallelLayout, curve: Path, steps: int) -> Any:
    """A run with every model-stage on one layout, of lengths that rise in stairs."""
    config = get_config()
    config.emulated_devices = max(DEVICES)
    config.num_steps = steps
    config.rollout.first_room = 0
    config.rollout.length_trace = str(curve)
    config.control.policy = ""
    config.calibration.mode = "on"
    config.checkpoint.every = 0
    config.rollout.batch_size, config.algorithm.minibatch_size = 48, 24
    config.train.microbatch_size = 2
    for stage in list(config.plan):
        del config.plan[stage]
    for stage in STAGES:
        config.plan[stage] = f"{layout},devices=0-{devices - 1}"
    return config


def measure(config: Any, workdir: Path, lengths: Sequence[int], steps: int) -> Seconds:
    """Seconds of a step at each length: the fastest, but never the first one at that length."""
    checked = parse_config(copy.deepcopy(config))
    train(checked, read_inputs(checked), form_world(emulated_devices=max(DEVICES)), workdir)
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = {row["step"]: row["step_s"] for row in map(json.loads, lines) if "step_s" in row}
    return {
        mean: min(rows[steps * i + j] for j in range(1, steps)) for i, mean in enumerate(lengths)
    }


def predict(job: Job, hardware: Hardware, known: Efficiencies, mean: int, seed: int) -> float:
    """Seconds of a step as a controller prices the plan."""
    config = job.config
    rows = config.rollout.num_rows
    trace = LengthTrace(
        curve=parse_curve(f"{mean}:{mean}:2"), shape=parse_shape(config.rollout.length_shape)
    )
    most = config.rollout.max_response_length
    responses_B = trace.draw(0, rows, most, seed)
    prompts_B = responses_B * 0 + config.data.max_prompt_length
    costs = PlannerCosts(problem=plan_problem(job, hardware, Efficiencies.prior()))
    workload = measured_workload(config, prompts_B, responses_B)
    beliefs = Beliefs(efficiencies=known)
    return costs.price(job.execution, workload, job.world.pool, beliefs).step_s


def choices(
    measured: Mapping[str, Seconds], predicted: Mapping[str, Seconds], mean: int
) -> dict[str, Any]:
    """What was chosen at a length, and what it costs over the best."""
    chosen = min(predicted, key=lambda name: predicted[name][mean])
    best = min(measured, key=lambda name: measured[name][mean])
    least = measured[best][mean]
    errors = [abs(predicted[name][mean] / measured[name][mean] - 1) for name in measured]
    return {
        "response_tokens": mean,
        "plans": len(measured),
        "chosen": chosen,
        "best": best,
        "regret": measured[chosen][mean] / least - 1,
        "regret_of_worst": max(x[mean] for x in measured.values()) / least - 1,
        "regret_of_random": statistics.fmean(x[mean] for x in measured.values()) / least - 1,
        "prediction_error_mean": statistics.fmean(errors),
        "measured_s": {name: x[mean] for name, x in measured.items()},
        "predicted_s": {name: x[mean] for name, x in predicted.items()},
    }


def setting(
    devices: int, lengths: Sequence[int], steps: int, root: Path, hardware: Hardware
) -> list[dict[str, Any]]:
    """All plans on so many devices: measured, and priced with what the first one taught."""
    curve = root / "lengths.csv"
    stairs = [f"{steps * i + j},{m}" for i, m in enumerate(lengths) for j in range(steps)]
    curve.write_text("step,mean_response_length\n" + "\n".join(stairs) + "\n")
    sizes = get_config().model
    measured: dict[str, Seconds] = {}
    jobs: dict[str, Job] = {}
    for layout in layouts(devices, sizes.num_heads, sizes.num_layers):
        config = configuration(devices, layout, curve, steps * len(lengths))
        name = str(layout)
        measured[name] = measure(config, root / f"{devices}-{name}", lengths, steps)
        checked = parse_config(config)
        jobs[name] = make_job(checked, read_inputs(checked), _world())
        print(f"{devices} devices, {name}: {measured[name]}", flush=True)
    first = root / f"{devices}-{next(iter(jobs))}" / "calibration.json"
    known = load_efficiencies(first, hardware.name, software_versions())
    predicted = {
        name: {mean: predict(job, hardware, known, mean, 0) for mean in lengths}
        for name, job in jobs.items()
    }
    return [{"devices": devices} | choices(measured, predicted, mean) for mean in lengths]


def _world() -> World:
    return form_world(emulated_devices=max(DEVICES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="2 devices, to prove that it runs")
    options = parser.parse_args()
    hardware = load_hardware(CPU_EMULATED, emulated_devices=max(DEVICES))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for devices in DEVICES[:1] if options.quick else DEVICES:
            root = Path(scratch) / str(devices)
            root.mkdir()
            rows += setting(devices, LENGTHS, 2 if options.quick else STEPS, root, hardware)
    detail = {
        "settings": rows,
        "regret_mean": statistics.fmean(row["regret"] for row in rows),
        "regret_of_random_mean": statistics.fmean(row["regret_of_random"] for row in rows),
    }
    write_report(options.json, {"regret_max": max(row["regret"] for row in rows)}, detail)


if __name__ == "__main__":
    main()
