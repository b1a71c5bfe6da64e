"""A step that one process of several had no memory for.

The others wait for it in a collective, so that nobody can go on: the process ends, and leaves a
note in the run's directory. The world that follows tells its controller before its first step.
"""

import contextlib
import json
import os

from nereus_jax.core.errors import OutOfMemoryError, WorldError
from nereus_jax.core.events import OutOfMemory
from nereus_jax.runtime import host
from nereus_jax.trainer.session import Session

NOTE = "device_full.json"


def leave_note(session: Session, step: int, error: OutOfMemoryError) -> WorldError:
    """Writes what the controller is to be told.

    Args:
      session: with a controller.
      step: that had no memory.
      error: what was said of it.

    Returns:
      The error to end this process with.
    """
    note = {"step": step, "room_tokens": error.room_tokens or session.job.room}
    path = session.workdir / NOTE
    part = path.with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError):  # without it the same plan is tried again
        part.write_text(json.dumps(note) + "\n", encoding="utf-8")
        os.replace(part, path)
    return WorldError(
        f"{error}; other processes may not know of it. Run the same command again for each "
        f"process, or with --elastic, which does so by itself: the controller then looks for a "
        f"plan that has the memory"
    )


def tell_of_note(session: Session) -> None:
    """Tells the controller what the world before has left, in every process alike."""
    path, adaptation = session.workdir / NOTE, session.adaptation
    assert adaptation is not None
    text = ""
    if session.job.world.is_main:
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="utf-8")
            path.unlink()
    try:
        note = json.loads(host.broadcast_text(text) or "{}")
        step, room_tokens = int(note["step"]), int(note["room_tokens"])
    except (ValueError, KeyError, TypeError):
        return
    session.outputs.message(
        f"one process had no memory for step {step}: the controller looks for a plan that has"
    )
    adaptation.tell(OutOfMemory(time_s=adaptation.time_s, room_tokens=room_tokens))
