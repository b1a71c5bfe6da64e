"""A decision as processes tell it to each other, with what goes along."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nereus_jax.control.decisions import decision_digest
from nereus_jax.control.pool_trace import PoolChange, TraceEvent
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.events import Decision, decision_from_json, decision_to_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decided:
    """What comes of the events since the last decision, the same on every process.

    Attributes:
      decision: of the controller.
      records: of all replans.
      pool: changes of the pool; where devices are lost, there is no decision before the job has
        taken note of it.
      pending: whether the controller waits for the end of a move.
      hurry: whether that move can wait for its programs no longer.
      said: lines to print; in process 0 alone.
    """

    decision: Decision
    records: Sequence[Mapping[str, Any]] = ()
    pool: tuple[TraceEvent, ...] = ()
    pending: bool = False
    hurry: bool = False
    said: tuple[str, ...] = ()

    @property
    def lost(self) -> frozenset[DeviceId]:
        """Devices that are gone."""
        return self._devices(PoolChange.LOST)

    @property
    def joined(self) -> frozenset[DeviceId]:
        """Devices that have come."""
        return self._devices(PoolChange.JOINED)

    def _devices(self, change: PoolChange) -> frozenset[DeviceId]:
        return frozenset(d for event in self.pool if event.change is change for d in event.devices)

    def to_json(self) -> dict[str, Any]:
        """What process 0 tells the others."""
        return {
            "decision": decision_to_json(self.decision),
            "records": list(self.records),
            "pool": [event.to_json() for event in self.pool],
            "pending": self.pending,
            "hurry": self.hurry,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Decided":
        """Reads what `to_json` made."""
        return cls(
            decision=decision_from_json(data["decision"]),
            records=data["records"],
            pool=tuple(TraceEvent.from_json(event) for event in data["pool"]),
            pending=data["pending"],
            hurry=data["hurry"],
        )

    def digest(self) -> bytes:
        """What processes compare."""
        rest = json.dumps([event.to_json() for event in self.pool], sort_keys=True)
        text = f"{decision_digest(self.decision)} {self.pending} {self.hurry} {rest}"
        return hashlib.sha256(text.encode()).digest()
