"""One replan: candidates, their transitions, admission, the decision and its record."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from nereus_jax.control.admission import (
    Assessed,
    Choice,
    Verdict,
    choose_profitable,
    choose_urgent,
)
from nereus_jax.control.costs import (
    Beliefs,
    Candidate,
    Candidates,
    CostFunction,
    TransitionEstimate,
)
from nereus_jax.control.decisions import device_ranges, make_record
from nereus_jax.control.expectation import expected_workload, forecast_of, with_length
from nereus_jax.control.forecast import Forecast
from nereus_jax.control.learning import corrected
from nereus_jax.control.monitor import (
    MEMORY_FORECAST,
    NO_SIGNALS,
    OUT_OF_MEMORY,
    PEAK_MEMORY,
    Prior,
    horizon,
    with_crossings,
    with_references,
)
from nereus_jax.control.offsets import Priced, doubt_s
from nereus_jax.control.plan_variants import sparing
from nereus_jax.control.settings import ControllerSettings
from nereus_jax.control.state import ControllerState
from nereus_jax.core.events import Decision, Halt, Keep, Transition
from nereus_jax.planning.plan_price import PlanPrice
from nereus_jax.planning.workload import Workload

BEYOND = 1.01
"""Of what plans may use, the least that a step took for which there was no memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replan:
    """What a replan starts from.

    Attributes:
      settings, costs: of the controller.
      state: what is known.
      triggers: why.
      values: of the signals; the new references.
    """

    settings: ControllerSettings
    costs: CostFunction
    state: ControllerState
    triggers: tuple[str, ...]
    values: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    """A replan with all that candidates are judged by.

    Attributes:
      workload: that is expected.
      beliefs: what was learned, measured peaks included.
      price: of the current plan.
      loss_s: seconds a step that losses are expected to cost a plan that does not survive them.
      horizon_steps: H_x.
      urgent: why the plan cannot go on; empty: it can.
      hidden_s: how long the job goes on while programs are compiled.
      left_s: until devices go; None: there is time.
    """

    start: Replan
    workload: Workload
    beliefs: Beliefs
    price: PlanPrice
    loss_s: float
    horizon_steps: float
    urgent: str
    hidden_s: float
    left_s: float | None

    def risk_s(self, price: PlanPrice) -> float:
        """What losses are expected to cost a plan, in seconds a step."""
        return 0.0 if price.survives else self.loss_s

    def doubt_s(self, candidate: Candidate) -> float:
        """Seconds a step that the gain by a candidate must be more than."""
        known = self.beliefs
        return self.start.settings.doubt * doubt_s(
            known.efficiencies,
            known.offsets,
            Priced(plan=self.start.state.plan, price=self.price),
            Priced(plan=candidate.plan, price=candidate.price),
        )

    @property
    def cost_s(self) -> float:
        """Of a step under the current plan, losses included."""
        return self.price.step_s + self.risk_s(self.price)

    def estimate(self, candidate: Candidate) -> TransitionEstimate:
        """Of the transition to a candidate."""
        state = self.start.state
        if state.halted:
            return self.restart(candidate)
        return self.start.costs.transition(
            state.plan,
            candidate.plan,
            self.beliefs,
            lost=state.missing(state.pool.devices),
            hidden_s=self.hidden_s,
        )

    def restart(self, candidate: Candidate) -> TransitionEstimate:
        """The same through a checkpoint."""
        return self.start.costs.transition(
            self.start.state.plan, candidate.plan, self.beliefs, by_checkpoint=True
        )


def replan(start: Replan) -> tuple[ControllerState, Decision]:
    """Looks for a plan and decides on it; references are new whatever comes of it."""
    settings, state = start.settings, start.state
    crossed = [t for t in start.triggers if t not in NO_SIGNALS]
    signals = with_crossings(
        state.signals, crossed, state.step, settings.interval_weight, settings.prior
    )
    quiet = 1 if settings.prior is Prior.PAPER else max(state.step - state.last_replan, 1)
    steps = horizon(signals, crossed, quiet)
    if settings.num_steps:
        steps = min(steps, max(settings.num_steps - state.step, 0))
    case, found = _searched(start, steps)
    choice, by_checkpoint = _choose(case, found)
    state = dataclasses.replace(
        state,
        signals=with_references(signals, start.values),
        beliefs=case.beliefs,
        noticed=(),
        last_replan=state.step,
        replans=state.replans + 1,
    )
    record = make_record(
        step=state.step,
        time_s=state.time_s,
        triggers=start.triggers,
        policy=settings.policy,
        plan=state.plan,
        price=case.price,
        choice=choice,
        horizon_steps=steps,
        pool=device_ranges(state.usable.devices),
        workload={
            "response_tokens_mean": case.workload.response_lengths.mean,
            "response_tokens_longest": float(case.workload.max_response_tokens),
            "prompt_tokens_mean": case.workload.prompt_lengths.mean,
        },
    )
    return _decided(case, state, choice, by_checkpoint, record)


