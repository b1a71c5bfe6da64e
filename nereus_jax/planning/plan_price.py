# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""The price of one plan exactly as it runs: its own microbatches and devices, wherever they lie.

A search prices candidates for a tidy pool; this prices what is there, or is about to be. All
seconds and bytes are modelled.
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import DTYPE_BYTES
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.calibration import OperationClass
from nereus_jax.planning.candidates import SCORE_FLUSH_PER_RANK, Candidates, Ints
from nereus_jax.planning.cost import stage_seconds
from nereus_jax.planning.cost_step import edge_seconds
from nereus_jax.planning.cost_terms import Prices, total_s
from nereus_jax.planning.search_problem import PlanProblem, stage_memory, with_edges
from nereus_jax.planning.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePrice:
    """What a model-stage costs in a step.

    Attributes:
      seconds: of all its calls, its weight edge and its parking.
      seconds_by_class: of its calls, by operation class.
      edge_s: of the weight edge to it.
      park_s: of bringing it from the memory of the host, and back.
      memory: bytes on each of its devices, by kind.
      resident_bytes: on each of its devices while others run.
      working_bytes: on top of all resident ones while it runs.
    """

    seconds: float
    seconds_by_class: Mapping[OperationClass, float]
    edge_s: float = 0.0
    park_s: float = 0.0
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    resident_bytes: float = 0.0
    working_bytes: float = 0.0


Known = dict[tuple[object, ...], StagePrice]
"""Prices of model-stages by all that they depend on beside the problem."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanPrice:
    """What a plan costs.

    Attributes:
      step_s: seconds of a step.
      stages: of each model-stage.
      device_bytes: peak of each device of the plan.
      limit_bytes: what a plan may use of a device.
    """

    step_s: float
    stages: Mapping[ModelStage, StagePrice]
    device_bytes: Mapping[DeviceId, float]
    limit_bytes: float

    @functools.cached_property
    def peak_bytes(self) -> float:
        """Of the fullest device."""
        return max(self.device_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether every device has room for it."""
        return self.peak_bytes <= self.limit_bytes

    @functools.cached_property
    def seconds_by_class(self) -> Mapping[OperationClass, float]:
        """Of all calls of all model-stages."""
        total: dict[OperationClass, float] = {}
        for stage in self.stages.values():
            for operation, seconds in stage.seconds_by_class.items():
                total[operation] = total.get(operation, 0.0) + seconds
        return total


