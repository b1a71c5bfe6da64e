"""The controller on a job whose prices are known: what triggers, what is decided, what is kept."""

import dataclasses
import json

import pytest

from nereus_jax.control.controller import Controller
from nereus_jax.control.decisions import decision_digest
from nereus_jax.control.expectation import with_length
from nereus_jax.control.monitor import POOL, Prior
from nereus_jax.control.policies import parse_policy
from nereus_jax.control.state import (
    ControllerState,
    initial_state,
    plan_devices,
    resumed,
    went_back,
)
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.events import (
    Decision,
    DevicesJoined,
    DevicesLost,
    Halt,
    Keep,
    OutOfMemory,
    Revocation,
    Transition,
    TransitionEnded,
)
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN, Stage
from tests.control.toy_job import (
    ToyCosts,
    finished,
    pool,
    settings,
    spread,
    toy_plan,
    tp_of,
    workload,
)

POOL8 = pool()
NAMES = {
    "step",
    "trigger",
    "policy",
    "plan",
    "target",
    "step_s_predicted",
    "step_s_target_predicted",
    "transition_s_predicted",
    "payback_steps",
    "gamma",
    "horizon_steps",
    "verdict",
    "reason",
    "candidates",
}


def devices(*indices: int) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(0, i) for i in indices)


class Run:
    """A job under a controller: every transition that is decided is carried out at once."""

    def __init__(
        self,
        policy: str = "payback",
        costs: ToyCosts | None = None,
        *,
        tp: int = 1,
        start: DevicePool = POOL8,
        **changes,
    ) -> None:
        self.controller = Controller(
            settings=settings(policy=parse_policy(policy), **changes), costs=costs or ToyCosts()
        )
        self.state = initial_state(toy_plan(start.devices, tp), start)
        self.time_s, self.step = 0.0, 0
        self.decisions: list[Decision] = []
        self.seconds: list[float] = []

    def tell(self, event, carry_out: bool = True) -> Decision:
        self.state, decision = self.controller.on_event(self.state, event)
        if not (isinstance(decision, Keep) and decision.record is None):
            self.decisions.append(decision)
        if isinstance(decision, Transition) and carry_out:
            self.time_s += 2.0
            self.tell(TransitionEnded(time_s=self.time_s, plan=decision.target, seconds=2.0))
        return decision

    def steps(self, *means: float, truth=None, carry_out: bool = True, **changes) -> list[Decision]:
        made: list[Decision] = []
        for mean in means:
            event = finished(self.state, self.step, spread(mean), self.time_s, truth, **changes)
            self.time_s += event.record.step_s
            self.seconds.append(event.record.step_s)
            event = finished(self.state, self.step, spread(mean), self.time_s, truth, **changes)
            made.append(self.tell(event, carry_out))
            self.step += 1
        return made

    @property
    def records(self):
        return [d.record for d in self.decisions if d.record is not None]


def record_of(decision: Decision):
    assert decision.record is not None
    return decision.record


def test_nothing_happens_while_nothing_changes():
    run = Run(tp=2)
    assert run.steps(*[150.0] * 40) == [Keep()] * 40
    assert run.state.replans == 0


def test_growing_responses_lead_to_the_plan_that_is_best_for_them():
    run = Run()
    run.steps(*[40.0 * 1.02**i for i in range(120)])
    moves = [d for d in run.decisions if isinstance(d, Transition)]
    assert [tp_of(m.target) for m in moves] == [2, 4] and not any(m.urgent for m in moves)
    assert tp_of(run.state.plan) == 4 and run.state.moves == 2
    first = record_of(moves[0])
    assert set(first) >= NAMES and first["trigger"] in ("length_mean", "length_mean, length_tail")
    assert first["verdict"] == "admit" and first["policy"] == "payback" and first["gamma"] == 0.5
    gain_s = first["step_s_predicted"] - first["step_s_target_predicted"]
    assert first["payback_steps"] == pytest.approx(first["transition_s_predicted"] / gain_s)
    assert first["payback_steps"] <= 0.5 * first["horizon_steps"]
    assert first["target"]["actor-TRAIN"]["tp"] == 2 and first["plan"]["actor-TRAIN"]["tp"] == 1
    taken = first["candidates"][0]
    assert taken["admitted"] and taken["price"]["stages"]["actor-TRAIN"]["seconds_by_class"]
    assert taken["price"]["device_bytes"].keys() == {"0:0-7"}
    assert taken["transition"]["bytes"]["intra_node"] == 400
    assert taken["transition"]["device_bytes"] == {"0:0-7": 400}
    json.dumps(run.records)


