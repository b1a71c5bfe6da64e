# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Seconds of single operations by class: the terms that the cost model is made of.

Everything is an array over candidates [C], or a scalar that broadcasts against it.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.emu_spec import DTYPE_BYTES
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.planning.calibration import Efficiencies, OperationClass
from nereus_jax.planning.candidates import by_degree

Floats = NDArray[np.float64]
Value = NDArray[Any] | float
"""An array [C], or what broadcasts against it."""
Spent = dict[OperationClass, Value]
"""Seconds by class."""

ROOFLINE_NORM = 1.5
"""A matrix product takes (compute^p + memory^p)^(1/p): between the larger of the two (p = infinity)
and their sum (p = 1). 1.5 has the smallest error on the profiles of Llama-2 7B and 70B on A100 and
H100 of Vidur (Agrawal et al., MLSys 2024): 7 and 9 %, against 8 and 11 % of the larger."""

KERNEL_S = 5e-6
"""What a kernel takes beside its work, from the same profiles."""

KERNELS_PER_LAYER = 10
"""Of a forward pass: 5 products, attention, norms and elementwise work."""

COMPILE_S = 5.0
"""Of one program at an efficiency of 1; the class's efficiency says what a compiler needs."""

WIDTH_TILE = 32
"""A matrix whose width on a device is no multiple of this runs its products unaligned: tensor cores
want rows of a multiple of 64 bytes and more (NVIDIA, Matrix Multiplication Background)."""


class DataSync(enum.StrEnum):
    """How replicas agree on gradients and parameters."""

    AT_END = "at end"  # once an update, when all gradients are there
    OVERLAPPED = "overlapped"  # layer by layer, while the backward pass of the last flush runs
    SHARDED = "sharded"  # FSDP: gathered for each pass, gradients scattered in each microbatch
    SHARDED_GRADS = "sharded grads"  # the same, but the gathered parameters stay for the update


