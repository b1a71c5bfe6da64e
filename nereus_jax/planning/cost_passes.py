# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Seconds of SCORE and TRAIN: passes of whole rows through the layers, in pipeline flushes.

A flush of M microbatches takes M times the slowest rank's microbatch, and the way of the first one
through the other ranks (the bubble). An update adds what the replicas tell each other, and the
optimizer's memory traffic.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.packed_cuts import GAIN, SCORE_FLUSH_PER_RANK, short_width
from nereus_jax.planning.calibration import OperationClass
from nereus_jax.planning.candidates import Candidates, by_degree
from nereus_jax.planning.cost_terms import (
    KERNELS_PER_LAYER,
    DataSync,
    Execution,
    Floats,
    ModelSizes,
    Prices,
    Ring,
    RowFill,
    Spent,
    Value,
    added,
    aligned_widths,
    scaled,
    total_s,
)
from nereus_jax.planning.workload import Workload

OPTIMIZER_BYTES = 28.0
"""Traffic of Adam for an element: read gradient, two moments and parameter, write the last three,
float32."""

LOGIT_BYTES = 16.0
"""Traffic for a logit in a forward pass: written once and read three times, float32."""

BACKWARD = 2.0
"""Backward over forward, in products and in memory traffic."""

FUSED_ATTENTION_BACKWARD = 2.5
"""The same of fused attention, which makes the scores again: 5 products against 2 (Dao 2023)."""


