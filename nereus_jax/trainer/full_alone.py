"""A step that one process of several had no memory for.

The others wait for it in a collective, so that nobody can go on: the process ends, and leaves a
note in the run's directory. The world that follows tells its controller before its first step.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from nereus_jax.config import RunConfig, config_to_json
from nereus_jax.control.decisions import parse_plan, plan_json
from nereus_jax.core.errors import OutOfMemoryError, WorldError
from nereus_jax.core.events import OutOfMemory
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.runtime import host
from nereus_jax.trainer.session import Session, last_good

NOTES = "device_full.jsonl"


def listens(session: Session) -> bool:
    """Whether there is a controller that would do something about it."""
    adaptation = session.adaptation
    return adaptation is not None and adaptation.controller.settings.policy.foresees


def leave_note(session: Session, step: int, error: OutOfMemoryError) -> WorldError:
    """Writes what the controller is to be told.

    Args:
      session: with a controller that listens.
      step: that had no memory.
      error: what was said of it.

    Returns:
      The error to end this process with.
    """
    session.outputs.failure(step, error)
    note = {
        "step": step,
        "room_tokens": error.room_tokens or session.job.room,
        "plan": plan_json(session.job.execution),
        "config": _digest(session.job.config),
    }
    with (
        contextlib.suppress(OSError),  # without it the same plan is tried again
        (session.workdir / NOTES).open("a", encoding="utf-8") as file,
    ):
        file.write(json.dumps(note) + "\n")
    return WorldError(
        f"{error}; other processes may not know of it. {last_good(session)}; with --elastic it is "
        f"run again by itself: the controller then looks for a plan that has the memory"
    )


def tell_of_notes(session: Session, step: int) -> None:
    """Tells the controller what worlds before have left, in every process alike: that the plan has
    no memory, and which other plans had none.

    Args:
      session: with a controller.
      step: that is made next; notes of steps that have been made since count no more.
    """
    adaptation = session.adaptation
    assert adaptation is not None
    text = ""
    if session.job.world.is_main:
        with contextlib.suppress(OSError):
            text = (session.workdir / NOTES).read_text(encoding="utf-8")
    rooms: list[int] = []
    failed: list[ExecutionPlan] = []
    for plan, room_tokens in _notes(host.broadcast_text(text), session.job.config, step):
        if plan == session.job.execution:
            rooms.append(room_tokens)
        elif plan not in failed:
            failed.append(plan)
    if (rooms or failed) and adaptation.state is not None:
        state = adaptation.state
        adaptation.state = dataclasses.replace(state, step=step, failed=(*state.failed, *failed))
    if rooms and listens(session):
        session.outputs.message(
            "one process had no memory for a step: the controller looks for a plan that has"
        )
        # Before what the checkpoint has waiting: a move for another reason would be under way then.
        event = OutOfMemory(time_s=adaptation.time_s, room_tokens=max(rooms))
        adaptation.waiting.insert(0, event)


def _notes(text: str, config: RunConfig, step: int) -> Iterator[tuple[ExecutionPlan, int]]:
    """The plan and the room of each note that is of this configuration and still counts."""
    digest = _digest(config)
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            note: dict[str, Any] = json.loads(line)
            if note["config"] == digest and int(note["step"]) >= step:
                yield parse_plan(note["plan"]), int(note["room_tokens"])


def _digest(config: RunConfig) -> str:
    text = json.dumps(config_to_json(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
