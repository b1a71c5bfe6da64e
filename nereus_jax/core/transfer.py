"""What moves between two tilings of a tree: made by planning, executed by runtime.

Devices are indices into `TransferSchedule.devices`, leaves are indices into its tilings. Boxes are
in logical coordinates.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.tiling import LeafTiling

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """What the devices have of a leaf already, and what is to be done with it.

    Attributes:
      shared: devices whose target block is their source block: it is handed on, never copied.
      copied: devices whose target block takes a part of their own source block.
      starts: [copied, D] first index of that part in each dim.
      extents: [copied, D] its shape.
      receiving: devices that get a new block, in ascending order.
    """

    shared: tuple[int, ...]
    copied: tuple[int, ...]
    starts: Ints
    extents: Ints
    receiving: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A box of one leaf for every pair of an exchange: other places, the same shape.

    Attributes:
      leaf: which one.
      extent: shape of the box.
      starts: [pairs, D] its first index in each dim.
    """

    leaf: int
    extent: tuple[int, ...]
    starts: Ints

    @property
    def num_elements(self) -> int:
        return math.prod(self.extent)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """One permutation: each device sends to at most one and receives from at most one.

    Attributes:
      pairs: (sender, receiver), ascending.
      parts: what each sender sends.
      forwards: the senders read the block that they received, not the one they had: the second
        leg of a box that crossed a slow link once and is spread inside the node.
    """

    pairs: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]
    forwards: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Leaves that are moved together.

    Attributes:
      leaves: indices; they lie on the same devices and the same devices get new blocks of them.
      holding: the devices that hold them.
      receiving: the devices that get new blocks.
      groups: exchanges; those of one group are in flight at the same time, a group begins when
        the one before has ended.
    """

    leaves: tuple[int, ...]
    holding: tuple[int, ...]
    receiving: tuple[int, ...]
    groups: tuple[tuple[Exchange, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TransferSchedule:
    """A transition of a tree, to the last box.

    Attributes:
      devices: all devices of both ends, in the order (host, index).
      sources: where each leaf is.
      targets: where each leaf goes.
      kept: for each leaf.
      batches: every leaf that any device gets a new block of, in the order in which they move.
      lost: devices whose source blocks are not there any more.
    """

    devices: tuple[DeviceId, ...]
    sources: tuple[LeafTiling, ...]
    targets: tuple[LeafTiling, ...]
    kept: tuple[Kept, ...]
    batches: tuple[Batch, ...]
    lost: frozenset[DeviceId]

    def wire_item_bytes(self, leaf: int) -> int:
        """Bytes of an element on the wire: it travels in the smaller of the two dtypes."""
        return min(self.sources[leaf].item_bytes, self.targets[leaf].item_bytes)

    def payload_bytes(self, exchange: Exchange) -> int:
        """What each sender of an exchange sends."""
        return sum(p.num_elements * self.wire_item_bytes(p.leaf) for p in exchange.parts)

    def group_bytes(self, group: tuple[Exchange, ...]) -> int:
        """Send and receive buffers of a group on one device."""
        return 2 * sum(self.payload_bytes(e) for e in group)

    @property
    def inflight_bytes(self) -> int:
        """The largest send and receive buffers of any group, on one device."""
        return max((self.group_bytes(g) for b in self.batches for g in b.groups), default=0)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(e for b in self.batches for g in b.groups for e in g)

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave a device, over all of them."""
        return sum(len(e.pairs) * self.payload_bytes(e) for e in self.exchanges)

    def bytes_by_pair(self) -> Mapping[tuple[DeviceId, DeviceId], int]:
        """Bytes from device to device."""
        totals: dict[tuple[DeviceId, DeviceId], int] = {}
        for exchange in self.exchanges:
            payload = self.payload_bytes(exchange)
            for sender, receiver in exchange.pairs:
                pair = self.devices[sender], self.devices[receiver]
                totals[pair] = totals.get(pair, 0) + payload
        return totals
