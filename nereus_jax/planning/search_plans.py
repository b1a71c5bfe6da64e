# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Plans for a job, best first, as values that can be read, written and run.

Everything in them is modelled: seconds, bytes, and what dominates.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.frontier import Floats
from nereus_jax.planning.search import Found, find_best, wave_seconds
from nereus_jax.planning.search_alternatives import next_best
from nereus_jax.planning.search_problem import (
    PlanProblem,
    PricedStage,
    Pricer,
    stage_candidates,
)
from nereus_jax.planning.search_shortage import Shortage, find_shortage
from nereus_jax.planning.search_waves import Pick, Wave


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """How a model-stage runs in a plan.

    Attributes:
      model_stage: which.
      layout: on how many devices.
      first_device: position of the first of them in the pool; the others follow.
      wave, lane: when it runs, and with whom it shares devices then.
      microbatch_size: rows; GENERATE: rows decoded at a time by a replica.
      microbatches: of a pipeline flush.
      accumulation: flushes.
      remat, zero1: as in `candidates`.
      parked: it waits in the host's memory while others run.
      seconds: of a step, its weight edge and its parking included.
      seconds_by_class: of one call, by operation class, the largest first.
      dominant: what takes most of a call: a class, or the pipeline's bubble.
      edge_s: of the weight edge to it.
      memory: bytes on each device by kind.
      resident_bytes: while others run.
      working_bytes: on top of all resident ones while it runs.
    """

    model_stage: ModelStage
    layout: ParallelLayout
    first_device: int
    wave: int
    lane: int
    microbatch_size: int
    microbatches: int
    accumulation: int
    remat: bool
    zero1: bool
    parked: bool
    seconds: float
    seconds_by_class: Mapping[str, float]
    dominant: str
    edge_s: float
    memory: Mapping[str, float]
    resident_bytes: float
    working_bytes: float

    @property
    def positions(self) -> range:
        """Of its devices in the pool."""
        return range(self.first_device, self.first_device + self.layout.num_devices)

    @property
    def choice(self) -> StageChoice:
        """How it runs on them."""
        return StageChoice(
            microbatch_size=self.microbatch_size,
            microbatches=self.microbatches,
            remat=self.remat,
            zero1=self.zero1,
            parked=self.parked,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A plan with its modelled price.

    Attributes:
      stages: of all model-stages, by wave.
      step_s: seconds of a step.
      device_bytes: peak of each device of the pool.
      devices_per_node: to name devices by node.
    """

    stages: tuple[PlannedStage, ...]
    step_s: float
    device_bytes: Floats = dataclasses.field(compare=False)
    devices_per_node: int

    @property
    def peak_memory_bytes(self) -> int:
        """Of the fullest device."""
        return int(self.device_bytes.max())

    @functools.cached_property
    def dominant(self) -> PlannedStage:
        """The model-stage that takes longest."""
        return max(self.stages, key=lambda s: s.seconds)

    @property
    def dominant_term(self) -> str:
        """What takes longest: a model-stage, and what in it."""
        return f"{self.dominant.model_stage}: {self.dominant.dominant}"

    def plan(self, devices_per_process: int | None = None) -> ExecutionPlan:
        """As the runtime takes it.

        Args:
          devices_per_process: of a run, by whose processes devices are named; None: those of a
            node.
        """
        each = devices_per_process or self.devices_per_node
        placements = {
            s.model_stage: Placement(
                layout=s.layout,
                devices=tuple(DeviceId(i // each, i % each) for i in s.positions),
            )
            for s in self.stages
        }
        choices = {s.model_stage: s.choice for s in self.stages}
        return ExecutionPlan(plan=Plan(placements=placements), choices=choices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSearch:
    """What a search found.

    Attributes:
      plans: best first; empty where nothing fits.
      shortage: why nothing fits; None where something does, or nobody asked.
    """

    plans: tuple[PlannedStep, ...]
    shortage: Shortage | None = None


def find_plans(
    problem: PlanProblem, top: int = 5, apart: float = 0.0, *, explain: bool = True
) -> PlanSearch:
    """The best plans of a job.

    Tensor parallelism stays inside a node, unless nothing fits that way.

    Args:
      problem: the job.
      top: how many plans at most; the first is the optimum, the others change one thing in it.
      apart: least relative difference of the seconds of two of the others.
      explain: where nothing fits, find out why; that takes longer than the search.
    """
    for across in (False, True) if not problem.tp_across_nodes else (True,):
        wanted = dataclasses.replace(problem, tp_across_nodes=across)
        if not all(len(stage_candidates(wanted, stage)) for stage in problem.degrees):
            continue
        limit = problem.limit_bytes
        pricer = Pricer(wanted, limit)
        priced = [[pricer.price(stage) for stage in wave] for wave in problem.waves()]
        waves = [
            Wave(
                [stage.options for stage in wave],
                problem.num_devices,
                problem.hardware.devices_per_node,
                limit,
            )
            for wave in priced
        ]
        best = find_best(waves, limit)
        if best is not None:
            others = next_best(waves, best, limit, top - 1, apart) if top > 1 else ()
            plans = tuple(_planned(problem, priced, found) for found in (best, *others))
            return PlanSearch(plans=plans)
    return PlanSearch(plans=(), shortage=find_shortage(problem) if explain else None)


def _planned(
    problem: PlanProblem, priced: Sequence[Sequence[PricedStage]], found: Found
) -> PlannedStep:
    stages: list[PlannedStage] = []
    for number, (prices, picks) in enumerate(zip(priced, found.waves, strict=True)):
        starts = _lane_starts(prices, picks)
        stages += [
            _planned_stage(price, pick, number, starts[pick.lane])
            for price, pick in zip(prices, picks, strict=True)
        ]
    return PlannedStep(
        stages=tuple(stages),
        step_s=sum(wave_seconds(picks) for picks in found.waves),
        device_bytes=_device_bytes(stages, problem.num_devices),
        devices_per_node=problem.hardware.devices_per_node,
    )


def _lane_starts(prices: Sequence[PricedStage], picks: Sequence[Pick]) -> dict[int, int]:
    """First device of each lane: those with larger tp degrees come first, so that all groups of
    ranks start at multiples of their size."""
    widths = {p.lane: p.width for p in picks}
    degrees = dict.fromkeys(widths, 1)
    for price, pick in zip(prices, picks, strict=True):
        tp = int(price.options.candidates.tp[pick.index])
        degrees[pick.lane] = max(degrees[pick.lane], tp)
    starts: dict[int, int] = {}
    start = 0
    for lane in sorted(widths, key=lambda lane: (-degrees[lane], lane)):
        starts[lane] = start
        start += widths[lane]
    return starts


def _planned_stage(price: PricedStage, pick: Pick, wave: int, start: int) -> PlannedStage:
    candidates, i = price.options.candidates, pick.index
    return PlannedStage(
        model_stage=pick.model_stage,
        layout=candidates.layout(i),
        first_device=start,
        wave=wave,
        lane=pick.lane,
        microbatch_size=int(candidates.microbatch_size[i]),
        microbatches=int(candidates.microbatches[i]),
        accumulation=int(candidates.accumulation[i]),
        remat=bool(candidates.remat[i]),
        zero1=bool(candidates.zero1[i]),
        parked=pick.parked,
        seconds=pick.seconds,
        seconds_by_class={c.value: s for c, s in price.cost.at(i).items()},
        dominant=price.cost.dominant(i),
        edge_s=float(price.edge_s[i]),
        memory=price.memory.at(i),
        resident_bytes=pick.resident_bytes,
        working_bytes=pick.working_bytes,
    )


def _device_bytes(stages: Sequence[PlannedStage], num_devices: int) -> Floats:
    """Peak of each device: all that is resident, and the most that one works with on top."""
    resident, working = np.zeros(num_devices), np.zeros(num_devices)
    for stage in stages:
        used = slice(stage.positions.start, stage.positions.stop)
        resident[used] += stage.resident_bytes
        working[used] = np.maximum(working[used], stage.working_bytes)
    return resident + working


def config_overrides(step: PlannedStep) -> dict[str, str]:
    """Keys of `nereus train` that run a plan, with their values.

    The configuration has one set of microbatches and memory choices for all model-stages that
    train, and one for all that score: the smallest and the most sparing of the plan's.
    """
    train = [s for s in step.stages if s.model_stage.stage is Stage.TRAIN]
    score = [s for s in step.stages if s.model_stage.stage is Stage.SCORE]
    generate = [s for s in step.stages if s.model_stage.stage is Stage.GENERATE]
    keys = {
        f"plan.{s.model_stage}": f"dp={s.layout.dp},pp={s.layout.pp},tp={s.layout.tp},"
        + ("parked," if s.parked else "")
        + f"devices={s.positions.start}-{s.positions.stop - 1}"
        for s in step.stages
    }
    keys["train.microbatch_size"] = str(min(s.microbatch_size for s in train))
    piped = [s.microbatches for s in train if s.layout.pp > 1]
    keys["train.pipeline_microbatches"] = str(min(piped, default=0))
    keys["train.remat"] = "layer" if any(s.remat for s in train) else "none"
    keys["train.zero1"] = str(any(s.zero1 for s in train))
    if score:
        keys["score.microbatch_size"] = str(min(s.microbatch_size for s in score))
    keys["rollout.max_num_seqs"] = str(min(s.microbatch_size for s in generate))
    return keys
