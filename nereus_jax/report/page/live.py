"""A run that `nereus train` wrote, as a record."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from nereus_jax.report.page.files import Files
from nereus_jax.report.page.record import (
    Evaluation,
    PlanFrom,
    RunRecord,
    StepPoint,
    read_plan,
)
from nereus_jax.report.page.rows import Row, latest_rows, mapping, number, numbers, text, whole

OUT_OF_MEMORY = ("OutOfMemoryError", "DeviceFullError")
"""Errors of a run that ended for want of memory."""
WAITED_S = 0.01
"""Seconds that a step must have waited for a compiler before it counts as one that compiled."""


def read_live(directory: Path) -> RunRecord | None:
    """The run of a directory; None: it holds no finished step and no plan of one.

    Raises:
      ConfigError: a file may not be read.
    """
    files = Files(directory=directory)
    metrics = files.rows("metrics.jsonl")
    config, decisions = files.object("config.json"), files.rows("decisions.jsonl")
    written = [row for row in files.rows("plans.jsonl") if whole(row, "step") is not None]
    moves = [row for row in metrics if number(row, "transition_s") is not None]
    rows = latest_rows(row for row in metrics if number(row, "step_s") is not None)
    if not rows:
        return None
    failure = files.object("failure.json")
    plans = _plans(files, written, moves, decisions, rows[0])
    limit_gib = number(config, "device_memory_gib")
    num_rows = (whole(config, "rollout", "batch_size") or 0) * (
        whole(config, "rollout", "samples_per_prompt") or 1
    )
    mape = [m for m in (number(row, "calibration_mape") for row in rows) if m is not None]
    return RunRecord(
        name=directory.resolve().name,
        simulated=False,
        where=_where(config, written, files),
        policy=text(config, "control", "policy"),
        steps=_steps(rows, moves, {plan.step for plan in plans}, _without_memory(decisions)),
        evaluations=_evaluations(metrics),
        plans=plans,
        decisions=decisions,
        budget_bytes=limit_gib * 2**30 if limit_gib else None,
        planned_steps=whole(config, "num_steps"),
        samples=num_rows * len(rows) or None,
        compile_s=_compile_s(rows),
        calibration_mape=mape[-1] if mape else None,
        failure=text(failure, "error"),
        out_of_memory=text(failure, "error_kind") in OUT_OF_MEMORY,
        notes=tuple(files.notes),
    )


def _where(config: Row, written: Sequence[Row], files: Files) -> str:
    """The devices, in words."""
    emulated = whole(config, "emulated_devices")
    if emulated:
        return f"{emulated} emulated CPU devices (no accelerator: seconds are those of this host)"
    kinds = {text(row, "device_kind") for row in written} - {""}
    kind = ", ".join(sorted(kinds)) or text(files.object("calibration.json"), "hardware")
    return f"devices of kind {kind}" if kind else "devices whose kind its files do not tell"


def _without_memory(decisions: Sequence[Row]) -> Counter[int]:
    """How often a step was tried that had no memory."""
    triggered = [d for d in decisions if "out_of_memory" in text(d, "trigger")]
    return Counter(whole(d, "step") or 0 for d in triggered)


def _steps(
    rows: Sequence[Row], moves: Sequence[Row], firsts: set[int], without_memory: Mapping[int, int]
) -> tuple[StepPoint, ...]:
    """The steps, each with whether it compiled and how often it had no memory.

    `compile_s.exposed` of a row is what its process has waited for compilers so far, transitions
    included, so that what a step waited is the difference less what the transition before it did.
    """
    moved_s: dict[int | None, float] = {}
    for move in moves:
        step = whole(move, "step")
        moved_s[step] = moved_s.get(step, 0.0) + (number(move, "transition_compile_s") or 0.0)
    steps: list[StepPoint] = []
    before: float | None = None
    for row in rows:
        step = whole(row, "step") or 0
        exposed = number(row, "compile_s", "exposed")
        waited = 0.0
        if exposed is not None and before is not None:
            waited = exposed - before - moved_s.get(step, 0.0)
        fresh = not steps or step in firsts or step in moved_s
        resumed = exposed is not None and before is not None and exposed < before
        point = _step(row, step, settled=not (fresh or resumed or waited > WAITED_S))
        tries = without_memory.get(step, 0)
        steps.append(dataclasses.replace(point, out_of_memory=tries))
        before = exposed
    return tuple(steps)


def _step(row: Row, step: int, *, settled: bool) -> StepPoint:
    return StepPoint(
        step=step,
        step_s=number(row, "step_s"),
        settled=settled,
        stage_s=_by_stage(numbers(row, "stage_s")),
        edge_s=sum(numbers(row, "weight_edge_s").values()),
        stage_s_predicted=_by_stage(numbers(row, "stage_s_predicted")),
        length_mean=number(row, "response_length_mean"),
        length_p95=number(row, "response_length_p95"),
        length_longest=number(row, "response_length_max"),
        peak_bytes=number(row, "peak_memory_bytes"),
        devices=whole(row, "devices"),
        tokens=number(row, "tokens"),
        reward=number(row, "reward_mean"),
        success=number(row, "success_rate"),
        kl=number(row, "kl"),
    )


def _by_stage(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by model-stage: ReMax calls some twice, under names with a word behind."""
    found: dict[str, float] = {}
    for name, value in seconds.items():
        stage = name.partition(" ")[0]
        found[stage] = found.get(stage, 0.0) + value
    return found


