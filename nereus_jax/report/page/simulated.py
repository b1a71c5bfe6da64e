"""What `nereus simulate --workdir` wrote, as records and a comparison."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from nereus_jax.core.errors import ConfigError
from nereus_jax.report.page.files import Files
from nereus_jax.report.page.record import PlanFrom, RunRecord, StepPoint, read_plan
from nereus_jax.report.page.rows import (
    Row,
    latest_rows,
    mapping,
    number,
    numbers,
    objects,
    text,
    whole,
)

MOVING = ("transitions", "compiling", "restarting")
"""Kinds of time that a change of plan takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Policies side by side; everything is simulated.

    Attributes:
      job: what was simulated, in words.
      policies: their figures by name: means over seeds, and `_std` of each.
      spent_s: seconds by what a run did, means over seeds, by policy.
      failures: of runs that ended early, by policy: seed and reason.
      seeds: how many.
      runs: one of each policy, the one of the first seed.
      notes: what could not be used.
    """

    job: str
    policies: Mapping[str, Row]
    spent_s: Mapping[str, Mapping[str, float]]
    failures: Mapping[str, Sequence[str]]
    seeds: int
    runs: Sequence[RunRecord]
    notes: Sequence[str] = ()


def read_simulated(directory: Path) -> Comparison | None:
    """The simulated runs of a directory; None: there are none.

    Raises:
      ConfigError: a file may not be read.
    """
    files = Files(directory=directory)
    figures = files.object("figures.json")
    job = mapping(figures, "job")
    own = objects(figures, "runs")
    try:
        found = sorted(p.parent for p in directory.glob("*/steps.jsonl") if p.is_file())
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be read: {error.strerror or error}; name another directory"
        ) from error
    if files.has("steps.jsonl"):
        found.append(directory)
    first: dict[str, tuple[int, Path]] = {}
    for path in found:
        policy, seed = _policy_and_seed(path.resolve().name)
        first[policy] = min(first.get(policy, (seed, path)), (seed, path))
    order = [name for name in mapping(figures, "policies") if name in first]
    order += [name for name in first if name not in order]
    where = _where(job)
    runs: list[RunRecord] = []
    for policy in order:
        seed, path = first[policy]
        mine = [r for r in own if text(r, "policy") == policy and whole(r, "seed") == seed]
        run = _read_run(path, policy, seed, where, mine[0] if mine else {}, job)
        if run is None:
            files.notes.append(f"{path.name}: no step can be read")
        else:
            runs.append(run)
    if not runs:
        return None
    every = mapping(figures, "policies")
    policies = {name: mapping(every, name) for name in every if mapping(every, name)}
    if not policies:
        files.notes.append("figures.json is missing: there is no comparison of policies")
    return Comparison(
        job=_job(job),
        policies=policies,
        spent_s={name: _spent(own, name) for name in policies},
        failures={name: _failures(own, name) for name in policies},
        seeds=len({whole(r, "seed") for r in own}) or 1,
        runs=runs,
        notes=tuple(files.notes),
    )


def _policy_and_seed(name: str) -> tuple[str, int]:
    policy, dash, seed = name.rpartition("-")
    return (policy, int(seed)) if dash and seed.isdecimal() else (name, 0)


def _where(job: Row) -> str:
    if not job:
        return "a simulated cluster"
    return f"a simulated cluster of {whole(job, 'devices')} {text(job, 'hardware')}"


def _job(job: Row) -> str:
    if not job:
        return "a simulated cluster; figures.json does not tell more"
    return (
        f"{text(job, 'algorithm').upper()} of {text(job, 'model')} on up to "
        f"{whole(job, 'devices')} {text(job, 'hardware')}, {whole(job, 'prompts')} prompts a step; "
        f"supply of devices: {text(job, 'supply')}, response lengths: {text(job, 'lengths')}"
    )


def _spent(own: Sequence[Row], policy: str) -> dict[str, float]:
    runs = [numbers(r, "spent_s") for r in own if text(r, "policy") == policy]
    kinds = dict.fromkeys(kind for run in runs for kind in run)
    return {kind: sum(run.get(kind, 0.0) for run in runs) / len(runs) for kind in kinds}


def _failures(own: Sequence[Row], policy: str) -> list[str]:
    return [
        f"seed {whole(r, 'seed')}: {text(r, 'failure')}"
        for r in own
        if text(r, "policy") == policy and text(r, "failure")
    ]


def _read_run(
    path: Path, policy: str, seed: int, where: str, figures: Row, job: Row
) -> RunRecord | None:
    files = Files(directory=path)
    rows = latest_rows(files.rows("steps.jsonl"))
    if not rows:
        return None
    decisions = files.rows("decisions.jsonl")
    plans = _plans(rows, decisions)
    if not any(mapping(row, "plan") for row in rows):
        files.notes.append("steps.jsonl has no plans: they are those of the decisions")
    return RunRecord(
        name=f"{policy}, seed {seed}",
        simulated=True,
        where=where,
        policy=policy,
        steps=tuple(_step(row) for row in rows),
        plans=plans,
        decisions=decisions,
        transitions=whole(figures, "transitions"),
        budget_bytes=number(job, "device_memory_bytes"),
        planned_steps=whole(job, "steps"),
        samples=whole(rows[-1], "samples"),
        spent_s=numbers(figures, "spent_s"),
        failure=text(figures, "failure"),
        notes=tuple(f"{path.name}/{note}" for note in files.notes),
    )


def _step(row: Row) -> StepPoint:
    return StepPoint(
        step=whole(row, "step") or 0,
        step_s=number(row, "step_s"),
        stage_s=numbers(row, "stage_s"),
        length_mean=number(row, "response_tokens_mean"),
        length_p95=number(row, "response_tokens_p95"),
        length_longest=number(row, "response_tokens_longest"),
        peak_bytes=number(row, "peak_memory_bytes"),
        devices=whole(row, "devices"),
        out_of_memory=whole(row, "out_of_memory") or 0,
    )


def _plans(rows: Sequence[Row], decisions: Sequence[Row]) -> tuple[PlanFrom, ...]:
    """The plans of a run; files of an older version tell of them in decisions alone."""
    known = [(row, mapping(row, "plan")) for row in rows if mapping(row, "plan")]
    if not known:
        known = [(d, mapping(d, "plan")) for d in decisions]
        known += [(d, mapping(d, "target")) for d in decisions[-1:]]
    plans: list[PlanFrom] = []
    for row, read in known:
        plan = read_plan(read)
        if not plan or (plans and plan == plans[-1].plan):
            continue
        before = numbers(row, "before_s")
        moving = [before[kind] for kind in MOVING if kind in before]
        plans.append(
            PlanFrom(
                step=(whole(row, "step") or 0) if plans else 0,
                plan=plan,
                seconds=sum(moving) if plans and moving else None,
                compile_s=before.get("compiling") if plans else None,
                ways="by checkpoint" if plans and "restarting" in before else "",
            )
        )
    return tuple(plans)
