# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What a given plan takes: seconds and bytes of these layouts and choices; nothing is searched.

The same model that a search prices its candidates with, for one candidate a model-stage: the plan
that a search returns has here the seconds and bytes that it was chosen for.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from nereus_jax.core.architectures import Head
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.calibration import OperationClass
from nereus_jax.planning.candidates import SCORE_FLUSH_PER_RANK, Candidates
from nereus_jax.planning.cost import StageCost
from nereus_jax.planning.memory import StageMemory
from nereus_jax.planning.search_problem import (
    PlanProblem,
    layer_passes,
    park_s,
    stage_cost,
    stage_memory,
    weight_edge_s,
    with_edges,
)
from nereus_jax.planning.workload import Workload

SecondsByClass = dict[OperationClass, float]


def candidates_of(
    workload: Workload, stages: Sequence[ModelStage], execution: ExecutionPlan
) -> Candidates:
    """How model-stages of one kind run in a plan, one row each.

    Args:
      workload: of a step.
      stages: all GENERATE, all SCORE or all TRAIN.
      execution: the plan.
    """
    layouts = [execution.plan[stage].layout for stage in stages]
    choices = [execution.choices[stage] for stage in stages]
    rows = [
        _row(workload, stage.stage, layout, choice)
        for stage, layout, choice in zip(stages, layouts, choices, strict=True)
    ]
    size, flush, flushes = np.array(rows, np.int64).T
    return Candidates(
        dp=np.array([x.dp for x in layouts], np.int64),
        pp=np.array([x.pp for x in layouts], np.int64),
        tp=np.array([x.tp for x in layouts], np.int64),
        microbatch_size=size,
        microbatches=flush,
        accumulation=flushes,
        remat=np.array([x.remat for x in choices], np.bool_),
        zero1=np.array([x.zero1 for x in choices], np.bool_),
    )


def _row(
    workload: Workload, kind: Stage, layout: ParallelLayout, choice: StageChoice
) -> tuple[int, int, int]:
    """Rows at a time, microbatches of a flush, and flushes, as the engines make them of a plan."""
    rows = workload.rows
    if kind is Stage.TRAIN:
        rows = min(workload.minibatch_size, rows)
    own = -(-rows // layout.dp)
    size = min(choice.microbatch_size or own, own)
    if kind is Stage.GENERATE:
        # Where all rows are decoded at a time there are as many of them in every pipeline group.
        return layout.pp * -(-size // layout.pp), 1, 1
    total = -(-own // size)
    if layout.pp == 1:
        return size, 1, total
    limit = SCORE_FLUSH_PER_RANK * layout.pp if kind is Stage.SCORE else choice.microbatches
    flush = min(limit or total, total)
    return size, flush, -(-total // flush)


def predict_stage_seconds(
    problem: PlanProblem, execution: ExecutionPlan
) -> dict[ModelStage, SecondsByClass]:
    """Modelled seconds of one call of every model-stage by operation class, the largest first.

    Args:
      problem: the job, with the lengths and the efficiencies to price it with.
      execution: the plan.
    """
    predicted: dict[ModelStage, SecondsByClass] = {}
    for stages in _alike(problem, execution.plan.placements):
        candidates = candidates_of(problem.workload, stages, execution)
        layers = layer_passes(problem, stages[0], candidates)
        costs: dict[Head, StageCost] = {}
        for i, stage in enumerate(stages):
            head = problem.head(stage)
            if head not in costs:
                costs[head] = stage_cost(problem, stage, candidates, layers)
            predicted[stage] = costs[head].at(i)
    return {stage: predicted[stage] for stage in execution.plan.placements}


def _alike(problem: PlanProblem, stages: Iterable[ModelStage]) -> list[list[ModelStage]]:
    """Model-stages that do the same with the same layers: priced together."""
    groups: dict[tuple[object, ...], list[ModelStage]] = {}
    for stage in stages:
        key = stage.stage, id(problem.models[stage.role])
        groups.setdefault(key, []).append(stage)
    return list(groups.values())


def predict_memory(problem: PlanProblem, execution: ExecutionPlan) -> dict[ModelStage, StageMemory]:
    """Modelled bytes of every model-stage on each of its devices, [1] each."""
    predicted: dict[ModelStage, StageMemory] = {}
    for stage in execution.plan.placements:
        candidates = candidates_of(problem.workload, [stage], execution)
        memory = stage_memory(problem, stage, candidates)
        predicted[stage] = with_edges(problem, stage, memory)
    return predicted


def predict_device_bytes(problem: PlanProblem, execution: ExecutionPlan) -> dict[DeviceId, float]:
    """Modelled peak of each device: what its model-stages hold, and the most that one works with.

    What is parked is there only while it works. The backend's own bytes
    (`MemoryModel.reserved_bytes`) are not in it, as in `PlannedStep.device_bytes`.
    """
    held: dict[DeviceId, float] = {}
    working: dict[DeviceId, float] = {}
    for stage, memory in predict_memory(problem, execution).items():
        resident, most = float(memory.held_bytes[0]), float(memory.working_bytes[0])
        if execution.choices[stage].parked:
            resident, most = 0.0, most + resident
        for device in execution.plan[stage].devices:
            held[device] = held.get(device, 0.0) + resident
            working[device] = max(working.get(device, 0.0), most)
    return {device: held[device] + working[device] for device in sorted(held)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """What a step of a plan takes.

    Attributes:
      step_s: modelled seconds.
      stage_s: of a step, all calls, weight edge and parking of each model-stage.
      seconds: of one call by operation class.
    """

    step_s: float
    stage_s: Mapping[ModelStage, float]
    seconds: Mapping[ModelStage, SecondsByClass]


def predict_step(problem: PlanProblem, execution: ExecutionPlan) -> PredictedStep:
    """Modelled seconds of a step, as a search adds them up.

    The model-stages of a wave that share devices run one after the other, the others at the same
    time; waves follow each other.

    Args:
      problem: the job.
      execution: the plan.
    """
    seconds = predict_stage_seconds(problem, execution)
    stage_s = {
        stage: sum(by_class.values()) * problem.calls(stage) + _beside_s(problem, execution, stage)
        for stage, by_class in seconds.items()
    }
    step_s = 0.0
    for wave in problem.waves():
        free_s: dict[DeviceId, float] = {}
        for stage in wave:
            devices = execution.plan[stage].devices
            end_s = max(free_s.get(d, 0.0) for d in devices) + stage_s[stage]
            free_s |= dict.fromkeys(devices, end_s)
        step_s += max(free_s.values())
    return PredictedStep(step_s=step_s, stage_s=stage_s, seconds=seconds)


def _beside_s(problem: PlanProblem, execution: ExecutionPlan, stage: ModelStage) -> float:
    """Seconds of the weight edge to a model-stage, and of parking it."""
    candidates = candidates_of(problem.workload, [stage], execution)
    beside_s = float(weight_edge_s(problem, stage, candidates)[0])
    if execution.choices[stage].parked:
        held = stage_memory(problem, stage, candidates).held_bytes
        beside_s += float(park_s(problem, stage, held)[0])
    return beside_s
