"""What a policy loses on the oracle, by cause: a difference of seconds without a rest.

    total - total of the oracle = transitions + losses + refused + mispredicted + late

The excess of a step is its seconds less those of the oracle's same step. Relative to the oracle's
seconds, the excess of the first step after a change of plan, or after a replan that kept the plan,
is what that choice was worth when it was made: `mispredicted`, or `refused` where admission had
faster candidates before it. What the excess has grown by since then is `late`: conditions changed,
and the plan did not.
"""

import dataclasses
from collections.abc import Sequence

from nereus_jax.simulator.ledger import RunResult, Spent, StepRow

MOVING = (Spent.TRANSITIONS, Spent.COMPILING)
LOST = (Spent.DROPPED, Spent.RESTARTING, Spent.REPEATING, Spent.CHECKPOINTS, Spent.WAITING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GapParts:
    """Seconds of a run beyond those of the oracle.

    Attributes:
      transitions_s: state that moves, and waiting for programs.
      losses_s: steps broken off and repeated, checkpoints, restarts, waiting for devices.
      refused_s: of steps: a faster plan was known and did not pay back.
      mispredicted_s: of steps: the plan that was taken for the fastest is not.
      late_s: of steps: the plan was right, and is not any more.
    """

    transitions_s: float
    losses_s: float
    refused_s: float
    mispredicted_s: float
    late_s: float

    @property
    def total_s(self) -> float:
        """All of them."""
        return sum(dataclasses.astuple(self))


def gap_parts(run: RunResult, bound: RunResult) -> GapParts | None:
    """The parts of a run's gap; None where one of the two did not come to its end.

    Args:
      run: of a policy.
      bound: of the oracle, in the same scenario.
    """
    if run.failure or bound.failure or len(run.steps) != len(bound.steps):
        return None
    steps = _step_parts(run, bound.steps)
    return GapParts(
        transitions_s=_spent(run, bound, MOVING),
        losses_s=_spent(run, bound, LOST),
        refused_s=steps[0],
        mispredicted_s=steps[1],
        late_s=steps[2],
    )


def _spent(run: RunResult, bound: RunResult, kinds: Sequence[Spent]) -> float:
    return sum(run.spent_s(k) - bound.spent_s(k) for k in kinds)


def _step_parts(run: RunResult, best: Sequence[StepRow]) -> tuple[float, float, float]:
    """Refused, mispredicted and late seconds of the steps that counted."""
    kept = {d["step"]: d["verdict"] for d in run.decisions if d["verdict"] in ("keep", "reject")}
    refused = mispredicted = late = 0.0
    base, by_refusal, before = 0.0, False, None
    for own, free in zip(run.steps, best, strict=True):
        excess = own.step_s - free.step_s
        same = before is not None and own.plan == before.plan
        if not same or own.step in kept:
            base = excess / free.step_s
            by_refusal = same and kept.get(own.step) == "reject"
        held = base * free.step_s
        if by_refusal:
            refused += held
        else:
            mispredicted += held
        late += excess - held
        before = own
    return refused, mispredicted, late
