"""What came of each decision: measured (or simulated) seconds beside the predicted ones."""

import bisect
import dataclasses
from collections.abc import Hashable, Sequence

from nereus_jax.report.page.record import (
    PlanFrom,
    PlanShown,
    RunRecord,
    StepPoint,
    read_plan,
)
from nereus_jax.report.page.rows import Row, mapping, number, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A decision and what came of it.

    Attributes:
      first, last: steps under the plan that it led to, or that it kept, up to the next decision
        that kept it or the next plan; last < first: there was none.
      predicted_s: of a step under that plan; None: it was not predicted.
      step_s: mean of those of the steps that have no compilation in them; None: there is none.
      steps: how many these are.
      transition_s: that the change of plan took; None: there was none, or it was not measured.
      made: whether the plan changed, for a decision with a target.
    """

    first: int
    last: int
    predicted_s: float | None
    step_s: float | None
    steps: int
    transition_s: float | None
    made: bool

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured seconds of a step."""
        if not self.step_s or self.predicted_s is None:
            return None
        return self.predicted_s / self.step_s - 1.0


def outcomes(run: RunRecord) -> tuple[Outcome, ...]:
    """What came of each decision of a run, in their order."""
    steps = [whole(d, "step") or 0 for d in run.decisions]
    settled = [p for p in run.steps if p.settled and p.step_s is not None]
    led_to = _changes_by_decision(run, steps)
    return tuple(
        _outcome(run, decision, step, _next(steps, i), led_to.get(i), settled)
        for i, (decision, step) in enumerate(zip(run.decisions, steps, strict=True))
    )


def _next(steps: Sequence[int], place: int) -> int | None:
    """The step of the first decision after one that is of a later step."""
    rest = range(place + 1, len(steps))
    return next((steps[i] for i in rest if steps[i] > steps[place]), None)


def _changes_by_decision(run: RunRecord, steps: Sequence[int]) -> dict[int, PlanFrom]:
    """Which change of plan a decision led to, by its place.

    That is the last decision before the change whose target is the plan; or, where the job had to
    go back to a checkpoint of an earlier step, one that comes later by its step.
    """
    found: dict[int, PlanFrom] = {}
    by_target: dict[Hashable, list[int]] = {}
    for place, decision in enumerate(run.decisions):
        target = read_plan(mapping(decision, "target"))
        if target:
            by_target.setdefault(_key(target), []).append(place)
    for change in run.changes:
        same = [i for i in by_target.get(_key(change.plan), ()) if i not in found]
        before = [i for i in same if steps[i] <= change.step]
        if before or same:
            found[(before or same)[-1]] = change
    return found


def _key(plan: PlanShown) -> Hashable:
    return tuple(sorted((stage, dataclasses.astuple(own)) for stage, own in plan.items()))


def _outcome(
    run: RunRecord,
    decision: Row,
    step: int,
    next_step: int | None,
    change: PlanFrom | None,
    settled: Sequence[StepPoint],
) -> Outcome:
    wanted = bool(mapping(decision, "target"))
    first = change.step if change is not None else step
    ends = [plan.step for plan in run.changes if plan.step > first]
    ends += [next_step] if next_step is not None and not wanted else []
    last = min(ends, default=run.last_step + 1) - 1
    if wanted and change is None:
        last = first - 1
    own = _seconds(settled, first, last)
    predicted = "step_s_target_predicted" if wanted else "step_s_predicted"
    return Outcome(
        first=first,
        last=last,
        predicted_s=number(decision, predicted),
        step_s=sum(own) / len(own) if own else number(decision, "step_s_measured"),
        steps=len(own),
        transition_s=_either(
            change.seconds if change is not None else None, decision, "transition_s_measured"
        ),
        made=change is not None,
    )


def _either(value: float | None, decision: Row, name: str) -> float | None:
    """What was found, or what the run wrote of it."""
    return number(decision, name) if value is None else value


def _seconds(settled: Sequence[StepPoint], first: int, last: int) -> list[float]:
    """Of the steps from one to another."""
    start = bisect.bisect_left(settled, first, key=lambda p: p.step)
    stop = bisect.bisect_right(settled, last, key=lambda p: p.step)
    return [p.step_s for p in settled[start:stop] if p.step_s is not None]


def errors(found: Sequence[Outcome]) -> tuple[float, float] | None:
    """Mean and largest absolute relative error of the predicted step seconds; None: no outcome."""
    values = [abs(e) for e in (outcome.error for outcome in found) if e is not None]
    return (sum(values) / len(values), max(values)) if values else None
