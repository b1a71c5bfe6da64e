"""A job changes its plan at a step boundary and nothing of its logical state with it."""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from nereus_jax.core.roles import CRITIC_TRAIN
from nereus_jax.core.transition import TransitionGraph, Way
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.transitions import Batch, Executed, batches, execute
from nereus_jax.trainer import plan_change
from nereus_jax.trainer.session import Session
from nereus_jax.trainer.state import JobState
from tests.trainer.plan_change_cases import boundary, logical, opened, tiny_config

# Entry by entry what becomes of the plan of `tiny_config`.
CHANGES: Mapping[str, Mapping[str, str]] = {
    "doubled": {
        "actor-TRAIN": "dp=4,pp=1,tp=2",
        "critic-TRAIN": "dp=4,pp=1,tp=1,devices=4-7",
        "reference-SCORE": "dp=2,pp=1,tp=2",
    },
    "halved": {
        "actor-TRAIN": "dp=1,pp=1,tp=2,devices=2-3",
        "critic-TRAIN": "dp=1,pp=1,tp=1,devices=5",
        "reference-SCORE": "dp=1,pp=1,tp=1,devices=1",
    },
    "other tp and pp": {
        "actor-TRAIN": "dp=1,pp=2,tp=4",
        "critic-TRAIN": "dp=1,pp=2,tp=2,devices=0-3",
        "reference-SCORE": "dp=1,pp=2,tp=1,devices=6-7",
    },
    "no power of two": {
        "actor-TRAIN": "dp=3,pp=1,tp=2,devices=1-6",
        "critic-TRAIN": "dp=3,pp=2,tp=1,devices=0-2,5-7",
        "reference-SCORE": "dp=5,pp=1,tp=1,devices=2-6",
    },
}


@pytest.fixture(scope="module")
def programs() -> ProgramCache:
    return ProgramCache()


def check_changed(session: Session, state: JobState, wanted: dict[str, Any]) -> None:
    """The job and its state are under the first plan of `plan_changes`, the values the same."""
    planned = session.schedule.jobs[1]
    assert session.job.plan == planned.plan
    for stage, held in state.trained.items():
        for name, array in held.params.items():
            mesh = array.sharding.mesh
            assert mesh == planned.sites[stage].mesh, name
    got = logical(session.job, state)
    assert got.keys() == wanted.keys()
    assert [name for name, value in got.items() if value != wanted[name]] == []