def _searched(start: Replan, steps: float) -> tuple[_Case, Candidates]:
    """The case with its candidates: those with memory for all that may come, or where there are
    none, for what may come soon, or for what was seen."""
    settings, state = start.settings, start.state
    forecast = forecast_of(settings, state)
    workload = expected_workload(settings, state, forecast)
    beliefs = _after_peak(start, workload)
    tried: list[tuple[_Case, Candidates]] = []
    for tokens in _rooms(start, forecast, workload):
        workload = dataclasses.replace(workload, max_response_tokens=tokens)
        found = start.costs.candidates(
            workload,
            state.usable,
            beliefs,
            current=state.plan,
            count=settings.candidates,
            same_degrees=settings.policy.same_degrees,
            surviving=state.losses > 0,
        )
        tried.append((_case(start, steps, forecast, workload, beliefs), found))
        if found.plans:
            break
    return tried[-1]


def _rooms(start: Replan, forecast: Forecast | None, workload: Workload) -> list[int]:
    """Response tokens to have memory for, the most first."""
    settings, state = start.settings, start.state
    least = workload.response_lengths.max
    if OUT_OF_MEMORY in start.triggers:
        least = max(least, state.room_tokens)
    rooms = [workload.max_response_tokens]
    if forecast is not None:
        rooms.append(math.ceil(forecast.tail_bound(settings.forecast.lead_steps)))
        rooms.append(max(state.lengths.longest[-settings.workload_steps :]))
    return list(dict.fromkeys(max(min(r, rooms[0]), least) for r in rooms))


def _case(
    start: Replan, steps: float, forecast: Forecast | None, workload: Workload, beliefs: Beliefs
) -> _Case:
    state = start.state
    price = start.costs.price(state.plan, workload, state.usable, beliefs)
    urgent, hidden_s, left_s = _urgency(start, forecast, price)
    return _Case(
        start=start,
        workload=workload,
        beliefs=beliefs,
        price=price,
        loss_s=_loss_s(start, beliefs, price),
        horizon_steps=steps,
        urgent=urgent,
        hidden_s=hidden_s,
        left_s=left_s,
    )


def _loss_s(start: Replan, beliefs: Beliefs, price: PlanPrice) -> float:
    """How often devices were lost so far, times what it costs to go back to a checkpoint: a
    restart, and the steps since then."""
    settings, state = start.settings, start.state
    if not state.losses:
        return 0.0
    restart = start.costs.transition(state.plan, state.plan, beliefs, by_checkpoint=True)
    repeated = settings.checkpoint_every / 2 if settings.checkpoint_every else state.step
    return state.losses / (state.step + 1) * (restart.seconds + repeated * price.step_s)


def _urgency(
    start: Replan, forecast: Forecast | None, price: PlanPrice
) -> tuple[str, float, float | None]:
    """Why the plan cannot go on; for how long it still does; and what is left until devices go."""
    settings, state = start.settings, start.state
    gone = state.missing(state.pool.devices)
    if state.halted or gone:
        return (
            f"devices are gone: {device_ranges(gone)}" if gone else "the job had ended",
            0.0,
            None,
        )
    going = state.missing(state.usable.devices)
    if going:
        left_s = max(min(state.leaving[d] for d in going) - state.time_s, 0.0)
        usable_s = left_s / settings.deadline_margin
        return f"devices will be gone: {device_ranges(going)}", usable_s, usable_s
    if OUT_OF_MEMORY in start.triggers:
        return f"there was no memory for a step with room for {state.room_tokens} tokens", 0.0, None
    if settings.policy.foresees and forecast is not None and state.facts is not None:
        coming = forecast.crossing_step(state.facts.limit_tokens)
        if coming is not None and MEMORY_FORECAST in start.triggers:
            why = f"memory for {state.facts.limit_tokens} tokens may not suffice in {coming} steps"
            return why, (coming - 1) * price.step_s, None
    if PEAK_MEMORY in start.triggers and state.peak_bytes > price.limit_bytes:
        return "the measured peak is beyond what plans may use", 0.0, None
    return "", math.inf, None


def _after_peak(start: Replan, workload: Workload) -> Beliefs:
    """What is known with the measured peak of the plan's steps; one that had no memory had a peak
    beyond what there is."""
    state, costs = start.state, start.costs
    room = min(state.room_tokens, start.settings.workload.max_response_tokens)
    if OUT_OF_MEMORY in start.triggers:
        seen = with_length(workload, room)
    elif state.peak_bytes and state.lengths.mean:
        most = max(room, workload.response_lengths.max)
        seen = dataclasses.replace(workload, max_response_tokens=most)
    else:
        return state.beliefs
    price = costs.price(state.plan, seen, state.pool, state.beliefs)
    peak_bytes = float(state.peak_bytes)
    if OUT_OF_MEMORY in start.triggers:
        peak_bytes = max(peak_bytes, price.peak_bytes, price.limit_bytes * BEYOND)
    fullest = max(price.device_bytes, key=lambda d: (price.device_bytes[d], d))
    here = [s for s, p in state.plan.plan.placements.items() if fullest in p.devices]
    worst = max(here, key=lambda s: (price.stages[s].working_bytes, str(s)))
    factors = corrected(
        state.beliefs.corrections,
        worst.stage,
        price.stages[worst].working_bytes,
        peak_bytes - price.peak_bytes,
    )
    return dataclasses.replace(state.beliefs, corrections=factors)