PACKED_FILL = 0.95
"""Share of a packed row that holds tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What a microbatch is made of.

    Attributes:
      tokens: [C] through the layers.
      pairs: [C] of a query and a key whose score is computed.
      head_tokens: [C] through the head.
    """

    tokens: Value
    pairs: Value
    head_tokens: Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """How a replica's sequences are cut.

    Attributes:
      micro: of what a microbatch is made.
      microbatches: [C] of a flush that are run.
      flushes: [C] that are run.
    """

    micro: Microbatch
    microbatches: Floats
    flushes: Floats

    @classmethod
    def of(
        cls,
        workload: Workload,
        c: Candidates,
        execution: Execution,
        sequences: int,
        train: bool,
    ) -> "Batch":
        """So many sequences of the workload, shared by the replicas of the candidates."""
        share = execution.score_share
        if execution.rows is RowFill.PACKED:
            held = np.asarray(-(-sequences // c.dp) * workload.mean_row_tokens, np.float64)
            cut = packed_cut(held / PACKED_FILL, c, workload.row_tokens, train)
            responses = workload.response_lengths.mean / workload.mean_row_tokens
            micro = Microbatch(
                tokens=cut.tokens / cut.microbatches,
                pairs=share * cut.pairs / cut.microbatches,
                head_tokens=held * responses / cut.microbatches,
            )
            per_flush = cut.microbatches / cut.flushes
            return cls(micro=micro, microbatches=per_flush, flushes=cut.flushes)
        if execution.rows is RowFill.EXACT:
            micro = Microbatch(
                tokens=c.microbatch_size * workload.mean_row_tokens,
                pairs=c.microbatch_size * share * workload.mean_square_row_tokens,
                head_tokens=c.microbatch_size * workload.response_lengths.mean,
            )
        else:
            length = float(workload.row_tokens)
            tokens = c.microbatch_size * length
            micro = Microbatch(
                tokens=tokens,
                pairs=share * tokens * length,
                head_tokens=c.microbatch_size * float(workload.max_response_tokens),
            )
        return cls(
            micro=micro,
            microbatches=c.microbatches.astype(np.float64),
            flushes=c.accumulation.astype(np.float64),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCut:
    """[C] What a replica runs on packed rows.

    Attributes:
      tokens: of all its microbatches.
      pairs: of a query and a key in them.
      microbatches: that are run.
      flushes: that they are run in.
    """

    tokens: Floats
    pairs: Floats
    microbatches: Floats
    flushes: Floats


def packed_cut(filled: Floats, c: Candidates, length: int, train: bool) -> PackedCut:
    """The rows that the engines choose (`rl/packed_forms`), foreseen from the number of tokens.

    Args:
      filled: [C] tokens of a replica, with the room that packing leaves beside them.
      c: the candidates.
      length: of the longest sequence.
      train: TRAIN, else SCORE.
    """
    size = c.microbatch_size
    # A flush that takes all of the usual microbatches takes all of smaller ones, too.
    limit = np.where(c.accumulation > 1, c.microbatches, np.iinfo(np.int32).max)
    limit = np.where(c.pp > 1, limit if train else SCORE_FLUSH_PER_RANK * c.pp, 1)
    filled = np.clip(filled / length, 1e-6, size * c.microbatches * c.accumulation)
    # Tokens, in long rows, of the usual microbatches and of smaller ones, [N, C].
    halvings = np.arange(int(size.max(initial=1)).bit_length())
    rows = np.maximum(size >> halvings[:, None], 1)
    cost = np.ceil(filled / rows) * rows
    lowest, width = cost.min(axis=0), short_width(length)
    part = width / length
    long = np.maximum(np.floor(filled), 1.0)
    short = np.ceil(np.maximum(filled - long, 0.0) / part) if width else np.zeros_like(long)
    mixed = long + short * part
    if width:
        bubble = np.ceil(short / limit) * (c.pp - 1)
        lowest = np.minimum(lowest, mixed + bubble * part)
    cheap = cost <= GAIN * lowest
    first, own = np.argmax(cheap, axis=0), np.arange(len(c))
    alike, row = cheap[first, own], rows[first, own]
    count = np.ceil(filled / row)
    run = count * row
    mixed_flushes = np.ceil(long / limit) + np.ceil(short / limit)
    return PackedCut(
        tokens=np.where(alike, run, mixed) * length,
        pairs=np.where(alike, run, long + short * part**2) * float(length) ** 2,
        microbatches=np.where(alike, count, long + short),
        flushes=np.where(alike, np.ceil(count / limit), mixed_flushes),
    )


def kv_share(sizes: ModelSizes, tp: NDArray[np.int64]) -> Floats:
    """[C] share of the key/value heads on a tensor-parallel rank; ranks above them share."""
    return by_degree(lambda tp: 1.0 / np.gcd(tp, sizes.num_kv_heads), tp)


def layer_weights(sizes: ModelSizes, tp: NDArray[np.int64]) -> Floats:
    """[C] matrix elements of a layer on a device."""
    d, kv = sizes.embed_dim, 2 * sizes.kv_dim * kv_share(sizes, tp)
    return d * (2 * sizes.query_dim + sizes.mlp_matrices * sizes.mlp_dim) / tp + d * kv


def layer_forward(
    sizes: ModelSizes,
    micro: Microbatch,
    tp: NDArray[np.int64],
    prices: Prices,
    execution: Execution,
) -> tuple[Spent, Spent]:
    """One layer's forward pass of a microbatch on a device, without collectives.

    Returns:
      (products and elementwise work, attention).
    """
    weights = layer_weights(sizes, tp)
    products = prices.product(
        2.0 * micro.tokens * weights, weights * prices.element_bytes, aligned_widths(sizes, tp)
    )
    # Two norms (read, write), two residual sums (two reads, a write): not split over tp. Rotation
    # of queries and keys, and the activation: split.
    whole = 10.0 * sizes.embed_dim / np.where(execution.sequence_parallel, tp, 1)
    split = 2.0 * sizes.query_dim / tp + sizes.mlp_matrices * sizes.mlp_dim / tp
    split = split + 2.0 * sizes.kv_dim * kv_share(sizes, tp)
    traffic = micro.tokens * (whole + split) * prices.element_bytes
    elementwise = {
        OperationClass.MEMORY: prices.memory_s(traffic, OperationClass.MEMORY),
        OperationClass.LAUNCH: prices.launch_s(float(KERNELS_PER_LAYER)),
    }
    return added(products, elementwise), attention(sizes, micro.pairs, tp, prices, execution)


def attention(
    sizes: ModelSizes, pairs: Value, tp: NDArray[np.int64], prices: Prices, execution: Execution
) -> Spent:
    """Scores and weighted sums of one layer: 4 * pairs * width FLOPs, and the scores' traffic."""
    flops_s = prices.flops_s(4.0 * pairs * sizes.query_dim / tp, OperationClass.ATTENTION)
    spent: Spent = {OperationClass.ATTENTION: flops_s}
    if execution.score_bytes:
        traffic = pairs * sizes.num_heads / tp * execution.score_bytes
        spent[OperationClass.MEMORY] = prices.memory_s(traffic, OperationClass.MEMORY)
    return spent


def head_pass(
    sizes: ModelSizes, tokens: Value, parts: Value, prices: Prices, passes: float
) -> Spent:
    """The vocabulary projection of some tokens, and what is done with the logits.

    Args:
      sizes: of the model.
      tokens: [C] whose logits are made.
      parts: [C] devices that share the vocabulary.
      prices: of the hardware.
      passes: times a forward pass.
    """
    if not sizes.vocab_size:
        return {}
    weights = sizes.vocab_size * sizes.embed_dim / parts
    aligned = np.ones(np.shape(parts), np.bool_)
    products = prices.product(2.0 * tokens * weights, weights * prices.element_bytes, aligned)
    traffic = tokens * sizes.vocab_size / parts * LOGIT_BYTES
    logits: Spent = {OperationClass.MEMORY: prices.memory_s(traffic, OperationClass.MEMORY)}
    return added(scaled(products, passes), scaled(logits, min(passes, 2.0)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerPasses:
    """What SCORE, or one update of TRAIN, does in the layers, for candidates [C].

    Whatever the model ends in: it is worked out once for the heads of a model.
    """

    sizes: ModelSizes
    workload: Workload
    candidates: Candidates
    prices: Prices
    execution: Execution
    train: bool

    @functools.cached_property
    def batch(self) -> Batch:
        """How a replica's sequences are cut."""
        rows = self.workload.rows
        sequences = min(self.workload.minibatch_size, rows) if self.train else rows
        return Batch.of(self.workload, self.candidates, self.execution, sequences, self.train)

    @functools.cached_property
    def layer(self) -> Spent:
        """All passes of one microbatch through one layer, tensor parallelism included."""
        c, execution = self.candidates, self.execution
        micro = self.batch.micro
        forward, scores = layer_forward(self.sizes, micro, c.tp, self.prices, execution)
        recompute = c.remat & self.train
        only_scores = execution.recompute_attention_only
        backward = BACKWARD if self.train else 0.0
        passes = 1.0 + backward + np.where(recompute & (not only_scores), 1.0, 0.0)
        fused = self.train and not execution.score_bytes
        score_backward = FUSED_ATTENTION_BACKWARD if fused else backward
        score_passes = 1.0 + score_backward + np.where(recompute, 1.0, 0.0)
        hidden_bytes = micro.tokens * self.sizes.embed_dim * self.prices.element_bytes
        reduced = 2.0 + (2.0 if self.train else 0.0)
        extra = float(execution.recomputed_all_reduces)
        reduced = reduced + np.where(recompute & (not only_scores), extra, 0.0)
        tensor = self.prices.ring(c.tp, 1).collective(hidden_bytes)
        return added(scaled(forward, passes), scaled(scores, score_passes), scaled(tensor, reduced))

    @functools.cached_property
    def layer_s(self) -> Value:
        """Seconds of `layer`."""
        return total_s(self.layer)

    @functools.cached_property
    def hops(self) -> Spent:
        """Activations, and their gradients, from one pipeline rank to the next in a flush."""
        c, execution = self.candidates, self.execution
        num_bytes = self.batch.micro.tokens * self.sizes.embed_dim * self.prices.element_bytes
        num_bytes = num_bytes / np.where(execution.p2p_scattered, c.tp, 1)
        ticks = (
            (self.batch.microbatches + c.pp - 1) * execution.interleave * (2 if self.train else 1)
        )
        crosses = c.pp * c.tp > self.prices.hardware.devices_per_node
        return self.prices.send(num_bytes, crosses, np.where(c.pp > 1, ticks, 0))

    @functools.cached_property
    def vocabulary_sums(self) -> Spent:
        """What the devices of a replica tell each other in a flush, where all share the vocabulary:
        embedded tokens, and the hidden states that the head is given."""
        c, batch = self.candidates, self.batch
        tokens = batch.microbatches * batch.micro.tokens
        head_tokens = batch.microbatches * batch.micro.head_tokens
        width = self.sizes.embed_dim * self.prices.element_bytes
        passes = 2.0 if self.train else 1.0
        replica = self.prices.ring(c.pp * c.tp, 1)
        embedded = replica.collective(tokens * width)
        picked = self.prices.ring(c.pp, c.tp).collective(head_tokens * width, 2.0 * passes)
        # In TRAIN the gradients of the hidden states are summed, too.
        summed = replica.collective(head_tokens * width) if self.train else {}
        return added(embedded, picked, summed)

    @functools.cached_property
    def replicas(self) -> Ring:
        """Of an update, which agree on gradients and parameters."""
        c = self.candidates
        return self.prices.ring(c.dp, c.pp * c.tp)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Passes:
    """SCORE, or one update of TRAIN, of a model with a head."""

    sizes: ModelSizes
    layers: LayerPasses

    @property
    def candidates(self) -> Candidates:
        """[C]."""
        return self.layers.candidates

    @property
    def prices(self) -> Prices:
        """Of the hardware."""
        return self.layers.prices

    @property
    def execution(self) -> Execution:
        """Of the engine."""
        return self.layers.execution

    @property
    def train(self) -> bool:
        """Whether it is an update."""
        return self.layers.train

    @property
    def _batch(self) -> Batch:
        return self.layers.batch

    def _flush(self) -> tuple[Spent, Value]:
        """One pipeline flush, and how much of it is bubble."""
        c, execution, sizes = self.candidates, self.execution, self.sizes
        layer, layer_s = self.layers.layer, self.layers.layer_s
        layers = -(-sizes.num_layers // c.pp)  # of the rank that has most
        micro = self._batch.microbatches
        layers_in_all = layers * c.pp if execution.padded_layers else sizes.num_layers
        head: Spent = {}
        head_s: Value = 0.0
        slowest_layers, slowest_heads = layers.astype(np.float64), 0.0
        if not execution.vocab_over_pp:
            tokens = self._batch.micro.head_tokens
            head = head_pass(sizes, tokens, c.tp, self.prices, self._head_passes)
            head_s = total_s(head)
            last = sizes.num_layers // c.pp
            at_last = last * layer_s + head_s > layers * layer_s
            slowest_layers = np.where(at_last, last, layers)
            slowest_heads = np.where(at_last, 1.0, 0.0)
        parts = float(execution.interleave)
        layer_count = micro * slowest_layers + (layers_in_all - slowest_layers) / parts
        head_count = micro * slowest_heads + (1.0 - slowest_heads) / parts
        mean_s = micro * (layer_s * sizes.num_layers + head_s) / c.pp
        bubble_s = np.maximum(layer_s * layer_count + head_s * head_count - mean_s, 0.0)
        spent = added(scaled(layer, layer_count), scaled(head, head_count))
        return added(spent, self.layers.hops, self._accumulation()), bubble_s

    def _accumulation(self) -> Spent:
        """A microbatch's gradients added to those before it: two read, one written."""
        c = self.candidates
        if not self.train:
            return {}
        traffic = 3.0 * self.execution.grad_bytes * self.sizes.params / (c.pp * c.tp)
        added_s = self.prices.memory_s(traffic, OperationClass.MEMORY)
        return {OperationClass.MEMORY: added_s * self._batch.microbatches}

    @property
    def _head_passes(self) -> float:
        return self.execution.head_passes if self.train else 1.0

    def _ends(self) -> Spent:
        """Embedding and head of a flush, where all devices of a replica share the vocabulary."""
        c = self.candidates
        if not self.execution.vocab_over_pp:
            return {}
        tokens = self._batch.microbatches * self._batch.micro.head_tokens
        head = head_pass(self.sizes, tokens, c.pp * c.tp, self.prices, self._head_passes)
        return added(self.layers.vocabulary_sums, head)

    def batch(self) -> tuple[Spent, Value]:
        """All flushes of a replica, and how much of their seconds is bubble."""
        flush, bubble_s = self._flush()
        flushes = self._batch.flushes
        return scaled(added(flush, self._ends()), flushes), bubble_s * flushes

    def update(self) -> tuple[Spent, Value]:
        """All flushes, the replicas' agreement and the optimizer."""
        c = self.candidates
        spent, bubble_s = self.batch()
        flush_s = total_s(spent) / self._batch.flushes
        sync = SYNC[self.execution.sync](self, flush_s)
        shards = c.pp * c.tp * np.where(c.zero1, self._zero_ranks, 1)
        if self.execution.sync in (DataSync.SHARDED, DataSync.SHARDED_GRADS):
            shards = c.pp * c.tp * c.dp
        traffic = OPTIMIZER_BYTES * self.sizes.params / shards
        step: Spent = {
            OperationClass.MEMORY: self.prices.memory_s(traffic, OperationClass.MEMORY),
            OperationClass.LAUNCH: self.prices.launch_s(2.0 * KERNELS_PER_LAYER),
        }
        return added(spent, sync, step), bubble_s

    @property
    def flushes(self) -> Floats:
        """[C] flushes of an update that are run."""
        return self._batch.flushes

    @property
    def _zero_ranks(self) -> NDArray[np.int64]:
        dp = self.candidates.dp
        return np.minimum(dp, self.execution.zero_ranks) if self.execution.zero_ranks else dp

    def gradient_sync(self) -> tuple[Spent, Spent]:
        """What an unsharded update sends: (gradients, gathered parameters)."""
        c, execution = self.candidates, self.execution
        elements, stride = self.sizes.params / (c.pp * c.tp), c.pp * c.tp
        replicas = self.layers.replicas
        whole = replicas.collective(elements * execution.grad_bytes)
        # Under ZeRO-1 over all replicas a reduce-scatter will do.
        scatter = c.zero1 & (self._zero_ranks == c.dp) & execution.zero_scatters
        gradients = scaled(whole, np.where(scatter, 0.5, 1.0))
        sharing = self.prices.ring(self._zero_ranks, stride) if execution.zero_ranks else replicas
        gather = sharing.collective(elements * execution.gather_bytes, 1.0)
        return gradients, scaled(gather, np.where(c.zero1, 1.0, 0.0))

    def sharded_sync(self, gathers: Value, scatters: Value) -> Spent:
        """FSDP: so many gathers of the parameters and scatters of the gradients."""
        c = self.candidates
        elements = self.sizes.params / (c.pp * c.tp)
        gather = elements * self.prices.element_bytes
        scatter = elements * self.execution.grad_bytes
        replicas = self.layers.replicas
        return added(
            scaled(replicas.collective(gather, 1.0), gathers),
            scaled(replicas.collective(scatter, 1.0), scatters),
        )


def exposed(sync: Spent, hiding_s: Value, num_layers: int) -> Spent:
    """What of a collective that runs layer by layer beside the compute is waited for.

    The first layer's has nothing to hide behind, and what exceeds the compute is waited for.
    """
    sync_s = total_s(sync)
    waited = np.maximum(sync_s - hiding_s, sync_s / num_layers)
    return scaled(sync, waited / np.maximum(sync_s, 1e-30))


def _at_end(passes: Passes, flush_s: Value) -> Spent:
    return added(*passes.gradient_sync())


def _overlapped(passes: Passes, flush_s: Value) -> Spent:
    """Gradients go out during the backward pass of the last flush."""
    gradients, gathered = passes.gradient_sync()
    backward_s = flush_s * BACKWARD / (1.0 + BACKWARD)
    return added(exposed(gradients, backward_s, passes.sizes.num_layers), gathered)


def _sharded(passes: Passes, flush_s: Value) -> Spent:
    """Parameters are gathered for the forward and the backward pass of each microbatch."""
    sync = passes.sharded_sync(2.0, 1.0)
    one = exposed(sync, flush_s, passes.sizes.num_layers)
    return scaled(one, passes.flushes)


def _sharded_grads(passes: Passes, flush_s: Value) -> Spent:
    """Parameters are gathered once for an update, gradients scattered in each microbatch."""
    flushes = passes.flushes
    sync = passes.sharded_sync(1.0, flushes)
    return exposed(sync, flush_s * flushes, passes.sizes.num_layers)


SYNC: dict[DataSync, Callable[[Passes, Value], Spent]] = {
    DataSync.AT_END: _at_end,
    DataSync.OVERLAPPED: _overlapped,
    DataSync.SHARDED: _sharded,
    DataSync.SHARDED_GRADS: _sharded_grads,
}
