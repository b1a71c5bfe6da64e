"""Model-stages that wait in host memory between their calls: the same run, with other memory."""

import itertools
from pathlib import Path
from typing import Any

import jax
import pytest

from nereus_jax.config import parse_config
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.roles import ACTOR_TRAIN, CRITIC_TRAIN, REFERENCE_SCORE
from nereus_jax.report.timeline import read_timeline
from nereus_jax.runtime.dispatch import Work, run_wave
from nereus_jax.runtime.parking import in_host_memory, is_parked, on_devices
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import form_world
from nereus_jax.trainer.footprint import check_memory, device_bytes, host_bytes, stage_bytes
from nereus_jax.trainer.job import Job, make_job, read_inputs
from nereus_jax.trainer.session import Session
from nereus_jax.trainer.state import JobState
from tests.trainer.plan_change_cases import (
    SMALL,
    Devices,
    Run,
    Trainer,
    boundary,
    logical,
    opened,
    tiny_config,
)
from tests.trainer.test_device_loss import device

SAME = ("policy_loss", "value_loss", "entropy", "approx_kl", "reward_mean", "tokens", "kl")


def shared_config(**settings: Any) -> Any:
    """The plan of `tiny_config` with actor and critic on the same devices."""
    config = tiny_config(**settings)
    config.plan["critic-TRAIN"] = config.plan["critic-SCORE"] = "dp=2,pp=1,tp=1,devices=0-1"
    return config


def parked_config(**settings: Any) -> Any:
    """The same with every model-stage parked."""
    config = shared_config(**settings)
    for name in list(config.plan):
        degrees, _, devices = config.plan[name].partition(",devices")
        config.plan[name] = f"{degrees},parked" + (f",devices{devices}" if devices else "")
    return config


def job_of(config: Any) -> Job:
    checked = parse_config(config)
    return make_job(checked, read_inputs(checked), form_world(emulated_devices=8))


def waiting(tree: Any) -> set[bool]:
    """Whether arrays are parked."""
    return {is_parked(x.sharding) for x in jax.tree.leaves(tree)}


def test_state_goes_to_host_memory_and_comes_back() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    on = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    array = jax.device_put(jax.numpy.arange(8.0).reshape(4, 2), on)
    away = in_host_memory({"x": array})
    assert waiting(away) == {True} and waiting(array) == {False}
    assert in_host_memory(away)["x"] is away["x"] and on_devices(array) is array
    back = on_devices(away)["x"]
    assert back.sharding == on and back.tolist() == array.tolist()


def test_parked_works_give_their_devices_to_each_other() -> None:
    """Two works on devices of their own, and one on those of both: a lane of three."""
    happened: list[str] = []

    def work(name: str, devices: str) -> Work:
        def note(what: str, result: Any = None) -> Any:
            happened.append(f"{what} {name}")
            return result

        return Work(
            name=name,
            devices=tuple(devices),
            launches=(lambda: note("run", {"x": jax.numpy.zeros(2)}),),
            bring=lambda: note("bring"),
            put_away=lambda: note("away"),
        )

    finished = run_wave((work("a", "01"), work("b", "23"), work("c", "0123")), 0)
    before, after = happened[:4], happened[4:]
    assert before == ["bring a", "run a", "bring b", "run b"]  # neither waits for the other
    assert after == ["away a", "away b", "bring c", "run c", "away c"]
    assert {name: len(x.parking) for name, x in finished.items()} == {"a": 2, "b": 2, "c": 2}


@pytest.mark.slow
def test_a_parked_run_is_the_same_run_with_less_on_its_devices(tmp_path: Path) -> None:
    trainer = Trainer()
    settings = {"eval__every": 2, "eval__num_prompts": 8, "num_steps": 4}
    held: dict[str, int] = {}

    def run(name: str, config: Any) -> Run:
        def look(session: Session, state: JobState) -> None:
            parked = any(choice.parked for choice in session.job.execution.choices.values())
            assert waiting([state.trained, state.frozen]) == {parked}
            held[name] = max(state.live_bytes(session.job.world).values())

        done = trainer.run(config, tmp_path / name, before_step=look)
        assert done.error is None, done.error
        return done

    plain, parked = (
        run("plain", shared_config(**settings)),
        run("parked", parked_config(**settings)),
    )
    assert held["parked"] == 0 < held["plain"]
    for ours, wanted in zip(parked.steps(), plain.steps(), strict=True):
        assert [ours[name] for name in SAME] == [wanted[name] for name in SAME]
        assert ours["peak_memory_bytes"] < wanted["peak_memory_bytes"]
        assert set(ours["park_s"]) == {f"park {s}" for s in ours["stage_s"]}
        assert not wanted["park_s"]
    assert parked.states == plain.states  # digests of all of the state, at every boundary
    assert [r for r in parked.rows() if "eval_success_rate" in r] != []
    spans = read_timeline(parked.workdir / "timeline.jsonl")
    for device_name in {d for s in spans for d in s.devices}:  # never two at a time on a device
        own = [s for s in spans if device_name in s.devices and s.kind in ("park", "model_stage")]
        for one, other in itertools.pairwise(sorted(own, key=lambda s: s.start_s)):
            assert one.end_s <= other.start_s + 1e-4


