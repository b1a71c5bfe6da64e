"""Devices go, at any moment: the job goes on from what is intact, else from the last checkpoint."""

from pathlib import Path
from typing import Any

import jax
import pytest

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import DevicesLostError, InfeasiblePlanError
from nereus_jax.core.roles import ACTOR_TRAIN, REFERENCE_SCORE
from nereus_jax.core.transition import TransitionGraph
from nereus_jax.runtime import faults
from nereus_jax.runtime.dispatch import run_wave
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.transitions import Batch, batches
from nereus_jax.trainer import loop
from nereus_jax.trainer import step as step_module
from nereus_jax.trainer.session import Session, resume_state
from nereus_jax.trainer.state import JobState
from tests.trainer import plan_change_cases as cases
from tests.trainer.plan_change_cases import (
    Devices,
    Run,
    Trainer,
    boundary,
    logical,
    opened,
    tiny_config,
)

SMALL = cases.SMALL | {"checkpoint__every": 1}
VERIFIED = SMALL | {"transition__verify": "digest"}


@pytest.fixture(scope="module")
def programs() -> ProgramCache:
    return ProgramCache()


def device(session: Session, index: int) -> DeviceId:
    return next(d for d in session.job.world.handles if d.index == index)


def check_goes_on(
    session: Session, state: JobState, wanted: dict[str, Any], lost: set[int]
) -> None:
    """The state is what is wanted, on a plan without the lost devices."""
    used = {d.index for p in session.job.plan.placements.values() for d in p.devices}
    assert used.isdisjoint(lost)
    assert {d.index for d in session.job.world.pool.devices} == set(range(8)) - lost
    got = logical(session.job, state)
    assert got.keys() == wanted.keys()
    assert [name for name, value in got.items() if value != wanted[name]] == []


def test_a_replica_is_left(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**VERIFIED)
    devices = Devices()
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        before = logical(session.job, state)
        assert devices.lose(device(session, 1))
        said = boundary(session, state, 1)
        check_goes_on(session, state, before | {"counters": state.counters}, {1})
        assert said[0] == "lost devices: 0:1; going on with 7 of 8 devices"
        assert not any("checkpoint" in text for text in said)
        plan = {
            str(s): [d.index for d in p.devices] for s, p in session.job.plan.placements.items()
        }
        assert plan["actor-TRAIN"] == plan["actor-GENERATE"] == [2, 3]
        assert plan["critic-TRAIN"] == plan["critic-SCORE"] == [4, 5]
        # The next one: the first is not used again, though the actor has no whole replica left.
        assert devices.lose(device(session, 4))
        boundary(session, state, 2)
        check_goes_on(session, state, before | {"counters": state.counters}, {1, 4})


@pytest.mark.slow
def test_blocks_of_broken_replicas_make_a_whole(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**SMALL)
    devices = Devices()
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        before = logical(session.job, state)
        devices.lose(device(session, 0), device(session, 3))
        said = boundary(session, state, 1)
        check_goes_on(session, state, before | {"counters": state.counters}, {0, 3})
        assert not any("checkpoint" in text for text in said)
        assert [d.index for d in session.job.plan[ACTOR_TRAIN].devices] == [1, 2]


@pytest.mark.parametrize(
    "zero1",
    [
        pytest.param(False, id="no replica"),
        pytest.param(True, id="zero1", marks=pytest.mark.slow),
    ],
)
def test_without_a_copy_the_last_checkpoint_holds(
    zero1: bool, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**SMALL, train__zero1=zero1)
    devices = Devices()
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        saved = checkpointed(session, state)
        lost = {1} if zero1 else {0, 2}
        devices.lose(*(device(session, i) for i in lost))
        said = boundary(session, state, 1)
        assert said[-1] == "resumed from the checkpoint of step 0"
        check_goes_on(session, state, saved, lost)


def checkpointed(session: Session, state: JobState) -> dict[str, Any]:
    """The logical state that the checkpoint of step 0 holds."""
    session.store.wait()
    return logical(session.job, resume_state(session, 0))


def test_without_a_checkpoint_it_is_one_line(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**SMALL | {"checkpoint__every": 0})
    devices = Devices()
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        devices.lose(device(session, 0), device(session, 2))
        with pytest.raises(DevicesLostError) as caught:
            boundary(session, state, 1)
        message = str(caught.value)
        assert "no checkpoint has been written; set checkpoint.every" in message
        assert "\n" not in message


@pytest.mark.slow
def test_without_any_device_it_is_one_line(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**SMALL)
    config.plan["actor-TRAIN"] = config.plan["actor-GENERATE"] = "dp=4,pp=1,tp=2"
    devices = Devices()
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        devices.lose(*session.job.world.pool.devices)
        with pytest.raises(InfeasiblePlanError, match="all devices are lost"):
            boundary(session, state, 1)


