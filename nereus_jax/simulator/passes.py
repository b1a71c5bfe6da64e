# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Seconds of SCORE and TRAIN on a simulated cluster: every microbatch on every rank.

Replicas have their own microbatches, ranks their own speed. A flush takes its microbatches through
the slowest rank, and the way of the first one through the others; an update waits for the slowest
replica, then for what replicas tell each other, then for the optimizer.

Shapes: U updates, R replicas, M microbatches, P pipeline ranks.
"""

import math

import numpy as np

from nereus_jax.planning.cost_terms import DataSync
from nereus_jax.simulator.operations import Device, Value
from nereus_jax.simulator.stage_run import Floats, Microbatches, StageRun, StepRows, cut

BACKWARD = 2.0
FUSED_BACKWARD = 2.5
"""Backward over forward, of products and of fused attention."""
ELEMENTWISE = 6
"""Kernels of a layer that are no products: two norms, two sums, rotation, activation."""
LOGIT_BYTES = 16.0
OPTIMIZER_BYTES = 28.0
"""Traffic of Adam for an element, float32: four read, three written."""


def kv_width(run: StageRun) -> float:
    """Of keys on a rank; ranks above the heads share them."""
    return run.sizes.kv_dim / math.gcd(run.layout.tp, run.sizes.num_kv_heads)


def layer_products(run: StageRun, device: Device, tokens: Value) -> Value:
    """Products of one layer's forward pass."""
    sizes, tp = run.sizes, run.layout.tp
    d, query, mlp = sizes.embed_dim, sizes.query_dim / tp, sizes.mlp_dim / tp
    return (
        device.product(tokens, d, query + 2.0 * kv_width(run))
        + device.product(tokens, query, d)
        + device.product(tokens, d, (sizes.mlp_matrices - 1) * mlp)
        + device.product(tokens, mlp, d)
    )


def layer_elementwise(run: StageRun, device: Device, tokens: Value) -> Value:
    """The rest of it but for attention."""
    sizes, tp = run.sizes, run.layout.tp
    whole = 10.0 * sizes.embed_dim / (tp if run.execution.sequence_parallel else 1)
    split = (2.0 * sizes.query_dim + sizes.mlp_matrices * sizes.mlp_dim) / tp
    split += 2.0 * kv_width(run)
    more = (ELEMENTWISE - 1) * device.curve.kernel_s
    return more + device.traffic(tokens * (whole + split) * device.element_bytes)


def layer_scores(run: StageRun, device: Device, pairs: Value, length: Value) -> Value:
    """Attention of it."""
    sizes, tp = run.sizes, run.layout.tp
    seconds = device.attention(4.0 * pairs * sizes.query_dim / tp, length)
    if run.execution.score_bytes:
        num_bytes = pairs * sizes.num_heads / tp * run.execution.score_bytes
        seconds = seconds + device.traffic(num_bytes)
    return seconds


def head_s(run: StageRun, device: Device, tokens: Value, parts: int, passes: float) -> Value:
    """The vocabulary's projection, and what is done with logits; 0 for a scalar head."""
    vocabulary = run.sizes.vocab_size / parts
    if not vocabulary:
        return 0.0 * tokens
    products = device.product(tokens, run.sizes.embed_dim, vocabulary)
    logits = device.traffic(tokens * vocabulary * LOGIT_BYTES)
    return passes * products + min(passes, 2.0) * logits


def _layer_s(run: StageRun, device: Device, micro: Microbatches) -> Floats:
    """[U, R, M] all passes of a microbatch through one layer."""
    execution = run.execution
    again = run.remat and run.train
    whole = again and not execution.recompute_attention_only
    backward = BACKWARD if run.train else 0.0
    scores_backward = backward if execution.score_bytes or not run.train else FUSED_BACKWARD
    tokens = micro.tokens
    forward = layer_products(run, device, tokens) + layer_elementwise(run, device, tokens)
    scores = layer_scores(run, device, micro.pairs, micro.length)
    reduced = 4.0 if run.train else 2.0
    if whole:
        reduced += float(execution.recomputed_all_reduces)
    hidden = tokens * run.sizes.embed_dim * device.element_bytes
    seconds = (
        forward * (1.0 + backward + whole)
        + scores * (1.0 + scores_backward + again)
        + reduced * device.all_reduce(hidden, run.layout.tp)
    )
    return np.where(tokens > 0, seconds, 0.0)


