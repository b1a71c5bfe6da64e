# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Ways to run one model-stage, as arrays: layouts with their microbatches and memory choices.

One row is one candidate. Objects are made only of the few that a search returns; a thousand devices
give some ten thousand rows a model-stage, which numpy prices at once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.layout import ParallelLayout, divisors
from nereus_jax.core.packed_cuts import SCORE_FLUSH_PER_RANK
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.search_lanes import make_cells
from nereus_jax.planning.workload import Workload

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PREFILL_ROWS = 4
"""Prompts of a replica that are in the layers at a time in GENERATE."""

MAX_FLUSH_PER_RANK = 8
"""So long a flush of TRAIN has a bubble below 1/9; a longer one only needs memory."""

MAX_MICROBATCH_ROWS = 64
"""Larger microbatches make no product faster, and only need memory."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Ways to run one model-stage, [C] each.

    A replica works on `accumulation * microbatches * microbatch_size` rows one flush after the
    other; in a flush the microbatches pass through the pipeline. In GENERATE a row of slots is
    decoded at a time, and rows that wait take free slots: `microbatch_size` is the slots.

    Attributes:
      dp, pp, tp: degrees.
      microbatch_size: rows of one replica that are in the layers at a time; GENERATE: slots.
      microbatches: of one pipeline flush; 1 without a pipeline and in GENERATE.
      accumulation: flushes; 1 in GENERATE.
      remat: activations of a layer are recomputed in the backward pass (TRAIN).
      zero1: the optimizer's state is sharded over dp (TRAIN).
    """

    dp: Ints
    pp: Ints
    tp: Ints
    microbatch_size: Ints
    microbatches: Ints
    accumulation: Ints
    remat: Bools
    zero1: Bools

    def __len__(self) -> int:
        return len(self.dp)

    @functools.cached_property
    def devices(self) -> Ints:
        """[C] devices that each takes."""
        return self.dp * self.pp * self.tp

    @functools.cached_property
    def forms(self) -> NDArray[np.signedinteger[Any]]:
        """[C] number of each one's layout and ZeRO-1: candidates of a form hold as many bytes."""
        code = self.dp
        for part in (self.pp, self.tp, self.zero1):
            code = code * (int(part.max(initial=0)) + 1) + part
        # Those of a form mostly follow each other: the first of each run will do.
        first = starts(code)
        number = np.unique(code[first], return_inverse=True)[1][np.cumsum(first) - 1]
        # Two bytes are sorted by their digits, several times as fast as eight by comparison.
        return number.astype(np.int16 if number.max(initial=0) < 1 << 15 else np.int64)

    @property
    def rows_per_replica(self) -> Ints:
        """[C] rows of a replica, those that only fill up included (TRAIN, SCORE)."""
        return self.accumulation * self.microbatches * self.microbatch_size

    def layout(self, index: int) -> ParallelLayout:
        """The layout of one candidate."""
        return ParallelLayout(int(self.dp[index]), int(self.pp[index]), int(self.tp[index]))

    def take(self, index: NDArray[np.generic]) -> "Candidates":
        """The candidates at these indices, or where a mask of [C] is set."""
        arrays = {f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)}
        return Candidates(**arrays)


def starts(values: NDArray[Any]) -> Bools:
    """Which values differ from the one before; the first one does."""
    found = np.ones(len(values), np.bool_)
    found[1:] = values[1:] != values[:-1]
    return found


def by_degree(function: Callable[[Ints], NDArray[Any]], degree: Ints) -> NDArray[Any]:
    """[C] a function of a degree, worked out once for each value: there are few, and integers are
    slow to divide."""
    return function(np.arange(1, int(degree.max(initial=1)) + 1))[degree - 1]


