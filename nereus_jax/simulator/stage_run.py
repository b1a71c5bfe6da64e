# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""A model-stage as the simulated cluster runs it, and the rows of a step.

Shapes: N rows, U updates of an optimizer, R replicas, M microbatches of a replica.
"""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.layout import ParallelLayout
from nereus_jax.planning.cost_terms import Execution, ModelSizes, RowFill
from nereus_jax.rl.packed_forms import FormFit, PackedForm, fit_form, packed_forms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOverheads:
    """What an engine's host costs beside the device's work.

    Attributes:
      decode_step_s: of one step of decoding.
      decode_row_s: of each row that is active in it.
      call_s: of a call of the model-stage.
      factor: of all seconds on the device: kernels that differ from those that were profiled.
    """

    decode_step_s: float = 0.0
    decode_row_s: float = 0.0
    call_s: float = 0.0
    factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRun:
    """How a model-stage runs.

    Attributes:
      sizes: of its model.
      train: it updates weights.
      layout: its degrees.
      microbatch_size: rows; GENERATE: rows that a replica decodes at a time.
      flush: most microbatches of a pipeline flush; 0: all of a replica's.
      remat: activations are computed again.
      zero1: the optimizer's state is split over replicas.
      execution: how the engine works.
      overheads: of its host.
      minibatch_size: rows of an update.
      epochs: passes over the rows.
      room_tokens: responses that the programs have room for.
      prompt_tokens: the same of prompts.
    """

    sizes: ModelSizes
    train: bool
    layout: ParallelLayout
    microbatch_size: int
    flush: int
    remat: bool
    zero1: bool
    execution: Execution
    overheads: EngineOverheads = dataclasses.field(default_factory=EngineOverheads)
    minibatch_size: int
    epochs: int = 1
    room_tokens: int
    prompt_tokens: int

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.prompt_tokens + self.room_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepRows:
    """The rows of a step.

    Attributes:
      prompts: [N] tokens.
      responses: [N] tokens.
    """

    prompts: Ints
    responses: Ints

    @functools.cached_property
    def fits(self) -> dict[tuple[int, tuple[PackedForm, ...]], list[FormFit]]:
        """How sequences are packed, by (updates, forms); filled when asked for."""
        return {}

    def chunks(self, updates: int) -> tuple[Ints, Ints]:
        """[U, N / U] lengths of sequences and of their responses, each update's longest first."""
        each = -(-len(self.prompts) // updates)
        gap = updates * each - len(self.prompts)
        lengths = np.pad(self.prompts + self.responses, (0, gap)).reshape(updates, each)
        responses = np.pad(self.responses, (0, gap)).reshape(updates, each)
        order = np.argsort(-lengths, axis=1, kind="stable")
        return np.take_along_axis(lengths, order, 1), np.take_along_axis(responses, order, 1)

    def packed(self, updates: int, forms: tuple[PackedForm, ...]) -> list[FormFit]:
        """How each update's sequences are packed for one of the forms, as the engines do it."""
        key = updates, forms
        if key not in self.fits:
            self.fits[key] = [fit_form(forms, row) for row in self.chunks(updates)[0]]
        return self.fits[key]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Microbatches:
    """What microbatches are made of, [U, R, M] each.

    Attributes:
      tokens: through the layers; 0: the microbatch is not run.
      pairs: of a query and a key whose score is computed.
      head_tokens: through the head.
      length: of the sequences that scores are taken over.
      flushes: that begin with it, spread evenly over the microbatches that are alike.
    """

    tokens: Floats
    pairs: Floats
    head_tokens: Floats
    length: Floats
    flushes: Floats


def cut(run: StageRun, rows: StepRows) -> Microbatches:
    """The microbatches of every update, or of the whole batch for SCORE."""
    updates = -(-len(rows.prompts) // run.minibatch_size) if run.train else 1
    if run.execution.rows is RowFill.PACKED:
        return _packed(run, rows, updates)
    lengths, responses = (
        _deal(part, run.layout.dp, run.microbatch_size) for part in rows.chunks(updates)
    )
    count = np.asarray((lengths > 0).sum(axis=3), np.float64)
    some = np.asarray((count > 0).sum(axis=2, keepdims=True), np.float64)
    spread: Floats = np.where(count > 0, num_flushes(run, some) / np.maximum(some, 1.0), 0.0)
    share = run.execution.score_share
    if run.execution.rows is RowFill.EXACT:
        tokens = np.asarray(lengths.sum(axis=3), np.float64)
        pairs = np.asarray(share * (lengths**2).sum(axis=3), np.float64)
        return Microbatches(
            tokens=tokens,
            pairs=pairs,
            head_tokens=np.asarray(responses.sum(axis=3), np.float64),
            length=tokens / np.maximum(count, 1.0),
            flushes=spread,
        )
    tokens: Floats = count * float(run.width)
    return Microbatches(
        tokens=tokens,
        pairs=share * tokens * run.width,
        head_tokens=count * float(run.room_tokens),
        length=np.full(tokens.shape, float(run.width)),
        flushes=spread,
    )


def num_flushes(run: StageRun, count: Floats) -> Floats:
    """Pipeline flushes of so many microbatches."""
    if run.layout.pp == 1:
        return count
    return np.ceil(count / run.flush) if run.flush else np.minimum(count, 1.0)


def _packed(run: StageRun, rows: StepRows, updates: int) -> Microbatches:
    """Full rows, as many microbatches as hold any; replicas have the same number of rows."""
    per_update = -(-len(rows.prompts) // updates)
    forms = packed_forms(per_update, run.width, run.layout, run.microbatch_size, run.flush)
    fits = rows.packed(updates, forms)
    most = max(sum(fit.microbatches) for fit in fits)
    tokens, length, flushes = np.zeros((3, updates, run.layout.dp, most))
    for update, fit in enumerate(fits):
        sizes = [shape.rows * shape.width for shape in fit.form]
        spans = [shape.span for shape in fit.form]
        count = sum(fit.microbatches)
        tokens[update, :, :count] = np.repeat(sizes, fit.microbatches)
        length[update, :, :count] = np.repeat(spans, fit.microbatches)
        kinds = np.array(fit.microbatches, np.float64)
        spread = num_flushes(run, kinds) / np.maximum(kinds, 1.0)
        flushes[update, :, :count] = np.repeat(spread, fit.microbatches)
    responses = float(rows.responses.sum()) / updates / run.layout.dp
    return Microbatches(
        tokens=tokens,
        pairs=run.execution.score_share * tokens * length,
        head_tokens=responses * tokens / tokens.sum(axis=2, keepdims=True),
        length=length,
        flushes=flushes,
    )


def _deal(lengths: Ints, replicas: int, size: int) -> Ints:
    """[U, R, M, size] rows, longest first, there and back again over the replicas."""
    updates, count = lengths.shape
    each = -(-count // replicas)
    each = -(-each // size) * size
    padded = np.pad(lengths, ((0, 0), (0, each * replicas - count)))
    dealt = padded.reshape(updates, each, replicas)
    dealt[:, 1::2] = dealt[:, 1::2, ::-1]
    return dealt.transpose(0, 2, 1).reshape(updates, replicas, each // size, size)
