"""The metrics of a run: `metrics.jsonl`, mirrored to TensorBoard.

The file keeps nested mappings; TensorBoard gets `{"stage_s": {"actor-GENERATE": 1.2}}` as
`stage_s/actor-GENERATE`. A value that is not finite is null in the file and not in TensorBoard.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nereus_jax.core.errors import ConfigError
from nereus_jax.report.jsonl import JsonlWriter, Row


class MetricsWriter:
    """Appends one row of metrics a step; a context manager.

    Args:
        workdir: The run's folder, which exists: gets `metrics.jsonl` and `tensorboard/`.
        tensorboard: Whether to mirror the numbers to TensorBoard.
        keep_through: On a resume, the last step whose rows stay; None starts afresh. TensorBoard
            is told to forget the later steps as well.

    Raises:
        ConfigError: `tensorboard` without the package tensorboardX.
        StorageError, DataError: As `JsonlWriter`.
    """

    def __init__(
        self, workdir: Path, tensorboard: bool, *, keep_through: int | None = None
    ) -> None:
        workdir = Path(workdir)
        first_step = 0 if keep_through is None else keep_through + 1
        self._tensorboard = _open_tensorboard(workdir, first_step) if tensorboard else None
        self._jsonl = JsonlWriter(workdir / "metrics.jsonl", keep_through=keep_through)

    def append(self, row: Row) -> None:
        """Write one row to the file, then its numbers to TensorBoard.

        Args:
            row: A mapping with the key `step`; TensorBoard gets nested names joined by `/`.

        Raises:
            StorageError, ValueError, TypeError: As `JsonlWriter.append`.
        """
        self._jsonl.append(row)
        if self._tensorboard is None:
            return
        for name, value in scalars(flatten(row)).items():
            self._tensorboard.add_scalar(name, value, global_step=int(row["step"]))
        self._tensorboard.flush()

    def close(self) -> None:
        """Close both sinks; a second call does nothing."""
        self._jsonl.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def flatten(row: Row, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level, the keys joined with `/`, in order."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}/")
        else:
            flat[name] = value
    return flat


def scalars(flat: Row) -> dict[str, float]:
    """The finite numbers of a flat row, without the step; truth values are no numbers."""
    found: dict[str, float] = {}
    for name, value in flat.items():
        if isinstance(value, np.generic | np.ndarray) and np.size(value) == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float) or name == "step":
            continue
        if math.isfinite(value):
            found[name] = float(value)
    return found


def _open_tensorboard(workdir: Path, first_step: int) -> Any:
    try:
        import tensorboardX
    except ImportError as error:
        raise ConfigError(
            "report.tensorboard is True but the package tensorboardX is missing: "
            "pip install 'nereus_jax[tensorboard]', or set report.tensorboard=False"
        ) from error
    # Its file names count whole seconds: the suffix keeps a quick resume off the file before it.
    return tensorboardX.SummaryWriter(
        str(workdir / "tensorboard"),
        purge_step=first_step,
        filename_suffix=f".from-step-{first_step}",
    )
