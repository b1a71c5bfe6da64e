# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What a live run left in its directory, as a simulation takes it.

Lengths come from metrics.jsonl (mean, 95th percentile and longest of each step), plans from
plans.jsonl, pools from decisions.jsonl. Between two replans the pool is taken to have stayed as the
first of them saw it; a replan that a resume cut out of the file is not known.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_jax.config import RunConfig, parse_config
from nereus_jax.control.decisions import parse_plan, parse_ranges
from nereus_jax.control.state import plan_devices
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import ModelStage
from nereus_jax.report.jsonl import read_jsonl
from nereus_jax.simulator.traces import DeviceChange, Recorded

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FILES = ("config.json", "metrics.jsonl", "decisions.jsonl", "plans.jsonl")
P95 = 0.95
STEEPEST = 64.0
BISECTIONS = 60


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordedStep:
    """A step as it was measured.

    Attributes:
      plan: that it ran under.
      step_s: what it took.
      stage_s: of each model-stage in all its calls.
      responses: lengths of its rows, with the mean, the 95th percentile and the longest as
        measured.
      prompt_tokens: mean of its prompts.
      settled: no program ran for the first time.
    """

    plan: ExecutionPlan
    step_s: float
    stage_s: Mapping[ModelStage, float]
    responses: Ints
    prompt_tokens: float
    settled: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """A run.

    Attributes:
      directory: of its files.
      config: of the run; of its data, traces and plan files nothing is kept.
      policy: that it ran under.
      steps: all of them, in order.
      pool: what devices there were, and the rows.
      moved_s: seconds of changes of plan.
      moves: how many there were.
      compiled_s: that it waited for the programs of its first plan.
    """

    directory: Path
    config: RunConfig
    policy: str
    steps: tuple[RecordedStep, ...]
    pool: Recorded
    moved_s: float
    moves: int
    compiled_s: float

    @property
    def mean_step_s(self) -> float:
        """Mean of the steps, first calls of programs in them."""
        return float(np.mean([s.step_s for s in self.steps]))


def read_recording(directory: Path) -> Recording:
    """Reads the directory of a run with `control.policy`.

    Raises:
      ConfigError: a file is missing, or is not what a run writes.
      DataError: a line is no JSON object.
    """
    _check_files(directory)
    try:
        values: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
        plans = read_jsonl(directory / "plans.jsonl")
        decisions = read_jsonl(directory / "decisions.jsonl")
        rows = read_jsonl(directory / "metrics.jsonl")
        return _recording(directory, values, plans, decisions, rows)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"--from: the files of {directory} are not those of a run of this version "
            f"({type(error).__name__}: {error}); give the directory of a live run"
        ) from error


def _check_files(directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigError(f"--from: {directory} is no directory; give the --workdir of a live run")
    missing = [name for name in FILES if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            f"--from: {directory} has no {' and no '.join(missing)}; a replay needs "
            f"{', '.join(FILES)} of a run with control.policy"
        )


def _recording(
    directory: Path,
    values: dict[str, Any],
    written: Sequence[Mapping[str, Any]],
    decisions: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
) -> Recording:
    values["plan_file"], values["plan_changes"] = "", {}
    policy = str(values["control"]["policy"])
    values["control"] |= {"pool_trace": ""}
    config = parse_config(values)
    steps = [r for r in rows if "stage_s" in r]
    if not steps:
        raise ConfigError(f"--from: metrics.jsonl of {directory} has no step; run at least one")
    moves = [r for r in rows if "transition_s" in r]
    numbers = [int(r["step"]) for r in steps]
    plans = _plans(numbers, written)
    count = config.rollout.batch_size * config.rollout.samples_per_prompt
    found = [
        _step(row, plan, count, before)
        for row, plan, before in zip(steps, plans, [None, *steps], strict=False)
    ]
    for i, (a, b) in enumerate(itertools.pairwise(plans), 1):
        if a != b:
            found[i] = dataclasses.replace(found[i], settled=False)
    first, changes = _pools(decisions, plans, numbers[0])
    return Recording(
        directory=directory,
        config=config,
        policy=policy,
        steps=tuple(found),
        pool=Recorded(responses=tuple(s.responses for s in found), first=first, changes=changes),
        moved_s=sum(float(r["transition_s"]) for r in moves),
        moves=len(moves),
        compiled_s=float(steps[0]["compile_s"]["exposed"]),
    )


def _step(
    row: Mapping[str, Any], plan: ExecutionPlan, count: int, before: Mapping[str, Any] | None
) -> RecordedStep:
    responses = lengths_of(
        float(row["response_length_mean"]),
        float(row["response_length_p95"]),
        int(row["response_length_max"]),
        count,
    )
    stages = {str(s): s for s in plan.choices}
    stage_s: dict[ModelStage, float] = {}
    for name, seconds in row["stage_s"].items():
        stage = stages.get(name.partition(" ")[0])  # ReMax calls some twice, by other names
        if stage is not None:
            stage_s[stage] = stage_s.get(stage, 0.0) + float(seconds)
    compiled = before is None or row["compile_s"]["exposed"] > before["compile_s"]["exposed"]
    return RecordedStep(
        plan=plan,
        step_s=float(row["step_s"]),
        stage_s=stage_s,
        responses=responses,
        prompt_tokens=max(row["tokens"] / count - float(row["response_length_mean"]), 1.0),
        settled=not compiled,
    )


def _plans(numbers: Sequence[int], written: Sequence[Mapping[str, Any]]) -> list[ExecutionPlan]:
    """The plan of each step: the last one that was written as holding from it, or from before."""
    known = [(int(row["step"]), parse_plan(row["plan"])) for row in written]
    found: list[ExecutionPlan] = []
    for number in numbers:
        until = [plan for step, plan in known if step <= number]
        if not until:
            raise ValueError(f"plans.jsonl has no plan of step {number}")
        found.append(until[-1])
    return found


def _pools(
    decisions: Sequence[Mapping[str, Any]], plans: Sequence[ExecutionPlan], first_step: int
) -> tuple[tuple[DeviceId, ...], tuple[DeviceChange, ...]]:
    """The devices at the start, and how they changed as replans saw them."""
    pools = [
        (int(d["step"]) - first_step, set(parse_ranges(d["pool"]) if d["pool"] else ()))
        for d in decisions
    ]
    there = set(plan_devices(plans[0]))
    if pools and "pool" not in str(decisions[0]["trigger"]):
        there |= pools[0][1]
    first = tuple(sorted(there))
    changes: list[DeviceChange] = []
    for step, pool in pools:
        if pool != there:
            going, coming = tuple(sorted(there - pool)), tuple(sorted(pool - there))
            changes.append(DeviceChange(at=float(step), going=going, coming=coming))
            there = pool
    return first, tuple(changes)


def lengths_of(mean: float, p95: float, longest: int, count: int) -> Ints:
    """[count] lengths with a mean, a 95th percentile and a longest one, ascending.

    Below the percentile they are p95 (u / 0.95)^k, with the k that gives the mean; above it they
    are on a straight line to the longest.

    Args:
      mean, p95, longest: measured, in tokens.
      count: rows.
    """
    shares = np.arange(count) / max(count - 1, 1)
    over = np.clip((shares - P95) / (1.0 - P95), 0.0, 1.0)

    def at(power: float) -> Floats:
        body = p95 * np.minimum(shares / P95, 1.0) ** power
        return np.clip(body + over * (longest - p95), 1.0, longest)

    low, high = 0.0, STEEPEST
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        if at(middle).mean() > mean:
            low = middle
        else:
            high = middle
    return np.round(at(high)).astype(np.int64)