@pytest.mark.slow
def test_a_parked_run_is_resumed_and_changes_its_plan(tmp_path: Path) -> None:
    trainer = Trainer()
    changes = {
        "2": {"actor-TRAIN": "dp=1,pp=1,tp=2,parked,devices=4-5", "critic-TRAIN": "dp=2"},
        "3": {"actor-TRAIN": "dp=2,pp=1,tp=2", "critic-TRAIN": "dp=2,parked"},
    }
    settings = {"num_steps": 4, "transition__verify": "digest", "checkpoint__every": 1}
    config = parked_config(**settings)
    config.plan_changes.update(changes)
    whole = trainer.run(config, tmp_path / "whole")
    assert whole.error is None, whole.error
    assert len(whole.transitions()) == 2

    def stop(session: Session, state: JobState) -> None:
        if state.counters.step == 1:
            raise RuntimeError("stopped")

    assert "stopped" in str(trainer.run(config, tmp_path / "parts", before_step=stop).error)
    seen: list[set[bool]] = []
    rest = trainer.run(
        config,
        tmp_path / "parts",
        before_step=lambda session, state: seen.append(waiting(state.trained[ACTOR_TRAIN])),
    )
    assert rest.error is None, rest.error
    assert rest.said("resumed from the checkpoint of step 1")
    assert seen == [{True}, {True}, {False}]
    assert rest.states == {s: whole.states[s] for s in (1, 2, 3)}
    ours, wanted = (run.steps() for run in (rest, whole))
    assert [[r[name] for name in SAME] for r in ours] == [[r[n] for n in SAME] for r in wanted]


def test_parked_state_moves_at_a_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parked_config(**SMALL | {"transition__verify": "digest"})
    config.plan_changes["1"] = {
        "actor-TRAIN": "dp=1,pp=2,tp=2,parked,devices=2-5",
        "critic-TRAIN": "dp=2,pp=1,tp=1,devices=4-5",
    }
    with opened(config, tmp_path, ProgramCache(), monkeypatch) as (session, state):
        state.trained = in_host_memory(state.trained)
        before = logical(session.job, state)
        boundary(session, state, 1)
        assert session.job.plan[ACTOR_TRAIN].layout.pp == 2
        assert waiting(state.trained[ACTOR_TRAIN]) == {True}
        assert waiting(state.trained[CRITIC_TRAIN]) == {False}
        assert logical(session.job, state) == before | {"counters": state.counters}


@pytest.mark.slow
def test_a_replica_of_parked_state_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parked_config(**SMALL | {"transition__verify": "digest"})
    devices = Devices()
    with opened(config, tmp_path, ProgramCache(), monkeypatch) as (session, state):
        state.trained = in_host_memory(state.trained)
        state.views.look(session.job.world, state.arrays())
        before = logical(session.job, state)
        assert devices.lose(device(session, 1))
        said = boundary(session, state, 1)
        assert said[0] == "lost devices: 0:1; going on with 7 of 8 devices"
        assert not any("checkpoint" in text for text in said)
        assert waiting(state.trained) == {True}
        assert logical(session.job, state) == before | {"counters": state.counters}


def test_what_is_parked_counts_while_it_works_and_on_the_host() -> None:
    plain, parked = job_of(shared_config()), job_of(parked_config())
    need, less = stage_bytes(plain), stage_bytes(parked)
    most = max(device_bytes(parked, less).values())
    assert most == max(x.held + x.temporaries for x in less.values())
    assert most < max(device_bytes(plain, need).values())
    held = sum(x.held * len(parked.plan[s].devices) for s, x in less.items())
    assert host_bytes(parked, less) == {0: held} and host_bytes(plain, need) == {0: 0}
    between = (most + max(device_bytes(plain, need).values())) / 2 / 2**30
    check_memory(job_of(parked_config(device_memory_gib=between)), less)
    with pytest.raises(InfeasiblePlanError, match="device_memory_gib allows"):
        check_memory(job_of(shared_config(device_memory_gib=between)), need)


def test_a_fallback_is_not_parked_because_what_it_falls_back_on_is() -> None:
    config = tiny_config()
    del config.plan["reference-SCORE"]
    config.plan["actor-TRAIN"] = "dp=2,pp=1,tp=2,parked"
    choices = job_of(config).execution.choices
    assert choices[ACTOR_TRAIN].parked and not choices[REFERENCE_SCORE].parked
