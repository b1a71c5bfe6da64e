"""The register by hand: reports and times in, orders out."""

import signal
from collections.abc import Callable

import pytest

from nereus_jax.elastic.messages import Action, Order, Report, order_message, read_order
from nereus_jax.elastic.register import Register, Timing

TIMING = Timing(beat_s=1, silence_s=10, join_s=100, finish_s=5)  # lost after 15 s


class Slots:
    """Slots that do at once what the register says, and the register of one of them."""

    def __init__(
        self,
        number: int,
        leader: int = 0,
        epoch: int = 0,
        left: str = "",
        *,
        resuming: bool = False,
    ) -> None:
        self.now_s, self.step, self.ports = 0.0, -1, 0
        members = [int(s) for s in left]
        self.register = Register(
            num_slots=number,
            leader=leader,
            timing=TIMING,
            new_coordinator=self.new_coordinator,
            progress=lambda: self.step,
            now_s=0.0,
            epoch=epoch,
            members=members,
            resuming=resuming,
        )
        self.reports = {slot: Report() for slot in (members if epoch else range(number))}

    def new_coordinator(self) -> str:
        self.ports += 1
        return f"host:{self.ports}"

    def beat(self, seconds: float = 1.0) -> Order:
        """One round: all report, the register advances, all obey."""
        self.now_s += seconds
        for slot, report in self.reports.items():
            self.register.hear(slot, f"slot{slot}:1", report, self.now_s)
        order = self.register.advance(self.now_s)
        for slot, report in self.reports.items():
            self.reports[slot] = self.obey(slot, report, order)
        return order

    @staticmethod
    def obey(slot: int, report: Report, order: Order) -> Report:
        fields = {k: getattr(report, k) for k in ("epoch", "running", "code", "leaving")}
        if order.action is Action.RUN and slot in order.members:
            if report.epoch < order.epoch:
                fields |= {"epoch": order.epoch, "running": True, "code": None}
        elif report.running:
            code = 0 if order.action is Action.STOP else -signal.SIGKILL
            fields |= {"running": False, "code": code}
        return Report(**fields, obeys=order.tag)

    def end(self, slot: int, code: int) -> None:
        report = self.reports[slot]
        self.reports[slot] = Report(epoch=report.epoch, code=code, obeys=report.obeys)

    def until(self, action: Action, limit_s: int = 200) -> Order:
        for _ in range(limit_s):
            order = self.beat()
            if order.action is action:
                return order
        raise AssertionError(f"never {action}: {order}")


def members(order: Order) -> list[int]:
    return sorted(order.members)


def test_a_job_is_founded_by_all_its_slots() -> None:
    slots = Slots(3)
    late = slots.reports.pop(2)
    assert slots.beat().action is Action.WAIT
    slots.reports[2] = late
    order = slots.beat()
    assert (order.action, order.epoch, members(order)) == (Action.RUN, 1, [0, 1, 2])
    assert order.coordinator == "host:1"


def test_slots_that_do_not_come_are_named() -> None:
    slots = Slots(4)
    del slots.reports[1], slots.reports[3]
    order = slots.until(Action.END)
    assert slots.now_s == TIMING.join_s
    assert order.code == 1 and "slots 1, 3 did not come in 100 s" in order.error


def test_a_job_that_was_there_before_goes_on_with_the_slots_that_come() -> None:
    slots = Slots(3, resuming=True)
    del slots.reports[2]
    order = slots.until(Action.RUN)
    assert (slots.now_s, members(order)) == (TIMING.join_s, [0, 1])


def test_a_crash_ends_all_workers_before_the_next_world() -> None:
    slots = Slots(2)
    slots.beat()
    slots.end(1, -signal.SIGSEGV)
    order = slots.beat()
    assert (order.action, order.epoch) == (Action.KILL, 1)
    assert order.reason == "the worker of slot 1 ended by SIGSEGV"
    # Slot 0 has not heard the order: its worker may be about to start, say.
    stale = slots.reports[0]
    slots.reports[0] = Report(epoch=1, obeys="0 1 run")
    assert slots.beat().action is Action.KILL
    slots.reports[0] = stale
    order = slots.until(Action.RUN)
    assert (order.epoch, members(order), order.coordinator) == (2, [0, 1], "host:2")


def test_a_broken_connection_is_waited_for_until_the_slot_is_surely_gone() -> None:
    slots = Slots(2)
    slots.beat()
    del slots.reports[1]
    slots.register.lose(1, slots.now_s)
    broken_s = slots.now_s
    assert slots.beat().action is Action.KILL
    order = slots.until(Action.RUN)
    assert slots.now_s - broken_s == TIMING.lost_s
    assert (order.epoch, members(order), order.process_id(0)) == (2, [0], 0)


def test_a_slot_that_is_known_to_be_gone_is_not_waited_for() -> None:
    slots = Slots(2)
    slots.beat()
    del slots.reports[1]
    slots.register.lose(1, slots.now_s)
    assert slots.register.unsure == {1}
    slots.register.bury(1)
    slots.beat()
    assert slots.until(Action.RUN).epoch == 2 and slots.now_s == 3