@pytest.mark.slow
def test_a_frozen_model_comes_from_the_checkpoint_alone(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(model__num_kv_heads=4, checkpoint__every=1)
    config.plan["reference-SCORE"] = "dp=1,pp=1,tp=2,devices=6-7"
    devices = Devices()
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        before = logical(session.job, state)
        devices.lose(device(session, 7))
        said = boundary(session, state, 1)
        check_goes_on(session, state, before | {"counters": state.counters}, {7})
        assert not any("going back" in text for text in said)
        assert session.job.plan[REFERENCE_SCORE].layout.num_devices == 2


# The actor's units go from devices 0-3 to 1-4, the critic's from 4-5 to 5 and 6.
MOVES = {"actor-TRAIN": "dp=2,pp=2,tp=1,devices=1-4", "critic-TRAIN": "dp=2,pp=1,tp=1,devices=5-6"}


def test_plans_on_lost_devices_are_dropped(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**SMALL)
    config.plan_changes["1"] = MOVES
    config.plan_changes["2"] = {"actor-TRAIN": "dp=1,pp=1,tp=2,devices=2-3"}
    config.plan_changes["3"] = {
        "actor-TRAIN": "dp=2,pp=1,tp=1,devices=6-7",
        "actor-GENERATE": "dp=1,pp=1,tp=2,devices=2-3",
    }
    devices = Devices()
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        before = logical(session.job, state)
        devices.lose(device(session, 1))
        said = boundary(session, state, 1)
        for step in (1, 2):  # GENERATE is on 0-3 until the third
            text = f"plan_changes.{step} is dropped: it needs devices that are lost"
            assert text in said
        check_goes_on(session, state, before | {"counters": state.counters}, {1})
        boundary(session, state, 3)
        assert [d.index for d in session.job.plan[ACTOR_TRAIN].devices] == [6, 7]
        check_goes_on(session, state, before | {"counters": state.counters}, {1})
        # Devices that were lost before the change are not taken for alive after it.
        devices.lose(device(session, 6))
        boundary(session, state, 4)
        check_goes_on(session, state, before | {"counters": state.counters}, {1, 6})


@pytest.mark.parametrize(
    "kept", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["kept", "given up"]
)
@pytest.mark.parametrize(
    "index", [3, pytest.param(5, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow)]
)
def test_a_device_goes_at_any_operation(
    index: int,
    kept: bool,
    programs: ProgramCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not kept:
        monkeypatch.setattr(TransitionGraph, "old_state_fits", property(lambda graph: False))
    config = tiny_config(**SMALL)
    config.plan_changes["1"] = MOVES
    came_back = lose_at_every_operation(config, index, tmp_path, programs, monkeypatch)
    assert not all(came_back)
    if kept:
        assert not any(came_back)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(4))
def test_a_device_goes_while_state_is_in_host_memory(
    index: int, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is parked goes with its device: here nothing has a second copy."""
    config = cases.swapping_config(
        checkpoint__every=1, device_memory_gib=cases.SMALL_MEMORY_GIB, transition__verify="digest"
    )
    came_back = lose_at_every_operation(config, index, tmp_path, programs, monkeypatch)
    assert any(came_back)


def lose_at_every_operation(
    config: Any, index: int, workdir: Path, programs: ProgramCache, patch: pytest.MonkeyPatch
) -> list[bool]:
    """Loses a device before each batch of a transition in turn, each time from the start.

    The state is that before the change, or that of the checkpoint if the run says so.

    Returns:
      Whether it was that of the checkpoint.
    """
    came_back: list[bool] = []
    while True:
        number = len(came_back)
        devices = Devices()
        with opened(config, workdir / str(number), programs, patch) as (session, state):
            prepared = session.schedule.prepared
            assert prepared is not None
            if number == len(batches(prepared.graph)):
                return came_back
            before, saved = logical(session.job, state), checkpointed(session, state)
            begun: list[Batch] = []
            gone = device(session, index)

            def lose(
                batch: Batch,
                number: int = number,
                begun: list[Batch] = begun,
                devices: Devices = devices,
                gone: DeviceId = gone,
            ) -> None:
                if len(begun) == number:
                    devices.lose(gone)
                begun.append(batch)

            session.observe = lose
            said = boundary(session, state, 1)
            came_back.append(any("resumed from the checkpoint" in text for text in said))
            wanted = saved if came_back[-1] else before | {"counters": state.counters}
            lost = {index}
            if gone in session.job.world.pool.devices:
                lost = set()  # what it held had been given up: nothing is missing
                assert not any("lost devices" in text for text in said)
            check_goes_on(session, state, wanted, lost)


# --- in steps that are taken ---


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture(scope="module")
def undisturbed(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nothing happens to."""
    run = trainer.run(steps_config(), tmp_path_factory.mktemp("undisturbed"))
    assert run.error is None
    return run


def steps_config() -> Any:
    """Two replicas of each, on few devices; GRPO has the fewest programs that are all kinds."""
    config = tiny_config(**VERIFIED, algorithm__name="grpo", num_steps=3)
    config.rollout.samples_per_prompt = 2
    config.rollout.batch_size = 8
    for entry in list(config.plan):
        del config.plan[entry]
    config.plan["actor-TRAIN"] = "dp=2,pp=1,tp=1,devices=0-1"
    config.plan["actor-GENERATE"] = "dp=2,pp=1,tp=1,devices=0-1"
    return config


def check_run(run: Run, undisturbed: Run, step: int, resumed: bool) -> None:
    """The step was taken again from the very state, and every sample was used once."""
    assert run.error is None
    assert run.said("lost devices: 0:0; going on with 7 of 8 devices")
    assert run.said("resumed from the checkpoint") == resumed
    for before in range(step + 1):
        assert run.states[before] == undisturbed.states[before]
    plan = run.jobs[step].plan
    assert all(d.index != 0 for p in plan.placements.values() for d in p.devices)
    assert [row["step"] for row in run.steps()] == [0, 1, 2]
    samples = [row["sample"] for row in run.rows("samples")]
    assert samples == [row["sample"] for row in undisturbed.rows("samples")] == list(range(48))
    prompts = [row["prompt"] for row in run.rows("samples")]
    assert prompts == [row["prompt"] for row in undisturbed.rows("samples")]
    for got, wanted in zip(run.steps()[: step + 1], undisturbed.steps(), strict=False):
        assert got["policy_version"] == wanted["policy_version"]
        assert got["policy_loss"] == pytest.approx(wanted["policy_loss"], abs=1e-5)
        assert got["reward_mean"] == pytest.approx(wanted["reward_mean"], abs=1e-6)


def first_device() -> DeviceId:
    return DeviceId(0, 0)


@pytest.mark.parametrize("wave", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_device_goes_between_waves(
    wave: int,
    trainer: Trainer,
    undisturbed: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After so many waves of the second step, before any update: intact replicas go on."""
    devices, waves = Devices(), []

    def run_some(*arguments: Any) -> Any:
        finished = run_wave(*arguments)
        if arguments[1] == 1:
            waves.append(finished)
            if len(waves) == wave + 1:
                assert devices.lose(first_device())
        return finished

    monkeypatch.setattr(step_module, "run_wave", run_some)
    run = trainer.run(steps_config(), tmp_path)
    check_run(run, undisturbed, 1, resumed=False)


@pytest.mark.slow
def test_a_device_goes_before_a_step(trainer: Trainer, undisturbed: Run, tmp_path: Path) -> None:
    devices, seen = Devices(), []

    def lose(session: Session, state: JobState) -> None:
        if state.counters.step == 1 and not seen:
            seen.append(devices.lose(first_device()))
            assert seen[0]

    run = trainer.run(steps_config(), tmp_path, before_step=lose)
    check_run(run, undisturbed, 1, resumed=False)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["refresh_edges", "evaluate"])
def test_a_device_does_not_answer(
    where: str,
    trainer: Trainer,
    undisturbed: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of the backend, where weights move and in an evaluation."""
    devices, gone, real = Devices(), [], getattr(loop, where)

    def fail(job: Any, state: JobState) -> Any:
        if state.counters.step != 1 or gone:
            return real(job, state)
        gone.append(first_device())
        devices.lose(first_device())
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the device is disconnected")

    monkeypatch.setattr(loop, where, fail)
    config = steps_config()
    config.eval.every, config.eval.num_prompts = 1, 16
    run = trainer.run(config, tmp_path)
    check_run(run, undisturbed, 1, resumed=False)
    assert [row["eval_step"] for row in run.rows() if "eval_step" in row] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_device_goes_in_an_update(
    checkpoints: bool,
    trainer: Trainer,
    undisturbed: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One update of two has been made, so that the state before the step is gone."""
    devices, gone = Devices(), []

    def run_half(works: Any, step: int, meanwhile: Any) -> Any:
        if step != 1 or gone or [work.name for work in works] != ["actor-TRAIN"]:
            return run_wave(works, step, meanwhile)
        works[0].launches[0]()
        gone.append(first_device())
        devices.lose(first_device())
        raise jax.errors.JaxRuntimeError("INTERNAL: no answer from the device")

    monkeypatch.setattr(step_module, "run_wave", run_half)
    monkeypatch.setattr(faults, "probe", lambda world: frozenset(gone))
    config = steps_config()
    config.checkpoint.every = int(checkpoints)
    run = trainer.run(config, tmp_path)
    if checkpoints:
        check_run(run, undisturbed, 1, resumed=True)
        assert run.said("an update of the step had begun")
    else:
        assert isinstance(run.error, DevicesLostError)
        assert "set checkpoint.every" in str(run.error)


@pytest.mark.slow
def test_a_program_that_is_wrong_is_no_lost_device(
    trainer: Trainer, undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

    monkeypatch.setattr(step_module, "run_wave", fail)
    run = trainer.run(steps_config(), tmp_path)
    assert isinstance(run.error, jax.errors.JaxRuntimeError)
