"""Admission, branch by branch, from cases whose numbers are made by hand."""

import dataclasses

import pytest

from nereus_jax.control.admission import Verdict, choose_profitable, choose_urgent
from nereus_jax.control.costs import Candidate, TransitionEstimate
from nereus_jax.control.policies import any_gain, every_k, payback, static
from nereus_jax.planning.plan_price import PlanPrice
from tests.control.toy_job import pool, toy_plan

DEVICES = pool().devices


def candidate(step_s: float, tp: int = 1) -> Candidate:
    price = PlanPrice(step_s=step_s, stages={}, device_bytes={DEVICES[0]: 1.0}, limit_bytes=1000.0)
    return Candidate(plan=toy_plan(DEVICES, tp), price=price, origin="by hand")


def takes(*seconds: float | str):
    """Estimates by step seconds: (step_s -> L_tran, or why there is no way)."""
    table = dict(zip(seconds[::2], seconds[1::2], strict=True))
    asked: list[float] = []

    def estimate(c: Candidate) -> TransitionEstimate:
        asked.append(c.price.step_s)
        found = table[c.price.step_s]
        if isinstance(found, str):
            return TransitionEstimate(executable=False, reason=found)
        return TransitionEstimate(executable=True, seconds=found, parts_s={"move": found})

    return estimate, asked


def test_the_fastest_is_taken_where_it_pays_back():
    estimate, asked = takes(8.0, 4.0, 9.0, 1.0)
    choice = choose_profitable(10.0, [candidate(8.0), candidate(9.0)], estimate, payback(), 10.0)
    assert choice.verdict is Verdict.ADMIT and asked == [8.0]  # the others are not even asked
    taken = choice.taken
    assert taken is not None and taken.gain_s == 2.0 and taken.payback_steps == 2.0
    assert choice.reason == "pays back in 2 steps, within gamma x H = 0.5 x 10 = 5"


@pytest.mark.parametrize(
    ("transition_s", "horizon", "admitted"),
    [
        (10.0, 10.0, True),  # 10 / 2 = 5 = 0.5 * 10: the border belongs to it
        (10.0 + 1e-9, 10.0, False),
        (10.0, 10.0 - 1e-9, False),
        (1.0, 1.0, True),  # the paper's first move: within half a step
        (1.1, 1.0, False),
        (0.0, 0.0, True),  # for nothing, any horizon will do
        (1e-9, 0.0, False),
    ],
)
def test_equation_2_at_its_borders(transition_s, horizon, admitted):
    estimate, _ = takes(8.0, transition_s)
    choice = choose_profitable(10.0, [candidate(8.0)], estimate, payback(0.5), horizon)
    assert (choice.verdict is Verdict.ADMIT) == admitted
    assert admitted or choice.verdict is Verdict.REJECT


def test_no_gain_is_no_reason_however_cheap():
    estimate, asked = takes(10.0, 0.0, 12.0, 0.0)
    choice = choose_profitable(
        10.0, [candidate(10.0), candidate(12.0)], estimate, payback(1.0), 1e9
    )
    assert choice.verdict is Verdict.KEEP and choice.reason == "no plan is faster" and not asked
    assert [a.gain_s for a in choice.assessed] == [0.0, -2.0]
    empty = choose_profitable(10.0, [], estimate, payback(), 1e9)
    assert empty.verdict is Verdict.KEEP and empty.reason == "no plan fits"


def test_a_slower_one_with_a_cheaper_transition_comes_next():
    estimate, asked = takes(8.0, 100.0, 8.5, "no memory", 9.0, 0.5)
    candidates = [candidate(8.0), candidate(8.5), candidate(9.0)]
    choice = choose_profitable(10.0, candidates, estimate, payback(), 10.0)
    assert asked == [8.0, 8.5, 9.0]
    assert choice.verdict is Verdict.ADMIT
    assert choice.taken is not None and choice.taken.candidate.price.step_s == 9.0
    assert choice.assessed[0].reason.startswith("pays back in 50 steps, more than gamma x H")
    assert choice.assessed[1].reason == "not executable: no memory"
    assert choice.assessed[1].payback_steps is None


def test_what_cannot_be_reached_is_rejected():
    estimate, _ = takes(8.0, "no memory")
    choice = choose_profitable(10.0, [candidate(8.0)], estimate, payback(), 10.0)
    assert choice.verdict is Verdict.REJECT and choice.reason == "not executable: no memory"


