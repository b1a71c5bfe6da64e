"""Room for responses that grows: no token is another one for it."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.ppo_tiny import get_config
from nereus_jax.config import parse_config
from nereus_jax.control.controller import Controller
from nereus_jax.core.errors import ConfigError, OutOfMemoryError
from nereus_jax.planning.length_traces import LengthTrace, parse_curve, parse_shape
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime.world import form_world
from nereus_jax.trainer.compilation import step_recipes
from nereus_jax.trainer.footprint import device_bytes, stage_bytes
from nereus_jax.trainer.job import make_job, read_inputs
from nereus_jax.trainer.loop import train
from nereus_jax.trainer.room import next_rooms

LONGEST = 12


def config_of(**changes: Any) -> Any:
    config = get_config()
    config.num_steps = 3
    config.emulated_devices = 8
    for stage in list(config.plan):
        del config.plan[stage]
    config.plan["actor-TRAIN"] = config.plan["critic-TRAIN"] = "dp=1,pp=1,tp=1"
    config.warmup.num_steps = 0
    config.model.num_layers, config.model.mlp_dim, config.model.embed_dim = 1, 32, 32
    config.rollout.batch_size, config.algorithm.minibatch_size = 8, 4
    config.train.microbatch_size = 2
    config.rollout.max_response_length = LONGEST
    config.rollout.record = True
    config.eval.every, config.eval.num_prompts = 3, 8
    config.report.tensorboard = False
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            config[section][name] = value
        else:
            config[section] = value
    return config


def run(config: Any, workdir: Path) -> list[dict[str, Any]]:
    checked = parse_config(copy.deepcopy(config))
    world = form_world(emulated_devices=checked.emulated_devices)
    train(checked, read_inputs(checked), world, workdir)
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def memory_between(config: Any) -> int:
    """More bytes than the job needs at first, less than it needs at its longest."""
    checked = parse_config(copy.deepcopy(config))
    world = form_world(emulated_devices=8)
    needs: list[int] = []
    for room in (3, LONGEST):
        job = make_job(checked, read_inputs(checked), world).with_room(room)
        for recipe in step_recipes(job):
            job.programs.get(*recipe)
        needs.append(max(device_bytes(job, stage_bytes(job)).values()))
    return sum(needs) // 2


def rollouts(workdir: Path) -> list[Rollout]:
    return [Rollout.load(path) for path in sorted((workdir / "rollouts").iterdir())]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("roomy")
    run(config_of(), workdir)
    return workdir


@pytest.mark.slow
def test_the_steps_are_those_with_all_room_at_once(roomy: Path, tmp_path: Path) -> None:
    rows = run(config_of(rollout__first_room=3), tmp_path)
    wanted = [json.loads(line) for line in (roomy / "metrics.jsonl").read_text().splitlines()]
    for got, full in zip(rollouts(tmp_path), rollouts(roomy), strict=True):
        width = got.response_width
        np.testing.assert_array_equal(got.response_lengths_B, full.response_lengths_B)
        np.testing.assert_array_equal(got.finished_B, full.finished_B)
        np.testing.assert_array_equal(got.tokens_BS, full.tokens_BS[:, : got.tokens_BS.shape[1]])
        np.testing.assert_allclose(got.logprobs_BT, full.logprobs_BT[:, :width], atol=1e-5)
        assert width == LONGEST or got.response_lengths_B.max() < width or got.finished_B.all()
    for row, full in zip(rows, wanted, strict=True):
        if "eval_step" in row:
            assert row["eval_success_rate"] == full["eval_success_rate"]
            assert row["eval_response_length_mean"] == full["eval_response_length_mean"]
            continue
        assert abs(row["policy_loss"] - full["policy_loss"]) < 1e-5
        assert row["tokens"] == full["tokens"]
        assert full["response_room"] == LONGEST
    rooms = [row["response_room"] for row in rows if "response_room" in row]
    assert rooms == sorted(rooms) and rooms[-1] > 3


@pytest.mark.slow
def test_a_resumed_run_has_the_room_that_it_had(tmp_path: Path) -> None:
    config = config_of(rollout__first_room=3, num_steps=1)
    before = run(config, tmp_path)
    config.num_steps = 2
    after = run(config, tmp_path)
    rooms = [row["response_room"] for row in after if "response_room" in row]
    assert rooms[0] == max(r["response_room"] for r in before if "response_room" in r)
    assert len(rooms) == 2 and rooms[1] >= rooms[0]


@pytest.mark.slow
def test_recorded_rollouts_have_the_room_that_they_had(tmp_path: Path) -> None:
    first = run(config_of(rollout__first_room=3), tmp_path / "first")
    config = config_of(rollout__first_room=3, rollout__record=False)
    config.rollout.source = "recorded"
    config.rollout.recorded_dir = str(tmp_path / "first" / "rollouts")
    config.eval.every = 0
    again = run(config, tmp_path / "again")
    steps = [row for row in first if "policy_loss" in row]
    for row, recorded in zip(again, steps, strict=True):
        assert row["response_room"] == recorded["response_room"]
        assert abs(row["policy_loss"] - recorded["policy_loss"]) < 1e-5


@pytest.mark.slow
def test_no_memory_for_more_room_ends_the_run_with_its_state_saved(tmp_path: Path) -> None:
    config = config_of(rollout__first_room=3, eval__every=0)
    config.device_memory_gib = memory_between(config) / 2**30
    with pytest.raises(OutOfMemoryError, match=r"responses outgrow \d+ tokens.*checkpoint of step"):
        run(config, tmp_path)
    last = json.loads((tmp_path / "failure.json").read_text())
    assert last["error_kind"] == "OutOfMemoryError" and "responses outgrow" in last["error"]
    config.device_memory_gib *= 4
    run(config, tmp_path)
    assert not (tmp_path / "failure.json").exists()


@pytest.mark.slow
def test_a_controller_finds_memory_for_more_room_when_it_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has foreseen nothing, since the need of a plan is not always what its model says."""
    monkeypatch.setattr(Controller, "_triggers", lambda *arguments: [])
    config = config_of(rollout__first_room=3, eval__every=0, control__policy="payback")
    config.device_memory_gib = memory_between(config) / 2**30
    rows = run(config, tmp_path)
    steps = [row["step"] for row in rows if "policy_loss" in row]
    assert steps == list(range(config.num_steps))
    (move,) = [row for row in rows if "transition_s" in row]
    decisions = (tmp_path / "decisions.jsonl").read_text().splitlines()
    urgent = [r for r in map(json.loads, decisions) if r["verdict"] == "urgent"]
    assert [r["trigger"] for r in urgent] == ["out_of_memory"]
    assert urgent[0]["transition_s_measured"] == move["transition_s"]
    indices = [i for r in rollouts(tmp_path) for i in r.sample_indices_B.tolist()]
    assert sorted(indices) == list(range(config.num_steps * config.rollout.batch_size))


