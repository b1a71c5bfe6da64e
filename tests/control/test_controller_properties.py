"""What holds of the controller whatever happens to the job."""

import json

from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.control.controller import Controller
from nereus_jax.control.monitor import LENGTH_MEAN, Thresholds
from nereus_jax.control.policies import parse_policy
from nereus_jax.control.state import ControllerState, initial_state, plan_devices
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.events import (
    Decision,
    DevicesJoined,
    DevicesLost,
    Event,
    Halt,
    Keep,
    Revocation,
    Transition,
    TransitionEnded,
    decision_from_json,
    decision_to_json,
)
from nereus_jax.planning.calibration import Efficiencies
from tests.control.toy_job import ToyCosts, finished, pool, settings, spread, toy_plan, tp_of

POLICIES = ("static", "dp_only", "any_gain", "every_k=3", "payback", "payback=1")

step_kind = st.tuples(st.just("step"), st.floats(0.5, 1.6))
device_kind = st.tuples(st.sampled_from(["lost", "join", "revoke"]), st.integers(0, 7))
fate = st.tuples(st.just("fail"), st.booleans())
happenings = st.lists(st.one_of(step_kind, step_kind, step_kind, device_kind, fate), max_size=40)


def play(
    policy: str, costs: ToyCosts, what: list[tuple[str, float]]
) -> list[tuple[ControllerState, Event, ControllerState, Decision]]:
    """Every event with the states around it. A transition ends before the next event, and fails
    where the last `fail` says so."""
    controller = Controller(settings=settings(policy=parse_policy(policy)), costs=costs)
    state = initial_state(toy_plan(pool().devices, 2), pool())
    told: list[tuple[ControllerState, Event, ControllerState, Decision]] = []
    time_s, step, mean, fails = 0.0, 0, 100.0, False

    def tell(event: Event) -> None:
        nonlocal state, time_s
        before = state
        state, decision = controller.on_event(state, event)
        told.append((before, event, state, decision))
        if isinstance(decision, Transition):
            time_s += 1.0
            runs_on = plan_devices(state.plan) <= set(state.usable.devices) and not state.halted
            plan = state.plan if fails and runs_on else decision.target
            error = "broke off" if plan is state.plan else ""
            tell(TransitionEnded(time_s=time_s, plan=plan, seconds=1.0, error=error))

    for kind, value in what:
        device = (DeviceId(0, int(value)),)
        alive = device[0] in state.pool.devices
        if kind == "fail":
            fails = bool(value)
        elif kind == "step" and not state.halted:
            mean = min(max(mean * value, 10.0), 1500.0)
            tell(finished(state, step, spread(mean, seed=step % 5), time_s))
            step, time_s = step + 1, time_s + 2.0
        elif kind == "join":
            tell(DevicesJoined(time_s=time_s, devices=device))
        elif kind == "lost" and alive:
            tell(DevicesLost(time_s=time_s, devices=device))
        elif kind == "revoke" and alive:
            tell(Revocation(time_s=time_s, devices=device, deadline_s=90.0))
    return told


@given(st.sampled_from(POLICIES), st.sampled_from([0.1, 5.0, 1e6]), happenings)
def test_invariants(policy, move_s, what):
    told = play(policy, ToyCosts(move_s=move_s), what)
    for _, event, after, decision in told:
        usable = set(after.usable.devices)
        if isinstance(decision, Transition):
            assert plan_devices(decision.target) <= usable  # no plan uses a device that goes
            assert after.pending == decision.target
        if isinstance(decision, Keep) and not after.halted and after.pending is None:
            assert plan_devices(after.plan) <= usable or not len(usable)
        if isinstance(decision, Halt):
            assert after.halted and after.pending is None
        assert decision_from_json(json.loads(json.dumps(decision_to_json(decision)))) == decision
        record = decision.record
        if record is None:
            continue
        urgent = record["verdict"] == "urgent"
        assert isinstance(decision, Transition) == (record["verdict"] in ("admit", "urgent"))
        if isinstance(decision, Transition) and not urgent:
            gain_s = record["step_s_predicted"] - record["step_s_target_predicted"]
            assert gain_s > 0 and policy not in ("static",)
            if policy.startswith("payback"):
                assert gain_s > record["candidates"][0]["doubt_s"] > 0
                assert record["transition_s_predicted"] <= (
                    gain_s * record["gamma"] * record["horizon_steps"] * (1 + 1e-9)
                )
        if policy in ("static", "dp_only") and isinstance(decision, Transition):
            assert tp_of(decision.target) == 2
        if policy == "static" and isinstance(decision, Transition):
            assert urgent
        assert not isinstance(event, TransitionEnded) or urgent or isinstance(decision, Halt)


@given(st.sampled_from(POLICIES), happenings)
def test_a_state_survives_json_at_any_moment(policy, what):
    for _, _, state, _ in play(policy, ToyCosts(), what):
        data = state.to_json()
        again = ControllerState.from_json(json.loads(json.dumps(data)))
        assert json.dumps(again.to_json()) == json.dumps(data)
        assert again.plan == state.plan and again.usable == state.usable


@given(
    st.integers(2, 4).map(lambda exponent: 2**exponent),
    st.floats(20.0, 200.0),
    st.lists(st.floats(-0.05, 0.05), min_size=30, max_size=60),
)
def test_a_pool_that_stays_and_no_drift_never_replan(devices, mean, noise):
    """Batches that scatter by 5 % and steps that take what was expected."""
    controller = Controller(settings=settings(), costs=ToyCosts(limit_bytes=1e9))
    start = pool(devices)
    state = initial_state(toy_plan(start.devices, 1), start)
    for step, off in enumerate(noise):
        event = finished(state, step, spread(mean * (1 + off)), float(step))
        state, decision = controller.on_event(state, event)
        assert decision == Keep()


@given(st.floats(1.4, 4.0), st.integers(5, 15))
def test_a_lasting_deviation_triggers_once(factor, before):
    """Whatever is decided: nothing pays back here, and nothing moves."""
    limits = Thresholds(efficiency=1e9, memory=1e9)
    controller = Controller(
        settings=settings(thresholds=limits), costs=ToyCosts(move_s=1e9, limit_bytes=1e9)
    )
    state = initial_state(toy_plan(pool().devices, 1), pool())
    replans = []
    for step in range(before + 20):
        mean = 100.0 if step < before else 100.0 * factor
        state, decision = controller.on_event(state, finished(state, step, spread(mean), step))
        if decision.record is not None:
            replans.append(step)
    assert len(replans) == 1 and before <= replans[0] <= before + 2
    assert state.signals[LENGTH_MEAN].deviation(100.0 * factor) < 0.05


@given(st.integers(0, 2**31 - 1))
def test_the_process_does_not_matter(seed):
    """Two controllers that share nothing decide alike."""
    what = [("step", 0.8 + (seed >> i & 7) / 10) for i in range(20)] + [("lost", seed % 8)]
    one, two = (play("payback", ToyCosts(), what) for _ in range(2))
    assert [decision_to_json(d) for *_, d in one] == [decision_to_json(d) for *_, d in two]
    truth = Efficiencies.prior()
    assert truth is not Efficiencies.prior()  # nothing above hangs on one object
