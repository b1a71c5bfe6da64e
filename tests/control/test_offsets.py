"""Efficiencies and offsets, learned together, against the posterior of all measurements at once."""

import dataclasses
import json
import math

import numpy as np
import pytest

from nereus_jax.control import offsets as offsets_module
from nereus_jax.control.controller import Controller
from nereus_jax.control.costs import Beliefs
from nereus_jax.control.offsets import (
    MOST_SETUPS,
    OFFSET_STD,
    OFFSET_WEIGHT,
    Offsets,
    Priced,
    doubt_s,
    observe_setup,
    off_by_std,
)
from nereus_jax.control.policies import parse_policy
from nereus_jax.control.state import beliefs_from_json, beliefs_to_json, initial_state
from nereus_jax.core.events import Transition, TransitionEnded
from nereus_jax.core.execution_plan import StageSetup
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN
from nereus_jax.planning.calibration import CLASSES, Efficiencies, OperationClass
from nereus_jax.planning.plan_price import PlanPrice, StagePrice
from tests.control.toy_job import ToyCosts, finished, pool, settings, spread, toy_plan, tp_of

GEMM, LAUNCH = OperationClass.GEMM, OperationClass.LAUNCH
PLANS = {tp: toy_plan(pool().devices, tp) for tp in (1, 2, 4)}


def setup(tp: int) -> StageSetup:
    return PLANS[tp].setup(ACTOR_TRAIN)


def modelled(efficiencies: Efficiencies, gemm: float, launch: float):
    return {GEMM: gemm / efficiencies[GEMM], LAUNCH: launch / efficiencies[LAUNCH]}


def test_one_after_the_other_is_all_at_once(monkeypatch):
    """Where shares are constant the filter is the posterior of a linear regression: 12 classes and
    two offsets as unknowns, by the normal equations."""
    monkeypatch.setattr(offsets_module, "DRIFT", 0.0)
    monkeypatch.setattr(offsets_module, "OFFSET_DRIFT", 0.0)
    monkeypatch.setattr(offsets_module, "OFFSET_WEIGHT", 1e12)  # the first value stays
    rng = np.random.default_rng(0)
    start = Efficiencies.prior()
    known, offsets, rows, targets, noise = start, Offsets(), [], [], 0.3
    for _ in range(12):
        tp, share = int(rng.choice([1, 2])), float(rng.uniform(0.2, 0.8))
        expected_s = sum(modelled(start, share * start[GEMM], (1 - share) * start[LAUNCH]).values())
        measured = expected_s * math.exp(rng.normal(0.0, 0.2))
        row = np.zeros(len(CLASSES) + 2)
        row[CLASSES.index(GEMM)], row[CLASSES.index(LAUNCH)] = -share, share - 1
        row[len(CLASSES) + tp - 1] = 1.0
        rows.append(row)
        targets.append(math.log(measured))
        # What the linear model predicts so far, dealt to the classes with the same shares.
        state = np.append(known.log_values - start.log_values, [_value(offsets, n) for n in (1, 2)])
        predicted = math.exp(float(row @ state))
        known, offsets = observe_setup(
            known,
            offsets,
            setup(tp),
            {GEMM: share * predicted, LAUNCH: (1 - share) * predicted},
            measured,
            noise,
        )
    prior = np.zeros((len(CLASSES) + 2,) * 2)
    prior[: len(CLASSES), : len(CLASSES)] = start.covariance
    prior[-2, -2] = prior[-1, -1] = OFFSET_STD**2
    matrix = np.array(rows)
    covariance = np.linalg.inv(np.linalg.inv(prior) + matrix.T @ matrix / noise**2)
    mean = covariance @ matrix.T @ np.array(targets) / noise**2
    np.testing.assert_allclose(known.log_values - start.log_values, mean[:-2], atol=1e-9)
    np.testing.assert_allclose([_value(offsets, 1), _value(offsets, 2)], mean[-2:], atol=1e-9)
    np.testing.assert_allclose(known.covariance, covariance[:-2, :-2], atol=1e-9)
    order = [len(CLASSES) + s.layout.tp - 1 for s in offsets.setups]
    np.testing.assert_allclose(offsets.own, covariance[np.ix_(order, order)], atol=1e-9)
    np.testing.assert_allclose(offsets.cross, covariance[:-2, order], atol=1e-9)


def _value(offsets: Offsets, tp: int) -> float:
    return math.log(offsets.factor(setup(tp)))


def learned(offset: float, steps: int = 12) -> tuple[Efficiencies, Offsets]:
    """After steps with tp 1 as modelled, then with tp 2 that take longer by the offset."""
    known, offsets = Efficiencies.prior(), Offsets()
    for tp, factor in ((1, 1.0), (2, math.exp(offset))):
        for _ in range(steps):
            seconds = modelled(Efficiencies.prior(), 3.0, 0.2)
            measured = factor * sum(seconds.values())
            said = modelled(known, 3.0, 0.2)
            expected = {c: s * offsets.factor(setup(tp)) for c, s in said.items()}
            known, offsets = observe_setup(known, offsets, setup(tp), expected, measured, 0.05)
    return known, offsets