def test_a_rejected_replan_resets_references_too():
    run = Run(costs=ToyCosts(move_s=1e6))
    run.steps(*[40.0] * 10, *[60.0] * 10)
    assert [r["verdict"] for r in run.records] == ["reject"]  # once, though the drift lasts
    assert run.state.signals["length_mean"].reference == pytest.approx(60.0, abs=1)
    run.steps(*[60.0] * 10, *[80.0] * 5)
    assert [r["verdict"] for r in run.records] == ["reject", "reject"]


def test_the_horizon_decides_as_in_the_paper_or_with_the_prior():
    """From 40 to 80 tokens in one step, after 20: tp 2 saves about 0.3 s, the move takes 2 s."""
    horizons = {}
    for prior in Prior:
        run = Run(prior=prior)
        run.steps(*[40.0] * 20, *[80.0] * 3)
        horizons[prior] = (run.records[0]["horizon_steps"], run.records[0]["verdict"])
    assert horizons[Prior.PAPER] == (1.0, "reject")
    assert horizons[Prior.ELAPSED] == (21.0, "admit")


def test_no_move_pays_back_after_the_end_of_the_run():
    run = Run(num_steps=24)
    run.steps(*[40.0] * 20, *[80.0] * 3)
    assert run.records[0]["horizon_steps"] == 2  # before step 22 of 24
    assert run.records[0]["verdict"] == "reject"


def test_memory_is_made_before_it_is_missed():
    """tp 1 has memory for 600 tokens; nothing but memory makes this plan move."""
    run = Run()
    run.controller = dataclasses.replace(
        run.controller,
        settings=dataclasses.replace(
            run.controller.settings,
            thresholds=dataclasses.replace(run.controller.settings.thresholds, length=1e9),
        ),
    )
    while not run.decisions:
        mean = 100.0 * 1.02**run.step
        assert max(spread(mean)) < 600, "the violation came first"
        run.steps(mean)
    move = run.decisions[0]
    assert isinstance(move, Transition) and move.urgent
    longer = dataclasses.replace(workload(), max_response_tokens=700)
    assert ToyCosts().peak_bytes(run.state.plan, longer, POOL8, run.state.beliefs) <= 1000
    assert record_of(move)["trigger"] == "memory_forecast"
    assert record_of(move)["reason"].startswith("memory for 600 tokens")
    assert max(spread(100.0 * 1.02 ** (run.step + 2))) < 600  # at least three steps ahead


def test_without_a_transition_the_plan_itself_is_made_smaller():
    run = Run(costs=ToyCosts(blocked=frozenset({2, 4})))
    run.steps(*[220.0 * 1.03**i for i in range(30)])
    move = next(d for d in run.decisions if isinstance(d, Transition))
    assert move.urgent and tp_of(move.target) == 1
    sizes = {c.microbatch_size for c in move.target.choices.values()}
    assert min(sizes) < 8
    assert "smaller microbatch" in record_of(move)["candidates"][0]["origin"]


def test_where_no_plan_has_the_memory_the_job_goes_on_and_does_not_ask_every_step():
    run = Run(costs=ToyCosts(limit_bytes=500.0, blocked=frozenset({1, 2, 4})))
    run.steps(*[20.0] * 10, *[400.0] * 20)
    reasons = [r["reason"] for r in run.records if "memory_forecast" in r["trigger"]]
    assert reasons and len(reasons) <= 6
    assert not any(isinstance(d, Halt) for d in run.decisions)