@pytest.mark.parametrize(
    ("name", "zero1"),
    [
        pytest.param("doubled", False),
        pytest.param("doubled", True, marks=pytest.mark.slow),
        pytest.param("halved", False, marks=pytest.mark.slow),
        pytest.param("halved", True, marks=pytest.mark.slow),
        pytest.param("other tp and pp", False),
        pytest.param("other tp and pp", True, marks=pytest.mark.slow),
        pytest.param("no power of two", False, marks=pytest.mark.slow),
        pytest.param("no power of two", True),
    ],
)
def test_the_state_is_the_same_to_the_bit(
    name: str, zero1: bool, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(train__zero1=zero1)
    config.plan_changes["1"] = CHANGES[name]
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        before = logical(session.job, state)
        boundary(session, state, 1)
        check_changed(session, state, before | {"counters": state.counters})


@pytest.mark.slow
@pytest.mark.parametrize("way", ["composed", "direct"])
def test_one_replica_to_one_replica_under_zero1(
    way: str, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units on the way are several, but none of them holds a part of the optimizer only."""
    config = tiny_config(train__zero1=True, transition__way=way)
    config.plan["actor-TRAIN"] = "dp=1,pp=2,tp=2"
    config.plan_changes["1"] = {"actor-TRAIN": "dp=1,pp=1,tp=4"}
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        before = logical(session.job, state)
        boundary(session, state, 1)
        check_changed(session, state, before | {"counters": state.counters})


class Plug:
    """Pulled before one batch of operations, so many times.

    Args:
      number: of the batch, counted over all that are begun.
      times: that it is pulled.
    """

    def __init__(self, number: int, times: int = 1) -> None:
        self.number, self.times, self.begun = number, times, 0

    def __call__(self, batch: Batch) -> None:
        self.begun += 1
        if self.number < self.begun <= self.number + self.times:
            raise RuntimeError("no power")


def number_of_batches(session: Session) -> int:
    prepared = session.schedule.prepared
    assert prepared is not None
    return len(batches(prepared.graph))


SMALL = {
    "model__num_kv_heads": 4,  # fewer cuts, fewer programs
    "algorithm__kl__place": "none",
}
MOVES = {"actor-TRAIN": "dp=2,pp=2,tp=1,devices=1-4", "critic-TRAIN": "dp=1,pp=1,tp=2,devices=2-3"}


def test_an_exception_at_any_operation_leaves_the_old_plan(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**SMALL)
    config.plan_changes["1"] = config.plan_changes["2"] = MOVES
    config.plan_changes["3"] = {"actor-TRAIN": "dp=1,pp=1,tp=2"}
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        job, before = session.job, logical(session.job, state)
        for number in range(number_of_batches(session)):
            session.observe = Plug(number)
            said = boundary(session, state, 1)
            assert "the old plan goes on: the transition stopped at operation" in said[-1]
            assert session.job is job
            assert logical(job, state) == before | {"counters": state.counters}
            session.schedule.prepare_next(job, 1)
        session.observe = None
        boundary(session, state, 1)
        check_changed(session, state, before | {"counters": state.counters})
        assert session.schedule.due(3) is not None  # the second is the plan that holds now


@pytest.mark.parametrize("times", [1, 2])
def test_without_room_for_the_old_state_it_goes_on_from_whole_units(
    times: int, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the same operation is tried again. Twice: the rest is planned anew."""
    monkeypatch.setattr(TransitionGraph, "old_state_fits", property(lambda graph: False))
    config = tiny_config(**SMALL)
    config.plan_changes["1"] = MOVES
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        job, before, first = session.job, logical(session.job, state), copy.copy(state)
        for number in range(number_of_batches(session)):
            session.observe = Plug(number, times)
            said = boundary(session, state, 1)
            anew = [text for text in said if "going on from the units that are intact" in text]
            assert len(anew) == times - 1
            check_changed(session, state, before | {"counters": state.counters})
            session.job, state = job, copy.copy(first)
            session.schedule.prepare_next(job, 1)


def test_what_never_goes_through_is_given_up(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransitionGraph, "old_state_fits", property(lambda graph: False))
    config = tiny_config(**SMALL)
    config.plan_changes["1"] = MOVES
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        before = logical(session.job, state)
        session.observe = Plug(1, 100)
        said = boundary(session, state, 1)
        assert "is given up; the job goes on where its state is now" in said[-1]
        assert session.job.plan != session.schedule.jobs[1].plan
        assert logical(session.job, state) == before | {"counters": state.counters}


def swapping_config() -> Any:
    """Two model-stages that change places, on devices that hold only one of them at a time."""
    config = tiny_config(**SMALL)
    config.plan["actor-TRAIN"] = "dp=1,pp=1,tp=2,devices=0-1"
    config.plan["critic-TRAIN"] = "dp=1,pp=1,tp=2,devices=2-3"
    config.plan["actor-GENERATE"] = "dp=1,pp=1,tp=2,devices=4-5"
    config.plan["critic-SCORE"] = "dp=1,pp=1,tp=1,devices=7"
    config.plan_changes["1"] = {
        "actor-TRAIN": "dp=1,pp=2,tp=1,devices=2-3",
        "critic-TRAIN": "dp=1,pp=1,tp=2,devices=0-1",
    }
    return config


@pytest.mark.parametrize("times", [0, 1, 2])
def test_state_that_waits_in_host_memory_is_whole_at_every_operation(
    times: int, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = swapping_config()
    config.device_memory_gib = 47_000 / 2**30
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        job, before, first = session.job, logical(session.job, state), copy.copy(state)
        prepared = session.schedule.prepared
        assert prepared is not None and not prepared.graph.old_state_fits
        assert Way.PARKED in {choice.way for choice in prepared.graph.choices.values()}
        for number in range(number_of_batches(session) if times else 1):
            session.observe = Plug(number, times)
            boundary(session, state, 1)
            check_changed(session, state, before | {"counters": state.counters})
            session.job, state = job, copy.copy(first)
            session.schedule.prepare_next(job, 1)


def flip_a_bit(executed: Executed) -> Executed:
    """One bit of one block of the critic is wrong."""
    unit = next(iter(executed.units[CRITIC_TRAIN].values()))
    blocks = dict(unit.blocks["parameters.layers.up"])
    device, block = next(iter(blocks.items()))
    wrong = np.array(block)
    wrong.reshape(-1).view(np.uint32)[3] ^= 1 << 20
    blocks[device] = jax.device_put(wrong, block.device)
    leaves = dict(unit.blocks) | {"parameters.layers.up": blocks}
    broken = dataclasses.replace(unit, blocks=leaves)
    held = dict(executed.units[CRITIC_TRAIN]) | {unit.unit: broken}
    return dataclasses.replace(executed, units=executed.units | {CRITIC_TRAIN: held})


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ("digest", True),
        ("off", True),
        ("full", True),
        pytest.param("digest", False, marks=pytest.mark.slow),
        pytest.param("full", False, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_bit_is_found(
    how: str, kept: bool, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransitionGraph, "old_state_fits", property(lambda graph: kept))
    monkeypatch.setattr(plan_change, "execute", lambda *a, **k: flip_a_bit(execute(*a, **k)))
    config = tiny_config(**SMALL, transition__verify=how, checkpoint__every=1)
    config.plan_changes["1"] = MOVES
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        job, before = session.job, logical(session.job, state)
        said = boundary(session, state, 1)
        if how == "off":
            got = logical(session.job, state)
            wrong = [name for name, value in got.items() if value != before[name]]
            assert wrong == ["counters", "critic-TRAIN parameters.layers.up"]
            return
        assert session.job is job
        assert any("critic-TRAIN: 'parameters.layers.up' has" in text for text in said)
        if kept:
            assert "the old plan goes on" in said[-1]
            assert logical(job, state) == before | {"counters": state.counters}
        else:
            assert said[-1] == "resumed from the checkpoint of step 0"
            assert state.counters.step == 0 and logical(job, state) != before