def test_room_grows_in_few_sizes_to_the_longest() -> None:
    config = parse_config(config_of(rollout__max_response_length=4000, rollout__first_room=100))
    rooms = [100]
    while rooms[-1] < 4000:
        rooms.append(next_rooms(config, rooms[-1])[0])
    assert rooms[-1] == 4000 and len(rooms) < 12
    assert next_rooms(config, 100) == (152, 128, 112)  # the smaller ones where memory is short
    assert next_rooms(config, 3999) == (4000,)
    with pytest.raises(ConfigError, match=r"first_room=13 .*max_response_length=12"):
        parse_config(config_of(rollout__first_room=13))


@pytest.mark.slow
def test_responses_are_as_long_as_a_trace_says(tmp_path: Path) -> None:
    changes = {"rollout__length_trace": "3:9:3", "rollout__length_shape": "lognormal=0.3"}
    rows = run(config_of(rollout__first_room=4, eval__every=0, **changes), tmp_path)
    trace = LengthTrace(curve=parse_curve("3:9:3"), shape=parse_shape("lognormal=0.3"))
    for step, (row, rollout) in enumerate(zip(rows, rollouts(tmp_path), strict=True)):
        wanted = trace.draw(step, 8, LONGEST, config_of().seed)
        np.testing.assert_array_equal(rollout.response_lengths_B, wanted)
        assert row["finished_fraction"] == 1.0
    assert rows[0]["response_room"] < rows[-1]["response_room"]


@pytest.mark.slow
def test_room_grows_by_less_where_memory_is_short(tmp_path: Path) -> None:
    """What was compiled for a room that did not fit counts no more."""
    config = config_of(
        num_steps=1,
        rollout__first_room=16,
        rollout__max_response_length=48,
        rollout__length_trace="19:19:2",
        rollout__length_shape="lognormal=0.0",
        eval__every=0,
    )
    checked = parse_config(copy.deepcopy(config))
    world = form_world(emulated_devices=8)
    needs: dict[int, int] = {}
    for room in (16, 24, 40):
        job = make_job(checked, read_inputs(checked), world).with_room(room)
        for recipe in step_recipes(job):
            job.programs.get(*recipe)
        needs[room] = max(device_bytes(job, stage_bytes(job)).values())
    assert needs[16] < needs[24] < needs[40]
    config.rollout.first_room, config.rollout.length_trace = 24, "26:26:2"
    config.device_memory_gib = (needs[40] - 1) / 2**30  # 24 -> 40 does not fit, 32 does
    (row,) = run(config, tmp_path)
    assert row["response_room"] == 32 and row["response_length_max"] == 26
