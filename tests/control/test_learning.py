"""A job whose seconds come from efficiencies that the controller is not told."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.control.controller import Controller
from nereus_jax.control.learning import (
    Learned,
    after_change,
    corrected,
    learn,
)
from nereus_jax.control.monitor import EFFICIENCY
from nereus_jax.control.offsets import Offsets
from nereus_jax.control.state import initial_state
from nereus_jax.core.events import Keep
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN, Stage
from nereus_jax.planning.calibration import CLASSES, Efficiencies, OperationClass
from tests.control.toy_job import (
    ToyCosts,
    finished,
    pool,
    settings,
    spread,
    toy_plan,
    toy_seconds,
    workload,
)

PLAN = toy_plan(pool().devices, 2)
SLOWED = (OperationClass.GEMM, OperationClass.DECODE_MEMORY)


def drift(operation: OperationClass, factor: float, seed: int, before: int = 30, after: int = 8):
    """Steps at which a job triggers after a class became slower, and what triggered.

    The hidden efficiencies differ from what is known at first, steps scatter by 3 %.
    """
    costs = ToyCosts(move_s=1e9, limit_bytes=1e9)
    controller = Controller(settings=settings(), costs=costs)
    state = initial_state(PLAN, pool())
    rng = np.random.default_rng(seed)
    prior = Efficiencies.prior()
    truth = prior.replace({c: prior[c] * float(rng.uniform(0.8, 1.2)) for c in OperationClass})
    slow = truth.replace({operation: truth[operation] / factor})
    triggers = []
    for step in range(before + after):
        now = truth if step < before else slow
        event = finished(state, step, spread(120.0, seed=step), float(step), now)
        noisy = {s: x * float(rng.lognormal(0.0, 0.03)) for s, x in event.record.stage_s.items()}
        event = dataclasses.replace(event, record=dataclasses.replace(event.record, stage_s=noisy))
        state, decision = controller.on_event(state, event)
        if not isinstance(decision, Keep) or decision.record is not None:
            assert decision.record is not None
            triggers.append((step, decision.record["trigger"]))
    return triggers, state, slow


@given(st.sampled_from(SLOWED), st.integers(0, 10_000))
def test_a_class_that_is_slowed_by_two_triggers_within_five_steps(operation, seed):
    triggers, state, slow = drift(operation, 2.0, seed)
    late = [what for step, what in triggers if 30 <= step < 35]
    assert any(EFFICIENCY + operation.value in what.split(", ") for what in late)
    # What was learned is what happened: the class is about half as fast, and seconds are right.
    known = state.beliefs.efficiencies
    assert known[operation] / slow[operation] == pytest.approx(1.0, abs=0.35)


@given(st.integers(0, 10_000))
def test_steps_that_scatter_do_not_trigger(seed):
    triggers, _, _ = drift(OperationClass.GEMM, 1.0, seed)
    assert not [step for step, _ in triggers if step >= 12]  # before that, it was found out


def test_one_slow_step_is_no_drift():
    controller = Controller(settings=settings(), costs=ToyCosts(limit_bytes=1e9))
    state = initial_state(PLAN, pool())
    for step in range(40):
        event = finished(state, step, spread(120.0), float(step))
        if step == 30:
            slow = {s: 3.0 * x for s, x in event.record.stage_s.items()}
            record = dataclasses.replace(event.record, stage_s=slow)
            event = dataclasses.replace(event, record=record)
        state, decision = controller.on_event(state, event)
        assert decision == Keep()


def seconds(stage, efficiencies):
    return toy_seconds(PLAN, stage, workload(120), efficiencies)


def start() -> Learned:
    return Learned(efficiencies=Efficiencies.prior(), offsets=Offsets(), spreads={}, history={})


def step_of(number: int, **changes):
    state = initial_state(PLAN, pool())
    return finished(state, number, [120] * 64, 0.0, **changes).record


def test_the_first_step_after_a_compile_teaches_nothing():
    slow = {ACTOR_TRAIN: 90.0, ACTOR_GENERATE: 0.7}
    first = frozenset({ACTOR_TRAIN})
    record = dataclasses.replace(step_of(0), stage_s=slow, first_after_compile=first)
    after = learn(start(), record, PLAN, seconds)
    assert set(after.history) == {ACTOR_GENERATE}
    both = frozenset({ACTOR_TRAIN, ACTOR_GENERATE})
    unchanged = learn(start(), dataclasses.replace(record, first_after_compile=both), PLAN, seconds)
    assert (
        unchanged.efficiencies is start().efficiencies
        or (unchanged.efficiencies.log_values == start().efficiencies.log_values).all()
    )


def test_only_what_is_due_is_priced():
    asked = []

    def counted(stage, efficiencies):
        asked.append(stage)
        return seconds(stage, efficiencies)

    known = start()
    for number in range(20):
        asked.clear()
        known = learn(known, step_of(number), PLAN, counted)
        assert len(asked) == (2 if number < 4 else 1)
    # A surprise is looked into at once.
    asked.clear()
    fast = {s: x / 2 for s, x in step_of(21).stage_s.items()}
    learn(known, dataclasses.replace(step_of(21), stage_s=fast), PLAN, counted)
    assert sorted(asked) == [ACTOR_GENERATE, ACTOR_TRAIN]


def test_seconds_that_are_none_are_passed_over():
    record = dataclasses.replace(
        step_of(0), stage_s={ACTOR_TRAIN: 0.0, ACTOR_GENERATE: float("nan")}
    )
    assert learn(start(), record, PLAN, seconds).history == {}


def test_a_change_is_dealt_by_shares_and_old_doubt_stays():
    before = Efficiencies.prior()
    modelled = {OperationClass.GEMM: 3.0, OperationClass.LAUNCH: 1.0}
    after = after_change(before, modelled, 8.0)
    moved = before.log_values - after.log_values
    gemm, launch = (moved[CLASSES.index(c)] for c in modelled)
    # Gains go by share times variance: 3/4 * 3/4 to 1/4 * 1/4; LAUNCH's large doubt is no reason.
    assert gemm == pytest.approx(9 * launch, rel=1e-3) and 0.5 < gemm < 1.2
    assert np.count_nonzero(moved) == 2
    assert all(after.log_std(c) >= before.log_std(c) for c in OperationClass)


@pytest.mark.parametrize("scatter", [0.02, 0.2])
def test_what_a_machine_scatters_is_the_noise_of_its_measurements(scatter):
    """Seconds that scatter do not chase efficiencies: what is learned of them is how they do."""
    rng = np.random.default_rng(0)
    prior = Efficiencies.prior()
    truth = prior.replace({c: 0.7 * prior[c] for c in OperationClass})
    known, errors = start(), []
    for number in range(300):
        right = {s: sum(seconds(s, truth).values()) for s in (ACTOR_TRAIN, ACTOR_GENERATE)}
        took = {s: x * float(rng.lognormal(0.0, scatter)) for s, x in right.items()}
        known = learn(known, dataclasses.replace(step_of(number), stage_s=took), PLAN, seconds)
        if number >= 100:
            factors = known.offsets.factors(PLAN)
            said = {s: factors[s] * sum(seconds(s, known.efficiencies).values()) for s in right}
            errors += [abs(np.log(said[s] / right[s])) for s in right]
    # The mean size of a normal deviation is 0.8 standard deviations.
    for found in known.spreads.values():
        assert found.size == pytest.approx(0.8 * scatter, rel=0.6)
    assert np.mean(errors) < 0.3 * scatter and np.quantile(errors, 0.95) < scatter


def test_peaks_above_the_model_count_in_full_and_those_below_a_little():
    above = corrected({}, Stage.TRAIN, 100.0, 50.0)
    assert above == {Stage.TRAIN: 1.5}
    below = corrected(above, Stage.TRAIN, 150.0, -75.0)
    assert below[Stage.TRAIN] == pytest.approx(1.5 * 0.5**0.1)
    assert corrected({Stage.SCORE: 2.0}, Stage.TRAIN, 100.0, 0.0)[Stage.SCORE] == 2.0
