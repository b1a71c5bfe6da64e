"""What generation hands to the rest of a step: sampled responses as host arrays, and as a file.

Shapes: B rows, P prompt width, T response width, S = P + T. Rows are contiguous and right padded:
row b is its prompt (`prompt_lengths_B[b]` tokens), then its response (`response_lengths_B[b]`
tokens), then padding.
"""

import dataclasses
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np

from nereus_jax.core.errors import DataError

_FORMAT_VERSION = 1
_DTYPES = {
    "tokens_BS": np.int32,
    "prompt_lengths_B": np.int32,
    "response_lengths_B": np.int32,
    "logprobs_BT": np.float32,
    "finished_B": np.bool_,
    "sample_indices_B": np.int64,
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """Sampled responses of one policy version; all arrays are numpy and checked at construction.

    Raises:
        ValueError: an array has another dtype or shape than stated below, or the lengths do not fit
            the widths.
    """

    tokens_BS: np.ndarray
    """int32: prompt, response, padding."""
    prompt_lengths_B: np.ndarray
    """int32 in [0, S - T]; 0 only in rows without a response."""
    response_lengths_B: np.ndarray
    """int32 in [0, T], the end-of-sequence token included."""
    logprobs_BT: np.ndarray
    """float32, nats: of each sampled token under softmax(logits / temperature); 0 where masked."""
    finished_B: np.ndarray
    """bool: ended by itself (end-of-sequence or stop text), not by the length limit."""
    sample_indices_B: np.ndarray
    """int64: global sample counter, which identifies the random draws of the row."""
    policy_version: int
    """Number of optimizer updates behind the weights that sampled these rows."""

    def __post_init__(self) -> None:
        self._check_arrays()
        self._check_lengths()

    def _check_arrays(self) -> None:
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                got = getattr(array, "dtype", type(array).__name__)
                raise ValueError(f"Rollout.{name} must be numpy {np.dtype(dtype)}, got {got}")
            rank = len(name.rpartition("_")[2])
            if array.ndim != rank or array.shape[0] != self.tokens_BS.shape[0]:
                raise ValueError(
                    f"Rollout.{name} must have rank {rank} and as many rows as tokens_BS "
                    f"({self.tokens_BS.shape[0]}), got shape {array.shape}"
                )
        if self.response_width > self.tokens_BS.shape[1]:
            raise ValueError(
                f"Rollout.logprobs_BT {self.logprobs_BT.shape} is wider than "
                f"tokens_BS {self.tokens_BS.shape}"
            )
        if self.policy_version < 0:
            raise ValueError(f"Rollout.policy_version must be >= 0, got {self.policy_version}")

    def _check_lengths(self) -> None:
        prompt, response = self.prompt_lengths_B, self.response_lengths_B
        problems = (
            (
                (prompt < 0) | (prompt > self.prompt_width),
                f"prompt length outside 0..{self.prompt_width}",
            ),
            (
                (response < 0) | (response > self.response_width),
                f"response length outside 0..{self.response_width}",
            ),
            ((prompt == 0) & (response > 0), "response without a prompt token before it"),
            (~np.isfinite(self.logprobs_BT).all(axis=1), "log-probability that is not finite"),
            (
                np.any((self.logprobs_BT != 0) & ~self.mask_BT, axis=1),
                "log-probability beyond its response",
            ),
        )
        for bad_B, problem in problems:
            if bad_B.any():
                row = int(np.argmax(bad_B))
                raise ValueError(
                    f"Rollout row {row} has a {problem} "
                    f"(prompt {prompt[row]}, response {response[row]} tokens)"
                )

    @property
    def num_rows(self) -> int:
        """B."""
        return self.tokens_BS.shape[0]

    @property
    def response_width(self) -> int:
        """T."""
        return self.logprobs_BT.shape[1]

    @property
    def prompt_width(self) -> int:
        """P = S - T."""
        return self.tokens_BS.shape[1] - self.logprobs_BT.shape[1]

    @property
    def mask_BT(self) -> np.ndarray:
        """bool: where a response token is."""
        return np.arange(self.response_width)[None, :] < self.response_lengths_B[:, None]

    @property
    def lengths_B(self) -> np.ndarray:
        """int32: prompt and response tokens of each row."""
        return self.prompt_lengths_B + self.response_lengths_B

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens in all rows, without padding."""
        return int(self.lengths_B.sum(dtype=np.int64))

    def take(self, rows: np.ndarray) -> "Rollout":
        """Returns the given rows (integer indices or a bool mask of B) in the given order."""
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in _DTYPES})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an .npz file without pickle, atomically: a reader never sees a part of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        arrays = {name: getattr(self, name) for name in _DTYPES}
        try:
            with temporary.open("wb") as file:
                np.savez(
                    file,
                    allow_pickle=False,
                    format_version=np.int64(_FORMAT_VERSION),
                    policy_version=np.int64(self.policy_version),
                    **arrays,
                )
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Rollout":
        """Reads what `save` wrote.

        Raises:
            DataError: the file is missing, damaged, not a rollout, or of another format version.
        """
        if not Path(path).is_file():
            raise DataError(
                f"recorded rollout {path} does not exist: record it first (rollout.record = True)"
            )
        try:
            with np.load(path, allow_pickle=False) as file:
                version = int(file["format_version"])
                if version != _FORMAT_VERSION:
                    raise ValueError(f"format version {version}, expected {_FORMAT_VERSION}")
                arrays = {name: file[name] for name in _DTYPES}
                return Rollout(policy_version=int(file["policy_version"]), **arrays)
        except (
            OSError,
            EOFError,
            KeyError,
            IndexError,
            TypeError,
            ValueError,
            AttributeError,
            NotImplementedError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"recorded rollout {path} cannot be read ({type(error).__name__}: {reason}): "
                "record it again"
            ) from error
