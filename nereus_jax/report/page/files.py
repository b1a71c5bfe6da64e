"""The files of a run's directory, read as far as they go."""

import dataclasses
import json
from pathlib import Path

from nereus_jax.core.errors import ConfigError
from nereus_jax.report.jsonl import scan_jsonl
from nereus_jax.report.page.rows import Row, as_row


@dataclasses.dataclass(kw_only=True)
class Files:
    """A directory, and what was found wrong in it while it was read.

    Attributes:
      directory: of the run.
      notes: one for each file that could not be used as it is.
    """

    directory: Path
    notes: list[str] = dataclasses.field(default_factory=list[str])

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.directory / name).is_file()

    def rows(self, name: str) -> list[Row]:
        """The rows of a JSON Lines file; none if it is not there.

        Raises:
          ConfigError: it is there, and may not be read.
        """
        path = self.directory / name
        try:
            rows, unread = scan_jsonl(path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(path, error) from error
        if unread:
            which = ", ".join(map(str, unread[:5])) + (", ..." if len(unread) > 5 else "")
            lines = "lines" if len(unread) > 1 else "line"
            self.notes.append(f"{name}: {lines} {which} cannot be read (torn or damaged): skipped")
        return [*rows]

    def object(self, name: str) -> Row:
        """The object of a JSON file; empty if there is none.

        Raises:
          ConfigError: it is there, and may not be read.
        """
        path = self.directory / name
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _unreadable(path, error) from error
        except ValueError:
            value = None
        found = as_row(value)
        if found is None:
            self.notes.append(f"{name} holds no JSON object: left out")
        return found or {}


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read: {error.strerror or error}; make it readable, or name another "
        f"directory"
    )