@pytest.mark.parametrize("steps", [0, 5])
def test_a_step_without_memory_leads_to_a_plan_that_takes_less_than_this_one(steps):
    """By the model, tp 1 has memory for 600 tokens: that it had none for 300 is learned."""
    run = Run()
    run.steps(*[100.0] * steps)
    move = run.tell(OutOfMemory(time_s=run.time_s, room_tokens=300))
    assert isinstance(move, Transition) and move.urgent and not move.by_checkpoint
    record = record_of(move)
    assert record["trigger"] == "out_of_memory" and record["verdict"] == "urgent"
    assert "no memory for a step with room for 300 tokens" in record["reason"]
    assert max(run.state.beliefs.corrections.values()) == pytest.approx(610 / 300)
    room = dataclasses.replace(workload(), max_response_tokens=300)
    costs = run.controller.costs
    assert costs.price(move.target, room, POOL8, run.state.beliefs).fits
    assert not costs.price(toy_plan(POOL8.devices, 1), room, POOL8, run.state.beliefs).fits


def test_a_step_without_memory_again_and_again_is_given_less_each_time():
    run = Run(costs=ToyCosts(blocked=frozenset({2, 4})))
    run.steps(*[100.0] * 3)
    sizes = [8]
    for _ in range(3):
        move = run.tell(OutOfMemory(time_s=run.time_s, room_tokens=300))
        assert isinstance(move, Transition)
        sizes.append(min(c.microbatch_size for c in move.target.choices.values()))
    assert sizes == [8, 4, 2, 1]


def test_only_who_looks_after_memory_does_anything_about_it():
    event = OutOfMemory(time_s=0.0, room_tokens=300)
    assert Run("static").tell(event) == Run("dp_only").tell(event) == Keep()
    assert isinstance(Run("every_k").tell(event), Transition)
    waiting = Run()
    assert isinstance(waiting.tell(event, carry_out=False), Transition)
    assert waiting.tell(event) == Keep()  # what was decided comes first
    full = Run(costs=ToyCosts(limit_bytes=10.0))
    decision = full.tell(event)
    assert isinstance(decision, Keep) and record_of(decision)["verdict"] == "reject"


def test_a_lost_device_is_left_at_once():
    run = Run(tp=2)
    run.steps(*[150.0] * 5)
    decision = run.tell(DevicesLost(time_s=run.time_s, devices=devices(3)))
    assert isinstance(decision, Transition) and decision.urgent and not decision.by_checkpoint
    assert DeviceId(0, 3) not in plan_devices(decision.target)
    assert record_of(decision)["verdict"] == "urgent" and record_of(decision)["trigger"] == "pool"
    assert record_of(decision)["reason"].startswith("devices are gone: 0:3")
    assert record_of(decision)["pool"] == "0:0-2,0:4-7"
    assert run.steps(*[150.0] * 20) == [Keep()] * 20


@pytest.mark.parametrize(("mean", "expected"), [(1000.0, True), (100.0, False)])
def test_a_job_stands_still_where_a_slow_step_takes_longer_than_a_compiler(mean, expected):
    """Programs take 4 s. Six devices more save 19 s a step of long responses, 2 s of short ones."""
    run = Run("any_gain", ToyCosts(limit_bytes=1e6), start=pool(2))
    run.steps(mean, mean)
    run.tell(DevicesJoined(time_s=run.time_s, devices=devices(*range(2, 8))))
    decision = run.steps(mean)[-1]
    assert isinstance(decision, Transition) and not decision.urgent
    assert decision.at_once is expected and record_of(decision)["at_once"] is expected


def test_losses_of_the_plan_without_notice_are_counted():
    run = Run(start=pool(3), tp=2)  # two of three devices are used
    run.steps(100.0)
    run.tell(DevicesLost(time_s=run.time_s, devices=devices(2)))
    assert run.state.losses == 0
    run.tell(DevicesLost(time_s=run.time_s, devices=devices(1)))
    assert run.state.losses == 1
    saved = run.state.to_json()
    assert ControllerState.from_json(saved).losses == 1
    del saved["losses"]  # of a version that did not count
    assert ControllerState.from_json(saved).losses == 0