def _evaluations(metrics: Sequence[Row]) -> tuple[Evaluation, ...]:
    by_step: dict[int, Evaluation] = {}
    for row in metrics:
        step = whole(row, "eval_step")
        if step is not None:
            by_step[step] = Evaluation(
                step=step,
                success=number(row, "eval_success_rate"),
                greedy=number(row, "eval_success_rate_greedy"),
                reward=number(row, "eval_reward_mean"),
            )
    return tuple(by_step[step] for step in sorted(by_step))


def _compile_s(rows: Sequence[Row]) -> float | None:
    """Seconds waited for compilers by all processes that the run has had, one after the other."""
    total: float | None = None
    before = 0.0
    for row in rows:
        exposed = number(row, "compile_s", "exposed")
        if exposed is not None:
            total = (total or 0.0) + (exposed - before if exposed >= before else exposed)
            before = exposed
    return total


def _plans(
    files: Files,
    written: Sequence[Row],
    moves: Sequence[Row],
    decisions: Sequence[Row],
    first: Row,
) -> tuple[PlanFrom, ...]:
    """The plans over the run; one of an older version has no plans.jsonl, but perhaps decisions."""
    by_step = {whole(move, "step") or 0: move for move in moves}
    known: list[tuple[int, Row]] = [(whole(r, "step") or 0, mapping(r, "plan")) for r in written]
    if not known and decisions:
        known.append((whole(first, "step") or 0, mapping(decisions[0], "plan")))
        targets = [d for d in decisions if mapping(d, "target")]
        for step in sorted(by_step):
            led = [d for d in targets if (whole(d, "step") or 0) <= step]
            known += [(step, mapping(led[-1], "target"))] if led else []
    elif not known:
        known.append((max(by_step, default=whole(first, "step") or 0), files.object("plan.json")))
        if by_step:
            files.notes.append("plans.jsonl is missing: plans before the last one are not known")
    plans: list[PlanFrom] = []
    for step, row in known:
        plan, move = read_plan(row), by_step.get(step, {})
        if plan and (not plans or plan != plans[-1].plan):
            plans.append(
                PlanFrom(
                    step=step,
                    plan=plan,
                    seconds=number(move, "transition_s"),
                    compile_s=number(move, "transition_compile_s"),
                    wire_bytes=number(move, "transition_wire_bytes"),
                    ways=", ".join(
                        f"{stage} {way}"
                        for stage, way in sorted(mapping(move, "transition_ways").items())
                    ),
                )
            )
    return tuple(plans)
