"""What a controller decides is done, whatever happens to the job meanwhile, and it is told."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from nereus_jax.control.controller import Controller
from nereus_jax.control.state import ControllerState
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import DevicesLostError, InfeasiblePlanError, OutOfMemoryError
from nereus_jax.core.events import (
    Decision,
    DevicesLost,
    Event,
    Halt,
    Keep,
    OutOfMemory,
    Revocation,
    Transition,
    TransitionEnded,
)
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN
from nereus_jax.core.transition import TransitionGraph, Way, placed_units
from nereus_jax.runtime.checkpoints import CheckpointStore
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.transitions import Batch, batches
from nereus_jax.trainer import footprint, loop, moves, outputs, recovery, steering
from nereus_jax.trainer.adaptation import make_adaptation
from nereus_jax.trainer.half_way import form_of, has_whole
from nereus_jax.trainer.plan_change import PlanChange
from nereus_jax.trainer.pool_events import PoolInbox, PoolSources
from nereus_jax.trainer.session import Session
from nereus_jax.trainer.state import JobState
from tests.trainer import plan_change_cases as cases
from tests.trainer.plan_change_cases import Devices, boundary, logical, opened, tiny_config

pytestmark = pytest.mark.slow

SMALL = cases.SMALL | {
    "checkpoint__every": 1,
    "control__policy": "static",
    "transition__verify": "digest",
}


@pytest.fixture(scope="module")
def programs() -> ProgramCache:
    return ProgramCache()


@dataclasses.dataclass
class Script:
    """Stands for a controller whose decisions are known: one for each event that is no end of a
    move."""

    settings: Any
    decisions: list[Decision]
    heard: list[Event] = dataclasses.field(default_factory=list)

    def on_event(self, state: ControllerState, event: Event) -> tuple[ControllerState, Decision]:
        self.heard.append(event)
        if isinstance(event, TransitionEnded):
            return dataclasses.replace(state, plan=event.plan, pending=None), Keep()
        if isinstance(event, DevicesLost):
            state = dataclasses.replace(state, pool=state.pool.without(event.devices))
        decision = self.decisions.pop(0)
        if isinstance(decision, Transition):
            state = dataclasses.replace(state, pending=decision.target, pending_s=1.0)
        return state, decision

    @property
    def ends(self) -> list[TransitionEnded]:
        return [event for event in self.heard if isinstance(event, TransitionEnded)]


RECORD = {"step": 1, "verdict": "urgent", "trigger": "pool", "reason": "so", "target": {}}
NEWS = Revocation(time_s=0.0, devices=(DeviceId(0, 7),), deadline_s=1e6)


def to(target: ExecutionPlan, **changes: Any) -> Transition:
    values: dict[str, Any] = {"target": target, "urgent": True, "record": RECORD}
    return Transition(**values | changes)


@contextmanager
def controlled(
    workdir: Path, programs: ProgramCache, patch: pytest.MonkeyPatch, **changes: Any
) -> Iterator[tuple[Session, JobState, Script]]:
    """A session at step 1 whose checkpoint of step 0 is another state, under a script."""
    patch.setattr(moves, "compile_programs", lambda job, warmup: None)
    config = tiny_config(**SMALL | changes)
    with opened(config, workdir, programs, patch) as (session, state):
        assert session.schedule.hardware is not None
        sources = PoolSources(inbox=PoolInbox())
        made = make_adaptation(session.job, session.schedule.hardware, sources)
        script = Script(settings=made.controller.settings, decisions=[])
        stands: Any = script
        made.controller = stands
        assert isinstance(made.controller, Script | Controller)
        session.adaptation = made
        state.counters = dataclasses.replace(state.counters, step=1)
        yield session, state, script


def moved(job: Any, devices: Sequence[int], dp: int, tp: int, zero1: bool = False) -> ExecutionPlan:
    """The plan with the actor elsewhere."""
    placement = Placement(
        layout=ParallelLayout(dp, 1, tp), devices=tuple(DeviceId(0, i) for i in devices)
    )
    placements = dict(job.plan.placements) | dict.fromkeys((ACTOR_TRAIN, ACTOR_GENERATE), placement)
    choices = dict(job.execution.choices)
    choices[ACTOR_TRAIN] = dataclasses.replace(choices[ACTOR_TRAIN], zero1=zero1)
    return ExecutionPlan(plan=Plan(placements=placements), choices=choices)


def decide(session: Session, state: JobState, script: Script, *decisions: Decision) -> str:
    """One boundary at which the controller has news."""
    assert session.adaptation is not None
    script.decisions += decisions
    session.adaptation.tell(NEWS)
    return steering.steer(session, state)


def no_checkpoint(patch: pytest.MonkeyPatch) -> None:
    def restore(*arguments: Any) -> Any:
        raise AssertionError("a checkpoint was read")

    patch.setattr(CheckpointStore, "restore", restore)


def test_a_move_is_planned_again_with_the_room_that_the_job_has(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        before, target = logical(session.job, state), moved(session.job, [2, 3, 6, 7], 2, 2)
        decide(session, state, script, to(target))
        room = session.job.room - 2
        session.job = session.job.with_room(room)
        recovery.prepare_next(session, 2)  # as a step does whose responses have outgrown the room
        prepared = session.schedule.prepared
        assert prepared is not None and prepared.new.execution == target
        assert prepared.new.room == prepared.old.room == room
        session.schedule.hurries = True
        boundary(session, state, 2)
        assert (session.job.execution, session.job.room) == (target, room)
        assert logical(session.job, state) == before | {"counters": state.counters}
        steering.steer(session, state)
        (end,) = script.ends
        assert (end.plan, end.error) == (target, "") and end.seconds > 0
        assert session.schedule.decided is None and session.schedule.prepared is None


def test_a_move_that_has_no_room_any_more_is_told(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        target = moved(session.job, [2, 3, 6, 7], 2, 2)
        decide(session, state, script, to(target))

        def refuse(*arguments: Any) -> None:
            raise InfeasiblePlanError("no memory for so many tokens")

        monkeypatch.setattr(footprint, "check_memory", refuse)
        recovery.prepare_next(session, 2)
        assert session.schedule.prepared is None
        steering.steer(session, state)
        assert [end.error for end in script.ends] == ["no memory for so many tokens"]
        rows = outputs_of(session)
        assert rows[-1]["transition_error"] == "no memory for so many tokens"


def outputs_of(session: Session) -> list[dict[str, Any]]:
    return cases.Run(workdir=session.workdir).rows("decisions")


def test_a_step_that_has_no_memory_makes_the_move_that_waits(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(session: Session, state: JobState) -> None:
        raise OutOfMemoryError("no room for so many tokens")

    monkeypatch.setattr(loop, "_one_step", full)
    monkeypatch.setattr(PlanChange, "is_ready", lambda self: False)
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        before, target = logical(session.job, state), moved(session.job, [2, 3, 6, 7], 2, 2)
        script.decisions.append(Keep())
        with pytest.raises(OutOfMemoryError):  # nothing is decided, and there is no other plan
            loop.step_or_move(session, state)
        decide(session, state, script, to(target))
        loop.step_or_move(session, state)
        assert session.job.execution == target
        assert logical(session.job, state) == before | {"counters": state.counters}
        steering.steer(session, state)
        assert [(end.plan, end.error) for end in script.ends] == [(target, "")]
        script.decisions.append(Keep())
        with pytest.raises(OutOfMemoryError):  # the plan that was to have the memory has it not
            loop.step_or_move(session, state)


def test_the_controller_is_told_of_a_step_that_has_no_memory(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(session: Session, state: JobState) -> None:
        raise OutOfMemoryError("no room for so many tokens", 40)

    monkeypatch.setattr(loop, "_one_step", full)
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        before, first = logical(session.job, state), moved(session.job, [2, 3, 6, 7], 2, 2)
        script.decisions.append(to(first))
        loop.step_or_move(session, state)
        assert [e.room_tokens for e in script.heard if isinstance(e, OutOfMemory)] == [40]
        assert session.job.execution == first
        assert logical(session.job, state) == before | {"counters": state.counters}

        state.updating = True  # then the state before the step is that of the last checkpoint
        second = moved(session.job, [0, 1, 6, 7], 2, 2)
        script.decisions.append(to(second))
        loop.step_or_move(session, state)
        assert session.job.execution == second
        assert state.counters.step == 0 and not state.updating
        steering.steer(session, state)
        assert [(end.plan, end.error) for end in script.ends] == [(first, ""), (second, "")]
        for attempt in (first, second):  # a step that never succeeds is given up
            script.decisions.append(to(attempt))
            try:
                loop.step_or_move(session, state)
            except OutOfMemoryError:
                break
        else:
            raise AssertionError("the controller was asked without end")


def test_a_move_for_memory_without_a_way_goes_through_a_checkpoint(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(session: Session, state: JobState) -> None:
        raise OutOfMemoryError("no room for so many tokens", 40)

    def no_way(*arguments: Any) -> PlanChange:
        raise InfeasiblePlanError("both ends do not fit")

    monkeypatch.setattr(loop, "_one_step", full)
    monkeypatch.setattr(moves, "plan_change", no_way)
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        before, target = logical(session.job, state), moved(session.job, [2, 3, 6, 7], 2, 2)
        script.decisions.append(to(target))
        loop.step_or_move(session, state)
        assert session.job.execution == target
        assert logical(session.job, state) == before  # of this very step
        assert session.store.latest_step() == state.counters.step
        assert session.schedule.decided is None


def test_what_cannot_be_begun_is_decided_anew_at_once(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = footprint.check_memory
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        first, second = (moved(session.job, where, 2, 2) for where in ([2, 3, 6, 7], [0, 1, 6, 7]))

        def refuse(job: Any, stages: Any) -> None:
            if job.execution == first:
                raise InfeasiblePlanError("no memory")
            real(job, stages)

        monkeypatch.setattr(footprint, "check_memory", refuse)

        def on_event(state: ControllerState, event: Event) -> tuple[ControllerState, Decision]:
            state, decision = Script.on_event(script, state, event)
            if isinstance(event, TransitionEnded) and event.error:
                decision = to(second)
                state = dataclasses.replace(state, pending=second)
            return state, decision

        monkeypatch.setattr(script, "on_event", on_event)
        decide(session, state, script, to(first))
        assert session.schedule.decided is not None
        assert session.schedule.decided.target == second
        assert len(outputs_of(session)) == 2


def test_a_decision_by_checkpoint_saves_what_is_whole(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        before, target = logical(session.job, state), moved(session.job, [2, 3, 6, 7], 2, 2)
        assert decide(session, state, script, to(target, by_checkpoint=True)) == ""
        assert session.job.execution == target
        assert session.store.latest_step() == 1
        assert logical(session.job, state) == before | {"counters": state.counters}
        (end,) = script.ends
        assert (end.plan, end.error) == (target, "") and end.seconds > 0
        (row,) = outputs_of(session)
        assert row["transition_s_measured"] == end.seconds and "transition_error" not in row
        (metrics,) = cases.Run(workdir=session.workdir).transitions()
        assert set(metrics["transition_ways"].values()) == {str(Way.RESTORED)}


def test_a_replica_fills_a_plan_with_zero1(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices()
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        before, target = logical(session.job, state), moved(session.job, [2, 3], 2, 1, zero1=True)
        no_checkpoint(monkeypatch)
        assert devices.lose(DeviceId(0, 1))
        script.decisions.append(to(target))
        boundary(session, state, 1)
        assert session.job.execution == target and session.job.trains[ACTOR_TRAIN].zero1
        assert logical(session.job, state) == before | {"counters": state.counters}
        steering.steer(session, state)
        assert [end.error for end in script.ends] == [""]
        (row,) = outputs_of(session)
        assert row["transition_s_measured"] > 0


def test_units_that_are_left_on_the_way_to_zero1_are_known_for_what_they_are(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole before the operation, parts after it; a loss before any operation is survived."""
    monkeypatch.setattr(TransitionGraph, "old_state_fits", property(lambda graph: False))
    no_checkpoint(monkeypatch)
    number, count = 0, 1
    while number < count:
        devices, begun = Devices(), []
        work = controlled(tmp_path / str(number), programs, monkeypatch)
        with work as (session, state, script):
            before = logical(session.job, state)
            target = moved(session.job, [2, 3], 2, 1, zero1=True)
            decide(session, state, script, to(target))
            prepared = session.schedule.prepared
            assert prepared is not None
            count = len(batches(prepared.graph))
            check_forms(prepared, session)
            script.decisions.append(Keep())

            def lose(
                batch: Batch,
                begun: list[Batch] = begun,
                number: int = number,
                devices: Devices = devices,
            ) -> None:
                if len(begun) == number:
                    devices.lose(DeviceId(0, 1))
                begun.append(batch)

            session.observe = lose
            for _ in range(2):
                session.schedule.hurries = True
                boundary(session, state, 1)
            assert session.job.execution == target
            assert logical(session.job, state) == before | {"counters": state.counters}
        number += 1


