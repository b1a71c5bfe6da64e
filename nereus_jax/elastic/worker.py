"""The process that trains, as its supervisor starts and ends it."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent dies."""
ASK_AGAIN_S = 5.0
"""A worker that is still compiling does not hear a request to stop; it is asked again."""


def end_with_parent(parent: int) -> None:
    """Called by a worker: it dies at once when its supervisor does, even inside a collective.

    Linux only; elsewhere a worker outlives a supervisor that was killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(1)


class Worker:
    """The worker of a slot, one at a time.

    Args:
      changed: called when it has ended.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        self.epoch = 0
        self.code: int | None = None

    @property
    def running(self) -> bool:
        """Whether there is a process that has not been waited for."""
        return self._process is not None

    async def start(self, command: Sequence[str], epoch: int) -> None:
        """Starts it, in a session of its own: Ctrl-C in a terminal reaches the supervisor alone."""
        assert not self.running
        self._process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
        self.epoch, self.code, self._asked_s = epoch, None, 0.0
        self._waiting = asyncio.create_task(self._wait(self._process))

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        self.code = await process.wait()
        self._process = None
        self._changed()

    def stop(self, now_s: float) -> None:
        """Asks it to save and end at the step boundary, now and then again."""
        if self._process is not None and now_s - self._asked_s >= ASK_AGAIN_S:
            self._asked_s = now_s
            self._signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self._signal(signal.SIGINT)

    async def kill(self) -> None:
        """Ends it at once, with what it has started itself, and returns when it is gone."""
        if self._process is not None and self._waiting is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._waiting

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
