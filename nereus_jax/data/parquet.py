"""Problems from a Parquet file, in memory that does not grow with the file.

The package `pyarrow` (extra `parquet`) is imported only when a Parquet file is opened.
"""

import bisect
import errno
import pathlib
import tempfile
from typing import Any

from nereus_jax.core.errors import ConfigError, DataError
from nereus_jax.data.records import RecordError, RecordSchema, missing_field
from nereus_jax.data.tasks import Problem

_BATCH_ROWS = 4096


class ParquetProblems:
    """The rows of a Parquet file.

    A row group is compressed as a whole and often holds the whole file, so that single rows cannot
    be read from it in the order of a permutation. The file is therefore read once, front to back in
    small batches: every row is checked, and the batches go uncompressed to a temporary file that is
    mapped into memory and has no name. From then on a row is read where it lies, and the operating
    system may drop what it holds of the file.

    Args:
      path: the file.
      schema: which columns are read; a field of a nested column is named with dots.

    Raises:
      ConfigError: pyarrow is not installed.
      DataError: the file is missing or damaged, a column is missing, a row is no problem, or the
        temporary directory has no room.
    """

    def __init__(self, path: pathlib.Path, schema: RecordSchema) -> None:
        self._path, self._schema = path, schema
        if not path.is_file():
            raise DataError(f"{path} does not exist; give the path of a data file or 'task:NAME'")
        arrow = _import_arrow(path)
        try:
            self._batches = self._read(arrow)
        except (arrow.ArrowException, OSError) as error:
            raise DataError(_describe(error, path)) from error
        self._ends: list[int] = []
        for batch in self._batches:
            self._ends.append(len(self) + batch.num_rows)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int, /) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect.bisect_right(self._ends, index)
        offset = index - (self._ends[which - 1] if which else 0)
        return self._problem(_rows(self._batches[which].slice(offset, 1))[0], index)

    def _read(self, arrow: Any) -> list[Any]:
        """The batches of rows, checked, in memory that maps a temporary file."""
        with (
            arrow.parquet.ParquetFile(str(self._path), memory_map=True) as source,
            tempfile.TemporaryDirectory(prefix="nereus-") as scratch,
        ):
            columns = self._columns_to_check(source.schema_arrow.names)
            copy = str(pathlib.Path(scratch) / "rows.arrow")
            with (
                arrow.OSFile(copy, "wb") as sink,
                arrow.ipc.new_stream(sink, source.schema_arrow) as writer,
            ):
                num_rows = 0
                for batch in source.iter_batches(batch_size=_BATCH_ROWS):
                    for row in _rows(batch.select(columns)):
                        self._problem(row, num_rows)
                        num_rows += 1
                    writer.write_batch(batch)
            # The mapping outlives both the name and the descriptor of the file.
            with arrow.memory_map(copy) as mapped:
                return list(arrow.ipc.open_stream(mapped))

    def _columns_to_check(self, names: list[str]) -> list[str]:
        """The columns that hold the fields of the schema."""
        columns: dict[str, None] = {}
        for setting, field in self._schema.fields:
            column = field if field in names else field.partition(".")[0]
            if column not in names:
                try:
                    missing_field(field, names, setting, noun="column")
                except RecordError as error:
                    raise DataError(f"{self._path}: {error}") from error
            columns[column] = None
        return list(columns)

    def _problem(self, row: dict[str, Any], index: int) -> Problem:
        try:
            return self._schema.problem(row)
        except RecordError as error:
            raise DataError(f"{self._path}: row {index} (the first is 0): {error}") from error


def _rows(batch: Any) -> list[dict[str, Any]]:
    columns = {name: _values(batch.column(i)) for i, name in enumerate(batch.schema.names)}
    return [{name: columns[name][i] for name in columns} for i in range(batch.num_rows)]


def _values(column: Any) -> list[Any]:
    # Python has no type for nanoseconds; pyarrow would give pandas' where that is installed, and a
    # run must not depend on it.
    if "[ns" not in str(column.type):
        try:
            return column.to_pylist()
        except ValueError:  # another type that Python lacks
            pass
    # As Arrow prints an array of one: between brackets, on lines of its own.
    shown = [" ".join(str(column.slice(i, 1)).split()) for i in range(len(column))]
    return [text.removeprefix("[ ").removesuffix(" ]") for text in shown]


def _describe(error: BaseException, path: pathlib.Path) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{path} does not fit, uncompressed, into {tempfile.gettempdir()}: {text}; set TMPDIR "
            "to a directory with more room"
        )
    return f"{path} cannot be read as Parquet: {text}; copy or write it again"


def _import_arrow(path: pathlib.Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{path} needs the package pyarrow; install it with: pip install 'nereus_jax[parquet]'"
        ) from None
    return pyarrow
