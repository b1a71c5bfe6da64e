"""Files of one JSON object per line that survive a crash, a resume and a full disk.

A row is written by one unbuffered write, so a crash of the process loses none, and a crash of the
machine at most tears the last; a reader and a resume drop a torn last line. The JSON is strict: a
number that is not finite becomes null, since NaN and Infinity are not JSON and most readers refuse
them.
"""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from nereus_jax.core.errors import DataError, StorageError

Row = Mapping[str, Any]


class JsonlWriter:
    """Appends rows to one file; a context manager.

    Args:
        path: The file; its folder must exist.
        keep_through: On a resume, the last step whose rows stay: later rows are cut, since those
            steps are about to run again. None starts the file afresh.

    Raises:
        StorageError: The file cannot be created or rewritten.
        DataError: The file is there but holds something else than rows with a step.
    """

    def __init__(self, path: Path, *, keep_through: int | None = None) -> None:
        self.path = Path(path)
        try:
            if keep_through is not None:
                truncate_jsonl(self.path, after=keep_through)
            mode = "wb" if keep_through is None else "ab"
            self._file = open(self.path, mode, buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise _storage_error(self.path, error) from error

    def append(self, row: Row) -> None:
        """Write one row; it is with the operating system when this returns.

        Args:
            row: A mapping with the key `step`. Numpy scalars and arrays are taken; values that are
                not finite become null.

        Raises:
            StorageError: The row could not be written; the file is as it was before.
            ValueError: The row has no `step`.
            TypeError: A value is no JSON and no numpy value.
        """
        if "step" not in row:
            raise ValueError(f"a row of {self.path.name} needs the key 'step', got {list(row)}")
        start = self._file.tell()
        rest = memoryview(encode_row(row))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # a torn line is dropped by readers all the same
                self._file.truncate(start)
                self._file.seek(start)
            raise _storage_error(self.path, error) from error

    def replace_last(self, row: Row) -> None:
        """Write a row in the place of the last one.

        Raises:
            StorageError: It could not be written; the file is as it was before.
        """
        rows = read_jsonl(self.path)
        kept = b"".join(encode_row(x) for x in (*rows[:-1], row))
        self._file.close()
        try:
            _replace_atomically(self.path, kept)
        except OSError as error:
            raise _storage_error(self.path, error) from error
        finally:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def samples_writer(workdir: Path, *, keep_through: int | None = None) -> JsonlWriter:
    """The writer of `samples.jsonl`: prompts and responses that a person may want to read."""
    return JsonlWriter(Path(workdir) / "samples.jsonl", keep_through=keep_through)


def encode_row(row: Row) -> bytes:
    """One line of strict JSON in UTF-8, with its newline."""
    text = json.dumps(_plain(row), allow_nan=False, ensure_ascii=False, separators=(", ", ": "))
    # A lone surrogate (half a character, cut by a tokenizer) becomes its JSON escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, without a torn last line.

    Raises:
        DataError: A line before the last is no JSON object.
        FileNotFoundError: There is no such file.
    """
    lines = Path(path).read_bytes().splitlines(keepends=True)
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        row = _decode_line(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines) or line.endswith(b"\n"):
            raise DataError(
                f"{path}, line {number}, is no JSON object: got {line[:60]!r}; "
                "repair or remove the line"
            )
    return rows


def scan_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of a file that may be damaged or still grow, for those who only look at it.

    Returns:
        The rows that can be read, and the numbers of the lines that cannot, from 1 on; where the
        last one is torn its number is among them.

    Raises:
        FileNotFoundError: There is no such file.
    """
    rows: list[dict[str, Any]] = []
    unread: list[int] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        row = _decode_line(line)
        if row is not None:
            rows.append(row)
        elif line.strip():
            unread.append(number)
    return rows, unread


def truncate_jsonl(path: Path, *, key: str = "step", after: int) -> int:
    """Cut the rows whose `row[key] > after`, and a torn last line; the order stays.

    Atomic: the kept rows go to a new file that replaces the old one, so a crash leaves either.

    Args:
        path: The file; one that is missing counts as empty.
        key: The key of the row's step, an integer.
        after: The last step that is kept.

    Returns:
        The number of rows cut.

    Raises:
        DataError: A line before the last is no JSON object, or a row has no integer under `key`.
        StorageError: The new file could not be written; the old one is as it was.
    """
    path = Path(path)
    if not path.exists():
        return 0
    rows = read_jsonl(path)
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get(key), int):
            raise DataError(
                f"{path}, line {number}, has no integer {key!r}: got {row.get(key)!r}; "
                "repair or remove the line"
            )
    kept = [row for row in rows if row[key] <= after]
    try:
        _replace_atomically(path, b"".join(encode_row(row) for row in kept))
    except OSError as error:
        raise _storage_error(path, error) from error
    return len(rows) - len(kept)


def _replace_atomically(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _decode_line(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # bad JSON, or a character torn in the middle
        return None
    return row if isinstance(row, dict) else None


def _plain(value: Any) -> Any:
    """The value in the types that JSON has; numbers that are not finite become None."""
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}; "
        "free space or make the place writable, then start the same command again to resume"
    )
