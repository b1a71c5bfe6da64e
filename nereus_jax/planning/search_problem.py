# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What is to be planned, and the prices of its candidates: seconds and bytes."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.emu_spec import DTYPE_BYTES
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.roles import ModelStage, Role, Stage
from nereus_jax.core.workflow import StageCall, Workflow
from nereus_jax.planning.calibration import Efficiencies, OperationClass
from nereus_jax.planning.candidates import Candidates, enumerate_candidates
from nereus_jax.planning.cost import OUR_ENGINES, StageCost, stage_seconds
from nereus_jax.planning.cost_passes import LayerPasses
from nereus_jax.planning.cost_step import edge_seconds
from nereus_jax.planning.cost_terms import ModelSizes, Prices, total_s
from nereus_jax.planning.frontier import Floats, StageOptions
from nereus_jax.planning.memory import MemoryModel, StageMemory
from nereus_jax.planning.workload import Workload

HEADROOM = 0.10
"""Share of a device's memory that a plan leaves free: for what the model of memory misses, and for
longer rows before a new plan is in place."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """A job to find plans for.

    Attributes:
      workflow: order of a step.
      models: sizes by role, of every role in the workflow.
      workload: of a step.
      hardware: of the devices.
      num_devices: of the pool.
      efficiencies: what is reached of the hardware's peaks.
      memory: how programs use memory.
      param_dtype: of the master weights.
      compute_dtype: of activations, and of the weights of GENERATE and SCORE.
      park: idle model-stages may wait in the host's memory.
      tp_across_nodes: tensor parallelism may use the slow links.
      zero1: the optimizer's state is split over dp; else every replica has all of it, and what is
        trained outlives a replica.
      degrees: (pp, tp) that a model-stage is to have; of the others all that are possible.
    """

    workflow: Workflow
    models: Mapping[Role, DecoderConfig]
    workload: Workload
    hardware: Hardware
    num_devices: int
    efficiencies: Efficiencies = dataclasses.field(default_factory=Efficiencies.prior)
    memory: MemoryModel = dataclasses.field(default_factory=MemoryModel)
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"
    park: bool = True
    tp_across_nodes: bool = False
    zero1: bool = True
    degrees: Mapping[ModelStage, tuple[int, int]] = dataclasses.field(
        default_factory=dict[ModelStage, tuple[int, int]]
    )

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ConfigError(f"devices: at least 1 is needed to plan, got {self.num_devices}")
        missing = {s.role for s in self.workflow.model_stages} - set(self.models)
        if missing:
            raise ConfigError(
                f"models: the workflow {self.workflow.name} has the roles "
                f"{', '.join(sorted(missing))} without a model; give their sizes"
            )

    @property
    def limit_bytes(self) -> float:
        """What plans may use of a device."""
        usable = self.hardware.memory_bytes * (1.0 - HEADROOM)
        return usable - self.memory.reserved_bytes

    def head(self, model_stage: ModelStage) -> Head:
        """What its model ends in."""
        return Head.SCALAR if model_stage.role in (Role.CRITIC, Role.REWARD) else Head.LM

    def calls(self, model_stage: ModelStage) -> int:
        """How often a step calls it."""
        calls = [c for c in self.workflow.calls if isinstance(c, StageCall)]
        return sum(c.model_stage == model_stage for c in calls)

    def waves(self) -> list[list[ModelStage]]:
        """The model-stages of every wave that has any, each in the first one that calls it."""
        seen: set[ModelStage] = set()
        waves: list[list[ModelStage]] = []
        for wave in self.workflow.waves():
            stages = [c.model_stage for c in wave if isinstance(c, StageCall)]
            stages = [s for s in dict.fromkeys(stages) if s not in seen]
            seen.update(stages)
            if stages:
                waves.append(stages)
        return waves


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PricedStage:
    """A model-stage's candidates with all that is known of them.

    Attributes:
      options: what the search needs.
      cost: seconds of one call, by operation class.
      edge_s: [C] of the weight edge to it, once a step.
      memory: bytes by kind.
    """

    options: StageOptions
    cost: StageCost
    edge_s: Floats
    memory: StageMemory


def stage_candidates(problem: PlanProblem, stage: ModelStage) -> Candidates:
    """The candidates of a model-stage; the same for all that do the same with the same model.

    Replicas share the optimizer's state: with ZeRO-1 as many bytes go over the links (a
    reduce-scatter and an all-gather are an all-reduce), an update touches fewer of them, and a
    device holds fewer, so that no second is lost by leaving the others out. What is lost is a copy:
    `zero1=False` has it.
    """
    p, model = problem, problem.models[stage.role]
    return enumerate_candidates(
        model,
        stage,
        p.workload,
        p.hardware,
        p.num_devices,
        tp_across_nodes=p.tp_across_nodes,
        degrees=p.degrees.get(stage),
        zero1=p.zero1,
    )


def head_memories(
    problem: PlanProblem, stage: ModelStage, candidates: Candidates, heads: Iterable[Head]
) -> dict[Head, StageMemory]:
    """The bytes of each candidate of a model-stage, whose model ends in each of some heads."""
    p = problem
    terms = p.memory.terms(
        p.models[stage.role],
        stage.stage,
        p.workload,
        candidates,
        param_dtype=p.param_dtype,
        compute_dtype=p.compute_dtype,
    )
    return p.memory.head_memories(terms, stage.stage, heads)


def stage_memory(problem: PlanProblem, stage: ModelStage, candidates: Candidates) -> StageMemory:
    """The bytes of each candidate of a model-stage."""
    head = problem.head(stage)
    return head_memories(problem, stage, candidates, (head,))[head]


def with_edges(problem: PlanProblem, stage: ModelStage, memory: StageMemory) -> StageMemory:
    """The same with what weight edges from or to the model-stage have in flight."""
    edges = problem.workflow.weight_edges
    return memory.with_edge() if any(stage in (e.source, e.target) for e in edges) else memory


def layer_passes(
    problem: PlanProblem, stage: ModelStage, candidates: Candidates
) -> LayerPasses | None:
    """What all heads of a model share in the seconds of SCORE or TRAIN; None for GENERATE."""
    p = problem
    if stage.stage is Stage.GENERATE:
        return None
    return LayerPasses(
        sizes=ModelSizes.of(p.models[stage.role], p.head(stage)),
        workload=p.workload,
        candidates=candidates,
        prices=Prices(hardware=p.hardware, efficiencies=p.efficiencies, dtype=p.compute_dtype),
        execution=OUR_ENGINES,
        train=stage.stage is Stage.TRAIN,
    )


def stage_cost(
    problem: PlanProblem,
    stage: ModelStage,
    candidates: Candidates,
    layers: LayerPasses | None = None,
) -> StageCost:
    """The seconds of one call of a model-stage; `layers` as in `stage_seconds`."""
    p = problem
    return stage_seconds(
        p.models[stage.role],
        p.head(stage),
        stage,
        p.workload,
        p.hardware,
        p.efficiencies,
        candidates,
        dtype=p.compute_dtype,
        layers=layers,
    )


def weight_edge_s(problem: PlanProblem, stage: ModelStage, candidates: Candidates) -> Floats:
    """[C] seconds of the weight edge to a model-stage; 0 where there is none."""
    p = problem
    if all(edge.target != stage for edge in p.workflow.weight_edges):
        return np.zeros(len(candidates))
    model, dtype = p.models[stage.role], p.compute_dtype
    spent = edge_seconds(
        1.0 * model.num_params(p.head(stage)) * DTYPE_BYTES[dtype],
        Prices(hardware=p.hardware, efficiencies=p.efficiencies, dtype=dtype),
        candidates.pp * candidates.tp,
        same_node=p.num_devices <= p.hardware.devices_per_node,
    )
    return np.broadcast_to(np.asarray(total_s(spent), np.float64), (len(candidates),))


def park_s(problem: PlanProblem, stage: ModelStage, held_bytes: Floats) -> Floats:
    """Once in and, where the bytes have changed, once out; others have a copy to come from."""
    ways = 2 if stage.stage is Stage.TRAIN else 1
    host, reached = problem.hardware.host, problem.efficiencies[OperationClass.HOST_COPY]
    return ways * (host.latency_s + held_bytes / host.bytes_per_s) / reached


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Shared:
    """What model-stages that do the same with the same layers share, whatever the models end in.

    Attributes:
      candidates: of all of them.
      memory: of each head.
      layers: what their seconds have in common.
    """

    candidates: Candidates
    memory: Mapping[Head, StageMemory]
    layers: LayerPasses | None


class Pricer:
    """Prices model-stages; those that do the same with the same model are priced once."""

    def __init__(self, problem: PlanProblem, limit_bytes: float = np.inf) -> None:
        """Takes the job.

        Args:
          problem: the job.
          limit_bytes: of a device. Candidates of TRAIN that do not even fit alone, whatever the
            model ends in, are left out before their seconds are worked out: that takes longer.
        """
        self._problem = problem
        self._limit_bytes = limit_bytes
        self._costs: dict[tuple[object, ...], StageCost] = {}
        self._shared: dict[tuple[object, ...], _Shared] = {}

    def price(self, stage: ModelStage) -> PricedStage:
        """The prices of a model-stage's candidates."""
        p, head = self._problem, self._problem.head(stage)
        # Rewards come from the last token alone, which changes neither seconds nor bytes by much.
        same = self._same(stage)
        if same not in self._shared:
            self._shared[same] = self._share(stage)
        shared = self._shared[same]
        candidates = shared.candidates
        if (same, head) not in self._costs:
            self._costs[same, head] = stage_cost(p, stage, candidates, shared.layers)
        cost, memory = self._costs[same, head], with_edges(p, stage, shared.memory[head])
        edge_s = weight_edge_s(p, stage, candidates)
        options = StageOptions(
            model_stage=stage,
            candidates=candidates,
            seconds=cost.total_s * p.calls(stage) + edge_s,
            held_bytes=memory.held_bytes,
            working_bytes=memory.working_bytes,
            park_seconds=park_s(p, stage, memory.held_bytes) if p.park else None,
        )
        return PricedStage(options=options, cost=cost, edge_s=edge_s, memory=memory)

    def _same(self, stage: ModelStage) -> tuple[object, ...]:
        """Equal for model-stages that do the same with the same layers."""
        p = self._problem
        return stage.stage, id(p.models[stage.role]), p.degrees.get(stage)

    def _share(self, stage: ModelStage) -> _Shared:
        p = self._problem
        candidates = stage_candidates(p, stage)
        same = self._same(stage)
        alike = [s for s in p.workflow.model_stages if self._same(s) == same]
        heads = dict.fromkeys(p.head(s) for s in (stage, *alike))
        memory = head_memories(p, stage, candidates, heads)
        # Of the other stages nearly all fit, and GENERATE's seconds are interpolated between those
        # of all of its candidates.
        if stage.stage is Stage.TRAIN and np.isfinite(self._limit_bytes):
            needed = [own.held_bytes + own.working_bytes for own in memory.values()]
            fits = np.minimum.reduce(needed) <= self._limit_bytes
            candidates = candidates.take(fits)
            memory = {head: own.take(fits) for head, own in memory.items()}
        layers = layer_passes(p, stage, candidates)
        return _Shared(candidates=candidates, memory=memory, layers=layers)