def test_without_a_whole_copy_the_last_checkpoint_is_what_is_left():
    run = Run(tp=4)
    run.steps(*[150.0] * 3)
    decision = run.tell(DevicesLost(time_s=run.time_s, devices=devices(0, 4)))
    assert isinstance(decision, Transition) and decision.by_checkpoint
    assert "restart: not executable: no copy is whole" in record_of(decision)["reason"]
    assert record_of(decision)["candidates"][0]["by_checkpoint"]


def test_an_unused_device_may_go_and_more_may_come():
    start = pool(8)
    run = Run(tp=2, start=start)
    run.state = initial_state(toy_plan(start.devices[:6], 2), start)
    run.steps(*[150.0] * 5)
    assert run.tell(DevicesLost(time_s=run.time_s, devices=devices(7))) == Keep()
    first = run.steps(150.0)[0]
    assert record_of(first)["trigger"] == POOL
    assert run.tell(DevicesJoined(time_s=run.time_s, devices=devices(7))) == Keep()
    assert run.tell(DevicesJoined(time_s=run.time_s, devices=(DeviceId(1, 0),))) == Keep()
    joined = run.steps(150.0)[0]  # both at the next boundary, in one replan
    assert record_of(joined)["trigger"] == POOL and record_of(joined)["pool"] == "0:0-7,1:0"


def test_a_revocation_is_left_before_its_deadline():
    run = Run(tp=2)
    run.steps(*[150.0] * 5)
    at = run.time_s
    decision = run.tell(Revocation(time_s=at, devices=devices(6, 7), deadline_s=60.0))
    assert isinstance(decision, Transition) and decision.urgent and not decision.by_checkpoint
    assert decision.deadline_s == at + 60.0
    assert plan_devices(decision.target) == frozenset(devices(*range(6)))
    # When they go, nothing is left to do.
    assert run.tell(DevicesLost(time_s=at + 60.0, devices=devices(6, 7))) == Keep()


def test_devices_that_go_as_announced_are_no_second_change():
    run = Run(tp=1)
    run.steps(*[40.0] * 3)
    run.tell(Revocation(time_s=run.time_s, devices=devices(7), deadline_s=1e4))
    run.steps(*[40.0] * 3)
    replans = run.state.replans
    run.tell(DevicesLost(time_s=run.time_s, devices=devices(7)))
    assert devices(7)[0] not in run.state.pool.devices and not run.state.noticed
    run.steps(40.0)
    assert run.state.replans == replans
    run.tell(DevicesLost(time_s=run.time_s, devices=devices(6)))  # nobody had announced it
    assert run.state.noticed == (POOL,)


def test_a_revocation_that_comes_too_late_is_a_checkpoint():
    run = Run(tp=2, costs=ToyCosts(move_s=50.0))
    run.steps(*[150.0] * 5)
    decision = run.tell(Revocation(time_s=run.time_s, devices=devices(6, 7), deadline_s=60.0))
    assert isinstance(decision, Transition) and decision.by_checkpoint
    assert "of the 40 s that are left" in record_of(decision)["reason"]  # 60 s with a margin of 1.5


def test_a_revocation_may_be_taken_back():
    run = Run(tp=2)
    run.steps(*[150.0] * 5)
    run.tell(Revocation(time_s=run.time_s, devices=devices(6, 7), deadline_s=60.0))
    run.tell(DevicesJoined(time_s=run.time_s, devices=devices(6, 7)))
    decision = run.steps(150.0)[0]
    assert record_of(decision)["pool"] == "0:0-7" and not run.state.leaving


