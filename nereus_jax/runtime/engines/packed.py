"""The arrays of a packed batch: what the programs of SCORE and TRAIN take, and the way back.

Shapes: B sequences, S longest sequence, T response, N packed rows of width W, F flushes of all
replicas, K places of a flush: its tokens, in which the response tokens come first, D replicas,
X places of a replica: those of all its flushes, kind by kind.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nereus_jax.core.layout import DP
from nereus_jax.models.forward import PackedFlush
from nereus_jax.rl.packed_forms import FormFit, PackedForm, PackedShape, fit_form
from nereus_jax.rl.packing import Packing
from nereus_jax.runtime import host
from nereus_jax.runtime.emu import Params, Site


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedPart:
    """The sequences of a batch that lie in one kind of rows, and the way back.

    Attributes:
      shape: of the rows.
      packing: where each of them lies.
      firsts_B: first column of a sequence whose hidden state is wanted.
      counts_B: how many are wanted.
    """

    shape: PackedShape
    packing: Packing
    firsts_B: np.ndarray
    counts_B: np.ndarray

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
        index = np.zeros((self.shape.num_flushes, self.shape.flush_tokens), np.int32)
        index[flush_X, slot_X] = place_X
        count = np.bincount(flush_X, minlength=self.shape.num_flushes).astype(np.int32)
        return {"index": index, "count": count}

    def place(self, array_BT: np.ndarray) -> np.ndarray:
        """Response-aligned values as [F, K], in the order of `wanted`; 0 behind its count."""
        flush_X, slot_X, _, b_X, t_X = self._entries
        shape = (self.shape.num_flushes, self.shape.flush_tokens)
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
        starts_F = np.searchsorted(flush_X, np.arange(self.shape.num_flushes))
        slot_X = np.arange(len(flush_X)) - starts_F[flush_X]
        return flush_X, slot_X, place_X, b_X, t_X


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """Sequences in packed rows of one form, and the way back.

    Attributes:
      fit: the form, and where each sequence lies.
      tokens: of all sequences.
      firsts_B: first column of a sequence whose hidden state is wanted.
      counts_B: how many are wanted.
    """

    fit: FormFit
    tokens: int
    firsts_B: np.ndarray
    counts_B: np.ndarray

    @functools.cached_property
    def parts(self) -> tuple[PackedPart, ...]:
        """By kind of rows."""
        return tuple(
            PackedPart(shape=shape, packing=packing, firsts_B=self.firsts_B, counts_B=self.counts_B)
            for shape, packing in zip(self.form, self.fit.packings, strict=True)
        )

    @property
    def form(self) -> PackedForm:
        """Of the program that they are packed for."""
        return self.fit.form

    @property
    def microbatches(self) -> np.ndarray:
        """That hold anything, of each replica, by kind of rows: int32."""
        return np.array(self.fit.microbatches, np.int32)

    @property
    def padding_share(self) -> float:
        """Share of the tokens that are run which belongs to no sequence."""
        return 1.0 - self.tokens / self.fit.run_tokens

    def arrays(
        self,
        tokens_BS: np.ndarray,
        lengths_B: np.ndarray,
        placed: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[dict[str, np.ndarray], ...]:
        """What `abstract_batch` describes.

        Args:
          tokens_BS: right-padded sequences.
          lengths_B: tokens of each.
          placed: response-aligned arrays [B, T], by name.
        """
        return tuple(
            part.rows(tokens_BS, lengths_B)
            | part.wanted()
            | {name: part.place(x) for name, x in (placed or {}).items()}
            for part in self.parts
        )

    def take(self, outputs_DX: np.ndarray, width: int) -> np.ndarray:
        """Outputs of the wanted places as [B, T], zeros where nothing was wanted."""
        sizes = [shape.flushes * shape.flush_tokens for shape in self.form]
        blocks = np.split(outputs_DX, np.cumsum(sizes)[:-1], axis=1)
        # A sequence lies in one part: what the others have for it is 0.
        array_BT = np.zeros((len(self.counts_B), width), outputs_DX.dtype)
        for part, block in zip(self.parts, blocks, strict=True):
            array_BT += part.take(block.reshape(part.shape.num_flushes, -1), width)
        return array_BT


def pack_batch(
    forms: Sequence[PackedForm],
    lengths_B: np.ndarray,
    firsts_B: np.ndarray,
    counts_B: np.ndarray,
) -> PackedBatch:
    """Packs sequences for one of the forms: the first that is nearly as good as the best.

    Args:
      forms: of `packed_forms`, for at least B rows.
      lengths_B: tokens of each sequence, at most the forms' span.
      firsts_B: first column of a sequence whose hidden state is wanted.
      counts_B: how many are wanted; a sequence of which none is has no place in the rows.
    """
    lengths_B = np.where(counts_B > 0, lengths_B, 0)
    return PackedBatch(
        fit=fit_form(forms, lengths_B),
        tokens=int(lengths_B.sum()),
        firsts_B=firsts_B,
        counts_B=counts_B,
    )


def _ragged(counts_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row, number) of every entry of rows with so many entries each, row by row."""
    rows_X = np.repeat(np.arange(len(counts_B)), counts_B)
    starts_B = np.cumsum(counts_B) - counts_B
    return rows_X, np.arange(len(rows_X)) - np.repeat(starts_B, counts_B)


AbstractBatch = tuple[dict[str, jax.ShapeDtypeStruct], ...]


def abstract_batch(
    form: PackedForm, site: Site, placed: Sequence[str] = ()
) -> tuple[AbstractBatch, jax.ShapeDtypeStruct]:
    """What a program takes: the arrays of `PackedBatch.arrays`, its `placed` ones in float32, and
    the `microbatches`."""
    by_row = site.sharding((DP,))

    def part(shape: PackedShape) -> dict[str, jax.ShapeDtypeStruct]:
        rows, places = (shape.num_rows, shape.width), (shape.num_flushes, shape.flush_tokens)
        shapes = {name: (rows, jnp.int32) for name in ("tokens", "positions", "segments")}
        shapes |= {"index": (places, jnp.int32), "count": ((shape.num_flushes,), jnp.int32)}
        shapes |= {name: (places, jnp.float32) for name in placed}
        return {
            name: jax.ShapeDtypeStruct(dims, dtype, sharding=by_row)
            for name, (dims, dtype) in shapes.items()
        }

    microbatches = jax.ShapeDtypeStruct((len(form),), jnp.int32, sharding=site.sharding())
    return tuple(map(part, form)), microbatches


def put_batch(
    arrays: Sequence[Mapping[str, np.ndarray]], microbatches: np.ndarray, site: Site
) -> tuple[tuple[Params, ...], jax.Array]:
    """A batch on its devices, as `abstract_batch` describes it."""
    by_row = site.sharding((DP,))
    parts = tuple({name: host.put(x, by_row) for name, x in part.items()} for part in arrays)
    return parts, host.put(microbatches, site.sharding())


def num_flushes(microbatches: jax.Array, shape: PackedShape) -> jax.Array:
    """Flushes of a replica that hold anything."""
    return (microbatches + shape.microbatches - 1) // shape.microbatches


def pick_flush(
    batch: Params, index: jax.Array | int, microbatches: jax.Array, shape: PackedShape
) -> tuple[PackedFlush, dict[str, jax.Array]]:
    """One flush of a replica's part of a batch, inside `shard_map`.

    Args:
      batch: one kind of rows of what `abstract_batch` describes, one replica's part.
      index: of the flush.
      microbatches: of the replica that hold anything.
      shape: of the rows.

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
