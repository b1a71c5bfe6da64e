"""Who leads, as files in the run directory: what keeps two leaders from running one job.

Every leadership is a term with a file of its own, `WORKDIR/elastic/term-000001.json`. It is claimed
by linking the file to its name, which only one process can do. The leader touches it with every
beat. Another process takes the next term when the leader is known to be gone, or when the file has
stayed as it is for too long by that process's own clock; clocks of machines are never compared.
"""

import dataclasses
import errno
import json
import os
import re
import uuid
from pathlib import Path

from nereus_jax.core.errors import ConfigError, NereusError, StorageError

DIRECTORY = "elastic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
    """A term, as its file tells.

    Attributes:
      term: ascending from 1.
      address: host:port of the leader's supervisor.
      code: exit code of the job, once it has ended.
      beat: changes with every beat of the leader.
    """

    term: int
    address: str
    code: int | None = None
    beat: int = 0


def read_lease(workdir: Path) -> Lease | None:
    """The newest term; None: there is none.

    Raises:
      ConfigError, StorageError: the directory cannot be read.
    """
    try:
        terms = _terms(workdir)
        if not terms:
            return None
        path = terms[max(terms)]
        content = json.loads(path.read_text())
        return Lease(
            term=max(terms),
            address=content["address"],
            code=content["code"],
            beat=path.stat().st_mtime_ns,
        )
    except FileNotFoundError:  # a newer term came, and took this one's file away
        return read_lease(workdir)
    except (OSError, ValueError, KeyError) as error:
        raise _failed(workdir, error) from error


def claim(workdir: Path, term: int, address: str) -> bool:
    """Takes a term; whether it could be had.

    Raises:
      ConfigError, StorageError: the directory cannot be written.
    """
    path = _path(workdir, term)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(temporary, Lease(term=term, address=address))
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        for older, file in _terms(workdir).items():
            if older < term:
                file.unlink(missing_ok=True)
        return True
    except OSError as error:
        raise _failed(workdir, error) from error


def beat(workdir: Path, term: int) -> bool:
    """Shows that the leader lives; whether the term is still the newest.

    Raises:
      OSError: the file cannot be touched.
    """
    try:
        os.utime(_path(workdir, term))
        return max(_terms(workdir)) == term
    except FileNotFoundError:
        return False


def finish(workdir: Path, lease: Lease, code: int) -> None:
    """Says that the job has ended.

    Raises:
      StorageError: the file cannot be written.
    """
    path = _path(workdir, lease.term)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        _write(temporary, dataclasses.replace(lease, code=code))
        os.replace(temporary, path)
    except OSError as error:
        raise _failed(workdir, error) from error


def _path(workdir: Path, term: int) -> Path:
    return workdir / DIRECTORY / f"term-{term:06d}.json"


def _terms(workdir: Path) -> dict[int, Path]:
    directory = workdir / DIRECTORY
    if not directory.is_dir():
        return {}
    found = ((re.fullmatch(r"term-(\d+)\.json", p.name), p) for p in directory.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _write(path: Path, lease: Lease) -> None:
    path.write_text(json.dumps({"address": lease.address, "code": lease.code}) + "\n")


def _failed(workdir: Path, error: BaseException) -> NereusError:
    wrong = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
    is_mistake = isinstance(error, OSError) and error.errno in wrong
    reason = getattr(error, "strerror", None) or str(error)
    return (ConfigError if is_mistake else StorageError)(
        f"{workdir / DIRECTORY}, where the leader of an elastic job is written down, cannot be "
        f"used: {reason}; --workdir must be a directory that all processes share and may write to"
    )