def check_forms(change: PlanChange, session: Session) -> None:
    old, new = (
        placed_units(ACTOR_TRAIN, job.plan[ACTOR_TRAIN]) for job in (change.old, change.new)
    )
    held = {unit: cast(Any, None) for unit in (*old, *new)}
    first, last = (form_of(change, n, ACTOR_TRAIN) for n in (0, len(change.graph.operations)))
    assert not first.choice.zero1 and last.choice.zero1
    assert has_whole(first, {ACTOR_TRAIN: {old[1]: held[old[1]]}}, ACTOR_TRAIN)
    assert not has_whole(first, {}, ACTOR_TRAIN)
    assert not has_whole(last, {ACTOR_TRAIN: {new[0]: held[new[0]]}}, ACTOR_TRAIN)
    assert has_whole(last, {ACTOR_TRAIN: {unit: held[unit] for unit in new}}, ACTOR_TRAIN)


def test_without_a_copy_the_decision_stays_on_record(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices()
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        target = moved(session.job, [1, 3], 2, 1)
        assert devices.lose(DeviceId(0, 0), DeviceId(0, 2))
        script.decisions.append(to(target))
        boundary(session, state, 1)
        assert session.job.execution == target and state.counters.step == 0
        (row,) = outputs_of(session)
        assert row["step"] == 1 and row["transition_s_measured"] > 0
        assert row["transition_error"] == "it was reached through a checkpoint"


@pytest.mark.parametrize("lost", [0, 7])
def test_a_loss_on_the_way_does_not_end_the_move(
    lost: int, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller keeps to its target; the job is there at once if it must be."""
    devices = Devices()
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        before, target = logical(session.job, state), moved(session.job, [2, 3], 1, 2)
        decide(session, state, script, to(target))
        no_checkpoint(monkeypatch)
        devices.lose(DeviceId(0, lost))
        script.decisions.append(Keep())
        recovery.go_on_without(
            session, state, DevicesLostError("lost", frozenset([DeviceId(0, lost)]))
        )
        assert DeviceId(0, lost) not in session.job.world.pool.devices
        if lost == 0:
            assert session.job.execution == target and session.schedule.prepared is None
        else:  # nothing was on it
            assert session.job.execution != target and session.schedule.decided is not None
            session.schedule.hurries = True
            boundary(session, state, 1)
            assert session.job.execution == target
        assert logical(session.job, state) == before | {"counters": state.counters}
        assert DeviceId(0, lost) not in session.job.world.pool.devices


def test_devices_that_come_are_not_forgotten_by_a_move(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        assert session.adaptation is not None and session.adaptation.state is not None
        gone, target = DeviceId(0, 6), moved(session.job, [2, 3], 1, 2)
        session.job = dataclasses.replace(session.job, world=session.job.world.without([gone]))
        known = dataclasses.replace(
            session.adaptation.state, pool=session.adaptation.state.pool.without([gone])
        )
        session.adaptation.state = known
        session.adaptation.sources.inbox.publish(
            dataclasses.replace(status(session), pool=known.pool)
        )
        decide(session, state, script, to(target))
        session.adaptation.sources.inbox.submit({"change": "joined", "devices": ["0:6"]})
        script.decisions.append(Keep())
        steering.steer(session, state)
        session.schedule.hurries = True
        boundary(session, state, 1)
        assert session.job.execution == target and gone in session.job.world.pool.devices


def status(session: Session) -> Any:
    assert session.adaptation is not None
    found = session.adaptation.sources.inbox._status
    assert found is not None
    return found


def test_a_halt_saves_and_says_how_to_go_on(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        reason = decide(session, state, script, Halt(reason="start it again", checkpoint=True))
        assert reason == "start it again"
        session.store.wait()
        assert session.store.latest_step() == 1


def test_a_move_that_the_controller_takes_back_is_not_made(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        assert session.adaptation is not None
        decide(session, state, script, to(moved(session.job, [2, 3], 1, 2)))
        known = session.adaptation.state
        assert known is not None and session.schedule.prepared is not None
        session.adaptation.state = dataclasses.replace(known, pending=None)
        steering.steer(session, state)
        assert session.schedule.prepared is None and session.schedule.decided is None


def test_emulated_devices_go_when_their_time_is_over(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        assert session.adaptation is not None and session.adaptation.state is not None
        session.adaptation.state = dataclasses.replace(
            session.adaptation.state, leaving={DeviceId(0, 1): 0.0}
        )
        with pytest.raises(DevicesLostError, match="lost devices: 0:1"):
            steering.steer(session, state)
        assert not script.heard  # it is told when the job has taken note of it


def test_messages_of_the_file_that_cannot_be_are_said(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(outputs.Outputs, "message", lambda self, text: said.append(text))
    with controlled(tmp_path, programs, monkeypatch) as (session, state, script):
        assert session.adaptation is not None and session.adaptation.state is not None
        inbox = session.adaptation.sources.inbox
        inbox.submit({"change": "revoke", "devices": ["0:7"], "deadline_s": 5})
        session.adaptation.state = dataclasses.replace(
            session.adaptation.state, pool=session.adaptation.state.pool.without([DeviceId(0, 7)])
        )
        steering.steer(session, state)
        assert not script.heard
        assert any("0:7 is not there and cannot be revoked" in line for line in said)
