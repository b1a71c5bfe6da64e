"""Plans as text, as JSON and as a plan file. All seconds and bytes are modelled."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.planning.search_plans import PlannedStage, PlannedStep, PlanSearch, config_overrides
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.search_shortage import Shortage, min_devices

STEPS = 1000
ROW = "{:<16} {:<19} {:<11} {:>9} {:>9} {:>9}  {}"
KINDS = {
    "parameters": "parameters",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "activations": "activations",
    "logits": "logits",
    "kv_cache": "KV cache",
    "inputs": "inputs",
    "results": "results",
    "buffers": "weight edge",
}


def infeasible_reason(shortage: Shortage) -> str:
    """One line: what does not fit, by which term, and what to change."""
    limit = gib(shortage.limit_bytes)
    if shortage.model_stage is None:
        return (
            f"no plan fits: each model-stage fits alone into {limit} of a device, all together do "
            f"not; use {shortage.advice}"
        )
    return (
        f"no plan fits: {shortage.model_stage} needs at least {gib(shortage.needed_bytes)} on a "
        f"device, of which {gib(shortage.term_bytes)} are {KINDS[shortage.term]}; plans may use "
        f"{limit}; use {shortage.advice}"
    )


def raise_infeasible(shortage: Shortage) -> None:
    """Raises InfeasiblePlanError with the reason."""
    raise InfeasiblePlanError(infeasible_reason(shortage))


def plans_json(
    problem: PlanProblem, found: PlanSearch, devices_per_process: int | None = None
) -> dict[str, Any]:
    """What `nereus plan --json` prints; devices are named as in `PlannedStep.plan`."""
    shortage = found.shortage
    return {
        "plans": [_plan_json(problem, step, devices_per_process) for step in found.plans],
        "infeasible_reason": None if shortage is None else infeasible_reason(shortage),
        "min_devices": min_devices(problem) if shortage is None else shortage.min_devices,
        "modelled": True,
    }


def _plan_json(
    problem: PlanProblem, step: PlannedStep, devices_per_process: int | None
) -> dict[str, Any]:
    return {
        "plan": step.plan(devices_per_process).to_json(),
        "step_s": step.step_s,
        "stage_s": {str(s.model_stage): s.seconds for s in step.stages},
        "peak_memory_bytes": step.peak_memory_bytes,
        "dominant_term": step.dominant_term,
        "memory_bytes": {str(s.model_stage): dict(s.memory) for s in step.stages},
        "config": config_overrides(step),
        **_rates(problem, step),
    }


def _rates(problem: PlanProblem, step: PlannedStep) -> dict[str, float]:
    tokens = problem.workload.rows * problem.workload.mean_row_tokens
    hours = problem.num_devices * step.step_s * STEPS / 3600
    rates = {"tokens_per_s": tokens / step.step_s, "device_hours_per_1000_steps": hours}
    price = problem.hardware.usd_per_device_hour
    return rates | ({"usd_per_1000_steps": hours * price} if price else {})


def plans_text(problem: PlanProblem, found: PlanSearch) -> str:
    """What `nereus plan` prints: the best plan in full, and why the others are slower."""
    best = found.plans[0]
    rates = _rates(problem, best)
    cost = f", {rates['usd_per_1000_steps']:,.0f} USD" if "usd_per_1000_steps" in rates else ""
    lines = [
        f"best of the plans for {problem.workflow.name} on {problem.num_devices} x "
        f"{problem.hardware.name} (all figures are modelled)",
        f"step: {best.step_s:.2f} s, {rates['tokens_per_s']:,.0f} tokens/s; 1,000 steps: "
        f"{rates['device_hours_per_1000_steps']:,.0f} device-hours{cost}",
        f"largest term: {best.dominant_term}",
        "",
        ROW.format("model-stage", "layout", "devices", "seconds", "held", "working", "how"),
        *(_stage_row(stage) for stage in best.stages),
        "",
        "memory by device (held by all its model-stages, and the most that one works with):",
        *_device_rows(problem, best),
        "",
        "bytes by kind on each device of a model-stage:",
        *(_kinds_row(stage) for stage in best.stages),
    ]
    if len(found.plans) > 1:
        lines += ["", "the next plans change one thing:"]
        lines += [f"  {_why_slower(best, other)}" for other in found.plans[1:]]
    lines += ["", "to run it: write it with --out=plan.json and train with"]
    lines += ["  --config.plan_file=plan.json", "or nearly so, with one choice for all, with"]
    lines += [f"  --config.{key}={value}" for key, value in config_overrides(best).items()]
    return "\n".join(lines) + "\n"


def _stage_row(stage: PlannedStage) -> str:
    return ROW.format(
        str(stage.model_stage),
        str(stage.layout),
        _shown(stage),
        f"{stage.seconds:.2f}",
        gib(stage.memory["parameters"] + stage.memory.get("optimizer", 0.0)),
        gib(stage.working_bytes),
        _how(stage),
    )


def _shown(stage: PlannedStage) -> str:
    return f"{stage.positions.start}-{stage.positions.stop - 1}"


def _how(stage: PlannedStage) -> str:
    if stage.model_stage.stage.value == "GENERATE":
        parts = [f"{stage.microbatch_size} rows at a time"]
    else:
        parts = [f"microbatches of {stage.microbatch_size}"]
    parts += [f"flushes of {stage.microbatches}"] if stage.layout.pp > 1 else []
    parts += ["recomputed"] if stage.remat else []
    parts += ["ZeRO-1"] if stage.zero1 else []
    parts += ["parked when idle"] if stage.parked else []
    return ", ".join(parts)


def _device_rows(problem: PlanProblem, step: PlannedStep) -> list[str]:
    rows: list[str] = []
    for size, run in itertools.groupby(enumerate(step.device_bytes), lambda item: item[1]):
        places = [place for place, _ in run]
        share = size / problem.hardware.memory_bytes
        rows.append(
            f"  devices {places[0]}-{places[-1]}: {gib(size)} of "
            f"{gib(problem.hardware.memory_bytes)} ({share:.0%})"
        )
    return rows


def _kinds_row(stage: PlannedStage) -> str:
    kinds = sorted(stage.memory.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{KINDS[kind]} {gib(size)}" for kind, size in kinds if size >= 2**20)
    return f"  {stage.model_stage}: {shown}"


def _why_slower(best: PlannedStep, other: PlannedStep) -> str:
    """What another plan changes, what that costs, and the class of operations that it costs."""
    changed = [
        (a, b)
        for a, b in zip(best.stages, other.stages, strict=True)
        if (a.layout, a.first_device, a.lane) != (b.layout, b.first_device, b.lane)
    ]
    behind = f"+{other.step_s - best.step_s:.2f} s"
    if not changed:
        return f"{behind}: the same layouts, other microbatches"
    what = "; ".join(_change(a, b) for a, b in changed)
    worst_s, term = max(
        (
            (seconds - a.seconds_by_class.get(name, 0.0), f"{b.model_stage}: {name}")
            for a, b in changed
            for name, seconds in b.seconds_by_class.items()
        ),
        default=(0.0, ""),
    )
    reason = f" (most of it {term}, +{worst_s:.2f} s)" if worst_s > 0 else ""
    return f"{behind}: {what}{reason}"


def _change(a: PlannedStage, b: PlannedStage) -> str:
    layout = f"{b.layout}" if a.layout != b.layout else "the same layout"
    places = f" on devices {_shown(b)}" if a.positions != b.positions else ""
    return f"{a.model_stage} {layout}{places}"


def gib(num_bytes: float) -> str:
    """A size in GiB, or MiB where that reads better."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"


def verification_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the compiler says of a plan's programs, beside what the model said."""
    row = "{:<16} {:>14} {:>14} {:>9} {:>9}"
    lines = [
        "memory of the compiled programs on each device, as XLA counts it:",
        row.format("model-stage", "modelled", "compiled", "error", "compile"),
    ]
    for entry in rows:
        modelled, compiled = entry["modelled_bytes"], entry["compiled_bytes"]
        lines.append(
            row.format(
                entry["model_stage"],
                gib(modelled),
                gib(compiled),
                f"{modelled / compiled - 1:+.1%}",
                f"{entry['compile_s']:.0f} s",
            )
        )
    return "\n".join(lines) + "\n"
