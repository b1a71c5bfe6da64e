"""Changes of the pool in JSON: a trace says when they come, a message is of now.

A trace is JSON lines, or a JSON list, of objects such as

    {"step": 10, "event": "lost", "devices": ["0:3"]}
    {"step": 20, "event": "joined", "devices": 2}
    {"step": 30, "event": "revoke", "devices": ["1:0-7"], "deadline_s": 120}
    {"step": 40, "devices": 12}

All have `step` or all have `time_s`. Devices are names, ranges of a host's (`1:0-7`), or how many:
the last ones of the pool leave, the first ones that are missing come. Without `event` it is what
the pool has from then on. Revoked devices are gone when their seconds are over; whoever plays the
trace takes them away.

A message to a running job has no time, and says what has happened:

    {"change": "lost", "devices": ["0:3"]}
    {"change": "revoke", "devices": ["0:4-7"], "deadline_s": 120}
"""

import dataclasses
import enum
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.events import DevicesJoined, DevicesLost, Revocation

MOST_NAMED = 1 << 16
"""Devices that one entry names at most."""

_TRACE_KEYS = ("step", "time_s", "devices", "event", "deadline_s")
_MESSAGE_KEYS = ("change", "devices", "deadline_s")


class PoolChange(enum.StrEnum):
    """What happens to devices."""

    LOST = "lost"
    JOINED = "joined"
    REVOKE = "revoke"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceEvent:
    """One change of the pool.

    Attributes:
      at: the step before which, or the second at which it happens.
      change: what.
      devices: to which.
      deadline_s: of a revocation: seconds until they are gone.
    """

    at: float
    change: PoolChange
    devices: tuple[DeviceId, ...]
    deadline_s: float = 0.0

    def event(self, time_s: float) -> DevicesLost | DevicesJoined | Revocation:
        """As a controller takes it, at a time of the run's clock."""
        if self.change is PoolChange.LOST:
            return DevicesLost(time_s=time_s, devices=self.devices)
        if self.change is PoolChange.JOINED:
            return DevicesJoined(time_s=time_s, devices=self.devices)
        return Revocation(time_s=time_s, devices=self.devices, deadline_s=self.deadline_s)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "at": self.at,
            "change": self.change.value,
            "devices": [str(d) for d in self.devices],
            "deadline_s": self.deadline_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TraceEvent":
        """Reads what `to_json` made."""
        return cls(
            at=float(data["at"]),
            change=PoolChange(data["change"]),
            devices=tuple(DeviceId.parse(d) for d in data["devices"]),
            deadline_s=float(data["deadline_s"]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolTrace:
    """The changes of a pool.

    Attributes:
      clock: `step` or `time_s`.
      events: in their order.
    """

    clock: str
    events: tuple[TraceEvent, ...]


def read_pool_trace(
    path: str | Path, every: DevicePool, start: DevicePool | None = None
) -> PoolTrace:
    """Reads a trace.

    Args:
      path: of the file.
      every: the devices that exist.
      start: those that a run starts with; None: all.

    Raises:
      ConfigError: the file cannot be read, or a line is not possible; the message says which.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"pool trace: {path} cannot be read: {reason}") from None
    return parse_pool_trace(text, every, start, str(path))


def parse_pool_trace(
    text: str, every: DevicePool, start: DevicePool | None = None, name: str = "pool trace"
) -> PoolTrace:
    """The trace in a text; see `read_pool_trace`."""
    reader = PoolReader(every, start or every)
    events: list[TraceEvent] = []
    for where, entry in _entries(text, name):
        try:
            events += reader.events(entry)
        except ValueError as error:
            raise ConfigError(f"{name}, {where}: {error}") from None
    return PoolTrace(clock=reader.clock or "step", events=tuple(events))


def _entries(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """The objects of a text with where they are: a line, or a place in the list."""
    if text.lstrip().startswith("["):
        try:
            listed: list[Any] = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{name} is no JSON list: {error}; correct the file") from None
        yield from ((f"entry {i}", entry) for i, entry in enumerate(listed, 1))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{name}, line {number}: is no JSON: {error}; write one object a line"
            ) from None
        yield f"line {number}", entry


class PoolReader:
    """Follows the pool from entry to entry; every ValueError is one entry's mistake.

    Args:
      every: the devices that exist.
      start: those that are there.
      leaving: of these, those that will be gone.
    """

    def __init__(
        self, every: DevicePool, start: DevicePool, leaving: Iterable[DeviceId] = ()
    ) -> None:
        self._every = every
        self._alive = set(start.devices)
        self._gone_at: dict[DeviceId, float] = dict.fromkeys(leaving, math.inf)
        self._last = -math.inf
        self.clock = ""

    def message(self, entry: Any) -> TraceEvent:
        """What a message means, at time 0."""
        fields = _fields(entry, _MESSAGE_KEYS)
        change = _change(fields, "change")
        devices = self._devices(fields["devices"], change)
        event = TraceEvent(
            at=0.0, change=change, devices=devices, deadline_s=_deadline(fields, change)
        )
        self.follow(event)
        return event

    def follow(self, event: TraceEvent) -> None:
        """Takes note of a change that will come to pass."""
        self._apply(event.at, event.change, event.devices, event.deadline_s)

    def events(self, entry: Any) -> list[TraceEvent]:
        """What an entry of a trace means."""
        fields = _fields(entry, _TRACE_KEYS)
        at = self._time(fields)
        for device in [d for d, t in self._gone_at.items() if t <= at]:
            self._alive.discard(device)
            del self._gone_at[device]
        if "event" not in fields:
            return self._becomes(at, fields)
        change = _change(fields, "event")
        devices = self._devices(fields["devices"], change)
        deadline_s = _deadline(fields, change)
        self._apply(at, change, devices, deadline_s)
        return [TraceEvent(at=at, change=change, devices=devices, deadline_s=deadline_s)]

    def _time(self, fields: Mapping[str, Any]) -> float:
        clocks = [k for k in ("step", "time_s") if k in fields]
        if len(clocks) != 1:
            raise ValueError(f"needs step or time_s and not both, got {', '.join(fields)}")
        clock = clocks[0]
        if self.clock and clock != self.clock:
            raise ValueError(f"has {clock}, the lines before it have {self.clock}; use one of them")
        at = fields[clock]
        whole = isinstance(at, int) and not isinstance(at, bool)
        if not whole and (clock == "step" or not isinstance(at, float)):
            kind = "a whole number" if clock == "step" else "a number"
            raise ValueError(f"{clock} must be {kind}, got {at!r}")
        if not 0 <= at < math.inf:
            raise ValueError(f"{clock} must be at least 0, got {at!r}")
        if at < self._last:
            raise ValueError(
                f"{clock} {at:g} comes after {self._last:g}: time cannot run backwards; sort the "
                f"lines"
            )
        self.clock, self._last = clock, at
        return float(at)

    def _becomes(self, at: float, fields: Mapping[str, Any]) -> list[TraceEvent]:
        """The pool is what the entry says, from then on."""
        if "deadline_s" in fields:
            raise ValueError("deadline_s needs the event revoke")
        wanted = fields["devices"]
        there = self._staying()
        if isinstance(wanted, int) and not isinstance(wanted, bool):
            self._check_count(wanted, len(self._every), "exist")
            missing = [d for d in self._every.devices if d not in there]
            new = set(there[:wanted]) | set(missing[: max(wanted - len(there), 0)])
        else:
            new = set(_named(wanted))
            self._check_known(new)
        events: list[TraceEvent] = []
        for change, devices in (
            (PoolChange.LOST, [d for d in there if d not in new]),
            (PoolChange.JOINED, [d for d in self._every.devices if d in new and d not in there]),
        ):
            if devices:
                self._apply(at, change, devices, 0.0)
                events.append(TraceEvent(at=at, change=change, devices=tuple(devices)))
        return events

    def _staying(self) -> list[DeviceId]:
        return [d for d in self._every.devices if d in self._alive and d not in self._gone_at]

    def _devices(self, given: Any, change: PoolChange) -> tuple[DeviceId, ...]:
        if isinstance(given, int) and not isinstance(given, bool):
            if change is PoolChange.JOINED:
                there = set(self._staying())
                missing = [d for d in self._every.devices if d not in there]
                self._check_count(given, len(missing), "are missing", least=1)
                return tuple(missing[:given])
            there = self._staying()
            self._check_count(given, len(there), "are there", least=1)
            return tuple(there[len(there) - given :])
        devices = _named(given)
        self._check_known(devices)
        absent = [d for d in devices if d not in self._alive]
        if change is not PoolChange.JOINED and absent:
            raise ValueError(
                f"device {absent[0]} is not there and cannot be {_past(change)}; name devices of "
                f"the pool"
            )
        here = [d for d in devices if d in self._alive and d not in self._gone_at]
        if change is PoolChange.JOINED and here:
            raise ValueError(f"device {here[0]} is there already and cannot join")
        return devices

    def _check_known(self, devices: Iterable[DeviceId]) -> None:
        unknown = sorted(set(devices) - set(self._every.devices))
        if unknown:
            raise ValueError(
                f"device {unknown[0]} does not exist; the job has {len(self._every)} devices from "
                f"{min(self._every.devices)} to {max(self._every.devices)}"
            )

    def _check_count(self, count: int, most: int, what: str, least: int = 0) -> None:
        if not least <= count <= most:
            raise ValueError(f"devices must be {least} to {most}, as many as {what}, got {count}")

    def _apply(
        self, at: float, change: PoolChange, devices: Iterable[DeviceId], deadline_s: float
    ) -> None:
        for device in devices:
            self._gone_at.pop(device, None)
            if change is PoolChange.LOST:
                self._alive.discard(device)
            elif change is PoolChange.JOINED:
                self._alive.add(device)
            else:
                # Steps are no seconds: until the trace says so, such a device is on its way out.
                self._gone_at[device] = at + deadline_s if self.clock == "time_s" else math.inf


def _fields(entry: Any, known: Iterable[str]) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"must be an object, got {entry!r}")
    fields: dict[str, Any] = entry  # pyright: ignore[reportUnknownVariableType]
    unknown = [k for k in fields if k not in known]
    if unknown:
        raise ValueError(f"key {unknown[0]!r} is not known; known are {', '.join(known)}")
    if "devices" not in fields:
        raise ValueError("devices is missing; give names or a number")
    return fields


def _change(fields: Mapping[str, Any], key: str) -> PoolChange:
    given = fields.get(key)
    if given not in list(PoolChange):
        known = ", ".join(PoolChange)
        raise ValueError(f"{key} {given!r} is not known; known are {known}")
    return PoolChange(given)


def _deadline(fields: Mapping[str, Any], change: PoolChange) -> float:
    given = fields.get("deadline_s")
    if (given is not None) != (change is PoolChange.REVOKE):
        raise ValueError(
            f"deadline_s {'is missing' if given is None else 'does not belong to it'}; revoke has "
            f"it, lost and joined do not"
        )
    if given is None:
        return 0.0
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not 0 <= given < math.inf:
        raise ValueError(f"deadline_s must be a number of at least 0, got {given!r}")
    return float(given)


def _named(given: Any) -> tuple[DeviceId, ...]:
    """Devices by name, each once, ranges taken apart."""
    if not isinstance(given, list) or not given:
        raise ValueError(
            f"devices must be a number or a list of names such as '0:3', got {given!r}"
        )
    names: list[Any] = given  # pyright: ignore[reportUnknownVariableType]
    devices: list[DeviceId] = []
    for name in names:
        match = re.fullmatch(r"(\d+):(\d+)(?:-(\d+))?", name) if isinstance(name, str) else None
        if match is None:
            raise ValueError(f"a device is written host:index or host:first-last, got {name!r}")
        first, last = int(match[2]), int(match[3] or match[2])
        if not first <= last < first + MOST_NAMED:
            raise ValueError(f"a range ascends and has up to {MOST_NAMED} devices, got {name!r}")
        devices += [DeviceId(int(match[1]), i) for i in range(first, last + 1)]
        if len(devices) > MOST_NAMED:
            raise ValueError(f"an entry names up to {MOST_NAMED} devices, got more")
    twice = [d for d, count in Counter(devices).items() if count > 1]
    if twice:
        raise ValueError(f"device {min(twice)} is named more than once")
    return tuple(devices)


def _past(change: PoolChange) -> str:
    return "lost" if change is PoolChange.LOST else "revoked"
