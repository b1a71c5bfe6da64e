"""Where the seconds of a simulated run went, and what happened in it."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from nereus_jax.control.costs import Beliefs
from nereus_jax.core.devices import DevicePool
from nereus_jax.core.execution_plan import ExecutionPlan


class Spent(enum.StrEnum):
    """What the job did."""

    STEPS = "steps"  # that counted
    TRANSITIONS = "transitions"  # moving state
    COMPILING = "compiling"  # waiting for programs
    DROPPED = "dropped"  # parts of steps that a loss or a revocation broke off
    RESTARTING = "restarting"  # from a checkpoint, its writing and reading
    REPEATING = "repeating"  # steps since the last checkpoint, once more
    CHECKPOINTS = "checkpoints"  # written beside
    WAITING = "waiting"  # for devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A time in which the job did one thing.

    Attributes:
      kind: what.
      start_s, end_s: on the run's clock.
      devices: of the pool at that time.
      step: that ran, or was next.
      plan: that held, or that was moved to.
    """

    kind: Spent
    start_s: float
    end_s: float
    devices: int
    step: int
    plan: ExecutionPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow:
    """A step that counted.

    Attributes:
      step: its number.
      start_s, step_s: when it started and what it took.
      mean_tokens, p95_tokens, longest_tokens: of its responses.
      peak_bytes: of the fullest device.
      pool: the devices that were there when it started.
      samples: position in the data after it, in samples.
      plan: that it ran under.
      stage_s: of each model-stage.
    """

    step: int
    start_s: float
    step_s: float
    mean_tokens: float
    p95_tokens: float
    longest_tokens: int
    peak_bytes: int
    samples: int
    pool: DevicePool = dataclasses.field(repr=False)
    plan: ExecutionPlan = dataclasses.field(repr=False)
    stage_s: Mapping[str, float] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """A step that did not fit.

    Attributes:
      step: its number.
      plan: that ran.
      room_tokens, prompt_tokens: that its programs had room for.
      used_bytes: of the fullest device, fragmentation included.
    """

    step: int
    plan: ExecutionPlan = dataclasses.field(repr=False)
    room_tokens: int
    prompt_tokens: int
    used_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """A simulated run.

    Attributes:
      policy: its name.
      seed: of everything that was drawn.
      steps: those that counted, each once.
      intervals: all of its time, in order.
      decisions: the records of the controller's replans, as in decisions.jsonl.
      transitions: changes of plan.
      out_of_memory: steps that did not fit.
      failure: why it ended before its last step; empty: it did not.
      beliefs: what the controller had learned at the end.
    """

    policy: str
    seed: int
    steps: Sequence[StepRow]
    intervals: Sequence[Interval]
    decisions: Sequence[Mapping[str, Any]]
    transitions: int
    out_of_memory: Sequence[OutOfMemory] = ()
    failure: str = ""
    beliefs: Beliefs = dataclasses.field(default_factory=Beliefs, repr=False)

    @property
    def oom(self) -> int:
        """Steps that did not fit."""
        return len(self.out_of_memory)

    @property
    def total_s(self) -> float:
        """From the first step to the end."""
        return self.intervals[-1].end_s if self.intervals else 0.0

    @property
    def mean_step_s(self) -> float:
        """All seconds over the steps that counted: what a step takes with all that is beside."""
        return self.total_s / max(len(self.steps), 1)

    def spent_s(self, kind: Spent) -> float:
        """Seconds of one kind."""
        return sum(i.end_s - i.start_s for i in self.intervals if i.kind is kind)

    @property
    def transition_share(self) -> float:
        """Share of the run in which it changed plans: moving, compiling, restarting."""
        kinds = (Spent.TRANSITIONS, Spent.COMPILING, Spent.RESTARTING)
        return sum(self.spent_s(k) for k in kinds) / max(self.total_s, 1e-9)

    @property
    def gpu_hours(self) -> float:
        """Of the pool, used or not."""
        return sum((i.end_s - i.start_s) * i.devices for i in self.intervals) / 3600.0

    def to_json(self) -> dict[str, Any]:
        """The figures of the run; they are simulated."""
        return {
            "simulated": True,
            "policy": self.policy,
            "seed": self.seed,
            "steps": len(self.steps),
            "mean_step_s": self.mean_step_s,
            "total_s": self.total_s,
            "gpu_hours": self.gpu_hours,
            "transitions": self.transitions,
            "transition_share": self.transition_share,
            "oom": self.oom,
            "failure": self.failure,
            "spent_s": {k.value: self.spent_s(k) for k in Spent},
        }
