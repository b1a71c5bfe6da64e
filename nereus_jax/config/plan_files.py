"""Plan files: the plans of a run that say how each model-stage runs, not only where."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nereus_jax.config.plan_entry import PlanEntry, largest_layout
from nereus_jax.config.schema import RunConfig
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import ConfigError, InfeasiblePlanError
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.roles import ModelStage, Stage


def read_plan_file(key: str, text: str) -> ExecutionPlan:
    """A plan that `nereus plan --out` or a run has written.

    Args:
      key: of the configuration, for errors.
      text: path of the file.

    Raises:
      ConfigError: it cannot be read as a plan; the message names the key and the file.
    """
    try:
        content: Any = json.loads(Path(text).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no JSON ({error})"
        raise ConfigError(
            f"{key}: {text!r} cannot be read as a plan file: {reason}; write one with "
            f"`nereus plan --out={Path(text).name}`, or give the plan.json of a run"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{key}: {text!r} holds no plan: expected model-stage -> dp, pp, tp, devices, "
            f"microbatch_size, ...; write one with `nereus plan --out`"
        )
    try:
        return ExecutionPlan.from_json(content)
    except InfeasiblePlanError as error:
        raise ConfigError(f"{key}: {text!r}: {error}; write it anew with `nereus plan`") from None


def plan_keys(config: RunConfig) -> dict[int, tuple[str, str]]:
    """The plan files that a configuration names: step -> (key, path); 0 is the start."""
    keys = {0: ("plan_file", config.plan_file)} if config.plan_file else {}
    keys |= {
        step: (f"plan_changes.{step}", change)
        for step, change in sorted(config.plan_changes.items())
        if isinstance(change, str)
    }
    return keys


def check_plan_files(config: RunConfig) -> None:
    """Checks that plan files can be read, and that nothing else says the same.

    Raises:
      ConfigError: see the message.
    """
    if config.plan_file and config.plan:
        raise ConfigError(
            f"plan_file={config.plan_file!r} gives all layouts, but plan.{next(iter(config.plan))} "
            f"is given too; drop the plan.* entries, or plan_file"
        )
    from_file = bool(config.plan_file)
    for step in sorted(config.plan_changes):
        change = config.plan_changes[step]
        if from_file and not isinstance(change, str):
            raise ConfigError(
                f"plan_changes.{step} changes single layouts of a plan that comes from a file; "
                f"give a plan file there too: --config.plan_changes.{step}=FILE"
            )
        from_file = from_file or isinstance(change, str)
    for key, path in plan_keys(config).values():
        read_plan_file(key, path)


def fit_plan_files(config: RunConfig, pool: DevicePool) -> tuple[RunConfig, list[str]]:
    """Replaces plan files that need devices which are not there by the nearest layouts that fit.

    Choices of single model-stages no longer fit then: the most sparing of them hold for all.

    Args:
      config: of the run.
      pool: the devices there are.

    Returns:
      The configuration, and a line for each layout that was replaced.
    """
    said: list[str] = []
    for step, (key, path) in plan_keys(config).items():
        given = read_plan_file(key, path)
        if set(pool.devices).issuperset(_devices(given)):
            continue
        entries = {
            str(stage): _fitted(f"{key}: {stage}", placement.devices, given, stage, pool, said)
            for stage, placement in sorted(given.plan.placements.items())
        }
        config = _with_choices(config, given.choices)
        if step == 0:
            config = dataclasses.replace(config, plan_file="", plan=entries)
        else:
            changes = {**config.plan_changes, step: entries}
            config = dataclasses.replace(config, plan_changes=changes)
    return config, said


def _devices(given: ExecutionPlan) -> Iterable[DeviceId]:
    return (d for placement in given.plan.placements.values() for d in placement.devices)


def _fitted(
    where: str,
    devices: tuple[DeviceId, ...],
    given: ExecutionPlan,
    stage: ModelStage,
    pool: DevicePool,
    said: list[str],
) -> PlanEntry:
    layout = given.plan[stage].layout
    parked = stage in given.choices and given.choices[stage].parked
    entry = PlanEntry(dp=layout.dp, pp=layout.pp, tp=layout.tp, parked=parked)
    places = {device: i for i, device in enumerate(pool.devices)}
    if places.keys() >= set(devices):
        return dataclasses.replace(entry, devices=tuple(places[d] for d in devices))
    fitted = largest_layout(entry, len(pool))
    said.append(
        f"{where} '{entry}' needs devices that are gone; '{fitted}' takes its place on "
        f"{len(pool)} devices"
    )
    return fitted


def _with_choices(config: RunConfig, choices: Mapping[ModelStage, StageChoice]) -> RunConfig:
    """The configuration with the smallest microbatches and the most sparing memory choices."""
    by_stage = {kind: [c for s, c in choices.items() if s.stage is kind] for kind in Stage}
    train, score = by_stage[Stage.TRAIN], by_stage[Stage.SCORE]
    slots = [c.microbatch_size for c in by_stage[Stage.GENERATE] if c.microbatch_size]
    flushes = [c.microbatches for c in train if c.microbatches > 1]
    return dataclasses.replace(
        config,
        train=dataclasses.replace(
            config.train,
            microbatch_size=min(c.microbatch_size for c in train),
            pipeline_microbatches=min(flushes, default=0),
            remat="layer" if any(c.remat for c in train) else "none",
            zero1=any(c.zero1 for c in train),
        ),
        score=dataclasses.replace(
            config.score, microbatch_size=min((c.microbatch_size for c in score), default=0)
        ),
        rollout=dataclasses.replace(config.rollout, max_num_seqs=min(slots, default=0)),
    )