def test_the_end_of_the_pool_is_a_checkpoint_and_a_clean_end():
    run = Run(tp=2)
    run.steps(*[150.0] * 3)
    halt = run.tell(Revocation(time_s=run.time_s, devices=POOL8.devices, deadline_s=30.0))
    assert isinstance(halt, Halt) and halt.checkpoint
    assert "resumes from its last checkpoint" in halt.reason
    gone = run.tell(DevicesLost(time_s=run.time_s + 30.0, devices=POOL8.devices))
    assert isinstance(gone, Halt) and not gone.checkpoint  # nothing is left to write from
    back = run.tell(DevicesJoined(time_s=run.time_s + 90.0, devices=devices(0, 1)))
    assert isinstance(back, Transition) and back.by_checkpoint and back.urgent
    assert plan_devices(back.target) == frozenset(devices(0, 1))
    assert not run.state.halted and run.steps(150.0) == [Keep()]


def test_too_few_devices_are_an_end_that_says_what_would_help():
    run = Run(tp=2, costs=ToyCosts(limit_bytes=350.0))
    run.steps(*[100.0] * 3)
    halt = run.tell(DevicesLost(time_s=run.time_s, devices=devices(1, 2, 3, 4, 5, 6, 7)))
    assert isinstance(halt, Halt) and not halt.checkpoint
    assert "1,000 bytes are too few" in halt.reason and "start the run again" in halt.reason
    assert record_of(halt)["verdict"] == "reject"


def test_a_device_that_is_not_there_cannot_go():
    run = Run()
    for event in (
        DevicesLost(time_s=0.0, devices=devices(9)),
        Revocation(time_s=0.0, devices=devices(9), deadline_s=1.0),
    ):
        with pytest.raises(ConfigError, match="0:9 cannot leave, the pool of 8 devices"):
            run.controller.on_event(run.state, event)


def test_while_a_transition_is_under_way_only_a_loss_plans_anew():
    run = Run()
    run.steps(*[40.0] * 10)
    while run.state.pending is None:
        run.steps(90.0, carry_out=False)
    target = run.state.pending
    assert run.steps(*[900.0] * 3, carry_out=False) == [Keep()] * 3
    assert run.state.pending is target
    lost = max(plan_devices(target))
    decision = run.tell(DevicesLost(time_s=run.time_s, devices=(lost,)), carry_out=False)
    assert isinstance(decision, Transition) and lost not in plan_devices(decision.target)


def test_a_target_that_could_not_be_reached_is_not_tried_again():
    run = Run()
    run.steps(*[40.0] * 10)
    while run.state.pending is None:
        run.steps(90.0, carry_out=False)
    failed = run.state.pending
    run.tell(
        TransitionEnded(time_s=run.time_s, plan=run.state.plan, seconds=3.0, error="broke off")
    )
    assert run.state.plan != failed and run.state.moves == 0
    run.steps(*[90.0] * 5, *[130.0] * 5)
    later = [r for r in run.records[1:]]
    assert later and all(r["target"] != run.records[0]["target"] for r in later)


def test_a_target_that_needs_more_than_modelled_teaches_what_plans_need():
    run = Run()
    run.steps(*[40.0] * 10)
    while run.state.pending is None:
        run.steps(90.0, carry_out=False)
    failed, room = run.state.pending, 200
    seen = with_length(run.controller.settings.workload, room)
    price = run.controller.costs.price(failed, seen, run.state.pool, run.state.beliefs)
    modelled = price.stages[ACTOR_TRAIN].working_bytes
    run.tell(
        TransitionEnded(
            time_s=run.time_s,
            plan=run.state.plan,
            seconds=0.0,
            error="no memory",
            working_bytes={ACTOR_TRAIN: round(3.0 * modelled), ACTOR_GENERATE: 0},
            room_tokens=room,
        )
    )
    assert run.state.beliefs.corrections == {Stage.TRAIN: pytest.approx(3.0, rel=1e-2)}
    # Programs that need less than modelled say nothing of the largest that may come.
    before = run.state.beliefs.corrections
    less = {ACTOR_TRAIN: round(0.5 * modelled)}
    event = TransitionEnded(
        time_s=run.time_s,
        plan=run.state.plan,
        seconds=0.0,
        error="no memory",
        working_bytes=less,
        room_tokens=room,
    )
    pending = dataclasses.replace(run.state, pending=failed)
    after, _ = run.controller.on_event(pending, event)
    assert after.beliefs.corrections == before


