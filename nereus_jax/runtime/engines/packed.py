"""How sequences are packed into the rows of SCORE and TRAIN: shapes of programs, arrays of batches.

A compiled program has room for the longest possible sequences; how many of its microbatches it runs
comes with the data. So short sequences cost what they are long, and nothing is compiled again when
their lengths change.

Shapes: B sequences, S longest sequence, T response, W width of a packed row, F flushes of all
replicas, K places of a flush: its tokens, in which the response tokens come first.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nereus_jax.core.layout import DP, ParallelLayout
from nereus_jax.models.forward import PackedFlush
from nereus_jax.rl.packing import Packing, pack_rows
from nereus_jax.runtime.emu import Params, Site

WIDE = 4
"""Longest sequences in a wide row: with four, best fit leaves little room whatever the lengths."""
GAIN = 1.1
"""Another shape than the usual one is taken where it saves this factor of tokens: its tokens cost
more (attention over wide rows, products of fewer rows), and its first use compiles."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedShape:
    """What a program is compiled for.

    Attributes:
      dp: replicas.
      flushes: most pipeline flushes (gradient accumulation) of a replica.
      microbatches: of one flush.
      rows: of one microbatch.
      width: W, columns of a row.
      span: S, the longest sequence: no token attends further back.
    """

    dp: int
    flushes: int
    microbatches: int
    rows: int
    width: int
    span: int

    @property
    def flush_rows(self) -> int:
        return self.microbatches * self.rows

    @property
    def flush_tokens(self) -> int:
        """K."""
        return self.flush_rows * self.width

    @property
    def num_rows(self) -> int:
        """Packed rows of all replicas that there is room for."""
        return self.dp * self.flushes * self.flush_rows


