"""Whether a move is made: executable, and urgent or profitable.

Eq. 2 of Nereus (arXiv 2609.34645): with dL = L_step(S) - L_step(S*),

    dL > 0  and  L_tran / dL <= gamma * H_x

What is gained must be more than prices may be off by, too: else it is no gain that anybody has
seen.

A target that is refused is not the end: slightly slower ones whose transitions are cheaper are
looked at in turn. In an urgent case profit is waived; then that target is taken which costs least
over the horizon, transition included, and that is reached before devices go.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence

from nereus_jax.control.costs import Candidate, TransitionEstimate
from nereus_jax.control.policies import Gain, Policy


class Verdict(enum.StrEnum):
    """What becomes of a replan.

    KEEP: no candidate is faster, or there is none.
    ADMIT: a candidate pays back.
    URGENT: a candidate is taken because the plan cannot go on.
    REJECT: candidates are faster, but none pays back or none can be reached.
    """

    KEEP = "keep"
    ADMIT = "admit"
    URGENT = "urgent"
    REJECT = "reject"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assessed:
    """A candidate that was looked at.

    Attributes:
      candidate: the plan with its price.
      gain_s: dL: seconds a step that it saves; below 0: it is slower.
      doubt_s: seconds a step that this may be off by, times what the settings ask.
      transition: what it takes to get there; None: not asked, because it saves nothing, or nothing
        that is sure.
      payback_steps: L_tran / dL; None: never.
      admitted: whether it is the one that is taken.
      reason: one line.
      by_checkpoint: it is reached through a checkpoint.
    """

    candidate: Candidate
    gain_s: float
    doubt_s: float = 0.0
    transition: TransitionEstimate | None = None
    payback_steps: float | None = None
    admitted: bool = False
    reason: str
    by_checkpoint: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The outcome of an admission.

    Attributes:
      verdict: see there.
      reason: one line.
      assessed: the candidates that were looked at, in that order.
    """

    verdict: Verdict
    reason: str
    assessed: Sequence[Assessed] = ()

    @property
    def taken(self) -> Assessed | None:
        """The candidate that is taken."""
        return next((a for a in self.assessed if a.admitted), None)


Estimate = Callable[[Candidate], TransitionEstimate]
Doubt = Callable[[Candidate], float]


def no_doubt(_candidate: Candidate) -> float:
    """Prices are right."""
    return 0.0


def choose_profitable(
    step_s: float,
    candidates: Sequence[Candidate],
    estimate: Estimate,
    policy: Policy,
    horizon_steps: float,
    doubt: Doubt = no_doubt,
) -> Choice:
    """An optional move.

    Args:
      step_s: modelled seconds of a step under the current plan, losses included.
      candidates: that fit, the fastest first.
      estimate: of the transition to one; asked only where it matters.
      policy: says what is asked of a move.
      horizon_steps: H_x.
      doubt: seconds a step that the gain by a candidate must be more than.
    """
    assessed: list[Assessed] = []
    for candidate in candidates:
        looked_at = Assessed(
            candidate=candidate, gain_s=step_s - candidate.cost_s, reason="no faster"
        )
        if looked_at.gain_s > 0:
            looked_at = dataclasses.replace(looked_at, doubt_s=doubt(candidate))
            looked_at = _faster(looked_at, estimate, policy, horizon_steps)
        assessed.append(looked_at)
        if looked_at.admitted:
            return Choice(verdict=Verdict.ADMIT, reason=looked_at.reason, assessed=assessed)
    if not assessed:
        return Choice(verdict=Verdict.KEEP, reason="no plan fits")
    faster = [a for a in assessed if a.gain_s > 0]
    if faster:
        return Choice(verdict=Verdict.REJECT, reason=faster[0].reason, assessed=assessed)
    return Choice(verdict=Verdict.KEEP, reason="no plan is faster", assessed=assessed)


