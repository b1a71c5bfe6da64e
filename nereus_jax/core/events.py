"""What happens to a running job, and what its controller decides: the two ends of its control.

Events carry what a real run shows and nothing else: seconds, bytes, lengths, devices. All of them
have the time at which they were seen, in seconds of the run's own clock, which goes on after a
resume. Events and decisions are values with a JSON form, so that one process can decide for all,
and a run can be replayed.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import ModelStage

BINS = 32
"""Lengths that a summary keeps: their mean and longest are exact, the others means of equal
shares."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthSummary:
    """The lengths of a batch, in tokens.

    Attributes:
      mean: of all rows.
      p95: what 95 % of the rows do not exceed.
      longest: of all rows.
      lengths: of parts of the rows, ascending; a compact histogram with `weights`.
      weights: share of the rows of each.
    """

    mean: float
    p95: float
    longest: int
    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.weights):
            raise ValueError(
                f"a summary needs as many weights as lengths and at least one, got "
                f"{len(self.lengths)} lengths and {len(self.weights)} weights"
            )
        if not (0 < self.mean < math.inf and 0 < self.p95 <= self.longest):
            raise ValueError(
                f"lengths must be positive, got mean {self.mean}, p95 {self.p95}, longest "
                f"{self.longest}"
            )

    @classmethod
    def of(cls, samples: Iterable[int], bins: int = BINS) -> "LengthSummary":
        """Of measured lengths; those below 1 count as 1.

        Args:
          samples: at least one.
          bins: lengths that are kept at most.
        """
        rows = sorted(max(int(n), 1) for n in samples)
        if not rows:
            raise ValueError("no length was given; give those of at least one row")
        count = len(rows)
        cuts = [round(i * (count - 1) / bins) for i in range(bins + 1)]
        shares: dict[int, int] = {}
        for start, stop in itertools.pairwise(cuts):
            if stop > start:
                middle = max(round(sum(rows[start:stop]) / (stop - start)), 1)
                shares[middle] = shares.get(middle, 0) + stop - start
        shares[rows[-1]] = shares.get(rows[-1], 0) + 1
        lengths = sorted(shares)
        return cls(
            mean=sum(rows) / count,
            p95=float(rows[math.ceil(0.95 * count) - 1]),
            longest=rows[-1],
            lengths=tuple(lengths),
            weights=tuple(shares[n] / count for n in lengths),
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "mean": self.mean,
            "p95": self.p95,
            "longest": self.longest,
            "lengths": list(self.lengths),
            "weights": list(self.weights),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LengthSummary":
        """Reads what `to_json` made."""
        return cls(
            mean=float(data["mean"]),
            p95=float(data["p95"]),
            longest=int(data["longest"]),
            lengths=tuple(data["lengths"]),
            weights=tuple(data["weights"]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What a step showed.

    Attributes:
      step: its number, from 0.
      time_s: when it ended, on the run's clock.
      step_s: what it took.
      stage_s: of that, each model-stage in all its calls.
      responses: lengths of the responses, in tokens.
      prompts: of the prompts.
      peak_memory_bytes: of the fullest device; 0: not measured.
      room_tokens: response tokens that the programs had room for; 0: as many as the longest had.
      tokens: of all rows, prompts and responses.
      first_after_compile: model-stages that ran a program for the first time, whose seconds have
        compilation and allocation in them and say nothing of an efficiency.
    """

    step: int
    time_s: float
    step_s: float
    stage_s: Mapping[ModelStage, float]
    responses: LengthSummary
    prompts: LengthSummary
    peak_memory_bytes: int = 0
    room_tokens: int = 0
    tokens: int = 0
    first_after_compile: frozenset[ModelStage] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "step": self.step,
            "time_s": self.time_s,
            "step_s": self.step_s,
            "stage_s": {str(s): x for s, x in sorted(self.stage_s.items())},
            "responses": self.responses.to_json(),
            "prompts": self.prompts.to_json(),
            "peak_memory_bytes": self.peak_memory_bytes,
            "room_tokens": self.room_tokens,
            "tokens": self.tokens,
            "first_after_compile": sorted(str(s) for s in self.first_after_compile),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StepRecord":
        """Reads what `to_json` made."""
        first = frozenset(ModelStage.parse(s) for s in data["first_after_compile"])
        return cls(
            step=int(data["step"]),
            time_s=float(data["time_s"]),
            step_s=float(data["step_s"]),
            stage_s={ModelStage.parse(s): float(x) for s, x in data["stage_s"].items()},
            responses=LengthSummary.from_json(data["responses"]),
            prompts=LengthSummary.from_json(data["prompts"]),
            peak_memory_bytes=int(data["peak_memory_bytes"]),
            room_tokens=int(data["room_tokens"]),
            tokens=int(data["tokens"]),
            first_after_compile=first,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFinished:
    """A step has ended; the job is at a safe boundary."""

    record: StepRecord

    @property
    def time_s(self) -> float:
        """When it ended."""
        return self.record.time_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """A step could not be made: its plan has no memory for it. The step is not over.

    Attributes:
      room_tokens: response tokens that there was no memory for.
    """

    time_s: float
    room_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesLost:
    """Devices are gone, with what they held."""

    time_s: float
    devices: tuple[DeviceId, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesJoined:
    """Devices may be used from now on."""

    time_s: float
    devices: tuple[DeviceId, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Revocation:
    """Devices will be gone.

    Attributes:
      deadline_s: seconds from `time_s` on that are left.
    """

    time_s: float
    devices: tuple[DeviceId, ...]
    deadline_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransitionEnded:
    """What became of a transition that was decided: until this comes, the old plan holds.

    Attributes:
      plan: what runs now: the target, or the old plan where it failed.
      seconds: that the job stood still for it.
      compile_s: of these, waiting for a compiler.
      error: why it failed; empty: it did not.
      working_bytes: of a target that there was no memory for: by model-stage, what its programs
        need on a device beside all that is resident; 0: not known.
      room_tokens: the longest response that those programs have room for.
    """

    time_s: float
    plan: ExecutionPlan
    seconds: float
    compile_s: float = 0.0
    error: str = ""
    working_bytes: Mapping[ModelStage, int] = dataclasses.field(
        default_factory=dict[ModelStage, int]
    )
    room_tokens: int = 0


Event = StepFinished | OutOfMemory | DevicesLost | DevicesJoined | Revocation | TransitionEnded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """The plan goes on.

    Attributes:
      record: the line of decisions.jsonl; None: nothing was planned.
    """

    record: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transition:
    """The job moves to another plan at the next safe boundary.

    Attributes:
      target: the plan.
      urgent: the old plan cannot go on; the step under way may be dropped for it.
      at_once: the job stands still for the target's programs: that costs less than another step
        under the old plan while they are compiled.
      by_checkpoint: not by moving state: what is whole is saved, and the job starts anew from the
        last checkpoint under the target.
      deadline_s: on the run's clock: by when nothing may be left on devices that the target does
        not use; None: there is time.
      record: the line of decisions.jsonl.
    """

    target: ExecutionPlan
    urgent: bool
    at_once: bool = False
    by_checkpoint: bool = False
    deadline_s: float | None = None
    record: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halt:
    """The job cannot go on, and ends cleanly.

    Attributes:
      reason: one line: why, and how to resume.
      checkpoint: one is to be written first, as far as the state is whole.
      record: the line of decisions.jsonl.
    """

    reason: str
    checkpoint: bool
    record: Mapping[str, Any] | None = None


Decision = Keep | Transition | Halt

_DEVICE_EVENTS = {c.__name__: c for c in (DevicesLost, DevicesJoined, Revocation)}


def event_to_json(event: Event) -> dict[str, Any]:
    """An event as JSON, with its kind."""
    kind = type(event).__name__
    if isinstance(event, StepFinished):
        return {"kind": kind, "record": event.record.to_json()}
    data: dict[str, Any] = {"kind": kind, "time_s": event.time_s}
    if isinstance(event, TransitionEnded):
        return {
            **data,
            "plan": event.plan.to_json(),
            "seconds": event.seconds,
            "compile_s": event.compile_s,
            "error": event.error,
        }
    if isinstance(event, OutOfMemory):
        return {**data, "room_tokens": event.room_tokens}
    data["devices"] = [str(d) for d in event.devices]
    if isinstance(event, Revocation):
        data["deadline_s"] = event.deadline_s
    return data


def event_from_json(data: Mapping[str, Any]) -> Event:
    """Reads what `event_to_json` made.

    Raises:
      ValueError: it is of no known kind.
    """
    kind = data["kind"]
    if kind == "StepFinished":
        return StepFinished(record=StepRecord.from_json(data["record"]))
    if kind == "TransitionEnded":
        return TransitionEnded(
            time_s=float(data["time_s"]),
            plan=ExecutionPlan.from_json(data["plan"]),
            seconds=float(data["seconds"]),
            compile_s=float(data["compile_s"]),
            error=str(data["error"]),
        )
    if kind == "OutOfMemory":
        return OutOfMemory(time_s=float(data["time_s"]), room_tokens=int(data["room_tokens"]))
    if kind not in _DEVICE_EVENTS:
        known = ", ".join(("StepFinished", "OutOfMemory", "TransitionEnded", *_DEVICE_EVENTS))
        raise ValueError(f"an event of kind {kind!r} is not known; known are {known}")
    values = {k: float(data[k]) for k in ("time_s", "deadline_s") if k in data}
    devices = tuple(DeviceId.parse(d) for d in data["devices"])
    return _DEVICE_EVENTS[kind](devices=devices, **values)


def decision_to_json(decision: Decision) -> dict[str, Any]:
    """A decision as JSON, with its kind: what one process tells the others."""
    data: dict[str, Any] = {"kind": type(decision).__name__, "record": decision.record}
    if isinstance(decision, Transition):
        data |= {
            "target": decision.target.to_json(),
            "urgent": decision.urgent,
            "at_once": decision.at_once,
            "by_checkpoint": decision.by_checkpoint,
            "deadline_s": decision.deadline_s,
        }
    elif isinstance(decision, Halt):
        data |= {"reason": decision.reason, "checkpoint": decision.checkpoint}
    return data


def decision_from_json(data: Mapping[str, Any]) -> Decision:
    """Reads what `decision_to_json` made.

    Raises:
      ValueError: it is of no known kind.
    """
    kind, record = data["kind"], data["record"]
    if kind == "Keep":
        return Keep(record=record)
    if kind == "Halt":
        return Halt(reason=data["reason"], checkpoint=data["checkpoint"], record=record)
    if kind != "Transition":
        raise ValueError(f"a decision of kind {kind!r} is not known; it is Keep, Transition, Halt")
    return Transition(
        target=ExecutionPlan.from_json(data["target"]),
        urgent=data["urgent"],
        at_once=data["at_once"],
        by_checkpoint=data["by_checkpoint"],
        deadline_s=data["deadline_s"],
        record=record,
    )
