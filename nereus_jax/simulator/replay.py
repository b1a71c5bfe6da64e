# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""A recorded run under other policies: what if I had used another one?

The simulated cluster is fitted to the run: one factor for each model-stage, so that the seconds of
its steps come out as measured, the seconds beside model-stages, and those of compiling a program.
What the run did not show is the ground truth's: plans that it never had, times those factors, and
moving state, checkpoints and restarts as they are.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nereus_jax.config import RunConfig
from nereus_jax.control.costs import Beliefs
from nereus_jax.control.offsets import first_offsets
from nereus_jax.control.planner_costs import PROGRAMS, PlannerCosts
from nereus_jax.control.settings import thresholds_of
from nereus_jax.control.state import plan_devices
from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import ModelStage, Role
from nereus_jax.data.tokenizers import make_tokenizer
from nereus_jax.planning.calibration import Efficiencies
from nereus_jax.planning.hardware import CPU_EMULATED, load_hardware
from nereus_jax.planning.run_problem import (
    most_prefill_rows,
    random_model,
    run_problem,
    run_workload,
)
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram
from nereus_jax.simulator.cluster import SimulatedCluster
from nereus_jax.simulator.recording import RecordedStep, Recording
from nereus_jax.simulator.scenario import Scenario
from nereus_jax.simulator.stage_run import StepRows
from nereus_jax.simulator.traces import DriftTrace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """How the simulated cluster was made like the one that was measured.

    Attributes:
      factors: of the seconds of each model-stage.
      between_s: of a step beside them.
      compile_s: of one program, from those of the first plan; 0: the run waited for none.
      steps: that were compared: those without first calls of programs.
      error: mean of |simulated / measured - 1| of their seconds, without noise.
    """

    factors: Mapping[ModelStage, float]
    between_s: float
    compile_s: float
    steps: int
    error: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """A run that can be played under other policies.

    Attributes:
      recording: of the run.
      problem: the job.
      fit: of the cluster.
    """

    recording: Recording
    problem: PlanProblem
    fit: Fit

    def scenario(self, seed: int) -> Scenario:
        """The run's rows, devices and first plan; noise by seed."""
        recording, problem = self.recording, self.problem
        cluster = _cluster(recording, problem, seed)
        overheads = cluster.truth.overheads
        if self.fit.compile_s:
            overheads = dataclasses.replace(overheads, compile_s=self.fit.compile_s)
        cluster = dataclasses.replace(
            cluster,
            truth=dataclasses.replace(cluster.truth, overheads=overheads),
            stage_factors=self.fit.factors,
            between_s=self.fit.between_s,
        )
        trace = DriftTrace(
            name=str(recording.directory),
            mean_tokens=np.array([s.responses.mean() for s in recording.steps]),
            shape=np.ones(1),
            nodes=cluster.nodes,
            recorded=recording.pool,
            step_s=recording.mean_step_s,
        )
        every = recording.config.checkpoint.every
        emulated = problem.hardware.name == CPU_EMULATED
        return Scenario(
            cluster=cluster,
            trace=trace,
            costs=PlannerCosts(
                problem=problem,
                node_of=lambda device: device.host,
                compiler_apart=not emulated,
            ),
            beliefs=Beliefs(offsets=first_offsets(emulated=emulated)),
            checkpoint_every=every or len(recording.steps) + 1,
            thresholds=thresholds_of(recording.config.control),
            doubt=recording.config.control.doubt,
            start=recording.steps[0].plan,
        )

    def job_json(self) -> dict[str, Any]:
        """What is simulated, for the reader of the figures."""
        config, hardware = self.recording.config, self.problem.hardware
        where = f"recorded in {self.recording.directory}"
        return {
            "model": config.model.path or config.model.preset or "sizes of the run",
            "algorithm": config.algorithm.name,
            "hardware": hardware.name,
            "devices": self.problem.num_devices,
            "device_memory_bytes": hardware.memory_bytes,
            "steps": len(self.recording.steps),
            "prompts": config.rollout.batch_size,
            "supply": where,
            "lengths": where,
        }

    def to_json(self) -> dict[str, Any]:
        """What was measured in the run, and how well the simulation fits it."""
        steps = self.recording.steps
        return {
            "simulated": False,
            "directory": str(self.recording.directory),
            "policy": self.recording.policy,
            "steps": len(steps),
            "mean_step_s": self.recording.mean_step_s,
            "transitions": self.recording.moves,
            "transition_s": self.recording.moved_s,
            "fit": {
                "steps": self.fit.steps,
                "error": self.fit.error,
                "between_s": self.fit.between_s,
                "compile_s": self.fit.compile_s,
                "factors": {str(s): x for s, x in self.fit.factors.items()},
            },
        }

    def text(self) -> str:
        """The same in words."""
        fit, recording = self.fit, self.recording
        return (
            f"recorded (measured): {recording.policy}, {len(recording.steps)} steps, "
            f"{recording.mean_step_s:.3g} s/step, {recording.moves} changes of plan in "
            f"{recording.moved_s:.3g} s\n"
            f"fit to it: {fit.error:.1%} mean error of {fit.steps} steps without first calls; what "
            f"follows is simulated\n"
        )


