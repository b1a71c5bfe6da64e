"""All that a controller knows, as one value: a part of the checkpoint, in JSON."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from nereus_jax.control.costs import Beliefs
from nereus_jax.control.learning import Spread, StageHistory
from nereus_jax.control.monitor import EFFICIENCY, Signal
from nereus_jax.control.offsets import Offsets
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.events import LengthSummary
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.calibration import CLASSES, Efficiencies

FORMAT = 1

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of past steps, the newest last, bounded.

    Attributes:
      mean, p95, longest: of the responses of each step, in tokens.
      responses, prompts: of the newest few.
    """

    mean: tuple[float, ...] = ()
    p95: tuple[float, ...] = ()
    longest: tuple[int, ...] = ()
    responses: tuple[LengthSummary, ...] = ()
    prompts: tuple[LengthSummary, ...] = ()

    def after(
        self, responses: LengthSummary, prompts: LengthSummary, steps: int, few: int
    ) -> "Lengths":
        """With one more step.

        Args:
          responses, prompts: of the step.
          steps: that are remembered.
          few: of which the histograms are.
        """
        return Lengths(
            mean=(*self.mean, responses.mean)[-steps:],
            p95=(*self.p95, responses.p95)[-steps:],
            longest=(*self.longest, responses.longest)[-steps:],
            responses=(*self.responses, responses)[-few:],
            prompts=(*self.prompts, prompts)[-few:],
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "mean": list(self.mean),
            "p95": list(self.p95),
            "longest": list(self.longest),
            "responses": [x.to_json() for x in self.responses],
            "prompts": [x.to_json() for x in self.prompts],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Lengths":
        """Reads what `to_json` made."""
        return cls(
            mean=tuple(data["mean"]),
            p95=tuple(data["p95"]),
            longest=tuple(data["longest"]),
            responses=tuple(LengthSummary.from_json(x) for x in data["responses"]),
            prompts=tuple(LengthSummary.from_json(x) for x in data["prompts"]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What holds of the running plan, worked out once.

    Attributes:
      limit_tokens: longest response that it has memory for.
      classes: operation classes with a share of a step that counts.
    """

    limit_tokens: int
    classes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControllerState:
    """What a controller knows between two events.

    Attributes:
      plan: that runs.
      pool: devices that are alive.
      step: the next step.
      time_s: of the last event, on the run's clock.
      leaving: devices that will be gone, and when.
      pending: the target of a transition that was decided and has not ended.
      pending_s: what moving to it was predicted to take.
      halted: the job has ended for want of devices.
      signals: references and intervals.
      lengths: of past steps.
      beliefs: what was learned.
      history: of each model-stage under this plan.
      plan_steps: that the plan has run.
      peak_bytes: largest measured one of this plan.
      room_tokens: of the programs of the last step.
      facts: of this plan; None: to be worked out.
      noticed: triggers that wait for the next boundary.
      last_replan: step of the last replan.
      refused_tokens: longest response that was foreseen when no plan had memory for it; 0: none.
      failed: plans that could not be reached, the newest last, bounded.
      replans, moves: counters.
      losses: of devices of the plan, without notice.
    """

    plan: ExecutionPlan
    pool: DevicePool
    step: int = 0
    time_s: float = 0.0
    leaving: Mapping[DeviceId, float] = dataclasses.field(default_factory=dict[DeviceId, float])
    pending: ExecutionPlan | None = None
    pending_s: float = 0.0
    halted: bool = False
    signals: Mapping[str, Signal] = dataclasses.field(default_factory=dict[str, Signal])
    lengths: Lengths = dataclasses.field(default_factory=Lengths)
    beliefs: Beliefs = dataclasses.field(default_factory=Beliefs)
    history: Mapping[ModelStage, StageHistory] = dataclasses.field(
        default_factory=dict[ModelStage, StageHistory]
    )
    plan_steps: int = 0
    peak_bytes: int = 0
    room_tokens: int = 0
    facts: PlanFacts | None = None
    noticed: tuple[str, ...] = ()
    last_replan: int = 0
    refused_tokens: float = 0.0
    failed: tuple[ExecutionPlan, ...] = ()
    replans: int = 0
    moves: int = 0
    losses: int = 0

    @functools.cached_property
    def usable(self) -> DevicePool:
        """Devices that are alive and stay so."""
        return self.pool.without(self.leaving) if self.leaving else self.pool

    def missing(self, devices: Iterable[DeviceId]) -> frozenset[DeviceId]:
        """Devices of the running plan that are not among these."""
        return plan_devices(self.plan) - frozenset(devices)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        facts = self.facts
        return {
            "format": FORMAT,
            "plan": self.plan.to_json(),
            "pool": {"kind": self.pool.kind, "devices": [str(d) for d in self.pool.devices]},
            "step": self.step,
            "time_s": self.time_s,
            "leaving": {str(d): s for d, s in sorted(self.leaving.items())},
            "pending": None if self.pending is None else self.pending.to_json(),
            "pending_s": self.pending_s,
            "halted": self.halted,
            "signals": {name: s.to_json() for name, s in self.signals.items()},
            "lengths": self.lengths.to_json(),
            "beliefs": beliefs_to_json(self.beliefs),
            "history": {
                str(s): [h.steps, h.rate, h.surprises] for s, h in sorted(self.history.items())
            },
            "plan_steps": self.plan_steps,
            "peak_bytes": self.peak_bytes,
            "room_tokens": self.room_tokens,
            "facts": None if facts is None else [facts.limit_tokens, list(facts.classes)],
            "noticed": list(self.noticed),
            "last_replan": self.last_replan,
            "refused_tokens": self.refused_tokens,
            "failed": [plan.to_json() for plan in self.failed],
            "replans": self.replans,
            "moves": self.moves,
            "losses": self.losses,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ControllerState":
        """Reads what `to_json` made.

        Raises:
          ValueError: it is of another format.
        """
        if data.get("format") != FORMAT:
            raise ValueError(
                f"controller state of format {data.get('format')!r}; this version reads {FORMAT}"
            )
        pending, facts = data["pending"], data["facts"]
        history = {
            ModelStage.parse(s): StageHistory(steps=h[0], rate=h[1], surprises=h[2])
            for s, h in data["history"].items()
        }
        return cls(
            plan=ExecutionPlan.from_json(data["plan"]),
            pool=DevicePool(
                devices=tuple(DeviceId.parse(d) for d in data["pool"]["devices"]),
                kind=data["pool"]["kind"],
            ),
            step=data["step"],
            time_s=data["time_s"],
            leaving={DeviceId.parse(d): s for d, s in data["leaving"].items()},
            pending=None if pending is None else ExecutionPlan.from_json(pending),
            pending_s=data["pending_s"],
            halted=data["halted"],
            signals={name: Signal.from_json(s) for name, s in data["signals"].items()},
            lengths=Lengths.from_json(data["lengths"]),
            beliefs=beliefs_from_json(data["beliefs"]),
            history=history,
            plan_steps=data["plan_steps"],
            peak_bytes=data["peak_bytes"],
            room_tokens=data["room_tokens"],
            facts=None
            if facts is None
            else PlanFacts(limit_tokens=facts[0], classes=tuple(facts[1])),
            noticed=tuple(data["noticed"]),
            last_replan=data["last_replan"],
            refused_tokens=data["refused_tokens"],
            failed=tuple(ExecutionPlan.from_json(p) for p in data["failed"]),
            replans=data["replans"],
            moves=data["moves"],
            losses=data.get("losses", 0),
        )


def initial_state(
    plan: ExecutionPlan, pool: DevicePool, beliefs: Beliefs | None = None, *, step: int = 0
) -> ControllerState:
    """Of a run that starts.

    The efficiencies that its plan was made with are the first references of theirs.

    Args:
      plan: the first plan.
      pool: the devices.
      beliefs: what is known, as from a calibration file.
      step: the first step.
    """
    known = beliefs or Beliefs()
    signals = {
        EFFICIENCY + c.value: Signal(reference=known.efficiencies[c], since=step) for c in CLASSES
    }
    return ControllerState(
        plan=plan, pool=pool, step=step, last_replan=step, beliefs=known, signals=signals
    )


def resumed(state: ControllerState, plan: ExecutionPlan, pool: DevicePool) -> ControllerState:
    """Of a run that goes on from a checkpoint, under whatever plan and on whatever devices.

    What was learned and seen stays; what was under way is over.

    Args:
      state: as the checkpoint has it.
      plan: that runs now.
      pool: the devices that are there now.
    """
    return dataclasses.replace(
        state,
        plan=plan,
        pool=pool,
        leaving={},
        pending=None,
        pending_s=0.0,
        halted=False,
        history={},
        plan_steps=0,
        peak_bytes=0,
        facts=None,
        refused_tokens=0.0,
        failed=(),
    )


def went_back(
    state: ControllerState, step: int, plan: ExecutionPlan, pool: DevicePool
) -> ControllerState:
    """Of a run that went back to a checkpoint and goes on in the same process.

    What was learned, decided and announced since then stays: only the steps that are done again
    are seen again.

    Args:
      state: as it is.
      step: of the checkpoint.
      plan: that runs now.
      pool: the devices that are there now.
    """
    lengths, again = state.lengths, max(state.step - step, 0)
    there = set(pool.devices)
    return dataclasses.replace(
        resumed(state, plan, pool),
        step=step,
        leaving={d: s for d, s in state.leaving.items() if d in there},
        lengths=Lengths(
            mean=_without_last(lengths.mean, again),
            p95=_without_last(lengths.p95, again),
            longest=_without_last(lengths.longest, again),
            responses=_without_last(lengths.responses, again),
            prompts=_without_last(lengths.prompts, again),
        ),
        last_replan=min(state.last_replan, step),
        failed=state.failed,
    )


def _without_last(values: tuple[T, ...], number: int) -> tuple[T, ...]:
    return values[: max(len(values) - number, 0)]


def plan_devices(plan: ExecutionPlan) -> frozenset[DeviceId]:
    """All devices of a plan."""
    distinct = {id(p.devices): p.devices for p in plan.plan.placements.values()}.values()
    return frozenset(d for devices in distinct for d in devices)


def beliefs_to_json(beliefs: Beliefs) -> dict[str, Any]:
    """What `beliefs_from_json` reads."""
    known = beliefs.efficiencies
    return {
        "classes": [c.value for c in CLASSES],
        "log_values": [float(x) for x in known.log_values],
        "covariance": [[float(x) for x in row] for row in known.covariance],
        "observations": [float(x) for x in known.observations],
        "offsets": beliefs.offsets.to_json(),
        "spreads": {str(m): [x.steps, x.size] for m, x in sorted(beliefs.spreads.items())},
        "corrections": {s.value: x for s, x in sorted(beliefs.corrections.items())},
        "transition_ratio": beliefs.transition_ratio,
    }


def beliefs_from_json(data: Mapping[str, Any]) -> Beliefs:
    """Reads what `beliefs_to_json` made.

    Raises:
      ValueError: it is of other operation classes.
    """
    if data["classes"] != [c.value for c in CLASSES]:
        raise ValueError(f"efficiencies of other operation classes: {', '.join(data['classes'])}")
    return Beliefs(
        efficiencies=Efficiencies(
            log_values=np.array(data["log_values"], np.float64),
            covariance=np.array(data["covariance"], np.float64),
            observations=np.array(data["observations"], np.float64),
        ),
        offsets=Offsets.from_json(data["offsets"]) if "offsets" in data else Offsets(),
        spreads={
            ModelStage.parse(m): Spread(steps=x[0], size=x[1])
            for m, x in data.get("spreads", {}).items()
        },
        corrections={Stage(s): float(x) for s, x in data["corrections"].items()},
        transition_ratio=float(data["transition_ratio"]),
    )
