"""A job with prices that can be worked out by hand, and its cost function.

Two model-stages share all devices with one tp. TRAIN's seconds fall with the devices, and rise a
little with tp; a rollout lasts as long as its longest response and is faster with tp; every rank
costs a fixed time. So short responses want tp 1, long ones tp 4. A device holds 400 / tp bytes of
state and 1 / tp byte of every token of the longest row, of a microbatch of 8; the limit is 1,000.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from nereus_jax.control.costs import Beliefs, Candidate, Candidates, TransitionEstimate
from nereus_jax.control.settings import ControllerSettings
from nereus_jax.control.state import ControllerState
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.events import LengthSummary, StepFinished, StepRecord
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN, ModelStage
from nereus_jax.core.transition import LinkBytes
from nereus_jax.planning.calibration import Efficiencies, OperationClass
from nereus_jax.planning.plan_price import PlanPrice, StagePrice
from nereus_jax.planning.workload import LengthHistogram, Workload

LIMIT_BYTES = 1000.0
DEGREES = (1, 2, 4)
CUT_TOKENS = 4000


def workload(tokens: int = 100) -> Workload:
    return Workload(
        prompts=64,
        prompt_lengths=LengthHistogram.constant(10),
        response_lengths=LengthHistogram.constant(tokens),
        max_response_tokens=CUT_TOKENS,
        minibatch_size=64,
    )


def toy_plan(devices: tuple[DeviceId, ...], tp: int, microbatch: int = 8) -> ExecutionPlan:
    """All devices that make whole groups of tp."""
    used = devices[: len(devices) // tp * tp]
    placement = Placement(layout=ParallelLayout(len(used) // tp, 1, tp), devices=used)
    stages = (ACTOR_GENERATE, ACTOR_TRAIN)
    return ExecutionPlan(
        plan=Plan(placements=dict.fromkeys(stages, placement)),
        choices=dict.fromkeys(stages, StageChoice(microbatch_size=microbatch)),
    )


def tp_of(plan: ExecutionPlan) -> int:
    return plan.plan[ACTOR_TRAIN].layout.tp


def toy_seconds(
    plan: ExecutionPlan, stage: ModelStage, work: Workload, efficiencies: Efficiencies
) -> dict[OperationClass, float]:
    """A GEMM takes 0.05 device seconds a token, a longest token 0.004 s over tp, a rank 0.05 s."""
    layout, choice = plan.plan[stage].layout, plan.choices[stage]
    mean = work.response_lengths.mean
    if stage == ACTOR_TRAIN:
        each = mean / layout.num_devices
        seconds = {
            OperationClass.GEMM: 0.05 * each * (1.3 if choice.remat else 1.0),
            OperationClass.MEMORY: 0.01 * each,
            OperationClass.ALL_REDUCE_INTRA: 0.002 * each * (layout.tp - 1),
            OperationClass.LAUNCH: 0.16 / choice.microbatch_size,
        }
    else:
        seconds = {
            OperationClass.DECODE_MEMORY: 0.004 * work.response_lengths.max / layout.tp,
            OperationClass.LAUNCH: 0.05 * layout.tp,
        }
    return {c: s / efficiencies[c] for c, s in seconds.items() if s > 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyCosts:
    """The cost function of the job.

    Attributes:
      move_s: seconds of a transition that changes placements.
      blocked: tp degrees that no transition reaches.
      limit_bytes: of a device.
    """

    move_s: float = 2.0
    blocked: frozenset[int] = frozenset()
    limit_bytes: float = LIMIT_BYTES

    def candidates(
        self,
        workload: Workload,
        pool: DevicePool,
        beliefs: Beliefs,
        *,
        current: ExecutionPlan,
        count: int,
        same_degrees: bool = False,
        surviving: bool = False,
    ) -> Candidates:
        degrees = (tp_of(current),) if same_degrees else DEGREES
        plans = [toy_plan(pool.devices, tp) for tp in degrees if tp <= len(pool)]
        priced = [
            Candidate(plan=p, price=self.price(p, workload, pool, beliefs), origin="toy")
            for p in plans
        ]
        fit = sorted((c for c in priced if c.price.fits), key=lambda c: c.price.step_s)
        return Candidates(plans=fit[:count], shortage="" if fit else "1,000 bytes are too few")

    def price(
        self, plan: ExecutionPlan, workload: Workload, pool: DevicePool, beliefs: Beliefs
    ) -> PlanPrice:
        stages: dict[ModelStage, StagePrice] = {}
        for stage in plan.choices:
            factor = beliefs.offsets.factor(plan.setup(stage))
            modelled = toy_seconds(plan, stage, workload, beliefs.efficiencies)
            by_class = {c: factor * s for c, s in modelled.items()}
            resident, working = self._bytes(plan, stage, workload, beliefs)
            stages[stage] = StagePrice(
                seconds=sum(by_class.values()),
                seconds_by_class=by_class,
                memory={"parameters": resident, "activations": working},
                resident_bytes=resident,
                working_bytes=working,
            )
        peak = self.peak_bytes(plan, workload, pool, beliefs)
        return PlanPrice(
            step_s=sum(s.seconds for s in stages.values()),
            stages=stages,
            device_bytes=dict.fromkeys(plan.plan[ACTOR_TRAIN].devices, peak),
            limit_bytes=self.limit_bytes,
        )

    def peak_bytes(
        self, plan: ExecutionPlan, workload: Workload, pool: DevicePool, beliefs: Beliefs
    ) -> float:
        parts = [self._bytes(plan, s, workload, beliefs) for s in plan.choices]
        return sum(r for r, _ in parts) + max(w for _, w in parts)

    @staticmethod
    def _bytes(
        plan: ExecutionPlan, stage: ModelStage, workload: Workload, beliefs: Beliefs
    ) -> tuple[float, float]:
        choice, tp = plan.choices[stage], plan.plan[stage].layout.tp
        resident = 400.0 / tp if stage == ACTOR_TRAIN else 0.0
        working = workload.max_response_tokens / tp * choice.microbatch_size / 8
        working *= 0.5 if choice.remat else 1.0
        if choice.parked:
            resident, working = 0.0, working + resident
        return resident, working * beliefs.corrections.get(stage.stage, 1.0)

    def stage_seconds(
        self, plan: ExecutionPlan, model_stage: ModelStage, workload: Workload, beliefs: Beliefs
    ) -> Mapping[OperationClass, float]:
        return toy_seconds(plan, model_stage, workload, beliefs.efficiencies)

    def transition(
        self,
        source: ExecutionPlan,
        target: ExecutionPlan,
        beliefs: Beliefs,
        *,
        lost: frozenset[DeviceId] = frozenset(),
        hidden_s: float = 0.0,
        by_checkpoint: bool = False,
    ) -> TransitionEstimate:
        if by_checkpoint:
            return TransitionEstimate(executable=True, seconds=60.0, parts_s={"setup": 60.0})
        old, new = source.plan[ACTOR_TRAIN], target.plan[ACTOR_TRAIN]
        if new.layout.tp in self.blocked and new.layout.tp != old.layout.tp:
            return TransitionEstimate(executable=False, reason=f"tp {new.layout.tp} is blocked")
        whole = [r for r in range(old.layout.dp) if lost.isdisjoint(old.replica_devices(r))]
        if not whole:
            return TransitionEstimate(executable=False, reason="no copy is whole")
        move_s = self.move_s * beliefs.transition_ratio if old != new else 0.0
        compile_s = max(4.0 - hidden_s, 0.0)
        return TransitionEstimate(
            executable=True,
            seconds=move_s + compile_s,
            parts_s={"move": move_s, "compile": compile_s},
            compile_s=4.0,
            link_bytes=LinkBytes(intra_node=400),
            device_bytes=dict.fromkeys(new.devices, 400),
        )


def settings(**changes) -> ControllerSettings:
    return dataclasses.replace(ControllerSettings(workload=workload()), **changes)


def pool(devices: int = 8) -> DevicePool:
    return DevicePool.uniform(1, devices)


def finished(
    state: ControllerState,
    step: int,
    lengths: list[int],
    time_s: float,
    truth: Efficiencies | None = None,
    **changes,
) -> StepFinished:
    """A step of the job as it would have been under the plan that runs.

    Args:
      state: says which plan that is.
      step: its number.
      lengths: of the responses.
      time_s: when it ended.
      truth: efficiencies that decide on its seconds; None: those that the job started with.
      changes: other fields of the record.
    """
    summary = LengthSummary.of(lengths)
    work = dataclasses.replace(
        workload(),
        response_lengths=LengthHistogram(lengths=summary.lengths, weights=summary.weights),
    )
    known = truth or Efficiencies.prior()
    stage_s = {s: sum(toy_seconds(state.plan, s, work, known).values()) for s in state.plan.choices}
    record = StepRecord(
        step=step,
        time_s=time_s,
        step_s=sum(stage_s.values()),
        stage_s=stage_s,
        responses=summary,
        prompts=LengthSummary.of([10]),
        tokens=sum(lengths),
    )
    return StepFinished(record=dataclasses.replace(record, **changes))


def spread(mean: float, seed: int = 0, rows: int = 64) -> list[int]:
    """Lengths around a mean, the same shape for each seed."""
    draws = np.random.default_rng(seed).gamma(8.0, 1.0 / 8.0, rows)
    return [max(int(x), 1) for x in draws / draws.mean() * mean]