def test_transitions_that_take_longer_than_predicted_are_believed():
    run = Run()
    run.steps(*[40.0] * 10)
    while run.state.pending is None:
        run.steps(90.0, carry_out=False)
    target = run.state.pending
    run.tell(TransitionEnded(time_s=run.time_s, plan=target, seconds=9.0, compile_s=1.0))
    assert run.state.beliefs.transition_ratio == pytest.approx(2.0)  # half way to 8 / 2, in logs


def test_policies_differ_in_when_they_look_and_in_what_they_ask():
    means = [40.0] * 6 + [45.0] * 6 + [60.0] * 6 + [90.0] * 6
    runs = {}
    for name in ("static", "dp_only", "any_gain", "every_k=3", "payback", "payback=0"):
        run = Run(name, costs=ToyCosts(move_s=20.0))
        run.steps(*means)
        runs[name] = run
    assert not runs["static"].records and not runs["dp_only"].records
    assert runs["every_k=3"].state.replans == 8
    assert {r["trigger"] for r in runs["every_k=3"].records} == {"period"}
    assert runs["any_gain"].state.moves >= 1 and runs["any_gain"].records[0]["reason"] == "faster"
    assert runs["payback"].state.moves == 0 and runs["payback=0"].state.moves == 0
    assert runs["payback"].records and "more than gamma x H" in runs["payback"].records[0]["reason"]


@pytest.mark.parametrize("name", ["static", "dp_only"])
def test_fixed_degrees_stay_what_they_are(name):
    run = Run(name, tp=2)
    run.steps(*[150.0] * 3)
    decision = run.tell(DevicesLost(time_s=run.time_s, devices=devices(7)))
    assert isinstance(decision, Transition) and tp_of(decision.target) == 2
    assert decision.target.plan.placements.keys() == run.state.plan.plan.placements.keys()
    run.tell(DevicesJoined(time_s=run.time_s, devices=devices(7)))
    run.steps(150.0)
    count = len(plan_devices(run.state.plan))
    assert count == (8 if name == "dp_only" else 6)


def test_measured_peaks_correct_the_memory_model():
    """The model says 400 + 250 of 1,000; the device says 1,100: the plan cannot stay."""
    run = Run()
    run.steps(*[100.0] * 5, peak_memory_bytes=600)
    assert not run.decisions
    run.steps(*[100.0] * 2, peak_memory_bytes=1100, room_tokens=300)
    record = run.records[0]
    assert record["trigger"] == "peak_memory" and record["verdict"] == "urgent"
    assert max(run.state.beliefs.corrections.values()) > 1.5
    assert tp_of(run.state.plan) > 1 or run.state.plan.choices != toy_plan(POOL8.devices, 1).choices


EVENTS_OF_A_RUN = (
    *[("step", 60.0)] * 12,
    *[("step", 85.0)] * 8,
    ("lost", 7),
    *[("step", 85.0)] * 6,
    ("revoke", 6),
    *[("step", 120.0)] * 6,
    ("lost", 6),
    ("join", 7),
    *[("step", 200.0)] * 8,
)


def play(run: Run, events) -> None:
    for kind, value in events:
        if kind == "step":
            run.steps(value)
        elif kind == "lost":
            run.tell(DevicesLost(time_s=run.time_s, devices=devices(value)))
        elif kind == "join":
            run.tell(DevicesJoined(time_s=run.time_s, devices=devices(value)))
        else:
            run.tell(Revocation(time_s=run.time_s, devices=devices(value), deadline_s=90.0))


