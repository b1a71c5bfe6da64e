"""What a run learns of its hardware: predictions beside measurements, and efficiencies from them.

After every step each model-stage's measured seconds meet what the cost model says of exactly the
plan and the lengths of that step, with what was known before it. The first call of a program does
not count: compilation, allocation and cold caches are in its time.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nereus_jax.config import RunConfig
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.roles import ModelStage
from nereus_jax.planning.calibration import CLASSES, Efficiencies, observe
from nereus_jax.planning.calibration_record import (
    CalibrationError,
    Prediction,
    load_efficiencies,
    save_efficiencies,
    software_versions,
)
from nereus_jax.planning.predict import predict_stage_seconds
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import Workload
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime import host
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.plan_change import live_hardware
from nereus_jax.trainer.problem import measured_workload, plan_problem
from nereus_jax.trainer.step import StepResult

FILE = "calibration.json"
WINDOW = 64
"""Predictions that the errors in a row are of, the last ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What calibration is told of a step.

    Attributes:
      execution: the plan that it ran under.
      workload: with its lengths.
      stage_s: measured seconds of one call of each model-stage.
      programs: of each model-stage, how many there are compiled.
    """

    execution: ExecutionPlan
    workload: Workload
    stage_s: Mapping[ModelStage, float]
    programs: Mapping[ModelStage, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What has been learned so far.

    Attributes:
      problem: the run, with the efficiencies as they are known now.
      last: of the step before; None: this process has taken none.
      recent: predictions with what was measured.
    """

    problem: PlanProblem
    last: StepFacts | None = None
    recent: tuple[Prediction, ...] = ()

    @property
    def efficiencies(self) -> Efficiencies:
        """What is known now."""
        return self.problem.efficiencies

    def after(self, facts: StepFacts) -> tuple["Calibration", dict[str, Any]]:
        """Learns from a step.

        Returns:
          What is known then, and for the step's row of metrics: what had been predicted, how far
          off predictions were lately, and the efficiencies.
        """
        problem = dataclasses.replace(self.problem, workload=facts.workload)
        predicted = predict_stage_seconds(problem, facts.execution)
        efficiencies, fresh = problem.efficiencies, []
        for stage, measured_s in facts.stage_s.items():
            if not self._settled(stage, facts):
                continue
            efficiencies = observe(efficiencies, predicted[stage], measured_s)
            fresh.append(Prediction(seconds=predicted[stage], measured_s=measured_s))
        recent = (*self.recent, *fresh)[-WINDOW:]
        known = Calibration(
            problem=dataclasses.replace(problem, efficiencies=efficiencies),
            last=facts,
            recent=recent,
        )
        predicted_s = {str(s): sum(predicted[s].values()) for s in facts.stage_s}
        return known, {"stage_s_predicted": predicted_s} | known._errors()

    def _settled(self, stage: ModelStage, facts: StepFacts) -> bool:
        """Whether a model-stage ran programs that have run before."""
        last = self.last
        return (
            last is not None
            and last.execution == facts.execution
            and stage in last.stage_s
            and last.programs.get(stage) == facts.programs.get(stage)
        )

    def _errors(self) -> dict[str, Any]:
        if not self.recent:
            return {}
        error = CalibrationError.of(list(self.recent))
        seen = [c for c, n in zip(CLASSES, self.efficiencies.observations, strict=True) if n > 0]
        return {
            "calibration_mape": error.mape,
            "calibration_max_error": error.max_error,
            "calibration_bias": {c.value: bias for c, bias in error.bias.items()},
            "efficiency": {c.value: self.efficiencies[c] for c in seen},
        }

    def resumed(self, workdir: Path) -> tuple["Calibration", str]:
        """What the run had learned before, if its file holds for this hardware.

        Returns:
          What is known, and what to tell of a file that is not used; empty: nothing.
        """
        path = workdir / FILE
        if not path.exists():
            return self, ""
        try:
            known = load_efficiencies(path, self.problem.hardware.name, software_versions())
        except ConfigError as error:
            return self, f"efficiencies are learned anew: {error}"
        problem = dataclasses.replace(self.problem, efficiencies=known)
        return dataclasses.replace(self, problem=problem), ""

    def save(self, workdir: Path) -> None:
        """Writes what is known."""
        hardware = self.problem.hardware.name
        save_efficiencies(workdir / FILE, self.efficiencies, hardware, software_versions())


def wants_calibration(config: RunConfig, kind: str) -> bool:
    """Whether a run calibrates.

    Args:
      config: of the run.
      kind: of its devices, as the backend names it.
    """
    if config.calibration.mode != "auto":
        return config.calibration.mode == "on"
    # What emulated devices can do at most would have to be measured first, at every start.
    emulated = bool(config.emulated_devices) or "cpu" in kind.lower()
    return bool(config.calibration.file) or not emulated


def make_calibration(job: Job, hardware: Hardware | None = None) -> tuple[Calibration | None, str]:
    """A run's calibration before its first step; process 0 alone has one.

    Args:
      job: the run.
      hardware: of its devices; None: found out here.

    Returns:
      The calibration, if the run has one, and what to tell; empty: nothing.

    Raises:
      ConfigError: `calibration.file` cannot be read, or is of other hardware; or the hardware is
        not known, and `calibration.mode` is "on".
    """
    config = job.config
    if not wants_calibration(config, job.world.pool.kind):
        return None, ""
    try:
        hardware = hardware or live_hardware(job)
    except ConfigError as error:
        if config.calibration.mode == "on" or config.calibration.file:
            raise
        return None, f"efficiencies are not learned: {error}"
    prior = Efficiencies.prior()
    with host.together():
        if config.calibration.file and job.world.is_main:
            path = Path(config.calibration.file).expanduser()
            prior = load_efficiencies(path, hardware.name, software_versions())
    if not job.world.is_main:
        return None, ""
    return Calibration(problem=plan_problem(job, hardware, prior)), ""


def step_facts(job: Job, result: StepResult) -> StepFacts:
    """What calibration is told of a step."""
    rollout: Rollout = result.values["rollout"]
    programs = job.num_programs
    spans = {span.name: span.duration_s for span in result.spans}
    stages = [stage for stage in job.plan.placements if str(stage) in spans]
    return StepFacts(
        execution=job.execution,
        workload=measured_workload(
            job.config,
            np.asarray(rollout.prompt_lengths_B),
            np.asarray(rollout.response_lengths_B),
        ),
        stage_s={stage: spans[str(stage)] for stage in stages},
        programs={stage: programs.get(str(stage), 0) for stage in stages},
    )
