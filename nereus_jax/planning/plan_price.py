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
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.calibration import OperationClass
from nereus_jax.planning.candidates import Candidates, Ints
from nereus_jax.planning.cost_passes import LayerPasses
from nereus_jax.planning.memory import StageMemory
from nereus_jax.planning.predict import candidates_of
from nereus_jax.planning.search_plans import PlannedStage, PlannedStep
from nereus_jax.planning.search_problem import (
    PlanProblem,
    layer_passes,
    park_s,
    stage_cost,
    stage_memory,
    weight_edge_s,
    with_edges,
)


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

    def times(self, factor: float) -> "StagePrice":
        """The same with calls that take longer by a factor."""
        if factor == 1.0:
            return self
        by_class = {c: factor * s for c, s in self.seconds_by_class.items()}
        return dataclasses.replace(
            self,
            seconds=sum(by_class.values()) + self.edge_s + self.park_s,
            seconds_by_class=by_class,
        )


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
      survives: what is trained is still whole when any one node is lost.
    """

    step_s: float
    stages: Mapping[ModelStage, StagePrice]
    device_bytes: Mapping[DeviceId, float]
    limit_bytes: float
    survives: bool = True

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


def stage_class_seconds(
    problem: PlanProblem,
    plan: ExecutionPlan,
    model_stage: ModelStage,
    devices_per_node: int | None = None,
) -> dict[OperationClass, float]:
    """Seconds of all calls of a model-stage in a step, by operation class.

    Args:
      problem: the job.
      plan: how it runs.
      model_stage: which.
      devices_per_node: of its groups of ranks; None: as the hardware has it.
    """
    problem = _in_nodes(problem, devices_per_node)
    candidates = candidates_of(problem.workload, [model_stage], plan)
    return _class_seconds(problem, model_stage, candidates)


def _in_nodes(problem: PlanProblem, devices_per_node: int | None) -> PlanProblem:
    """The problem with that many devices in a node; None: as the hardware has it."""
    hardware = problem.hardware
    if devices_per_node is None or devices_per_node == hardware.devices_per_node:
        return problem
    hardware = dataclasses.replace(hardware, devices_per_node=devices_per_node)
    return dataclasses.replace(problem, hardware=hardware)


def _class_seconds(
    problem: PlanProblem,
    model_stage: ModelStage,
    candidates: Candidates,
    layers: LayerPasses | None = None,
) -> dict[OperationClass, float]:
    """Of all calls of the only candidate."""
    cost, calls = stage_cost(problem, model_stage, candidates, layers), problem.calls(model_stage)
    return {operation: calls * seconds for operation, seconds in cost.at(0).items()}


def price_plan(
    problem: PlanProblem,
    plan: ExecutionPlan,
    node_sizes: Mapping[ModelStage, int] | None = None,
    known: Known | None = None,
    factors: Mapping[ModelStage, float] | None = None,
) -> PlanPrice:
    """The price of a plan.

    Args:
      problem: the job; its number of devices says whether a weight edge leaves a node.
      plan: of the job's model-stages.
      node_sizes: devices of a model-stage's groups of ranks that share a node, where that is not as
        the hardware has it.
      known: prices of model-stages of the same problem, which are added to; plans of one search
        differ in few of them.
      factors: measured over modelled seconds of model-stages as they run in this plan; by default
        1.
    """
    sizes = node_sizes or {}
    made: Known = {} if known is None else known
    layers: _Layers = {}
    stages: dict[ModelStage, StagePrice] = {}
    for stage in problem.workflow.model_stages:
        layout, choice = plan.plan[stage].layout, plan.choices[stage]
        key = _key(problem, stage, layout, choice, sizes.get(stage))
        if key not in made:
            made[key] = _stage_price(problem, plan, stage, sizes.get(stage), layers)
        stages[stage] = made[key].times((factors or {}).get(stage, 1.0))
    devices, positions = _positions(plan)
    parts = {s: (x.resident_bytes, x.working_bytes) for s, x in stages.items()}
    peaks = _device_bytes(parts, positions, len(devices))
    return PlanPrice(
        step_s=_step_s(problem, {s: x.seconds for s, x in stages.items()}, positions),
        stages=stages,
        device_bytes=dict(zip(devices, peaks, strict=True)),
        limit_bytes=problem.limit_bytes,
    )


def searched_prices(problem: PlanProblem, step: PlannedStep) -> Known:
    """What a search has priced of a plan already, as `price_plan` would price it.

    Without GENERATE: the tables that its seconds are read from depend on what is priced beside it,
    so that a search has the last digits otherwise.

    Args:
      problem: that was searched; of the plan's groups of ranks none is torn.
      step: what was found.
    """
    size = problem.hardware.devices_per_node
    return {
        _key(problem, s.model_stage, s.layout, s.choice, size): _searched_price(problem, s)
        for s in step.stages
        if s.model_stage.stage is not Stage.GENERATE
    }


def _searched_price(problem: PlanProblem, found: PlannedStage) -> StagePrice:
    stage, parked_s = found.model_stage, 0.0
    calls = problem.calls(stage)
    by_class = {OperationClass(c): calls * s for c, s in found.seconds_by_class.items()}
    if found.parked:
        held = found.memory.get("parameters", 0.0) + found.memory.get("optimizer", 0.0)
        parked_s = float(park_s(problem, stage, np.array([held]))[0])
    return StagePrice(
        seconds=sum(by_class.values()) + found.edge_s + parked_s,
        seconds_by_class=by_class,
        edge_s=found.edge_s,
        park_s=parked_s,
        memory=found.memory,
        resident_bytes=found.resident_bytes,
        working_bytes=found.working_bytes,
    )


def plan_bytes(problem: PlanProblem, plan: ExecutionPlan) -> float:
    """Peak of the fullest device under a plan, without its seconds."""
    made: dict[tuple[object, ...], tuple[float, float]] = {}
    parts: dict[ModelStage, tuple[float, float]] = {}
    for stage in problem.workflow.model_stages:
        key = _kind(problem, stage, plan.plan[stage].layout, plan.choices[stage])
        if key not in made:
            memory = _stage_memory(problem, plan, stage)
            made[key] = _resident_and_working(memory, plan.choices[stage].parked)
        parts[stage] = made[key]
    devices, positions = _positions(plan)
    return max(_device_bytes(parts, positions, len(devices)))


def _kind(
    problem: PlanProblem, stage: ModelStage, layout: ParallelLayout, choice: StageChoice
) -> tuple[object, ...]:
    """Equal for model-stages that do the same with the same model in the same way."""
    edges = problem.workflow.weight_edges
    ends = any(e.source == stage for e in edges), any(e.target == stage for e in edges)
    model, head = problem.models[stage.role], problem.head(stage)
    return stage.stage, id(model), head, layout, choice, ends


def _key(
    problem: PlanProblem,
    stage: ModelStage,
    layout: ParallelLayout,
    choice: StageChoice,
    node_size: int | None,
) -> tuple[object, ...]:
    """Of `Known`: equal for model-stages that have the same price."""
    return (*_kind(problem, stage, layout, choice), problem.calls(stage), node_size)


def _stage_memory(problem: PlanProblem, plan: ExecutionPlan, stage: ModelStage) -> StageMemory:
    candidates = candidates_of(problem.workload, [stage], plan)
    return with_edges(problem, stage, stage_memory(problem, stage, candidates))


def _resident_and_working(memory: StageMemory, parked: bool) -> tuple[float, float]:
    """Bytes while others run, and on top of all resident ones while it runs."""
    held, working = float(memory.held_bytes[0]), float(memory.working_bytes[0])
    return (0.0, working + held) if parked else (held, working)


_Layers = dict[tuple[object, ...], LayerPasses | None]
"""What model-stages of a plan share that differ in their heads alone."""


def _stage_price(
    problem: PlanProblem,
    plan: ExecutionPlan,
    stage: ModelStage,
    node_size: int | None,
    layers: _Layers,
) -> StagePrice:
    choice = plan.choices[stage]
    candidates = candidates_of(problem.workload, [stage], plan)
    here = _in_nodes(problem, node_size)
    model, layout = problem.models[stage.role], plan.plan[stage].layout
    key = stage.stage, id(model), layout, choice, node_size
    if key not in layers:
        layers[key] = layer_passes(here, stage, candidates)
    by_class = _class_seconds(here, stage, candidates, layers[key])
    memory = with_edges(problem, stage, stage_memory(problem, stage, candidates))
    edge_s = float(weight_edge_s(problem, stage, candidates)[0])
    parked_s = float(park_s(problem, stage, memory.held_bytes)[0]) if choice.parked else 0.0
    resident, working = _resident_and_working(memory, choice.parked)
    return StagePrice(
        seconds=sum(by_class.values()) + edge_s + parked_s,
        seconds_by_class=by_class,
        edge_s=edge_s,
        park_s=parked_s,
        memory=memory.at(0),
        resident_bytes=resident,
        working_bytes=working,
    )


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
    parts: Mapping[ModelStage, tuple[float, float]],
    positions: Mapping[ModelStage, Ints],
    count: int,
) -> list[float]:
    """Peak of each device: all that is resident, and the most that one works with on top."""
    resident, working = np.zeros(count), np.zeros(count)
    for stage, (held, used) in parts.items():
        at = positions[stage]
        resident[at] += held
        working[at] = np.maximum(working[at], used)
    return (resident + working).tolist()