def rank_layers(run: StageRun) -> Floats:
    """[P] layers of each pipeline rank."""
    pp, layers = run.layout.pp, run.sizes.num_layers
    if run.execution.padded_layers:
        return np.full(pp, float(-(-layers // pp)))
    return layers // pp + (np.arange(pp) < layers % pp).astype(np.float64)


def _rank_s(run: StageRun, device: Device, micro: Microbatches, slow: Floats) -> Floats:
    """[U, R, M, P] a microbatch on each rank."""
    layer_s = _layer_s(run, device, micro)
    ranks = layer_s[..., None] * (rank_layers(run) * slow)[None, :, None, :]
    if not run.execution.vocab_over_pp:
        passes = run.execution.head_passes if run.train else 1.0
        head = head_s(run, device, micro.head_tokens, run.layout.tp, passes)
        ranks[..., -1] += np.where(micro.tokens > 0, head, 0.0) * slow[None, :, -1:]
    return ranks


def _hops_s(run: StageRun, device: Device, micro: Microbatches) -> Floats:
    """[U, R] messages between pipeline ranks."""
    pp, tp, execution = run.layout.pp, run.layout.tp, run.execution
    if pp == 1:
        return np.zeros(micro.tokens.shape[:2])
    hidden = micro.tokens.max() * run.sizes.embed_dim * device.element_bytes
    num_bytes = hidden / (tp if execution.p2p_scattered else 1)
    one = device.send(num_bytes, crosses_nodes=pp * tp > device.devices_per_node)
    count = (micro.tokens > 0).sum(axis=2)
    ticks = (
        (count + micro.flushes.sum(axis=2) * (pp - 1))
        * execution.interleave
        * (2 if run.train else 1)
    )
    return ticks * float(one)


def _ends_s(run: StageRun, device: Device, micro: Microbatches) -> Floats:
    """[U, R] embedding and head, where all devices of a replica share the vocabulary."""
    layout = run.layout
    if not run.execution.vocab_over_pp:
        return np.zeros(micro.tokens.shape[:2])
    parts = layout.pp * layout.tp
    width = run.sizes.embed_dim * device.element_bytes
    tokens, head_tokens = micro.tokens.sum(axis=2), micro.head_tokens.sum(axis=2)
    embedded = device.all_reduce(tokens * width, parts)
    picked = device.all_reduce(head_tokens * width, layout.pp, layout.tp)
    summed = device.all_reduce(head_tokens * width, parts if run.train else 1)
    passes = run.execution.head_passes if run.train else 1.0
    head = head_s(run, device, head_tokens, parts, passes)
    whole = embedded + (2.0 if run.train else 1.0) * picked + summed + head
    return np.asarray(whole, np.float64)


def _replica_s(
    run: StageRun, device: Device, micro: Microbatches, slow: Floats
) -> tuple[Floats, Floats]:
    """[U, R] seconds of a replica, and [U, R, M] of its microbatches alone."""
    ranks = _rank_s(run, device, micro, slow)
    slowest = ranks.max(axis=3)
    count = (micro.tokens > 0).sum(axis=2)
    fill = ((ranks.sum(axis=3) - slowest) * micro.flushes).sum(axis=2)
    whole = slowest.sum(axis=2) + fill / run.execution.interleave
    whole = whole + _hops_s(run, device, micro) + _ends_s(run, device, micro)
    if run.train:
        shard = run.sizes.params / (run.layout.pp * run.layout.tp)
        added = device.traffic(3.0 * run.execution.grad_bytes * shard)
        whole = whole + count * added
    return whole, slowest


def score_s(run: StageRun, device: Device, rows: StepRows, slow: Floats) -> float:
    """Seconds of a SCORE call.

    Args:
      run: how it runs.
      device: that it runs on.
      rows: of the step.
      slow: [R, P] seconds of each rank over those of a usual one.
    """
    micro = cut(run, rows)
    whole, each = _replica_s(run, device, micro, slow)
    seconds = float(whole.max())
    if run.execution.sync is DataSync.SHARDED:
        gather = _gather_s(run, device, device.element_bytes)
        seconds += float(_lockstep(whole, each, gather, run)[0])
    return run.overheads.call_s + run.overheads.factor * seconds


def train_s(run: StageRun, device: Device, rows: StepRows, slow: Floats) -> float:
    """Seconds of a TRAIN call, all its updates."""
    micro = cut(run, rows)
    whole, each = _replica_s(run, device, micro, slow)
    update_s = whole.max(axis=1) + _sync_s(run, device, whole, each) + _optimizer_s(run, device)
    seconds = float(update_s.sum()) * run.epochs
    return run.overheads.call_s + run.overheads.factor * seconds


def _gather_s(run: StageRun, device: Device, element_bytes: float) -> float:
    """One pass of the parameters over the replicas."""
    layout = run.layout
    stride = layout.pp * layout.tp
    num_bytes = run.sizes.params / stride * element_bytes
    return float(device.all_reduce(num_bytes, layout.dp, stride, passes=1.0))


def _lockstep(whole: Floats, each: Floats, sync_s: float, run: StageRun) -> Floats:
    """[U] beyond the slowest replica, where all wait for each other in every microbatch.

    The first layer's collective has nothing to hide behind; what exceeds the compute is waited for.
    """
    slowest = each.max(axis=1)  # [U, M]
    waits = slowest.sum(axis=1) - each.sum(axis=2).max(axis=1)
    ran = slowest > 0
    exposed = np.maximum(sync_s - slowest, sync_s / run.sizes.num_layers)
    return waits + np.where(ran, exposed, 0.0).sum(axis=1)


def _sync_s(run: StageRun, device: Device, whole: Floats, each: Floats) -> Floats:
    """[U] what replicas tell each other, as far as it is waited for."""
    execution, layout = run.execution, run.layout
    flush_s = whole.max(axis=1)
    gather = _gather_s(run, device, device.element_bytes)
    scatter = _gather_s(run, device, execution.grad_bytes)
    layers = run.sizes.num_layers
    if execution.sync is DataSync.SHARDED:
        return _lockstep(whole, each, 2.0 * gather + scatter, run)
    if execution.sync is DataSync.SHARDED_GRADS:
        sync = gather + scatter * (each.max(axis=1) > 0).sum(axis=1)
        return np.maximum(sync - flush_s, sync / layers)
    if layout.dp == 1:
        return np.zeros(flush_s.shape)
    ranks = min(execution.zero_ranks, layout.dp) if execution.zero_ranks else layout.dp
    scatters = run.zero1 and ranks == layout.dp and execution.zero_scatters
    gradients = scatter if scatters else 2.0 * scatter
    gathered = _gather_s(run, device, execution.gather_bytes) if run.zero1 else 0.0
    if execution.sync is DataSync.OVERLAPPED:
        behind = flush_s * BACKWARD / (1.0 + BACKWARD)
        return np.maximum(gradients - behind, gradients / layers) + gathered
    return np.full(flush_s.shape, gradients + gathered)


def _optimizer_s(run: StageRun, device: Device) -> float:
    layout, execution = run.layout, run.execution
    shards = layout.pp * layout.tp
    if execution.sync in (DataSync.SHARDED, DataSync.SHARDED_GRADS):
        shards *= layout.dp
    elif run.zero1:
        ranks = min(execution.zero_ranks, layout.dp) if execution.zero_ranks else layout.dp
        shards *= ranks
    return float(device.traffic(OPTIMIZER_BYTES * run.sizes.params / shards))
