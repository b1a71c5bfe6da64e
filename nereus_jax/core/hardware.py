"""What a kind of device can do at most: the peaks and links that costs are priced with.

Peaks are what the maker states; what a program reaches of them is learned (`planning/calibration`).
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A way for bytes.

    Attributes:
      bytes_per_s: of one device, in one direction.
      latency_s: of one message.
    """

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(f"a link has bytes_per_s > 0 and latency_s >= 0, got {self}")

    def seconds(self, num_bytes: float) -> float:
        """Of one message of so many bytes at the peak."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device in its usual node.

    Attributes:
      name: as on the command line (`h100`).
      devices_per_node: that share the fast links.
      peak_flops_per_s: dense, by dtype (`bfloat16`).
      memory_bytes: of one device.
      memory_bytes_per_s: of one device.
      intra_node: between devices of a node.
      inter_node: between nodes, for each device.
      host: between a device and the memory of its host.
      usd_per_device_hour: a usual price; None: unknown.
      sources: where the numbers come from.
    """

    name: str
    devices_per_node: int
    peak_flops_per_s: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    intra_node: Link
    inter_node: Link
    host: Link
    usd_per_device_hour: float | None = None
    sources: tuple[str, ...] = ()

    def link(self, same_node: bool) -> Link:
        """The link between two devices."""
        return self.intra_node if same_node else self.inter_node
