"""Keeps off the screen what orbax and tensorstore print about a save that fails.

The failure itself is raised, in one line. They print it many times over beside that: orbax to its
log, asyncio about the writes that failed after the first one, and tensorstore about writes whose
event loop has ended by the time they do.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

LOGGERS = ("absl", "asyncio")
TENSORSTORE = ("OCDBT database", "[os_error_code=", "source locations='tensorstore")
"""What a message of tensorstore, whose errors have no type of their own, has one of."""


class _Unraisable(Protocol):
    @property
    def exc_value(self) -> BaseException | None: ...
    @property
    def exc_traceback(self) -> TracebackType | None: ...


@contextmanager
def quiet() -> Iterator[None]:
    """Silences these messages, and nothing else, while checkpoints are open."""
    before = sys.unraisablehook

    def hook(unraisable: _Unraisable) -> None:
        if not _is_late_write(unraisable):
            before(unraisable)  # type: ignore[arg-type]

    def is_other(record: logging.LogRecord) -> bool:  # an object of its own: it is taken off again
        return not _is_orbax(record)

    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(is_other)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before
        for logger in loggers:
            logger.removeFilter(is_other)


def stay_quiet() -> None:
    """Silences the logged ones until the process ends.

    After a save that failed, asyncio tells of its other writes when their tasks are collected,
    which may be as late as the end of the process.
    """
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_not_orbax)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return not _is_orbax(record)


def _is_late_write(unraisable: _Unraisable) -> bool:
    """Whether a write ended after the event loop that waited for it; no frame names tensorstore."""
    error, frames = unraisable.exc_value, unraisable.exc_traceback
    return (
        isinstance(error, RuntimeError)
        and str(error) == "Event loop is closed"
        and frames is not None
        and frames.tb_frame.f_code.co_name == "call_soon_threadsafe"
    )


def _is_orbax(record: logging.LogRecord) -> bool:
    if record.name == "asyncio":
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ValueError) and any(sign in str(error) for sign in TENSORSTORE):
            return True  # raised where no Python frame is
        frames = error.__traceback__ if error else None
        while frames is not None:
            if _in_orbax(frames.tb_frame.f_code.co_filename):
                return True
            frames = frames.tb_next
        return False
    return _in_orbax(record.pathname)


def _in_orbax(path: str) -> bool:
    return f"{os.sep}orbax{os.sep}" in path
