"""How the rows of a batch are cut into replicas, pipeline flushes and microbatches."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from nereus_jax.core.layout import ParallelLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSplit:
    """A batch as [dp, flushes, microbatches, microbatch_size] rows.

    Attributes:
      num_rows: rows that the batch really has.
      dp: replicas.
      flushes: pipeline flushes (gradient accumulation) a replica runs one after the other.
      microbatches: microbatches of one flush.
      microbatch_size: rows of one microbatch.
    """

    num_rows: int
    dp: int
    flushes: int
    microbatches: int
    microbatch_size: int

    @property
    def rows_per_replica(self) -> int:
        return self.flushes * self.microbatches * self.microbatch_size

    @property
    def padded_rows(self) -> int:
        """Rows of the arrays, those that only fill up included."""
        return self.dp * self.rows_per_replica

    def pad(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Appends rows of zeros: no prompt, no response, no weight in any loss."""
        missing = self.padded_rows - self.num_rows
        return {
            name: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) if missing else x
            for name, x in arrays.items()
        }


def split_rows(
    num_rows: int, layout: ParallelLayout, microbatch_size: int, flush_microbatches: int = 0
) -> RowSplit:
    """Cuts a batch for a layout, padding it up where it does not divide.

    Args:
      num_rows: rows of the batch.
      layout: of the model-stage.
      microbatch_size: most rows of a microbatch.
      flush_microbatches: most microbatches of a pipeline flush; 0: all of a replica's.
    """
    per_replica = -(-num_rows // layout.dp)
    size = min(microbatch_size, per_replica)
    total = -(-per_replica // size)
    flush = 1 if layout.pp == 1 else min(flush_microbatches or total, total)
    return RowSplit(
        num_rows=num_rows,
        dp=layout.dp,
        flushes=-(-total // flush),
        microbatches=flush,
        microbatch_size=size,
    )