def test_a_silent_slot_is_lost() -> None:
    slots = Slots(2)
    slots.beat()
    del slots.reports[1]
    heard_s = slots.now_s
    order = slots.until(Action.KILL)
    assert slots.now_s - heard_s == TIMING.lost_s
    assert order.reason == "slot 1 is lost"
    assert members(slots.until(Action.RUN)) == [0]


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (2, 2), (3, 1), (130, 130)])
def test_a_worker_that_ends_for_good_ends_the_job(code: int, ends: int) -> None:
    slots = Slots(2)
    slots.beat()
    slots.end(1, code)
    order = slots.until(Action.END)
    assert (order.code, order.error) == (ends, "")


def test_an_error_that_comes_with_a_lost_slot_does_not_end_the_job() -> None:
    """A machine dies; what the other worker meets is an error in writing, say."""
    slots = Slots(2)
    slots.beat()
    del slots.reports[1]  # silent from now on
    slots.beat()
    slots.end(0, 3)
    order = slots.until(Action.KILL)
    assert order.reason == "slot 1 is lost"
    assert members(slots.until(Action.RUN)) == [0]


def test_three_crashes_without_a_new_checkpoint_end_the_job() -> None:
    slots = Slots(2)
    slots.beat()
    for step in (-1, 4, 4):  # the second world made progress
        slots.step = step
        slots.end(0, 1)
        assert slots.until(Action.KILL).error == ""
        assert slots.until(Action.RUN).action is Action.RUN
    slots.end(0, 1)
    order = slots.until(Action.END)
    assert order.code == 1
    assert "ended with exit code 1: 3 crashes since the checkpoint of step 4" in order.error


@pytest.mark.parametrize("code", [0, -signal.SIGTERM])
def test_a_slot_that_comes_back_joins_at_a_step_boundary(code: int) -> None:
    slots = Slots(2)
    slots.beat()
    del slots.reports[1]
    slots.register.lose(1, slots.now_s)
    slots.register.bury(1)
    assert members(slots.until(Action.RUN)) == [0]
    slots.reports[1] = Report()
    order = slots.beat()
    assert (order.action, order.reason) == (Action.STOP, "slot 1 joins")
    slots.end(0, code)
    order = slots.until(Action.RUN)
    assert (order.epoch, members(order)) == (3, [0, 1])


@pytest.mark.parametrize(("code", "after_s"), [(-signal.SIGTERM, 1), (0, TIMING.finish_s)])
def test_a_worker_is_not_left_waiting_for_one_that_has_stopped(code: int, after_s: float) -> None:
    slots = Slots(2)
    slots.beat()
    slots.reports[2] = Report()
    assert slots.beat().action is Action.STOP
    stopped_s = slots.now_s
    slots.end(0, code)
    slots.reports[1] = Report(epoch=1, running=True, obeys="0 1 stop")
    stuck = slots.reports[1]
    while slots.beat().action is Action.STOP:
        slots.reports[1] = stuck
    assert slots.now_s - stopped_s == after_s
    assert members(slots.until(Action.RUN)) == [0, 1, 2]


def test_a_slot_leaves_and_the_last_one_ends_the_job() -> None:
    slots = Slots(2)
    slots.beat()
    slots.reports[1] = Report(epoch=1, running=True, leaving=True)
    assert slots.beat().reason == "slot 1 leaves"
    assert members(slots.until(Action.RUN)) == [0]
    slots.reports[0] = Report(epoch=2, running=True, leaving=True)
    assert slots.until(Action.END).code == 0


def test_a_new_leader_fences_the_old_world() -> None:
    slots = Slots(3, leader=1, epoch=7, left="12")
    slots.reports = {1: Report(epoch=7)}  # slot 2 has not found the new leader yet
    assert slots.beat().action is Action.KILL
    assert slots.register.unsure == {2}
    slots.reports[2] = Report(epoch=7, running=True)  # and its worker runs
    assert slots.beat().action is Action.KILL
    order = slots.until(Action.RUN)
    assert (order.epoch, order.process_id(1), order.process_id(2)) == (8, 0, 1)


def test_the_leader_is_process_0_whatever_its_slot() -> None:
    order = Order(epoch=1, action=Action.RUN, members={0: "a:1", 2: "b:1", 3: "c:1"}, leader=2)
    assert [order.process_id(slot) for slot in range(4)] == [1, None, 0, 2]
    assert read_order(order_message(order)) == order


@pytest.mark.parametrize(
    "break_it",
    [lambda m: m["order"].pop("epoch"), lambda m: m["order"].update(action="dance"), dict.clear],
)
def test_what_is_no_order_is_refused(break_it: Callable[..., None]) -> None:
    message = order_message(Order(epoch=1, action=Action.RUN, members={}, leader=0))
    break_it(message)
    with pytest.raises((ValueError, KeyError, TypeError)):
        read_order(message)