def packed_shapes(
    num_rows: int,
    length: int,
    layout: ParallelLayout,
    microbatch_size: int,
    flush_microbatches: int = 0,
) -> tuple[PackedShape, ...]:
    """The shapes that serve a batch, the usual one first.

    Narrow rows are as long as the longest sequence. That wastes room when most sequences are longer
    than half of it: wide rows with the same tokens in a microbatch do not. And it wastes room when
    the last microbatch of every replica is nearly empty: microbatches of half as many rows, and
    half of that, waste less.

    Args:
      num_rows: B, sequences of the batch.
      length: S, tokens of the longest possible sequence.
      layout: of the model-stage.
      microbatch_size: longest sequences of a microbatch and replica: its token budget is this * S.
      flush_microbatches: most microbatches of a pipeline flush; 0: all of a replica's.
    """
    per_replica = -(-num_rows // layout.dp)
    size = min(microbatch_size, per_replica)
    joined = max(k for k in range(1, WIDE + 1) if size % k == 0)
    cuts = [(size, 1), (size, joined)]
    cuts += [(size >> n, 1) for n in range(1, size.bit_length())]
    shapes: list[PackedShape] = []
    for rows, k in dict.fromkeys(cuts):
        joined_rows = -(-num_rows // k)
        rows_needed = -(-joined_rows // layout.dp)
        total = -(-rows_needed // (rows // k))
        flush = 1 if layout.pp == 1 else min(flush_microbatches or total, total)
        shapes.append(
            PackedShape(
                dp=layout.dp,
                flushes=-(-total // flush),
                microbatches=flush,
                rows=rows // k,
                width=k * length,
                span=length,
            )
        )
    return tuple(shapes)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """Sequences in packed rows, and the way back.

    Attributes:
      shape: of the program that they are packed for.
      microbatches: that hold anything, of each replica.
      tokens: of all sequences.
      packing: where each sequence lies.
      firsts_B: first column of a sequence whose hidden state is wanted.
      counts_B: how many are wanted.
    """

    shape: PackedShape
    microbatches: int
    tokens: int
    packing: Packing
    firsts_B: np.ndarray
    counts_B: np.ndarray

    @property
    def run_tokens(self) -> int:
        """Tokens of the microbatches that are run, over all replicas."""
        shape = self.shape
        return shape.dp * self.microbatches * shape.rows * shape.width

    @property
    def padding_share(self) -> float:
        """Share of these that belongs to no sequence."""
        return 1.0 - self.tokens / self.run_tokens

    def rows(self, tokens_BS: np.ndarray, lengths_B: np.ndarray) -> dict[str, np.ndarray]:
        """The packed rows [N, W]: tokens, their positions in their sequences, and segments.

        A segment is the number of a sequence in its row, from 1; padding has 0.
        """
        shape = self.shape
        tokens = np.zeros((shape.num_rows, shape.width), np.int32)
        positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
        lengths_B = np.where(self.packing.rows_B >= 0, lengths_B, 0)
        b, column = _ragged(lengths_B)
        place = self._rows_B[b], self.packing.starts_B[b] + column
        tokens[place], positions[place] = tokens_BS[b, column], column
        segments[place] = self._segments_B[b]
        return {"tokens": tokens, "positions": positions, "segments": segments}

    def wanted(self) -> dict[str, np.ndarray]:
        """Where the wanted hidden states are: index [F, K] in the tokens of a flush, count [F].

        What is behind the count is 0.
        """
        flush_X, slot_X, place_X, _, _ = self._entries
        num_flushes = self.shape.dp * self.shape.flushes
        index = np.zeros((num_flushes, self.shape.flush_tokens), np.int32)
        index[flush_X, slot_X] = place_X
        count = np.bincount(flush_X, minlength=num_flushes).astype(np.int32)
        return {"index": index, "count": count}

    def place(self, array_BT: np.ndarray) -> np.ndarray:
        """Response-aligned values as [F, K], in the order of `wanted`; 0 behind its count."""
        flush_X, slot_X, _, b_X, t_X = self._entries
        shape = (self.shape.dp * self.shape.flushes, self.shape.flush_tokens)
        placed = np.zeros(shape, array_BT.dtype)
        placed[flush_X, slot_X] = array_BT[b_X, t_X]
        return placed

    def take(self, placed_FK: np.ndarray, width: int) -> np.ndarray:
        """The inverse of `place`: [B, T] with zeros where nothing was wanted."""
        flush_X, slot_X, _, b_X, t_X = self._entries
        array_BT = np.zeros((len(self.counts_B), width), placed_FK.dtype)
        array_BT[b_X, t_X] = placed_FK[flush_X, slot_X]
        return array_BT

    @functools.cached_property
    def _rows_B(self) -> np.ndarray:
        """Rows of the arrays: a replica's rows are followed by the room that it does not use."""
        used = self.packing.num_rows // self.shape.dp
        room = self.shape.num_rows // self.shape.dp
        replica_B, row_B = np.divmod(np.maximum(self.packing.rows_B, 0), max(used, 1))
        return replica_B * room + row_B

    @property
    def _segments_B(self) -> np.ndarray:
        order_B = np.lexsort((self.packing.starts_B, self.packing.rows_B))
        rows_B = self.packing.rows_B[order_B]
        first_B = np.concatenate([[True], rows_B[1:] != rows_B[:-1]])
        number_B = np.arange(len(rows_B)) - np.flatnonzero(first_B)[np.cumsum(first_B) - 1]
        segments_B = np.empty(len(rows_B), np.int32)
        segments_B[order_B] = number_B + 1
        return segments_B

    @functools.cached_property
    def _entries(self) -> tuple[np.ndarray, ...]:
        """Of every wanted hidden state: flush, slot, place in the flush, sequence, number in it."""
        counts_B = np.where(self.packing.rows_B >= 0, self.counts_B, 0)
        b_X, t_X = _ragged(counts_B)
        flush_X, row_X = np.divmod(self._rows_B[b_X], self.shape.flush_rows)
        column_X = self.packing.starts_B[b_X] + self.firsts_B[b_X] + t_X
        place_X = row_X * self.shape.width + column_X
        order_X = np.argsort(flush_X * self.shape.flush_tokens + place_X, kind="stable")
        flush_X, place_X, b_X, t_X = (x[order_X] for x in (flush_X, place_X, b_X, t_X))
        starts_F = np.searchsorted(flush_X, np.arange(self.shape.dp * self.shape.flushes))
        slot_X = np.arange(len(flush_X)) - starts_F[flush_X]
        return flush_X, slot_X, place_X, b_X, t_X


def pack_batch(
    shapes: Sequence[PackedShape],
    lengths_B: np.ndarray,
    firsts_B: np.ndarray,
    counts_B: np.ndarray,
) -> PackedBatch:
    """Packs sequences for one of the shapes: the first, unless another one saves much.

    Args:
      shapes: of `packed_shapes`, for at least B rows.
      lengths_B: tokens of each sequence, at most the shapes' span.
      firsts_B: first column of a sequence whose hidden state is wanted.
      counts_B: how many are wanted; a sequence of which none is has no place in the rows.
    """
    lengths_B = np.where(counts_B > 0, lengths_B, 0)
    best: PackedBatch | None = None
    for shape in shapes:
        packing = pack_rows(lengths_B, shape.width, shape.dp)
        rounds = -(-packing.num_rows // (shape.dp * shape.rows))
        batch = PackedBatch(
            shape=shape,
            microbatches=max(rounds, 1),
            tokens=int(lengths_B.sum()),
            packing=packing,
            firsts_B=firsts_B,
            counts_B=counts_B,
        )
        if best is None or best.run_tokens > GAIN * batch.run_tokens:
            best = batch
    assert best is not None
    return best


def _ragged(counts_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row, number) of every entry of rows with so many entries each, row by row."""
    rows_X = np.repeat(np.arange(len(counts_B)), counts_B)
    starts_B = np.cumsum(counts_B) - counts_B
    return rows_X, np.arange(len(rows_X)) - np.repeat(starts_B, counts_B)


def abstract_batch(
    shape: PackedShape, site: Site, placed: Sequence[str] = ()
) -> dict[str, jax.ShapeDtypeStruct]:
    """What a program takes: the arrays of `rows` and `wanted`, and `placed` ones in float32."""
    by_row = site.sharding((DP,))
    num_flushes = shape.dp * shape.flushes
    rows, places = (shape.num_rows, shape.width), (num_flushes, shape.flush_tokens)
    shapes = {name: (rows, jnp.int32) for name in ("tokens", "positions", "segments")}
    shapes |= {"index": (places, jnp.int32), "count": ((num_flushes,), jnp.int32)}
    shapes |= {name: (places, jnp.float32) for name in placed}
    return {
        name: jax.ShapeDtypeStruct(dims, dtype, sharding=by_row)
        for name, (dims, dtype) in shapes.items()
    }


def num_flushes(microbatches: jax.Array, shape: PackedShape) -> jax.Array:
    """Flushes of a replica that hold anything."""
    return (microbatches + shape.microbatches - 1) // shape.microbatches


def pick_flush(
    batch: Params, index: jax.Array | int, microbatches: jax.Array, shape: PackedShape
) -> tuple[PackedFlush, dict[str, jax.Array]]:
    """One flush of a replica's part of a batch, inside `shard_map`.

    Args:
      batch: what `abstract_batch` describes, one replica's part.
      index: of the flush.
      microbatches: of the replica that hold anything.
      shape: of the batch.

    Returns:
      The flush, and the placed arrays as rows [1, K].
    """

    def pick(x: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(x, index, keepdims=False)

    grid = (shape.flushes, shape.microbatches, shape.rows, shape.width)
    rows = {name: pick(batch[name].reshape(grid)) for name in ("tokens", "positions", "segments")}
    before = index * shape.microbatches
    flush = PackedFlush(
        **rows,
        index=pick(batch["index"]),
        count=pick(batch["count"]),
        active=jnp.clip(microbatches - before, 0, shape.microbatches),
    )
    placed = {name: pick(x)[None] for name, x in batch.items() if name not in flush._fields}
    return flush, placed