def _faster(
    looked_at: Assessed, estimate: Estimate, policy: Policy, horizon_steps: float
) -> Assessed:
    """What becomes of a candidate that is priced faster."""
    gain_s = looked_at.gain_s
    if policy.gain is Gain.PAYBACK and gain_s <= looked_at.doubt_s:
        reason = f"saves {gain_s:.3g} s a step, and prices may be off by {looked_at.doubt_s:.3g} s"
        return dataclasses.replace(looked_at, reason=reason)
    transition = estimate(looked_at.candidate)
    looked_at = dataclasses.replace(
        looked_at,
        transition=transition,
        payback_steps=transition.seconds / gain_s if transition.executable else None,
    )
    if not transition.executable:
        return dataclasses.replace(looked_at, reason=f"not executable: {transition.reason}")
    if policy.gain is Gain.NEVER:
        return dataclasses.replace(looked_at, reason=f"{policy.name} makes no optional move")
    if policy.gain is Gain.ANY:
        return dataclasses.replace(looked_at, admitted=True, reason="faster")
    if policy.gamma == 0:
        return dataclasses.replace(looked_at, reason="gamma is 0: urgent moves only")
    payback, bound = transition.seconds / gain_s, policy.gamma * horizon_steps
    admitted = payback <= bound
    sign = "within" if admitted else "more than"
    return dataclasses.replace(
        looked_at,
        admitted=admitted,
        reason=(
            f"pays back in {payback:.3g} steps, {sign} gamma x H = {policy.gamma:g} x "
            f"{horizon_steps:.3g} = {bound:.3g}"
        ),
    )


def choose_urgent(
    step_s: float,
    candidates: Sequence[Candidate],
    estimate: Estimate,
    horizon_steps: float,
    left_s: float | None = None,
) -> Choice:
    """A move that must be made.

    Args:
      step_s: modelled seconds of a step under the current plan, losses included; the gain is told
        beside.
      candidates: that fit.
      estimate: of the transition to one.
      horizon_steps: H_x: over so many steps the transition is paid off.
      left_s: until devices go; None: there is time.
    """
    steps = max(horizon_steps, 1.0)
    assessed: list[Assessed] = []
    least_s = math.inf
    for candidate in sorted(candidates, key=lambda c: c.cost_s):
        gain_s = step_s - candidate.cost_s
        if candidate.cost_s * steps >= least_s:
            # Even for nothing it would cost more than one that can be had.
            reason = "slower than another with its transition"
            assessed.append(Assessed(candidate=candidate, gain_s=gain_s, reason=reason))
            continue
        transition = estimate(candidate)
        reason = ""
        if not transition.executable:
            reason = f"not executable: {transition.reason}"
        elif left_s is not None and transition.seconds > left_s:
            reason = f"takes {transition.seconds:.3g} s of the {left_s:.3g} s that are left"
        else:
            least_s = min(least_s, candidate.cost_s * steps + transition.seconds)
        pays = gain_s > 0 and transition.executable
        assessed.append(
            Assessed(
                candidate=candidate,
                gain_s=gain_s,
                transition=transition,
                payback_steps=transition.seconds / gain_s if pays else None,
                reason=reason,
            )
        )
    costs = {i: _total_s(a, steps) for i, a in enumerate(assessed) if not a.reason}
    if not costs:
        why = assessed[0].reason if assessed else "no plan fits"
        return Choice(verdict=Verdict.REJECT, reason=why, assessed=assessed)
    best = min(costs, key=lambda i: (costs[i], i))
    for i in costs:
        if i != best:
            reason = f"{costs[i] - costs[best]:.3g} s more over {steps:.3g} steps"
            assessed[i] = dataclasses.replace(assessed[i], reason=reason)
    reason = f"the least seconds over {steps:.3g} steps, transition included"
    assessed[best] = dataclasses.replace(assessed[best], admitted=True, reason=reason)
    return Choice(verdict=Verdict.URGENT, reason=reason, assessed=assessed)


def _total_s(assessed: Assessed, steps: float) -> float:
    assert assessed.transition is not None
    return assessed.candidate.cost_s * steps + assessed.transition.seconds
