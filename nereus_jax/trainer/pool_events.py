"""Changes of the device pool that a running job is told of: by a file, HTTP, or who embeds it.

All of them put messages (`control.pool_trace` says what they look like) into one `PoolInbox`, which
refuses what cannot be. The job takes them out at a step boundary, on process 0 alone; what it took
travels to the others with the controller's decision.

To tell a run that you start yourself:

    pool = PoolInbox()
    threading.Thread(target=watch_the_cluster, args=(pool,)).start()
    train(config, inputs, world, workdir, pool=pool)

    pool.submit({"change": "revoke", "devices": ["0:4-7"], "deadline_s": 120})  # in any thread
"""

import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nereus_jax.config import RunConfig
from nereus_jax.control.decisions import plan_json
from nereus_jax.control.pool_trace import PoolReader, TraceEvent
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.runtime import host
from nereus_jax.trainer.pool_hook import open_hook

MOST_READ_BYTES = 1 << 20
"""Of the file at one step boundary; the rest comes at the next ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolStatus:
    """What a job says of its devices.

    Attributes:
      every: devices that the job was formed with.
      pool: those that are there.
      leaving: of these, those that will be gone, and in how many seconds.
      plan: that runs.
      step: the next one.
    """

    every: DevicePool
    pool: DevicePool
    leaving: Mapping[DeviceId, float]
    plan: ExecutionPlan
    step: int


class PoolInbox:
    """What a job is told of its device pool, until it looks; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[TraceEvent] = []
        self._status: PoolStatus | None = None
        self._reader: PoolReader | None = None
        self._published_s = 0.0

    def submit(self, message: Mapping[str, Any]) -> TraceEvent:
        """Tells of a change; the job hears of it at its next step boundary.

        Args:
          message: `change` (lost, joined, revoke), `devices` (names, ranges, or how many), and for
            revoke `deadline_s`, the seconds that are left.

        Returns:
          What it was understood to be.

        Raises:
          ConfigError: it cannot be: the message is wrong, a device is not there, or the run does
            not listen (yet).
        """
        with self._lock:
            if self._reader is None:
                raise ConfigError("pool: the run does not listen yet; try again in a while")
            try:
                event = self._reader.message(message)
            except ValueError as error:
                raise ConfigError(f"pool: {error}") from None
            self._waiting.append(event)
            return event

    def take(self) -> list[TraceEvent]:
        """What was submitted since the last time, in order."""
        with self._lock:
            taken, self._waiting = self._waiting, []
            return taken

    def publish(self, status: PoolStatus) -> None:
        """The pool as the job has it now."""
        with self._lock:
            self._status, self._published_s = status, time.monotonic()
            self._reader = PoolReader(status.every, status.pool, status.leaving)
            for event in self._waiting:
                self._reader.follow(event)

    def to_json(self) -> dict[str, Any]:
        """The pool and the plan that was published last, and what waits for the job to look."""
        with self._lock:
            status = self._status
            if status is None:
                return {"waiting": []}
            passed_s = time.monotonic() - self._published_s
            return {
                "step": status.step,
                "pool": [str(d) for d in status.pool.devices],
                "leaving_s": {
                    str(d): round(max(s - passed_s, 0.0), 3)
                    for d, s in sorted(status.leaving.items())
                },
                "plan": plan_json(status.plan),
                "waiting": [event.to_json() for event in self._waiting],
            }


class PoolFile:
    """A file of JSON lines that a scheduler appends to; only whole lines count.

    What is in the file when the run starts is history: the devices are those that there are now.

    Args:
      path: of the file, which may be still to come.

    Raises:
      ConfigError: there is no such directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.parent.is_dir():
            raise ConfigError(
                f"control.pool_file: {path.parent} is no directory; name a file in one that exists"
            )
        self._offset, self._inode = self._find()
        self._last_error = ""

    def poll(self, inbox: PoolInbox) -> list[str]:
        """Puts new lines into the inbox.

        Returns:
          A line of text for each that was refused.
        """
        size, inode = self._find()
        if size < self._offset or inode != self._inode:
            self._offset, self._inode = 0, inode  # cut, or another file
        if size <= self._offset:
            return []
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                content = file.read(MOST_READ_BYTES)
        except OSError as error:
            said = f"control.pool_file: {self._path} cannot be read: {error.strerror or error}"
            new = said != self._last_error
            self._last_error = said
            return [said] if new else []
        whole = content[: content.rfind(b"\n") + 1]
        if not whole and len(content) == MOST_READ_BYTES:
            whole = content  # no line is so long; what is left of it is refused as well
        self._offset += len(whole)
        return [said for line in whole.splitlines() if (said := self._read(line, inbox))]

    def _find(self) -> tuple[int, int]:
        """Size and identity of the file; 0 while there is none."""
        try:
            found = self._path.stat()
        except OSError:
            return 0, 0
        return found.st_size, found.st_ino

    def _read(self, line: bytes, inbox: PoolInbox) -> str:
        if not line.strip():
            return ""
        try:
            inbox.submit(json.loads(line))
        except (ValueError, RecursionError) as error:  # ConfigError is a ValueError
            shown = line[:80].decode("utf-8", "replace")
            return f"control.pool_file: {shown!r} is passed over: {error}"
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSources:
    """Where a run hears of its pool; only process 0 has anything to hear.

    Attributes:
      inbox: what was told.
      file: that is looked at at each step boundary; None: none is.
      address: where HTTP is answered; empty: nowhere.
    """

    inbox: PoolInbox
    file: PoolFile | None = None
    address: str = ""

    def take(self) -> tuple[list[TraceEvent], list[str]]:
        """What came since the last time, and what to tell of it."""
        said = self.file.poll(self.inbox) if self.file is not None else []
        return self.inbox.take(), said


@contextmanager
def open_pool_sources(
    config: RunConfig, *, is_main: bool, inbox: PoolInbox | None = None
) -> Iterator[PoolSources]:
    """Begins to listen, in process 0.

    Args:
      config: of the run.
      is_main: whether this is process 0.
      inbox: of whoever embeds the run; None: a new one.

    Raises:
      ConfigError: the file or the address cannot be; the same on every process.
    """
    inbox = PoolInbox() if inbox is None else inbox
    control = config.control
    with ExitStack() as stack:
        file, address = None, ""
        with host.together():
            if is_main and control.pool_file:
                file = PoolFile(Path(control.pool_file).expanduser())
            if is_main and control.pool_hook:
                hook = open_hook(
                    control.pool_hook, control.pool_hook_token_file, inbox.submit, inbox.to_json
                )
                address = stack.enter_context(hook)
        yield PoolSources(inbox=inbox, file=file, address=address)
