# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Seconds of single operations on a simulated device: products, traffic, collectives, messages.

All take arrays of any shape. Unlike in `planning.cost_terms` an efficiency depends on the size of
what is done.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.emu_spec import DTYPE_BYTES
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.simulator.curves import KernelCurve, LinkCurve, Truth

Value = NDArray[Any] | float

WIDTH_TILE = 64
"""Columns that a matrix unit's tile has; a width that is no multiple computes the rest as well."""
ROW_TILE = 128
"""The same of rows."""


def product_s(
    curve: KernelCurve,
    peak_flops_per_s: float,
    memory_bytes_per_s: float,
    rows: Value,
    depth: Value,
    width: Value,
    element_bytes: float,
) -> Value:
    """Of [rows, depth] x [depth, width]."""
    tiled = ROW_TILE * np.ceil(rows / ROW_TILE) * depth * WIDTH_TILE * np.ceil(width / WIDTH_TILE)
    reached = curve.peak * width / (width + curve.half_width) * depth / (depth + curve.half_depth)
    compute_s = 2.0 * tiled / (peak_flops_per_s * reached)
    num_bytes = element_bytes * (rows * depth + depth * width + rows * width)
    memory_s = num_bytes / (memory_bytes_per_s * curve.bandwidth)
    both = compute_s**curve.corner + memory_s**curve.corner
    return curve.kernel_s + both ** (1.0 / curve.corner)


def traffic_s(curve: KernelCurve, memory_bytes_per_s: float, num_bytes: Value) -> Value:
    """Of a kernel that is bound by memory."""
    return curve.kernel_s + num_bytes / (memory_bytes_per_s * curve.elementwise_bandwidth)


def message_s(curve: LinkCurve, link: Link, num_bytes: Value, message_bytes: Value) -> Value:
    """Of so many bytes through one device's link, in messages of a size; without hops."""
    slow = 1.0 + (curve.half_bytes / np.maximum(message_bytes, 1.0)) ** curve.ramp
    return num_bytes / (link.bytes_per_s * curve.share) * slow


def ring_s(curve: LinkCurve, link: Link, num_bytes: Value, ranks: float, passes: float) -> Value:
    """Of a collective: `passes` (ranks - 1) / ranks of the buffer through every rank's link."""
    if ranks <= 1:
        return 0.0
    moved = passes * (ranks - 1.0) / ranks * num_bytes
    hops = passes * np.ceil(np.log2(ranks)) * curve.hop_s
    return hops + message_s(curve, link, moved, num_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One simulated device with its links.

    Attributes:
      hardware: peaks and links.
      truth: what is reached of them.
      dtype: of activations and of weights in products.
      devices_per_node: that share fast links in the group of ranks at hand.
      network: what the network between nodes reaches now, over what it usually does.
    """

    hardware: Hardware
    truth: Truth
    dtype: str = "bfloat16"
    devices_per_node: int
    network: float = 1.0

    @property
    def element_bytes(self) -> int:
        """Of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def curve(self) -> KernelCurve:
        """Of its kernels."""
        return self.truth.kernel(self.hardware.name)

    def product(self, rows: Value, depth: Value, width: Value) -> Value:
        """A matrix product."""
        hardware = self.hardware
        return product_s(
            self.curve,
            hardware.peak_flops_per_s[self.dtype],
            hardware.memory_bytes_per_s,
            rows,
            depth,
            width,
            self.element_bytes,
        )

    def traffic(self, num_bytes: Value) -> Value:
        """A layer's elementwise work, or the optimizer."""
        return traffic_s(self.curve, self.hardware.memory_bytes_per_s, num_bytes)

    def reading(self, num_bytes: Value) -> Value:
        """Large arrays read from end to end: caches of keys and values."""
        curve = self.curve
        return curve.kernel_s + num_bytes / (self.hardware.memory_bytes_per_s * curve.bandwidth)

    def attention(self, flops: Value, length: Value) -> Value:
        """Scores and weighted sums over sequences of a length."""
        curve = self.curve
        reached = curve.attention_peak * length / (length + curve.attention_half_tokens)
        peak = self.hardware.peak_flops_per_s[self.dtype]
        return curve.kernel_s + flops / (peak * np.maximum(reached, 1e-6))

    def all_reduce(
        self, num_bytes: Value, ranks: int, stride: int = 1, *, passes: float = 2.0
    ) -> Value:
        """In the node, then between nodes; 1 pass: a reduce-scatter or an all-gather.

        Args:
          num_bytes: of the buffer of a rank.
          ranks: of the group.
          stride: devices from one rank to the next.
          passes: over the buffer.
        """
        if ranks <= 1:
            return 0.0
        in_node = int(min(max(self.devices_per_node // stride, 1), ranks))
        nodes = -(-ranks // in_node)
        links, hardware = self.truth.links, self.hardware
        inside = ring_s(links["intra_node"], hardware.intra_node, num_bytes, in_node, passes)
        outside = ring_s(
            links["inter_node"], hardware.inter_node, num_bytes / in_node, nodes, passes
        )
        # Parts of the buffer are between nodes while others are inside: the slower way counts.
        return np.maximum(inside, outside / self.network)

    def send(self, num_bytes: Value, *, crosses_nodes: bool) -> Value:
        """One message to a neighbour."""
        name = "inter_node" if crosses_nodes else "intra_node"
        curve = self.truth.links[name]
        seconds = message_s(curve, self.hardware.link(not crosses_nodes), num_bytes, num_bytes)
        return curve.hop_s + seconds / (self.network if crosses_nodes else 1.0)

    def host_copy(self, num_bytes: float) -> float:
        """Between a device and the memory of its host."""
        curve = self.truth.links["host"]
        return curve.hop_s + float(message_s(curve, self.hardware.host, num_bytes, num_bytes))
