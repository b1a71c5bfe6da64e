"""When a move that was decided can wait no longer, and what a trace may do."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nereus_jax.config import parse_config
from nereus_jax.control.controller import Controller
from nereus_jax.control.state import Lengths, PlanFacts, initial_state
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import ConfigError
from nereus_jax.testing import tiny_run_config
from nereus_jax.trainer.adaptation import Adaptation, _read_trace
from nereus_jax.trainer.pool_events import PoolInbox, PoolSources
from tests.control.toy_job import ToyCosts, pool, settings, toy_plan

POOL8 = pool()


def growing(first: int) -> Lengths:
    mean = tuple(float(x) for x in range(first, first + 12))
    longest = tuple(range(first + 4, first + 16))
    return Lengths(mean=mean, p95=tuple(x + 2 for x in mean), longest=longest)


def adaptation(**changes: Any) -> Adaptation:
    config = tiny_run_config()
    config.rollout.max_response_length, config.rollout.first_room = 64, 8
    state = dataclasses.replace(
        initial_state(toy_plan(POOL8.devices, 1), POOL8),
        pending=toy_plan(POOL8.devices[:4], 1),
        pending_s=10.0,
        facts=PlanFacts(limit_tokens=40, classes=()),
        lengths=growing(10),  # at 40 tokens in 3 steps
        room_tokens=16,
    )
    return Adaptation(
        controller=Controller(settings=settings(), costs=ToyCosts()),
        state=dataclasses.replace(state, **changes),
        config=parse_config(config),
        every=POOL8,
        sources=PoolSources(inbox=PoolInbox()),
        last_step_s=20.0,
    )


def cannot_wait(**changes: Any) -> bool:
    made = adaptation(**changes)
    assert made.state is not None
    return made._cannot_wait(made.state)


def test_a_move_waits_as_long_as_one_more_step_does_no_harm() -> None:
    assert not cannot_wait()
    assert not cannot_wait(pending=None, room_tokens=32)
    assert not cannot_wait(room_tokens=32), "the next room may be one of 40 tokens"
    assert cannot_wait(room_tokens=40), "the next room is at least one of 48 tokens"
    assert cannot_wait(lengths=growing(20)), "the next step may have 40"
    assert cannot_wait(facts=None)
    # One more step and 1.5 times the move: 35 s.
    margin = adaptation().controller.settings.deadline_margin
    assert not cannot_wait(leaving={DeviceId(0, 7): 25.0 + margin * 10.0})
    assert cannot_wait(leaving={DeviceId(0, 7): 15.0 + margin * 10.0})
    assert cannot_wait(pool=POOL8.without([DeviceId(0, 7)]))


def test_a_loss_waits_for_the_boundary_and_what_came_after_it(tmp_path: Path) -> None:
    made = adaptation(pending=None)
    inbox = made.sources.inbox
    inbox.submit({"change": "lost", "devices": ["0:3"]})
    inbox.submit({"change": "joined", "devices": ["0:3"]})
    first = made.decide(1)
    assert first.lost == {DeviceId(0, 3)} and not first.joined
    assert made.decide(None).pool == ()
    assert made.state is not None
    made.state = dataclasses.replace(made.state, pool=made.state.pool.without([DeviceId(0, 3)]))
    second = made.decide(1)
    assert second.joined == {DeviceId(0, 3)} and DeviceId(0, 3) in made.state.pool.devices


def test_devices_that_are_real_are_not_taken_away_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"step": 3, "event": "lost", "devices": ["0:1"]}) + "\n")
    config = tiny_run_config()
    config.checkpoint.every, config.control.policy = 1, "payback"
    config.control.pool_trace, config.emulated_devices = str(path), 0
    job: Any = SimpleNamespace(
        config=parse_config(config), world=SimpleNamespace(pool=DevicePool.uniform(1, 8))
    )
    with pytest.raises(ConfigError, match="devices lost at step 3; a file can take away emulated"):
        _read_trace(cast(Any, job))
    path.write_text(json.dumps({"time_s": 3, "event": "lost", "devices": ["0:1"]}) + "\n")
    with pytest.raises(ConfigError, match="is by time_s; a run takes one by step"):
        _read_trace(job)