def said_s(known: Efficiencies, offsets: Offsets, tp: int) -> float:
    return offsets.factor(setup(tp)) * sum(modelled(known, 3.0, 0.2).values())


@pytest.mark.parametrize(("offset", "within"), [(-0.2, 0.03), (0.0, 0.01), (0.2, 0.03), (0.4, 0.1)])
def test_what_has_run_is_priced_by_what_it_took(offset, within):
    """Also the setup that does not run any more, whatever was learned of another since."""
    known, offsets = learned(offset)
    right = sum(modelled(Efficiencies.prior(), 3.0, 0.2).values())
    assert said_s(known, offsets, 1) == pytest.approx(right, rel=within)
    assert said_s(known, offsets, 2) == pytest.approx(right * math.exp(offset), rel=within)
    # What never ran lies between: nobody knows whether the first or the second was the exception.
    low, high = sorted((right, right * math.exp(offset)))
    assert (1 - within) * low < said_s(known, offsets, 4) < (1 + within) * high
    # A hardware that has become slower by a half is so for all of them.
    slow = known.replace({c: known[c] / 1.5 for c in CLASSES})
    for tp in (1, 2, 4):
        assert said_s(slow, offsets, tp) == pytest.approx(1.5 * said_s(known, offsets, tp))


def test_how_large_offsets_are_is_learned_from_those_found():
    assert Offsets().std == pytest.approx(OFFSET_STD)
    _, small = learned(0.0)
    _, large = learned(0.6)
    assert small.std < 1.1 * OFFSET_STD and large.std > 1.5 * OFFSET_STD
    # By hand: two values of 0.3 and -0.1 that are known for sure, and the first value as eight.
    found = Offsets(
        setups=(setup(1), setup(2)),
        values=np.array([0.3, -0.1]),
        own=np.zeros((2, 2)),
        cross=np.zeros((len(CLASSES), 2)),
    )
    wanted = (OFFSET_WEIGHT * OFFSET_STD**2 + 0.09 + 0.01) / (OFFSET_WEIGHT + 2)
    assert found.std == pytest.approx(math.sqrt(wanted))


def priced(tp: int, **seconds: float) -> Priced:
    """By class; TRAIN takes `train` of GEMM, GENERATE `generate`."""
    stages = {ACTOR_TRAIN: seconds["train"], ACTOR_GENERATE: seconds["generate"]}
    prices = {s: StagePrice(seconds=x, seconds_by_class={GEMM: x}) for s, x in stages.items()}
    price = PlanPrice(
        step_s=sum(stages.values()), stages=prices, device_bytes={}, limit_bytes=1000.0
    )
    return Priced(plan=PLANS[tp], price=price)


def test_the_doubt_of_a_difference_by_hand():
    known = dataclasses.replace(Efficiencies.prior(), covariance=0.04 * np.eye(len(CLASSES)))
    seen = Offsets(
        setups=(PLANS[1].setup(ACTOR_TRAIN), PLANS[1].setup(ACTOR_GENERATE)),
        values=np.zeros(2),
        own=np.array([[0.01, 0.002], [0.002, 0.03]]),
        cross=np.zeros((len(CLASSES), 2)),
    )
    seen.cross[CLASSES.index(GEMM), 0] = 0.005
    now, then = priced(1, train=5.0, generate=2.0), priced(2, train=4.0, generate=1.0)
    # Classes: 2 s less of GEMM; offsets of now: 5 and 2 s; those of then are alike.
    variance = 0.04 * 2.0**2 + 0.01 * 25 + 0.03 * 4 + 2 * 0.002 * 10
    variance += 2.0 * 2.0 * -5.0 * 0.005
    variance += (seen.std * 5.0) ** 2
    assert doubt_s(known, seen, now, then) == pytest.approx(math.sqrt(variance))
    # The same setups cancel: what is left is that there is less of the work.
    less = priced(1, train=4.0, generate=2.0)
    left = 0.04 * 1.0 + 0.01 * 1.0 - 2.0 * 0.005
    assert doubt_s(known, seen, now, less) == pytest.approx(math.sqrt(left))
    assert doubt_s(known, Offsets(), now, now) == 0.0


def test_doubt_is_less_where_both_plans_have_run():
    known, offsets = learned(0.1)
    now, back, new = (priced(tp, train=5.0, generate=0.0) for tp in (2, 1, 4))
    assert doubt_s(known, offsets, now, back) < 0.4 * doubt_s(known, offsets, now, new)
    seconds = modelled(known, 3.0, 0.2)
    assert off_by_std(known, offsets, setup(2), seconds) < 0.03
    assert off_by_std(known, offsets, setup(4), seconds) > OFFSET_STD