def enumerate_candidates(
    model: DecoderConfig,
    model_stage: ModelStage,
    workload: Workload,
    hardware: Hardware,
    num_devices: int,
    *,
    tp_across_nodes: bool = False,
    degrees: tuple[int, int] | None = None,
    zero1: bool | None = None,
) -> Candidates:
    """Every way to run a model-stage on at most so many devices.

    Degrees are all divisors that the model and the batch allow, not only powers of two:
    - tp divides the query heads and the node, so that no group of ranks straddles two nodes (one
      node: any tp up to its devices); with `tp_across_nodes` also multiples of a node.
    - pp: for every number of layers a rank can have, the shortest pipeline with it; layers that do
      not divide are padded.
    - dp of TRAIN: only where dp * microbatch * microbatches * accumulation is the minibatch. The
      other stages fill up with rows without weight, and their replicas never wait for each other:
      the more of them fit a lane (`search_lanes`), the faster, and the less memory each needs. So
      for every width of a lane the largest dp, but no larger one than leaves a replica less rows.

    Args:
      model: sizes of the model.
      model_stage: what is to be run.
      workload: of a step.
      hardware: says how many devices share a node.
      num_devices: most devices of a candidate.
      tp_across_nodes: allow tensor parallelism over the slow links.
      degrees: the only (pp, tp), wherever their ranks lie; None: all that are possible.
      zero1: whether replicas of TRAIN share the optimizer's state; None: both ways.
    """
    stage = model_stage.stage
    rows = min(workload.minibatch_size, workload.rows) if stage is Stage.TRAIN else workload.rows
    cells = make_cells(num_devices, hardware.devices_per_node)
    widths = tuple(cells.widths)
    degrees_of: list[tuple[int, int]] = []
    parts: list[Ints] = [np.empty((0, 4), np.int64)]
    tps = _tensor_degrees(model, hardware, num_devices, tp_across_nodes)
    for tp in tps if degrees is None else degrees[1:]:
        pps = _pipeline_degrees(model.num_layers, num_devices // tp)
        for pp in pps if degrees is None else degrees[:1]:
            degrees_of.append((pp, tp))
            parts.append(_replicas(rows, _data_degrees(rows, widths, tp * pp, stage), pp, stage))
    repeats = np.array([len(part) for part in parts[1:]], np.int64)
    pp, tp = np.array(degrees_of, np.int64).reshape(-1, 2).repeat(repeats, axis=0).T
    dp, size, flush, flushes = np.concatenate(parts).T
    off = np.zeros(len(dp), np.bool_)
    plain = Candidates(
        dp=dp.copy(),
        pp=pp.copy(),
        tp=tp.copy(),
        microbatch_size=size.copy(),
        microbatches=flush.copy(),
        accumulation=flushes.copy(),
        remat=off,
        zero1=off,
    )
    return _with_memory_choices(plain, zero1) if stage is Stage.TRAIN else plain


def _with_memory_choices(plain: Candidates, zero1: bool | None) -> Candidates:
    """Each candidate with and without recomputation, and with or without ZeRO-1 where dp > 1."""
    several = plain.dp > 1
    whole = np.flatnonzero(~several) if zero1 else np.arange(len(plain))
    split = np.arange(0) if zero1 is False else np.flatnonzero(several)
    each = (whole, whole, split, split)
    repeats = [len(index) for index in each]
    return dataclasses.replace(
        plain.take(np.concatenate(each)),
        remat=np.array([False, True, False, True]).repeat(repeats),
        zero1=np.array([False, False, True, True]).repeat(repeats),
    )


def _tensor_degrees(
    model: DecoderConfig, hardware: Hardware, num_devices: int, across_nodes: bool
) -> list[int]:
    node = hardware.devices_per_node
    degrees = [d for d in divisors(model.num_heads) if d <= num_devices]
    if num_devices <= node:
        return degrees
    return [d for d in degrees if node % d == 0 or (across_nodes and d % node == 0)]


@functools.cache
def _pipeline_degrees(num_layers: int, limit: int) -> tuple[int, ...]:
    return shortest_splits(num_layers, min(limit, num_layers))


@functools.cache
def _data_degrees(
    rows: int, widths: tuple[int, ...], replica_devices: int, stage: Stage
) -> tuple[int, ...]:
    limits = [min(width // replica_devices, rows) for width in widths]
    if stage is Stage.TRAIN:
        return tuple(d for d in divisors(rows) if d <= limits[-1])
    # The smallest dp that leaves a replica as few rows as the largest one that fits.
    return tuple(sorted({-(-rows // -(-rows // limit)) for limit in limits if limit}))


@functools.cache
def shortest_splits(total: int, limit: int) -> tuple[int, ...]:
    """Numbers of parts up to `limit` that no smaller number equals in its largest part."""
    sizes: dict[int, int] = {}
    for parts in range(1, limit + 1):
        sizes.setdefault(-(-total // parts), parts)
    return tuple(sizes.values())


@functools.lru_cache(maxsize=4096)
def _replicas(rows: int, dps: tuple[int, ...], pp: int, stage: Stage) -> Ints:
    """[N, 4] dp, and the cuts of a replica of it."""
    cuts = [_cuts(-(-rows // dp), pp, stage) for dp in dps]
    numbers = np.repeat(np.array(dps, np.int64), [len(cut) for cut in cuts])
    return np.column_stack([numbers, np.concatenate([np.empty((0, 3), np.int64), *cuts])])


@functools.lru_cache(maxsize=65536)
def _cuts(rows: int, pp: int, stage: Stage) -> Ints:
    """[N, 3] microbatch_size, microbatches and accumulation for the rows of a replica."""
    if stage is Stage.GENERATE:
        halves = {-(-rows // (1 << halvings)) for halvings in range(rows.bit_length())}
        slots = {whole_groups(s, pp) for s in halves if s >= pp or s == rows}
        return np.array([(s, 1, 1) for s in sorted(slots)], np.int64)
    sizes = [s for s in divisors(rows) if s <= MAX_MICROBATCH_ROWS]
    if stage is Stage.SCORE:
        pairs = [(s, 1 if pp == 1 else min(SCORE_FLUSH_PER_RANK * pp, rows // s)) for s in sizes]
        return np.array([(s, m, -(-(rows // s) // m)) for s, m in pairs], np.int64)
    triples = [
        (size, flush, rows // size // flush)
        for size in sizes
        for flush in _flush_sizes(rows // size, pp)
    ]
    return np.array(triples, np.int64)


def whole_groups(slots: int, pp: int, prefill_rows: int = PREFILL_ROWS) -> int:
    """Slots as the engine has them: equal groups for the pipeline ranks, each of whole prefill
    microbatches."""
    group = -(-slots // pp)
    together = min(group, prefill_rows)
    return pp * together * -(-group // together)


def _flush_sizes(total: int, pp: int) -> list[int]:
    """Microbatches of a flush: divisors of all of them, at least as many as ranks if there are."""
    if pp == 1:
        return [1]
    some = [m for m in divisors(total) if pp <= m <= MAX_FLUSH_PER_RANK * pp]
    return some or [max(m for m in divisors(total) if m <= MAX_FLUSH_PER_RANK * pp)]