def make_replay(
    recording: Recording, model: Callable[[str], DecoderConfig], hardware: str = ""
) -> Replay:
    """A run as a simulation.

    Args:
      recording: the run.
      model: the sizes of a model by name.
      hardware: of its devices; empty: as the run's files say.

    Raises:
      ConfigError: the hardware is not known, or is none that the run's types run on.
    """
    devices = set(recording.pool.first).union(*(plan_devices(s.plan) for s in recording.steps))
    devices |= {d for change in recording.pool.changes for d in change.coming}
    machine = dataclasses.replace(
        _hardware(recording, hardware, len(devices)),
        devices_per_node=max(d.index for d in devices) + 1,
    )
    config = recording.config
    if config.model.compute_dtype not in machine.peak_flops_per_s:
        raise ConfigError(
            f"--from: hardware {machine.name} has no peak for {config.model.compute_dtype}, which "
            f"the run computes in; use --hardware with another kind"
        )
    prompt_tokens = statistics.median(s.prompt_tokens for s in recording.steps)
    cut = config.rollout.max_response_length
    prompts = min(max(round(prompt_tokens), 1), config.data.max_prompt_length)
    workload = run_workload(
        config, LengthHistogram.constant(prompts), LengthHistogram.constant(cut)
    )
    problem = run_problem(
        config,
        _models(config, model),
        workload,
        machine,
        (max(d.host for d in devices) + 1) * machine.devices_per_node,
        Efficiencies.prior(),
        most_prefill_rows(config),
    )
    return Replay(recording=recording, problem=problem, fit=fit_to(recording, problem))


def fit_to(recording: Recording, problem: PlanProblem) -> Fit:
    """One factor a model-stage, the median over the steps that have no first calls in them; of all
    steps where every one has.

    Args:
      recording: the run.
      problem: the job.
    """
    cluster = _cluster(recording, problem, 0)
    steps = [s for s in recording.steps if s.settled] or list(recording.steps)
    logs: dict[ModelStage, list[float]] = {}
    for step in steps:
        usual, _ = cluster.usual_s(step.plan, _rows(step, problem))
        for stage, measured_s in step.stage_s.items():
            if measured_s > 0.0:
                logs.setdefault(stage, []).append(math.log(measured_s / usual[stage]))
    factors = {s: math.exp(statistics.median(x)) for s, x in logs.items()}
    scaled = dataclasses.replace(cluster, stage_factors=factors)
    modelled = [scaled.usual_s(s.plan, _rows(s, problem))[1] for s in steps]
    missing = [s.step_s - m for s, m in zip(steps, modelled, strict=True)]
    between_s = max(statistics.median(missing), 0.0)
    errors = [abs((m + between_s) / s.step_s - 1.0) for s, m in zip(steps, modelled, strict=True)]
    programs = sum(PROGRAMS[s.stage] for s in recording.steps[0].plan.choices)
    return Fit(
        factors=factors,
        between_s=between_s,
        compile_s=recording.compiled_s / programs,
        steps=len(steps),
        error=statistics.mean(errors),
    )


def _rows(step: RecordedStep, problem: PlanProblem) -> StepRows:
    prompts = problem.workload.prompt_lengths.max
    return StepRows(
        prompts=np.full(len(step.responses), prompts, np.int64), responses=step.responses
    )


def _cluster(recording: Recording, problem: PlanProblem, seed: int) -> SimulatedCluster:
    nodes = problem.num_devices // problem.hardware.devices_per_node
    return SimulatedCluster(problem=problem, nodes=nodes, seed=seed)


def _hardware(recording: Recording, name: str, devices: int) -> Hardware:
    config = recording.config
    name = name or config.transition.hardware
    if not name and config.emulated_devices:
        name = CPU_EMULATED
    if not name:
        name = _calibrated_on(recording.directory / "calibration.json")
    found = load_hardware(name, emulated_devices=devices)
    if memory_bytes := config.device_memory_bytes:
        found = dataclasses.replace(found, memory_bytes=memory_bytes)
    return found


def _calibrated_on(path: Path) -> str:
    """The hardware that a run's calibration is of."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["hardware"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--from: {path} does not say on which hardware the run was; name it with --hardware"
        ) from None


def _models(
    config: RunConfig, model: Callable[[str], DecoderConfig]
) -> Mapping[Role, DecoderConfig]:
    sizes = config.model
    if sizes.path:
        actor = model(sizes.path)
    elif sizes.preset:
        actor = preset(sizes.preset)
    else:
        vocab = sizes.vocab_size or make_tokenizer(config).vocab_size
        actor = random_model(config, vocab)
    models: dict[Role, DecoderConfig] = {}
    models |= dict.fromkeys((Role.ACTOR, Role.CRITIC, Role.REFERENCE), actor)
    if config.reward.model_path:
        models[Role.REWARD] = model(config.reward.model_path)
    return models
