"""Problems from data files: JSONL, plain or gzipped, and Parquet; one file or many.

Every record is checked when a file is opened, so that a run fails before it begins. A problem is
read when it is asked for: memory holds 16 bytes for a line of JSONL, whatever its length.
"""

import array
import bisect
import contextlib
import gzip
import json
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from nereus_jax.core.errors import DataError
from nereus_jax.data.parquet import ParquetProblems
from nereus_jax.data.prompts import Problems
from nereus_jax.data.records import RecordError, RecordSchema
from nereus_jax.data.tasks import Problem

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_problems(paths: Sequence[pathlib.Path], schema: RecordSchema) -> Problems:
    """The problems of files, one file after the other in the given order.

    Args:
      paths: at least one. `.parquet` is Parquet, `.gz` gzipped JSONL, anything else JSONL.
      schema: which fields of a record are read.

    Raises:
      ConfigError: a file is Parquet and pyarrow is not installed.
      DataError: a file cannot be read, a record is not a problem, or there are none.
    """
    parts = [
        ParquetProblems(path, schema) if path.suffix == ".parquet" else JsonlProblems(path, schema)
        for path in paths
    ]
    if not any(len(part) for part in parts):
        which = (
            f"{paths[0]} is"
            if len(paths) == 1
            else f"all {len(paths)} files from {paths[0]} on are"
        )
        raise DataError(
            f"{which} empty; data needs at least one problem (a row, or a line of JSON)"
        )
    return parts[0] if len(parts) == 1 else ChainedProblems(parts)


class ChainedProblems:
    """The problems of several sources, one source after the other."""

    def __init__(self, parts: Sequence[Problems]) -> None:
        self._parts = parts
        self._ends: list[int] = []
        for part in parts:
            self._ends.append(len(self) + len(part))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int, /) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect.bisect_right(self._ends, index)
        return self._parts[which][index - (self._ends[which - 1] if which else 0)]


class JsonlProblems:
    """The problems of a file with one JSON object a line; blank lines are skipped.

    Every line is checked at construction; only byte offsets are kept, and a problem is read when
    asked for. A gzipped file is unpacked once to a temporary file that has no name.

    Args:
      path: the file, UTF-8; gzipped if its name ends in `.gz`.
      schema: which fields of an object are read.

    Raises:
      DataError: the file is missing, or a line is malformed or no problem.
    """

    def __init__(self, path: pathlib.Path, schema: RecordSchema) -> None:
        self._path, self._schema = path, schema
        if not path.is_file():
            raise DataError(f"{path} does not exist; give the path of a data file or 'task:NAME'")
        self._unpacked = _unpack(path) if path.suffix == ".gz" else None
        self._offsets = array.array("q")
        self._line_numbers = array.array("q")
        self._index_lines()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int, /) -> Problem:
        with self._open() as file:
            file.seek(self._offsets[index])
            return self._parse(file.readline(), self._line_numbers[index])

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        if self._unpacked is not None:
            yield self._unpacked
        else:
            with self._path.open("rb") as file:
                yield file

    def _index_lines(self) -> None:
        offset = 0
        with self._open() as file:
            for number, line in enumerate(file, start=1):
                start, offset = offset, offset + len(line)
                if number == 1 and line.startswith(_BYTE_ORDER_MARK):
                    start, line = start + len(_BYTE_ORDER_MARK), line[len(_BYTE_ORDER_MARK) :]
                if line.strip():
                    self._parse(line, number)
                    self._offsets.append(start)
                    self._line_numbers.append(number)

    def _parse(self, line: bytes, number: int) -> Problem:
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._error(number, f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise self._error(number, f"must be a JSON object, got {type(row).__name__}")
        try:
            return self._schema.problem(row)
        except RecordError as error:
            raise self._error(number, str(error)) from error

    def _error(self, number: int, what: str) -> DataError:
        return DataError(f"{self._path}: line {number}: {what}")


def _unpack(path: pathlib.Path) -> BinaryIO:
    target = tempfile.TemporaryFile(prefix="nereus-")  # noqa: SIM115 (it stays open)
    try:
        with gzip.open(path) as source:
            shutil.copyfileobj(source, target)
    except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
        target.close()
        raise DataError(
            f"{path} cannot be unpacked to {tempfile.gettempdir()}: {error}; copy it again, or set "
            "TMPDIR to a directory with room for its contents"
        ) from error
    target.seek(0)
    return target
