"""In what rows SCORE and TRAIN pack a batch: the forms of programs, and which one serves it.

A compiled program has room for the longest possible sequences; how many of its microbatches it runs
comes with the data. So short sequences cost what they are long, and nothing is compiled again when
their lengths change. A program has one kind of rows, or long and short ones: its form. The short
ones finish what would leave a long row nearly empty on every replica.

Shapes: B sequences, S longest sequence, W width of a packed row, F flushes of all replicas,
K places of a flush: its tokens.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.packed_cuts import GAIN, WIDE, short_width
from nereus_jax.rl.packing import Packing, pack_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedShape:
    """One kind of rows that a program is compiled for.

    Attributes:
      dp: replicas.
      pp: pipeline ranks.
      flushes: most pipeline flushes (gradient accumulation) of a replica.
      microbatches: of one flush.
      rows: of one microbatch.
      width: W, columns of a row.
      span: S, the longest sequence: no token attends further back.
    """

    dp: int
    pp: int
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

    @property
    def num_flushes(self) -> int:
        """F."""
        return self.dp * self.flushes


PackedForm = tuple[PackedShape, ...]
"""What a program is compiled for: one kind of rows, or long ones and short ones."""


def packed_forms(
    num_rows: int,
    length: int,
    layout: ParallelLayout,
    microbatch_size: int,
    flush_microbatches: int = 0,
) -> tuple[PackedForm, ...]:
    """The forms that serve a batch, the usual one first.

    Narrow rows are as long as the longest sequence. That wastes room when most sequences are longer
    than half of it: wide rows with the same tokens in a microbatch do not. And it wastes room when
    the last microbatch of every replica is nearly empty: microbatches of half as many rows, and
    half of that, waste less; least of all those of one row with short rows after them.

    Args:
      num_rows: B, sequences of the batch.
      length: S, tokens of the longest possible sequence.
      layout: of the model-stage.
      microbatch_size: longest sequences of a microbatch and replica: its token budget is this * S.
      flush_microbatches: most microbatches of a pipeline flush; 0: all of a replica's.
    """
    per_replica = -(-num_rows // layout.dp)
    size = min(microbatch_size, per_replica)

    def shape(rows: int, width: int, span: int, total: int) -> PackedShape:
        flush = 1 if layout.pp == 1 else min(flush_microbatches or total, total)
        return PackedShape(
            dp=layout.dp,
            pp=layout.pp,
            flushes=-(-total // flush),
            microbatches=flush,
            rows=rows,
            width=width,
            span=span,
        )

    joined = max(k for k in range(1, WIDE + 1) if size % k == 0)
    cuts = [(size, 1), (size, joined)]
    cuts += [(size >> n, 1) for n in range(1, size.bit_length())]
    forms: list[PackedForm] = []
    for rows, k in dict.fromkeys(cuts):
        joined_rows = -(-num_rows // k)
        rows_needed = -(-joined_rows // layout.dp)
        total = -(-rows_needed // (rows // k))
        forms.append((shape(rows // k, k * length, length, total),))
    if short := short_width(length):
        forms.append((shape(1, length, length, per_replica), shape(1, short, short, per_replica)))
    return tuple(forms)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FormFit:
    """A batch in the rows of a form.

    Attributes:
      form: of the program.
      packings: where sequences lie, by kind of rows; each is in one of them.
    """

    form: PackedForm
    packings: tuple[Packing, ...]

    @functools.cached_property
    def microbatches(self) -> tuple[int, ...]:
        """That hold anything, of each replica, by kind of rows. The first kind always runs."""
        pairs = zip(self.form, self.packings, strict=True)
        run = [-(-packing.num_rows // (shape.dp * shape.rows)) for shape, packing in pairs]
        return max(run[0], 1), *run[1:]

    @property
    def run_tokens(self) -> int:
        """Tokens of the microbatches that are run, over all replicas."""
        pairs = zip(self.form, self.microbatches, strict=True)
        return sum(shape.dp * n * shape.rows * shape.width for shape, n in pairs)

    @property
    def cost_tokens(self) -> int:
        """These, and the time in tokens in which pipelines fill and drain for short rows."""
        bubbles = 0
        for shape, n in zip(self.form[1:], self.microbatches[1:], strict=True):
            ticks = -(-n // shape.microbatches) * (shape.pp - 1)
            bubbles += shape.dp * ticks * shape.rows * shape.width
        return self.run_tokens + bubbles


def fit_form(forms: Sequence[PackedForm], lengths_B: np.ndarray) -> FormFit:
    """Packs sequences for one of the forms: the first that is nearly as good as the best.

    Args:
      forms: of `packed_forms`, for at least B rows.
      lengths_B: tokens of each sequence, at most the forms' span; one without tokens has no place.
    """
    tokens = int(lengths_B.sum())

    @functools.cache
    def one_kind(width: int, dp: int) -> Packing:
        return pack_rows(lengths_B, width, dp)

    fits: list[FormFit] = []
    for form in forms:
        shape = form[0]
        if fits and shape.width > shape.span:
            usual = one_kind(shape.span, shape.dp)
            if usual.num_rows * shape.span <= GAIN * tokens:
                continue  # narrow rows are full: if anything, the microbatches are too large
        if len(form) == 1:
            packings = [(one_kind(shape.width, shape.dp),)]
        else:
            packings = _long_and_short(form, lengths_B)
        for fit in (FormFit(form=form, packings=p) for p in packings):
            if fit.cost_tokens <= GAIN * tokens:
                return fit  # the best there is could save no more than that
            fits.append(fit)
    least = min(fit.cost_tokens for fit in fits)
    return next(fit for fit in fits if fit.cost_tokens <= GAIN * least)


def _long_and_short(form: PackedForm, lengths_B: np.ndarray) -> Iterator[tuple[Packing, Packing]]:
    """With about as many long rows as the tokens fill, as many first; none where what they leave is
    too long for short rows."""
    long, short = form
    full = int(lengths_B.sum()) // (long.dp * long.width)
    for rounds in (full, full - 1, full + 1):
        if rounds < 1:
            continue
        packing = pack_rows(lengths_B, long.width, long.dp, rounds * long.dp)
        left_B = np.where(packing.rows_B < 0, lengths_B, 0)
        if left_B.max(initial=0) <= short.width:
            yield packing, pack_rows(left_B, short.width, short.dp)
