"""The cost model against this project's engines on emulated devices of this machine.

python benchmarks/cost_model/live.py --json=live.json
"""

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nereus_jax.config import parse_config
from nereus_jax.core.architectures import Head
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN, REFERENCE_SCORE, ModelStage
from nereus_jax.planning.calibration import CLASSES, Efficiencies, OperationClass, fit
from nereus_jax.planning.hardware import CPU_EMULATED, load_hardware
from nereus_jax.planning.predict import predict_stage_seconds
from nereus_jax.planning.workload import Workload
from nereus_jax.runtime.emu import initialize
from nereus_jax.runtime.world import World, form_world
from nereus_jax.testing import tiny_run_config
from nereus_jax.trainer.job import Job, make_job, read_inputs
from nereus_jax.trainer.problem import measured_workload, plan_problem

DEVICES = 4
"""All layouts take all of them: emulated devices share the cores, so that fewer would be faster
each."""
LAYOUTS = ((4, 1, 1), (2, 1, 2), (2, 2, 1), (1, 1, 4), (1, 4, 1), (1, 2, 2))
RESPONSES = (6, 12, 24, 48)
"""Mean response lengths; responses are between a half and one and a half of it."""
ROWS, PROMPT, MICROBATCH = 32, 16, 4
STAGES = (ACTOR_GENERATE, REFERENCE_SCORE, ACTOR_TRAIN)
NOISE = 0.10
"""Relative deviation of a time on shared cores from what any model could say of it."""
SPLITS, REPEATS = 20, 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One measured time.

    Attributes:
      stage: of which model-stage.
      layout: its layout.
      response: mean length.
      measured_s: the fastest of several calls; the first one after a compile is none of them.
      job: the run.
      workload: with the lengths.
    """

    stage: ModelStage
    layout: ParallelLayout
    response: int
    measured_s: float
    job: Job
    workload: Workload


def configuration() -> Any:
    """A job whose model-stages take some ten milliseconds."""
    config = tiny_run_config()
    config.emulated_devices = DEVICES
    config.model.num_layers = 4
    config.model.embed_dim = 128
    config.model.num_heads = config.model.num_kv_heads = 8
    config.model.head_dim = 16
    config.model.mlp_dim = 384
    config.model.vocab_size = 2048
    config.data.max_prompt_length = PROMPT
    config.rollout.batch_size = config.algorithm.minibatch_size = ROWS
    config.rollout.max_response_length = 3 * max(RESPONSES) // 2
    config.rollout.ignore_eos = True
    config.train.microbatch_size = MICROBATCH
    return parse_config(config)


def job_on(layout: ParallelLayout, world: World) -> Job:
    """The run with every model-stage on all devices."""
    config = configuration()
    placement = Placement(layout=layout, devices=world.pool.devices)
    stages = make_job(config, read_inputs(config), world).plan.placements
    choices = {stage: StageChoice(microbatch_size=MICROBATCH) for stage in stages}
    choices[ACTOR_GENERATE] = StageChoice(microbatch_size=0)
    plan = Plan(placements=dict.fromkeys(stages, placement))
    return make_job(config, read_inputs(config), world, ExecutionPlan(plan=plan, choices=choices))


def calls(job: Job, lengths_B: np.ndarray, seed: int) -> Mapping[ModelStage, Callable[[], Any]]:
    """What runs each model-stage once, on responses of these lengths."""
    draw = np.random.default_rng(seed)
    prompts_B = draw.integers(PROMPT // 2, PROMPT + 1, ROWS)
    tokens_BS = draw.integers(2, 2048, (ROWS, job.row_length)).astype(np.int32)
    totals_B = prompts_B + lengths_B
    sampling = dataclasses.replace(job.sampling(), stop_ids=())
    model, train = job.inputs.model, job.trains[ACTOR_TRAIN]
    dtype = job.config.model.compute_dtype
    weights = initialize(model, Head.LM, job.sites[ACTOR_GENERATE], dtype, seed)
    held = [train.init(initialize(model, Head.LM, job.sites[ACTOR_TRAIN], dtype, seed))]
    width = job.config.rollout.max_response_length
    arrays = {
        name: draw.random((ROWS, width)).astype(np.float32) / ROWS
        for name in train.objective.batch_keys
    }

    def generate() -> Any:
        return job.generate.dispatch(
            weights,
            tokens_BS[:, :PROMPT],
            prompts_B,
            np.arange(ROWS, dtype=np.uint32),
            seed,
            sampling,
            lengths_B,
        )

    def score() -> Any:
        engine = job.scores[REFERENCE_SCORE]
        return engine.dispatch(weights, tokens_BS, prompts_B, totals_B)

    def update() -> Any:
        scalars = dict.fromkeys(train.objective.scalar_keys, 0.0)
        held[0], metrics = train.dispatch(held[0], tokens_BS, prompts_B, totals_B, arrays, scalars)
        return metrics

    return {ACTOR_GENERATE: generate, REFERENCE_SCORE: score, ACTOR_TRAIN: update}


def measure(
    layouts: Sequence[tuple[int, int, int]], responses: Sequence[int], repeats: int
) -> list[Point]:
    """Times of every model-stage, layout and length."""
    world = form_world(emulated_devices=DEVICES)
    points: list[Point] = []
    for degrees in layouts:
        layout = ParallelLayout(*degrees)
        job = job_on(layout, world)
        for number, mean in enumerate(responses):
            draw = np.random.default_rng(number)
            lengths_B = draw.integers(mean // 2, 3 * mean // 2 + 1, ROWS)
            runs = calls(job, lengths_B, number)
            prompts_B = np.random.default_rng(number).integers(PROMPT // 2, PROMPT + 1, ROWS)
            workload = measured_workload(job.config, prompts_B, lengths_B)
            for stage in STAGES:
                jax.block_until_ready(runs[stage]())
                times: list[float] = []
                for _ in range(repeats):
                    begin_s = time.perf_counter()
                    jax.block_until_ready(runs[stage]())
                    times.append(time.perf_counter() - begin_s)
                point = Point(
                    stage=stage,
                    layout=layout,
                    response=mean,
                    measured_s=min(times),
                    job=job,
                    workload=workload,
                )
                points.append(point)
                print(f"{stage!s:16} {layout!s:16} {mean:3} tokens: {min(times) * 1e3:.1f} ms")
    return points


def predict(
    points: Sequence[Point], hardware: Hardware
) -> Callable[[Efficiencies], dict[OperationClass, np.ndarray]]:
    """Seconds of the points by class, as `fit` wants them."""

    def seconds(efficiencies: Efficiencies) -> dict[OperationClass, np.ndarray]:
        rows = []
        for point in points:
            problem = plan_problem(point.job, hardware, efficiencies, point.workload)
            rows.append(predict_stage_seconds(problem, point.job.execution)[point.stage])
        return {c: np.array([row.get(c, 0.0) for row in rows]) for c in CLASSES}

    return seconds


def held_out(points: Sequence[Point], hardware: Hardware, splits: int) -> list[dict[int, float]]:
    """Predicted seconds of the half that was not learned from, for each split.

    All points of a layout and a length are in the same half.
    """
    groups = sorted({(str(p.layout), p.response) for p in points})
    found: list[dict[int, float]] = []
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(len(groups))
        learned = {groups[i] for i in order[: len(groups) // 2]}
        known = [p for p in points if (str(p.layout), p.response) in learned]
        efficiencies = fit(predict(known, hardware), [p.measured_s for p in known], noise=NOISE)
        others = [i for i, p in enumerate(points) if (str(p.layout), p.response) not in learned]
        table = predict([points[i] for i in others], hardware)(efficiencies)
        total = np.sum(list(table.values()), axis=0)
        found.append(dict(zip(others, total.tolist(), strict=True)))
    return found


def report(points: Sequence[Point], predicted: Sequence[dict[int, float]]) -> dict[str, Any]:
    """The marks, and every point with the mean of its predictions."""
    by_split = [
        statistics.fmean(abs(s / points[i].measured_s - 1) for i, s in split.items())
        for split in predicted
    ]
    rows = []
    for i, point in enumerate(points):
        errors = [s[i] / point.measured_s - 1 for s in predicted if i in s]
        rows.append(
            {
                "stage": str(point.stage),
                "layout": str(point.layout),
                "response_tokens": point.response,
                "measured_s": point.measured_s,
                "error": statistics.fmean(errors) if errors else None,
            }
        )
    by_stage = {
        str(stage): statistics.fmean(
            abs(r["error"]) for r in rows if r["stage"] == str(stage) and r["error"] is not None
        )
        for stage in STAGES
    }
    held = [abs(r["error"]) for r in rows if r["error"] is not None]
    return {
        "mape_live": statistics.fmean(by_split),
        "mape_live_least": min(by_split),
        "mape_live_most": max(by_split),
        "error_median": statistics.median(held),
        "error_max": max(held),
        "points": len(points),
        "splits": len(predicted),
        "by_stage": by_stage,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="two layouts and lengths, once each")
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    load = os.getloadavg()[0]
    hardware = load_hardware(CPU_EMULATED, emulated_devices=DEVICES)
    points = measure(
        LAYOUTS[:2] if quick else LAYOUTS,
        RESPONSES[:2] if quick else RESPONSES,
        1 if quick else REPEATS,
    )
    result = report(points, held_out(points, hardware, 2 if quick else SPLITS))
    result["load_before"] = load
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1))


if __name__ == "__main__":
    main()
