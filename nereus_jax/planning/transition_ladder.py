"""Which way a model-stage takes, and which one next if memory blocks that."""

import copy
from collections.abc import Callable, Sequence

from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.roles import ModelStage
from nereus_jax.core.transition import Choice, Price, Way
from nereus_jax.planning import transition_ways as ways
from nereus_jax.planning.transition_composed import composed
from nereus_jax.planning.transition_draft import Draft, Ground
from nereus_jax.planning.transition_inputs import StageState
from nereus_jax.planning.transition_problem import Problem
from nereus_jax.planning.transition_ways import Change

MakeDraft = Callable[[], Draft]


class Ladder:
    """The ways of a model-stage in the order of preference; later ones are made when needed.

    Args:
      model_stage: whose.
      change: what becomes of its units.
      state: what may be done with it.
      wanted: whether the target has it.
      refreshed: whether a weight edge of the target fills it.
    """

    def __init__(
        self,
        model_stage: ModelStage,
        change: Change,
        state: StageState,
        *,
        wanted: bool,
        refreshed: bool,
    ) -> None:
        self.model_stage, self.change = model_stage, change
        self.parked_after = state.parked_after
        allowed = state, change
        if not wanted:
            first, later = [ways.released(change)], []
        elif state.parked_before or state.parked_after:
            first, later = [_parked(model_stage, *allowed)], []
        elif change.is_kept:
            first, later = [ways.kept(change)], [(Way.PARKED, lambda: ways.evicted(change))]
        elif refreshed:
            first, later = [ways.refreshed(change)], []
        elif change.has_intact:
            first, later = _moving(change)
        else:
            first, later = _recovering(model_stage, *allowed)
        permitted = change.ground.budget.ways
        self._later = [make for way, make in later if way in permitted]
        self._made = [d for d in first if len(first) == 1 or d.way in permitted]
        if not self._made:
            self._made = [self._later.pop(0)()] if self._later else first[:1]
        self._made.sort(key=lambda d: d.price.seconds)
        self._made_before = {d.way: d.price for d in (*first, *self._made)}
        self._obstacle = ""

    def copy(self) -> "Ladder":
        """One that goes its own way from here on; drafts that were made are shared."""
        other = copy.copy(self)
        other._later, other._made = list(self._later), list(self._made)
        other._made_before = dict(self._made_before)
        return other

    @property
    def draft(self) -> Draft:
        """The way taken now."""
        return self._made[0]

    @property
    def changes(self) -> bool:
        """Whether units of it move anyway."""
        return not self.change.is_kept

    def step(self, obstacle: str) -> bool:
        """Takes the next way, because of an obstacle; False: there is none."""
        if len(self._made) > 1:
            self._made.pop(0)
        elif self._later:
            self._made = [self._later.pop(0)()]
        else:
            return False
        self._made_before[self.draft.way] = self.draft.price
        self._obstacle = obstacle
        return True

    def choice(self) -> Choice:
        """What was chosen, and why."""
        draft = self.draft
        if self._obstacle:
            reason = f"{draft.reason}; the ways before it were blocked: {self._obstacle}"
        else:
            others = [p for w, p in self._made_before.items() if w is not draft.way]
            reason = draft.reason + "".join(
                f"; {_cost(draft.price)} against {_cost(other)}" for other in others
            )
        return Choice(way=draft.way, prices=dict(self._made_before), reason=reason)


def escalate(
    ladders: Sequence[Ladder], problem: Problem, blocked: tuple[int, int], ground: Ground
) -> None:
    """Lets a model-stage take its next way: the blocked one, else one that lives on the device.

    Raises:
      InfeasiblePlanError: nobody has another way.
    """
    task, cell = problem.tasks[blocked[0]], blocked[1]
    ladder = ladders[task.draft]
    needed = dict(task.takes).get(cell, 0)
    here = [
        x for x in ladders if (x.change.old.rows == cell).any() or (x.change.new.rows == cell).any()
    ]
    obstacle = (
        f"the {task.phase.kind} of {ladder.model_stage} needs {needed} bytes on device "
        f"{ground.devices[cell]}"
    )
    here.sort(key=lambda x: (x is not ladder, not x.changes, -x.change.old.device_bytes))
    if any(x.step(obstacle) for x in [ladder, *here]):
        return
    old = {x.model_stage: x.change.old.device_bytes for x in here}
    holders = ", ".join(f"{stage} ({size})" for stage, size in old.items())
    raise InfeasiblePlanError(
        f"{ladder.model_stage} cannot reach its target: the operation {task.phase.kind} needs "
        f"{needed} bytes on device {ground.devices[cell]}, which has {ground.capacity[cell]} for "
        f"units of {holders}; free some of it first, or allow more ways"
    )


def _cost(price: Price) -> str:
    return f"{price.seconds:.3g} s and {price.link_bytes.wire / 1e9:.3g} GB"


def _moving(change: Change) -> tuple[list[Draft], list[tuple[Way, MakeDraft]]]:
    if change.grouped:
        if len(change.broken):  # read where they are: what is left of a broken unit is not parked
            return [ways.regrouped(change)], []
        return [ways.regrouped(change)], [(Way.PARKED, lambda: ways.parked(change))]
    later: list[tuple[Way, MakeDraft]] = [(Way.LEAN, lambda: ways.lean(change))]
    if not len(change.kept_old):
        later.append((Way.PARKED, lambda: ways.parked(change)))
    return [composed(change), ways.direct(change)], later


def _recovering(
    model_stage: ModelStage, state: StageState, change: Change
) -> tuple[list[Draft], list[tuple[Way, MakeDraft]]]:
    sources = state.recovery
    if change.survives:
        # Not a matter of `TransitionBudget.ways`: nothing else is left to choose from.
        return [ways.regrouped(change)], []
    if not sources:
        raise InfeasiblePlanError(
            f"{model_stage} has no copy that is whole on devices that are alive, and neither a "
            f"host snapshot nor a checkpoint was offered; name one in its recovery sources"
        )
    return [ways.restored(change, sources[0])], []


def _parked(model_stage: ModelStage, state: StageState, change: Change) -> Draft:
    """The way of a model-stage that is in host memory in one of the plans."""
    unmoved = change.old.degrees == change.new.degrees and bool(
        change.old.rows.shape == change.new.rows.shape
        and (change.old.rows == change.new.rows).all()
    )
    if state.parked_before and not state.parked_after:
        return ways.unparked(change)
    if not unmoved:
        raise InfeasiblePlanError(
            f"{model_stage} is to be in host memory at a place that is not its old one; park it "
            f"where it is, and move it when it comes back to devices"
        )
    return ways.put_away(change) if not state.parked_before else ways.stays_parked(change)
