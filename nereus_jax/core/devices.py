"""The pool of devices as a value: which devices are alive and on which host each sits."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, order=True)
class DeviceId:
    """A device named by its host (process index) and its index on that host; never by a backend's
    id."""

    host: int
    index: int

    def __str__(self) -> str:
        return f"{self.host}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> "DeviceId":
        """Reads `host:index`."""
        host, _, index = text.partition(":")
        if not (host.isdecimal() and index.isdecimal()):
            raise ValueError(f"a device is written host:index, such as 0:3; got {text!r}")
        return cls(int(host), int(index))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicePool:
    """The devices that are alive, in one flat order that every mesh and every process uses."""

    devices: tuple[DeviceId, ...]
    kind: str = "cpu"

    def __post_init__(self) -> None:
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"a device is listed twice: {[str(d) for d in self.devices]}")

    @classmethod
    def uniform(cls, num_hosts: int, devices_per_host: int, kind: str = "cpu") -> "DevicePool":
        """A pool of `num_hosts` hosts with the same number of devices each."""
        devices = tuple(DeviceId(h, i) for h in range(num_hosts) for i in range(devices_per_host))
        return cls(devices=devices, kind=kind)

    def __len__(self) -> int:
        return len(self.devices)

    def without(self, lost: Iterable[DeviceId]) -> "DevicePool":
        """The pool after `lost` are gone."""
        gone = set(lost)
        return dataclasses.replace(self, devices=tuple(d for d in self.devices if d not in gone))

    def joined(self, new: Iterable[DeviceId]) -> "DevicePool":
        """The pool after `new` came, in the order (host, index)."""
        return dataclasses.replace(self, devices=tuple(sorted({*self.devices, *new})))
