# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Seconds of GENERATE on a simulated cluster: every row in its slot until it ends.

Rows are dealt to replicas without knowing their length, wait for a slot, and leave it when they
end. The number of busy slots and of cached tokens is followed over the whole stage, and a decode
step is priced at `POINTS` moments of each replica's time.

Shapes: R replicas, n rows of a replica, K moments.
"""

import heapq

import numpy as np

from nereus_jax.planning.cost_terms import RowFill
from nereus_jax.simulator.operations import Device
from nereus_jax.simulator.passes import (
    head_s,
    kv_width,
    layer_elementwise,
    layer_products,
    layer_scores,
    rank_layers,
)
from nereus_jax.simulator.stage_run import Floats, Ints, StageRun, StepRows

POINTS = 24
DRAW_KERNELS = 20
"""Of drawing a token."""


def generate_s(run: StageRun, device: Device, rows: StepRows, slow: Floats) -> float:
    """Seconds of a GENERATE call.

    Args:
      run: how it runs; its `microbatch_size` are the slots of a replica.
      device: that it runs on.
      rows: of the step.
      slow: [R, P] seconds of each rank over those of a usual one.
    """
    replicas = run.layout.dp
    prompts, responses = (_deal(x, replicas) for x in (rows.prompts, rows.responses))
    slots = min(run.microbatch_size, prompts.shape[1])
    start = _starts(responses, slots)
    finish = start + responses
    end = finish.max(axis=1)
    at = end[:, None] * (np.arange(POINTS) + 0.5) / POINTS
    busy, cached = _occupied(at, start, finish, prompts, run, slots)
    ranks = rank_layers(run) * slow
    slowest = ranks.max(axis=1)[:, None] * run.layout.pp
    tick = _layer_step_s(run, device, busy, cached) * slowest + _rest_s(run, device, busy)
    steps = (tick * run.overheads.factor).mean(axis=1) * end
    host = (run.overheads.decode_step_s + run.overheads.decode_row_s * busy).mean(axis=1) * end
    prefill = _prefill_s(run, device, rows, prompts.shape[1], slots) * run.overheads.factor
    return run.overheads.call_s + float((steps + host).max()) + prefill * float(slow.max())


def _deal(values: Ints, replicas: int) -> Floats:
    """[R, n] in turn; places that are left have length 0."""
    each = -(-len(values) // replicas)
    padded = np.pad(values, (0, each * replicas - len(values)))
    return padded.reshape(each, replicas).T.astype(np.float64)


def _starts(responses: Floats, slots: int) -> Floats:
    """[R, n] step at which each row gets a slot; rows wait in order."""
    start = np.zeros(responses.shape)
    if responses.shape[1] <= slots:
        return start
    for replica, lengths in enumerate(responses.tolist()):
        free = lengths[:slots]
        heapq.heapify(free)
        for row in range(slots, len(lengths)):
            start[replica, row] = free[0]
            heapq.heapreplace(free, free[0] + lengths[row])
    return start


def _occupied(
    at: Floats, start: Floats, finish: Floats, prompts: Floats, run: StageRun, slots: int
) -> tuple[Floats, Floats]:
    """[R, K] slots that are computed, and tokens that are read of their caches."""
    inside = (start[:, None, :] <= at[..., None]) & (at[..., None] < finish[:, None, :])
    length = prompts[:, None, :] + at[..., None] - start[:, None, :]
    if run.execution.static_slots:  # all are computed, as far as the longest of them reaches
        busy = np.full(at.shape, float(slots))
        return busy, slots * np.where(inside, length, 0.0).max(axis=2)
    return inside.sum(axis=2).astype(np.float64), np.where(inside, length, 0.0).sum(axis=2)


def _layer_step_s(run: StageRun, device: Device, busy: Floats, cached: Floats) -> Floats:
    """[R, K] a token of one group of slots through one layer."""
    pp, tp = run.layout.pp, run.layout.tp
    rows = np.maximum(busy / pp, 1.0)
    cache_bytes = cached / pp * 2.0 * kv_width(run) * device.element_bytes
    hidden = rows * run.sizes.embed_dim * device.element_bytes
    seconds = layer_products(run, device, rows) + layer_elementwise(run, device, rows)
    seconds = seconds + device.reading(cache_bytes) + 2.0 * device.all_reduce(hidden, tp)
    return np.asarray(seconds, np.float64)


def _rest_s(run: StageRun, device: Device, busy: Floats) -> Floats:
    """[R, K] of a step of all groups: hops, the head and drawing."""
    pp, tp = run.layout.pp, run.layout.tp
    rows = np.maximum(busy / pp, 1.0)
    hidden = rows * run.sizes.embed_dim * device.element_bytes
    parts = pp * tp if run.execution.vocab_over_pp else tp
    seconds = head_s(run, device, rows, parts, 1.0) + device.all_reduce(hidden, parts)
    seconds = seconds + DRAW_KERNELS * device.curve.kernel_s
    if pp > 1:
        seconds = seconds + device.send(hidden, crosses_nodes=pp * tp > device.devices_per_node)
    return np.asarray(pp * seconds, np.float64)


def _prefill_s(run: StageRun, device: Device, rows: StepRows, own: int, slots: int) -> float:
    """The prompts of a replica's rows, as many at a time as a group has slots."""
    pp, tp = run.layout.pp, run.layout.tp
    exact = run.execution.rows is RowFill.EXACT
    length = float(rows.prompts.mean()) if exact else float(run.prompt_tokens)
    together = max(slots // pp, 1)
    tokens = together * length
    pairs = together * length**2 * run.execution.score_share
    layer = (
        layer_products(run, device, tokens)
        + layer_elementwise(run, device, tokens)
        + layer_scores(run, device, pairs, length)
        + 2.0 * device.all_reduce(tokens * run.sizes.embed_dim * device.element_bytes, tp)
    )
    return float(layer * rank_layers(run).max() * (own / together + pp - 1))