def as_candidates(
    workload: Workload, model_stage: ModelStage, layout: ParallelLayout, choice: StageChoice
) -> Candidates:
    """A way to run a model-stage as a table of one candidate.

    Args:
      workload: of a step.
      model_stage: which.
      layout: its degrees.
      choice: how it runs.
    """
    train = model_stage.stage is Stage.TRAIN
    rows = min(workload.minibatch_size, workload.rows) if train else workload.rows
    own = -(-rows // layout.dp)
    size = min(choice.microbatch_size or own, own)
    flush, flushes = 1, 1
    if model_stage.stage is not Stage.GENERATE:
        parts = -(-own // size)
        if layout.pp > 1:
            score = SCORE_FLUSH_PER_RANK * layout.pp
            flush = min(choice.microbatches or (parts if train else score), parts)
        flushes = -(-parts // flush)

    def one(value: int) -> Ints:
        return np.array([value], np.int64)

    return Candidates(
        dp=one(layout.dp),
        pp=one(layout.pp),
        tp=one(layout.tp),
        microbatch_size=one(size),
        microbatches=one(flush),
        accumulation=one(flushes),
        remat=np.array([choice.remat and train]),
        zero1=np.array([choice.zero1 and train and layout.dp > 1]),
    )


def stage_class_seconds(
    problem: PlanProblem,
    model_stage: ModelStage,
    layout: ParallelLayout,
    choice: StageChoice,
    devices_per_node: int | None = None,
) -> dict[OperationClass, float]:
    """Seconds of all calls of a model-stage in a step, by operation class.

    Args:
      problem: the job.
      model_stage: which.
      layout: its degrees.
      choice: how it runs.
      devices_per_node: of its groups of ranks; None: as the hardware has it.
    """
    p, hardware = problem, problem.hardware
    if devices_per_node is not None and devices_per_node != hardware.devices_per_node:
        hardware = dataclasses.replace(hardware, devices_per_node=devices_per_node)
    cost = stage_seconds(
        p.models[model_stage.role],
        p.head(model_stage),
        model_stage,
        p.workload,
        hardware,
        p.efficiencies,
        as_candidates(p.workload, model_stage, layout, choice),
        dtype=p.compute_dtype,
    )
    calls = p.calls(model_stage)
    return {operation: calls * seconds for operation, seconds in cost.at(0).items()}


def price_plan(
    problem: PlanProblem,
    plan: ExecutionPlan,
    node_sizes: Mapping[ModelStage, int] | None = None,
    known: Known | None = None,
) -> PlanPrice:
    """The price of a plan.

    Args:
      problem: the job; its number of devices says whether a weight edge leaves a node.
      plan: of the job's model-stages.
      node_sizes: devices of a model-stage's groups of ranks that share a node, where that is not as
        the hardware has it.
      known: prices of model-stages of the same problem, which are added to; plans of one search
        differ in few of them.
    """
    sizes = node_sizes or {}
    made: Known = {} if known is None else known
    stages: dict[ModelStage, StagePrice] = {}
    for stage in problem.workflow.model_stages:
        layout, choice = plan.plan[stage].layout, plan.choices[stage]
        edges = [(e.source == stage, e.target == stage) for e in problem.workflow.weight_edges]
        ends = any(x or y for x, y in edges), any(y for _, y in edges)
        # Those that do the same with the same model have the same price.
        alike = stage.stage, problem.models[stage.role], problem.head(stage), problem.calls(stage)
        key = (*alike, layout, choice, *ends, sizes.get(stage))
        if key not in made:
            made[key] = _stage_price(problem, stage, layout, choice, ends[1], sizes.get(stage))
        stages[stage] = made[key]
    devices, positions = _positions(plan)
    return PlanPrice(
        step_s=_step_s(problem, {s: x.seconds for s, x in stages.items()}, positions),
        stages=stages,
        device_bytes=dict(
            zip(devices, _device_bytes(stages, positions, len(devices)), strict=True)
        ),
        limit_bytes=problem.limit_bytes,
    )


def plan_bytes(problem: PlanProblem, plan: ExecutionPlan) -> float:
    """Peak of the fullest device under a plan, without its seconds."""
    made: dict[tuple[object, ...], tuple[float, float]] = {}
    devices, positions = _positions(plan)
    resident, working = np.zeros(len(devices)), np.zeros(len(devices))
    edges = problem.workflow.weight_edges
    for stage in problem.workflow.model_stages:
        layout, choice = plan.plan[stage].layout, plan.choices[stage]
        edge = any(stage in (e.source, e.target) for e in edges)
        key = stage.stage, problem.models[stage.role], problem.head(stage), layout, choice, edge
        if key not in made:
            made[key] = _stage_bytes(problem, stage, layout, choice)[:2]
        held, used = made[key]
        resident[positions[stage]] += held
        working[positions[stage]] = np.maximum(working[positions[stage]], used)
    return float((resident + working).max())


def _stage_price(
    problem: PlanProblem,
    stage: ModelStage,
    layout: ParallelLayout,
    choice: StageChoice,
    filled: bool,
    node_size: int | None,
) -> StagePrice:
    """Args: filled: a weight edge fills it in every step."""
    by_class = stage_class_seconds(problem, stage, layout, choice, node_size)
    resident, working, memory, held = _stage_bytes(problem, stage, layout, choice)
    edge_s = _edge_s(problem, stage, layout) if filled else 0.0
    park_s = _park_s(problem, stage, held) if choice.parked else 0.0
    return StagePrice(
        seconds=sum(by_class.values()) + edge_s + park_s,
        seconds_by_class=by_class,
        edge_s=edge_s,
        park_s=park_s,
        memory=memory,
        resident_bytes=resident,
        working_bytes=working,
    )


def _stage_bytes(
    problem: PlanProblem, stage: ModelStage, layout: ParallelLayout, choice: StageChoice
) -> tuple[float, float, dict[str, float], float]:
    """Resident, working, by kind, and those of the state."""
    candidates = as_candidates(problem.workload, stage, layout, choice)
    memory = with_edges(problem, stage, stage_memory(problem, stage, candidates))
    held, working = float(memory.held_bytes[0]), float(memory.working_bytes[0])
    if choice.parked:
        return 0.0, working + held, memory.at(0), held
    return held, working, memory.at(0), held


def _edge_s(problem: PlanProblem, stage: ModelStage, layout: ParallelLayout) -> float:
    p = problem
    model_bytes = p.models[stage.role].num_params(p.head(stage)) * DTYPE_BYTES[p.compute_dtype]
    prices = Prices(hardware=p.hardware, efficiencies=p.efficiencies, dtype=p.compute_dtype)
    same_node = p.num_devices <= p.hardware.devices_per_node
    spent = edge_seconds(1.0 * model_bytes, prices, layout.pp * layout.tp, same_node=same_node)
    return float(np.sum(total_s(spent)))


def _park_s(problem: PlanProblem, stage: ModelStage, held_bytes: float) -> float:
    """Once in and, where the bytes have changed, once out; as a search has it."""
    ways = 2 if stage.stage is Stage.TRAIN else 1
    reached = problem.efficiencies[OperationClass.HOST_COPY]
    return ways * problem.hardware.host.seconds(held_bytes) / reached


def _positions(
    plan: ExecutionPlan,
) -> tuple[tuple[DeviceId, ...], dict[ModelStage, Ints]]:
    """The devices of a plan, and the places of each model-stage's among them."""
    place: dict[DeviceId, int] = {}
    seen: dict[int, Ints] = {}
    positions: dict[ModelStage, Ints] = {}
    for stage, placement in plan.plan.placements.items():
        devices = placement.devices
        if id(devices) not in seen:  # many model-stages have the very same devices
            indices = [place.setdefault(d, len(place)) for d in devices]
            seen[id(devices)] = np.array(indices)
        positions[stage] = seen[id(devices)]
    return tuple(place), positions


def _step_s(
    problem: PlanProblem,
    seconds: Mapping[ModelStage, float],
    positions: Mapping[ModelStage, Ints],
) -> float:
    """Waves one after the other; in a wave, model-stages that share a device in turn.

    Each model-stage runs in the first wave that calls it, with all its calls, as a search has it.
    """
    total = 0.0
    count = 1 + max(int(p.max()) for p in positions.values())
    for wave in problem.waves():
        free_at = np.zeros(count)
        for stage in wave:
            used = positions[stage]
            free_at[used] = free_at[used].max() + seconds[stage]
        total += float(free_at.max())
    return total


def _device_bytes(
    stages: Mapping[ModelStage, StagePrice], positions: Mapping[ModelStage, Ints], count: int
) -> list[float]:
    """Peak of each device: all that is resident, and the most that one works with on top."""
    resident, working = np.zeros(count), np.zeros(count)
    for stage, price in stages.items():
        used = positions[stage]
        resident[used] += price.resident_bytes
        working[used] = np.maximum(working[used], price.working_bytes)
    return (resident + working).tolist()
