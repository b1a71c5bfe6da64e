# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What each model-stage of a given plan takes: seconds and bytes of these layouts and choices;
nothing is searched.

The same model that a search prices its candidates with, for one candidate a model-stage: the plan
that a search returns has here the seconds and bytes that it was chosen for. `plan_price` adds them
up.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from nereus_jax.core.architectures import Head
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.packed_cuts import SCORE_FLUSH_PER_RANK
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.calibration import OperationClass
from nereus_jax.planning.candidates import Candidates, whole_groups
from nereus_jax.planning.cost import StageCost
from nereus_jax.planning.memory import StageMemory
from nereus_jax.planning.search_problem import (
    PlanProblem,
    layer_passes,
    stage_cost,
    stage_memory,
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
        return whole_groups(size, layout.pp), 1, 1
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