def test_a_machine_that_becomes_slower_makes_no_gain():
    """Three plans take the same. One ran, another runs while everything becomes slower by a third,
    little by little: neither the one that ran before nor one that never ran looks faster."""
    known, offsets = Efficiencies.prior(), Offsets()
    right = sum(modelled(Efficiencies.prior(), 3.0, 0.2).values())
    for step in range(320):
        tp, slower = (1, 1.0) if step < 20 else (2, 1.3 ** ((step - 20) / 300))
        expected = {c: s * offsets.factor(setup(tp)) for c, s in modelled(known, 3.0, 0.2).items()}
        known, offsets = observe_setup(known, offsets, setup(tp), expected, slower * right, 0.05)

    def one(tp: int) -> Priced:
        seconds = {c: s * offsets.factor(setup(tp)) for c, s in modelled(known, 3.0, 0.2).items()}
        total = sum(seconds.values())
        stage = StagePrice(seconds=total, seconds_by_class=seconds)
        price = PlanPrice(
            step_s=total, stages={ACTOR_TRAIN: stage}, device_bytes={}, limit_bytes=1.0
        )
        return Priced(plan=PLANS[tp], price=price)

    now = one(2)
    for other in (one(1), one(4)):
        gain_s = now.price.step_s - other.price.step_s
        assert gain_s < doubt_s(known, offsets, now, other)
        assert gain_s < 0.02 * now.price.step_s
    assert offsets.std < 1.2 * OFFSET_STD


def test_only_so_many_setups_are_remembered():
    known, offsets = Efficiencies.prior(), Offsets()
    choice = PLANS[1].choices[ACTOR_TRAIN]
    made = [
        StageSetup(
            model_stage=ACTOR_TRAIN,
            layout=PLANS[1].plan[ACTOR_TRAIN].layout,
            choice=dataclasses.replace(choice, microbatch_size=i + 1),
        )
        for i in range(MOST_SETUPS + 5)
    ]
    for one in made:
        for seen in (one, made[0]):  # the first one runs on
            known, offsets = observe_setup(known, offsets, seen, {GEMM: 1.0}, 1.1, 0.05)
    assert offsets.setups == (*made[6:], made[0])
    assert offsets.own.shape == (MOST_SETUPS, MOST_SETUPS) and len(offsets.values) == MOST_SETUPS
    whole = np.block([[known.covariance, offsets.cross], [offsets.cross.T, offsets.own]])
    assert np.linalg.eigvalsh((whole + whole.T) / 2).min() > -1e-12


def test_offsets_survive_json():
    known, offsets = learned(0.3)
    beliefs = Beliefs(efficiencies=known, offsets=offsets)
    again = beliefs_from_json(json.loads(json.dumps(beliefs_to_json(beliefs))))
    assert again.offsets.setups == offsets.setups
    for name in ("values", "own", "cross"):
        np.testing.assert_array_equal(getattr(again.offsets, name), getattr(offsets, name))
    # A state from before there were offsets is one that knows of none.
    old = {k: v for k, v in beliefs_to_json(beliefs).items() if k not in ("offsets", "spreads")}
    assert beliefs_from_json(old).offsets.setups == () and beliefs_from_json(old).spreads == {}


@pytest.mark.parametrize(("doubt", "moves"), [(0.0, 2), (1.0, 0)])
def test_a_plan_that_does_not_keep_its_promise_is_left_and_not_tried_again(doubt, moves):
    """tp 4 is priced a few per cent faster than tp 2, and takes 1.5 times as long. Without doubt it
    is tried once, at the first look for a plan; with it, not at all."""
    controller = Controller(
        settings=settings(doubt=doubt, policy=parse_policy("payback=1"), candidates=4),
        costs=ToyCosts(limit_bytes=1e9, move_s=0.01),
    )
    state = initial_state(PLANS[2], pool())
    ran: list[int] = []
    for step in range(80):
        mean = 142.0 if step // 8 % 2 else 100.0  # a ripple that makes it look now and then
        event = finished(state, step, spread(mean), float(step))
        if tp_of(state.plan) == 4:
            slow = {s: 1.5 * x for s, x in event.record.stage_s.items()}
            event = dataclasses.replace(
                event, record=dataclasses.replace(event.record, stage_s=slow)
            )
        ran.append(tp_of(state.plan))
        state, decision = controller.on_event(state, event)
        if isinstance(decision, Transition):
            ended = TransitionEnded(time_s=float(step), plan=decision.target, seconds=0.01)
            state, _ = controller.on_event(state, ended)
    assert state.moves == moves and ran[-1] == 2, ran
    assert ran.count(4) < 20