def test_the_same_events_give_the_same_decisions():
    first, second = Run(), Run()
    play(first, EVENTS_OF_A_RUN)
    play(second, EVENTS_OF_A_RUN)
    assert len(first.decisions) >= 4
    assert [decision_digest(d) for d in first.decisions] == [
        decision_digest(d) for d in second.decisions
    ]
    assert json.dumps(first.state.to_json()) == json.dumps(second.state.to_json())


@pytest.mark.parametrize("cut", [3, 15, 21, 28, 36])
def test_a_state_from_json_goes_on_as_if_nothing_had_been(cut):
    whole, halves = Run(), Run()
    play(whole, EVENTS_OF_A_RUN)
    play(halves, EVENTS_OF_A_RUN[:cut])
    text = json.dumps(halves.state.to_json())
    halves.state = ControllerState.from_json(json.loads(text))
    assert json.dumps(halves.state.to_json()) == text
    play(halves, EVENTS_OF_A_RUN[cut:])
    assert [decision_digest(d) for d in halves.decisions] == [
        decision_digest(d) for d in whole.decisions
    ]
    assert json.dumps(halves.state.to_json()) == json.dumps(whole.state.to_json())


def test_a_resumed_run_knows_what_it_knew_and_forgets_what_was_under_way():
    run = Run()
    run.steps(*[40.0] * 10)
    while run.state.pending is None:
        run.steps(90.0, carry_out=False)
    fewer = pool(4)
    state = resumed(run.state, toy_plan(fewer.devices, 2), fewer)
    assert state.pending is None and not state.leaving and state.facts is None
    assert state.lengths == run.state.lengths and state.signals == run.state.signals
    run.state = state
    assert run.steps(*[90.0] * 5) == [Keep()] * 5


def test_a_run_that_goes_back_forgets_no_more_than_the_steps_that_come_again():
    run = Run()
    run.steps(*[40.0] * 10)
    run.tell(Revocation(time_s=run.time_s, devices=devices(6, 7), deadline_s=1e4), carry_out=False)
    fewer = pool(7)
    state = went_back(run.state, 7, toy_plan(fewer.devices, 1), fewer)
    assert state.step == 7 and state.last_replan <= 7
    assert state.lengths.mean == run.state.lengths.mean[:7]
    assert state.leaving == {DeviceId(0, 6): run.state.leaving[DeviceId(0, 6)]}  # 7 is gone
    assert state.signals == run.state.signals and state.beliefs == run.state.beliefs
    assert state.pending is None and state.plan_steps == 0
    whole = went_back(run.state, 0, run.state.plan, POOL8)
    assert whole.lengths.mean == () and set(whole.leaving) == set(devices(6, 7))
    run.state = state
    assert all(isinstance(d, Keep) for d in run.steps(*[40.0] * 3))


def test_what_failed_once_may_be_started_anew_from_a_checkpoint():
    """Both ways away from the lost device have failed: the job is not given up for that."""
    run = Run("dp_only", tp=4)
    run.steps(*[150.0] * 3)
    first = run.tell(DevicesLost(time_s=run.time_s, devices=devices(7)), carry_out=False)
    assert isinstance(first, Transition) and not first.by_checkpoint
    again = run.tell(
        TransitionEnded(time_s=run.time_s, plan=run.state.plan, seconds=1.0, error="broke off"),
        carry_out=False,
    )
    assert isinstance(again, Transition) and again.by_checkpoint and again.target == first.target
    assert "it failed before" in record_of(again)["reason"]


def test_a_state_of_another_format_is_refused():
    data = Run().state.to_json()
    with pytest.raises(ValueError, match="format 99; this version reads 1"):
        ControllerState.from_json({**data, "format": 99})
    data["beliefs"]["classes"] = ["gemm"]
    with pytest.raises(ValueError, match="other operation classes: gemm"):
        ControllerState.from_json(data)


def test_digests_tell_decisions_apart():
    run = Run()
    play(run, EVENTS_OF_A_RUN)
    digests = [decision_digest(d) for d in run.decisions]
    assert len(set(digests)) == len(digests) and all(len(d) == 64 for d in digests)
