"""What supervisors tell each other, as values and as lines of JSON.

Both are whole states, sent again with every beat: one that is lost or comes twice does no harm.
"""

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any

MAX_LINE_BYTES = 1 << 20


class Action(enum.StrEnum):
    """What a slot is to do."""

    WAIT = "wait"
    """Nothing; no worker is running."""
    RUN = "run"
    """Have a worker of this epoch, if the slot is a member of it."""
    STOP = "stop"
    """Have it save and end at the step boundary."""
    KILL = "kill"
    """End it at once."""
    END = "end"
    """The job is over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a slot says of itself.

    Attributes:
      epoch: of its worker, the running one or the last; 0: it had none.
      running: whether that worker runs.
      code: its exit code; negative: the signal that ended it. None: it runs, or there was none.
      leaving: whether the slot was asked to leave the job (SIGTERM).
      interrupted: whether the job was asked to end (Ctrl-C).
      obeys: tag of the order that this report comes after.
    """

    epoch: int = 0
    running: bool = False
    code: int | None = None
    leaving: bool = False
    interrupted: bool = False
    obeys: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What all slots are to do.

    Attributes:
      epoch: that it is about; every set of processes has its own, and they ascend.
      action: to take.
      members: slot -> address of its supervisor; the processes of the epoch.
      leader: the slot that keeps the register. Its worker is process 0.
      coordinator: host:port where process 0 of the epoch is found.
      code: exit code of the job, with END.
      reason: why, in words.
      error: what ended the job, with END, where no worker has told of it.
    """

    epoch: int
    action: Action
    members: Mapping[int, str]
    leader: int
    coordinator: str = ""
    code: int = 0
    reason: str = ""
    error: str = ""

    @property
    def tag(self) -> str:
        """Tells orders apart."""
        return f"{self.leader} {self.epoch} {self.action}"

    def process_id(self, slot: int) -> int | None:
        """The rank of a slot's worker; None: it has none in this epoch."""
        ranked = sorted(self.members, key=lambda s: (s != self.leader, s))
        return ranked.index(slot) if slot in self.members else None


def encode(message: Mapping[str, Any]) -> bytes:
    """One line."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Reads a line.

    Raises:
      ValueError: it is none of a supervisor.
    """
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"expected an object, got {line[:80]!r}")
    return message


def report_message(report: Report) -> dict[str, Any]:
    """A report, to send."""
    return {"report": dataclasses.asdict(report)}


def read_report(message: Mapping[str, Any]) -> Report:
    """Raises ValueError, KeyError or TypeError if the message holds no report."""
    return Report(**message["report"])


def order_message(order: Order) -> dict[str, Any]:
    """An order, to send."""
    return {"order": dataclasses.asdict(order)}


def read_order(message: Mapping[str, Any]) -> Order:
    """Raises ValueError, KeyError or TypeError if the message holds no order."""
    fields = dict(message["order"])
    fields["action"] = Action(fields["action"])
    fields["members"] = {int(slot): str(a) for slot, a in fields["members"].items()}
    return Order(**fields)