def test_a_gain_that_prices_may_be_off_by_is_none():
    estimate, asked = takes(8.0, 1.0, 8.5, 1.0)
    candidates = [candidate(8.0), candidate(8.5)]

    def choose(policy, **doubts: float):
        doubt = {8.0: doubts["first"], 8.5: doubts["second"]}
        return choose_profitable(
            10.0, candidates, estimate, policy, 10.0, lambda c: doubt[c.price.step_s]
        )

    choice = choose(payback(), first=2.0, second=1.5)  # the border belongs to doubt
    assert choice.verdict is Verdict.REJECT and not asked  # no way there is looked for
    assert choice.reason == "saves 2 s a step, and prices may be off by 2 s"
    assert [a.doubt_s for a in choice.assessed] == [2.0, 1.5]
    assert choice.assessed[0].transition is None and choice.assessed[0].payback_steps is None
    taken = choose(payback(), first=2.1, second=1.4).taken  # a smaller gain that is surer
    assert taken is not None and taken.candidate.price.step_s == 8.5
    taken = choose(any_gain(), first=2.0, second=1.5).taken
    assert taken is not None and taken.candidate.price.step_s == 8.0


def test_gamma_0_makes_urgent_moves_only():
    estimate, _ = takes(8.0, 0.0)
    choice = choose_profitable(10.0, [candidate(8.0)], estimate, payback(0.0), 10.0)
    assert choice.verdict is Verdict.REJECT and "urgent moves only" in choice.reason


def test_other_policies():
    dear, _ = takes(9.9, 1e6)
    for policy in (any_gain(), every_k()):
        choice = choose_profitable(10.0, [candidate(9.9)], dear, policy, 1.0)
        assert choice.verdict is Verdict.ADMIT and choice.reason == "faster"
    choice = choose_profitable(10.0, [candidate(9.9)], dear, static(), 1.0)
    assert choice.verdict is Verdict.REJECT and "no optional move" in choice.reason


def test_urgent_waives_profit_and_takes_what_costs_least_over_the_horizon():
    # Over 10 steps: 11 * 10 + 50 = 160; 12 * 10 + 1 = 121; 20 * 10 is more whatever it takes.
    estimate, asked = takes(11.0, 50.0, 12.0, 1.0, 20.0, 0.0)
    candidates = [candidate(20.0), candidate(11.0), candidate(12.0)]
    choice = choose_urgent(10.0, candidates, estimate, 10.0)
    assert choice.verdict is Verdict.URGENT and asked == [11.0, 12.0]
    assert choice.taken is not None and choice.taken.candidate.price.step_s == 12.0
    assert choice.taken.gain_s == -2.0 and choice.taken.payback_steps is None
    # Over 100 steps the faster one is worth its transition.
    longer = choose_urgent(10.0, candidates, estimate, 100.0)
    assert longer.taken is not None and longer.taken.candidate.price.step_s == 11.0


def test_urgent_keeps_the_deadline():
    estimate, _ = takes(11.0, 50.0, 12.0, 1.0)
    candidates = [candidate(11.0), candidate(12.0)]
    choice = choose_urgent(10.0, candidates, estimate, 1000.0, left_s=30.0)
    assert choice.taken is not None and choice.taken.candidate.price.step_s == 12.0
    assert choice.assessed[0].reason == "takes 50 s of the 30 s that are left"
    late = choose_urgent(10.0, candidates, estimate, 1000.0, left_s=0.5)
    assert late.verdict is Verdict.REJECT and late.taken is None


def test_urgent_without_a_way_says_why():
    estimate, _ = takes(11.0, "no copy is whole")
    choice = choose_urgent(10.0, [candidate(11.0)], estimate, 10.0)
    assert choice.verdict is Verdict.REJECT
    assert choice.reason == "not executable: no copy is whole"
    assert choose_urgent(10.0, [], estimate, 10.0).reason == "no plan fits"


def test_at_most_one_is_taken():
    estimate, _ = takes(7.0, 0.0, 8.0, 0.0)
    twice = [candidate(7.0), candidate(8.0), dataclasses.replace(candidate(8.0, 2))]
    for choice in (
        choose_profitable(10.0, twice, estimate, payback(), 10.0),
        choose_urgent(10.0, twice, estimate, 10.0),
    ):
        assert sum(a.admitted for a in choice.assessed) == 1