class RowFill(enum.StrEnum):
    """How sequences lie in the rows of SCORE and TRAIN."""

    PADDED = "padded"  # one in a row, all rows as long as the longest
    PACKED = "packed"  # several in a row, microbatches only as far as there are tokens
    EXACT = "exact"  # a microbatch is so many sequences, and only their tokens are computed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How an engine runs a model-stage. The defaults are this project's engines.

    Attributes:
      rows: how sequences lie in rows; prompts of GENERATE are padded unless EXACT.
      static_slots: a decode step computes all slots, also those without a row.
      score_bytes: memory traffic of attention for each score, one forward pass; 0: fused.
      score_share: share of the S x S scores that are computed; causal at best 1/2.
      vocab_over_pp: embedding and head are split over pipeline ranks too, and run after the flush;
        else the last rank has the head, and all wait for it.
      padded_layers: every rank has as many layers as the largest.
      interleave: parts of the layers that a pipeline rank has (Narayanan et al. 2021).
      recomputed_all_reduces: of the 2 in a layer's forward pass, when it is recomputed.
      recompute_attention_only: recomputation means scores only (Korthikanti et al. 2022).
      sequence_parallel: norms and residuals are split over tp too.
      p2p_scattered: tp ranks send a part each between pipeline ranks.
      sync: how replicas agree.
      zero_ranks: replicas that share the optimizer's state under ZeRO-1; 0: all.
      zero_scatters: under ZeRO-1 over all replicas gradients are scattered, not summed everywhere.
      grad_bytes: of a gradient on the wire.
      gather_bytes: of a parameter that is gathered.
      head_passes: passes of the head: forward, two backward, and one for recomputed logits.
    """

    rows: RowFill = RowFill.PACKED
    static_slots: bool = True
    score_bytes: float = 16.0
    score_share: float = 1.0
    vocab_over_pp: bool = True
    padded_layers: bool = True
    interleave: int = 1
    recomputed_all_reduces: int = 1
    recompute_attention_only: bool = False
    sequence_parallel: bool = False
    p2p_scattered: bool = False
    sync: DataSync = DataSync.AT_END
    zero_ranks: int = 0
    zero_scatters: bool = True
    grad_bytes: float = 4.0
    gather_bytes: float = 4.0
    head_passes: float = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What of a model costs something.

    Attributes:
      num_layers: layers.
      embed_dim: width of the residual stream.
      query_dim: width of all query heads; kv_dim: of all key heads.
      num_heads, num_kv_heads: heads.
      mlp_dim: width of the feed-forward layer.
      mlp_matrices: 3 with a gate, 2 without.
      vocab_size: rows of the head; 0 where there is none (a scalar head).
      params: elements of the model.
    """

    num_layers: int
    embed_dim: int
    query_dim: int
    kv_dim: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    mlp_matrices: int = 3
    vocab_size: int
    params: float

    @classmethod
    def of(cls, model: DecoderConfig, head: Head) -> "ModelSizes":
        """The sizes of a decoder with a head."""
        return cls(
            num_layers=model.num_layers,
            embed_dim=model.embed_dim,
            query_dim=model.num_heads * model.head_dim,
            kv_dim=model.num_kv_heads * model.head_dim,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            mlp_dim=model.mlp_dim,
            vocab_size=model.vocab_size if head is Head.LM else 0,
            params=float(model.num_params(head)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices:
    """Hardware with its efficiencies: turns work into seconds.

    Attributes:
      hardware: peaks and links.
      efficiencies: what is reached of them.
      dtype: of activations and of weights in products.
    """

    hardware: Hardware
    efficiencies: Efficiencies
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in self.hardware.peak_flops_per_s:
            raise ConfigError(
                f"hardware {self.hardware.name} has no peak for {self.dtype}; use one of "
                f"{', '.join(self.hardware.peak_flops_per_s)}"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.dtype]

    def flops_s(self, flops: Value, operation: OperationClass | NDArray[np.bool_]) -> Value:
        """Seconds of matrix work; a mask stands for GEMM where set, UNALIGNED_GEMM elsewhere."""
        peak = self.hardware.peak_flops_per_s[self.dtype]
        if isinstance(operation, OperationClass):
            return flops / (peak * self.efficiencies[operation])
        aligned = self.efficiencies[OperationClass.GEMM]
        unaligned = self.efficiencies[OperationClass.UNALIGNED_GEMM]
        return flops / (peak * np.where(operation, aligned, unaligned))

    def memory_s(self, num_bytes: Value, operation: OperationClass) -> Value:
        """Seconds of traffic to a device's memory."""
        return num_bytes / (self.hardware.memory_bytes_per_s * self.efficiencies[operation])

    def launch_s(self, kernels: Value) -> Value:
        """Seconds of so many kernels beside their work."""
        return kernels * (KERNEL_S / self.efficiencies[OperationClass.LAUNCH])

    def host_copy(self, num_bytes: Value) -> Spent:
        """Bytes between a device and the memory of its host (Park, Unpark)."""
        link = self.hardware.host
        seconds = link.latency_s + num_bytes / link.bytes_per_s
        return {OperationClass.HOST_COPY: seconds / self.efficiencies[OperationClass.HOST_COPY]}

    def compile(self, programs: Value) -> Spent:
        """Programs that the compiler has not seen."""
        seconds = programs * COMPILE_S / self.efficiencies[OperationClass.COMPILE]
        return {OperationClass.COMPILE: seconds}

    def product(self, flops: Value, weight_bytes: Value, aligned: NDArray[np.bool_]) -> Spent:
        """A matrix product by the roofline with a rounded corner.

        Its seconds are dealt to the classes by their elasticity, (term / total)^p, so that the
        shares say what a better efficiency would bring.
        """
        compute = self.flops_s(flops, aligned) ** ROOFLINE_NORM
        memory = self.memory_s(weight_bytes, OperationClass.DECODE_MEMORY) ** ROOFLINE_NORM
        both = compute + memory
        factor = both ** (1.0 / ROOFLINE_NORM - 1.0)
        compute_s = compute * factor
        return {
            OperationClass.GEMM: np.where(aligned, compute_s, 0.0),
            OperationClass.UNALIGNED_GEMM: np.where(aligned, 0.0, compute_s),
            OperationClass.DECODE_MEMORY: memory * factor,
        }

    def ring(self, ranks: Value, stride: Value) -> "Ring":
        """What groups of ranks take for a collective.

        Args:
          ranks: of the group.
          stride: devices from one rank of the group to the next.
        """
        in_node = np.minimum(np.maximum(self.hardware.devices_per_node // stride, 1), ranks)
        nodes = np.ceil(ranks / in_node)
        intra, inter = self.hardware.intra_node, self.hardware.inter_node
        intra_reached = self.efficiencies[OperationClass.ALL_REDUCE_INTRA]
        inter_reached = self.efficiencies[OperationClass.ALL_REDUCE_INTER]
        return Ring(
            intra_s_per_byte=_byte_s(intra, in_node) / intra_reached,
            intra_latency_s=_hops(in_node) * (intra.latency_s / intra_reached),
            inter_s_per_byte=_byte_s(inter, nodes) / (in_node * inter_reached),
            inter_latency_s=_hops(nodes) * (inter.latency_s / inter_reached),
        )

    def all_reduce(self, num_bytes: Value, ranks: Value, stride: Value) -> Spent:
        """One `Ring.collective` of a group that has no other."""
        return self.ring(ranks, stride).collective(num_bytes)

    def send(self, num_bytes: Value, crosses_nodes: NDArray[np.bool_], sends: Value) -> Spent:
        """Messages between neighbours, one after the other."""
        spent: Spent = {}
        for link, operation, used in (
            (self.hardware.intra_node, OperationClass.P2P_INTRA, ~crosses_nodes),
            (self.hardware.inter_node, OperationClass.P2P_INTER, crosses_nodes),
        ):
            one_s = link.latency_s + num_bytes / link.bytes_per_s
            spent[operation] = np.where(used, sends * one_s / self.efficiencies[operation], 0.0)
        return spent


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ring:
    """Collectives of groups of ranks, in the node and then between nodes, for one pass.

    Ring: (n - 1) / n * bytes / bandwidth; a tree's latency: log2(n) hops. The ranks of a group in
    one node use their links to other nodes together.

    Attributes:
      intra_s_per_byte, inter_s_per_byte: [C] of the whole buffer of a rank.
      intra_latency_s, inter_latency_s: [C].
    """

    intra_s_per_byte: Value
    intra_latency_s: Value
    inter_s_per_byte: Value
    inter_latency_s: Value

    def collective(self, num_bytes: Value, passes: float = 2.0) -> Spent:
        """An all-reduce, which is two passes; a reduce-scatter or an all-gather is one.

        Args:
          num_bytes: of the whole buffer of a rank.
          passes: over the ring.
        """
        intra_s = num_bytes * self.intra_s_per_byte + self.intra_latency_s
        inter_s = num_bytes * self.inter_s_per_byte + self.inter_latency_s
        return {
            OperationClass.ALL_REDUCE_INTRA: passes * intra_s,
            OperationClass.ALL_REDUCE_INTER: passes * inter_s,
        }


def _byte_s(link: Link, ranks: Value) -> Value:
    """Seconds of a byte in one pass at the peak; one rank takes none."""
    return (1.0 - 1.0 / ranks) / link.bytes_per_s


def _hops(ranks: Value) -> Value:
    return np.ceil(np.log2(ranks))


def added(*parts: Spent) -> Spent:
    """The sum by class."""
    total: Spent = {}
    for part in parts:
        for operation, seconds in part.items():
            total[operation] = total[operation] + seconds if operation in total else seconds
    return total


def scaled(part: Spent, factor: Value) -> Spent:
    """Each class's seconds times a factor."""
    return {operation: seconds * factor for operation, seconds in part.items()}


def total_s(part: Mapping[OperationClass, Value]) -> Value:
    """The sum over classes."""
    result: Value = 0.0
    for seconds in part.values():
        result = result + seconds
    return result


def aligned_widths(sizes: ModelSizes, tp: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[C] whether every matrix of a layer has a width on a device that fits a matrix unit."""

    def fit(tp: NDArray[np.int64]) -> NDArray[np.bool_]:
        fits = np.full(tp.shape, sizes.embed_dim % WIDTH_TILE == 0)
        for width in (sizes.query_dim, sizes.mlp_dim):
            fits &= (-(-width // tp)) % WIDTH_TILE == 0
        return fits

    return by_degree(fit, tp)