def _choose(case: _Case, found: Candidates) -> tuple[Choice, bool]:
    """The outcome, and whether it is reached through a checkpoint."""
    state, policy = case.start.state, case.start.settings.policy
    plans = [c for c in found.plans if c.plan not in state.failed]
    if not state.halted:
        plans = [c for c in plans if c.plan != state.plan]
    plans = _with_risks(case, plans)
    if not case.urgent:
        choice = choose_profitable(
            case.cost_s, plans, case.estimate, policy, case.horizon_steps, case.doubt_s
        )
        return choice, False
    plans += _with_risks(case, _sparing(case))
    choice = choose_urgent(case.cost_s, plans, case.estimate, case.horizon_steps, case.left_s)
    if choice.taken is not None:
        reason = f"{case.urgent}; {choice.reason}"
        return dataclasses.replace(choice, reason=reason), state.halted
    left = plans or _with_risks(case, found.plans)  # what failed once may be started anew
    if not left:
        reason = f"{case.urgent}; no plan fits{f': {found.shortage}' if found.shortage else ''}"
        return dataclasses.replace(choice, reason=reason), False
    return _through_checkpoint(case, choice, left), True


def _with_risks(case: _Case, plans: Sequence[Candidate]) -> list[Candidate]:
    """The same with what losses may cost, the least seconds first."""
    priced = [dataclasses.replace(c, risk_s=case.risk_s(c.price)) for c in plans]
    return sorted(priced, key=lambda c: c.cost_s)


def _sparing(case: _Case) -> list[Candidate]:
    """The plan as it is, with less memory, where its devices stay."""
    start, state = case.start, case.start.state
    if state.missing(state.usable.devices):
        return []
    variants = sparing(
        state.plan,
        case.workload,
        lambda plan: start.costs.price(plan, case.workload, state.usable, case.beliefs),
        park=start.settings.park,
    )
    return [Candidate(plan=plan, price=price, origin=how) for plan, price, how in variants]


def _through_checkpoint(case: _Case, choice: Choice, plans: list[Candidate]) -> Choice:
    """The fastest plan, reached by a restart: the last resort."""
    fastest = min(plans, key=lambda c: c.cost_s)
    why = next((a.reason for a in choice.assessed if a.candidate is fastest), "it failed before")
    reason = f"{case.urgent}; by checkpoint and restart: {why}"
    taken = Assessed(
        candidate=fastest,
        gain_s=case.cost_s - fastest.cost_s,
        transition=case.restart(fastest),
        admitted=True,
        reason=reason,
        by_checkpoint=True,
    )
    return Choice(verdict=Verdict.URGENT, reason=reason, assessed=(taken, *choice.assessed))


def _stands_still(case: _Case, taken: Assessed) -> bool:
    """Whether compiling the target's programs takes less than another step under the old plan would
    take longer than one under the target."""
    assert taken.transition is not None
    gain_s = case.price.step_s - taken.candidate.price.step_s
    return taken.transition.compile_s < gain_s


def _decided(
    case: _Case,
    state: ControllerState,
    choice: Choice,
    by_checkpoint: bool,
    record: Mapping[str, object],
) -> tuple[ControllerState, Decision]:
    taken = choice.taken
    if taken is not None:
        assert taken.transition is not None
        parts = taken.transition.parts_s
        moving_s = parts.get("move", 0.0) + parts.get("setup", 0.0)
        state = dataclasses.replace(
            state,
            pending=taken.candidate.plan,
            pending_s=0.0 if by_checkpoint else moving_s,
            halted=False,
        )
        going = state.missing(state.usable.devices) & state.leaving.keys()
        at_once = not case.urgent and _stands_still(case, taken)
        return state, Transition(
            target=taken.candidate.plan,
            urgent=bool(case.urgent),
            at_once=at_once,
            by_checkpoint=by_checkpoint,
            deadline_s=min((state.leaving[d] for d in going), default=None),
            record={**record, "at_once": at_once},
        )
    if not case.urgent:
        return state, Keep(record=record)
    if not state.missing(state.usable.devices) and not state.halted:
        # Memory alone: it may yet suffice. It is looked for again when longer rows are foreseen.
        refused = float(case.workload.max_response_tokens)
        return dataclasses.replace(state, refused_tokens=refused), Keep(record=record)
    lost = bool(state.missing(state.pool.devices))
    state = dataclasses.replace(state, halted=True)
    reason = (
        f"{choice.reason}; start the run again in the same directory when there are more devices: "
        f"it resumes from its last checkpoint"
    )
    return state, Halt(reason=reason, checkpoint=not lost, record=record)
