"""What the end of a worker means for the job."""

import enum
import signal

FAILED = 3
"""A worker ends with it on an error that would come again, such as a loss that is not finite; the
job then ends with 1. A worker that ends with 1 has crashed or lost the others."""
INTERRUPTED = 130
MISTAKE = 2


class Ending(enum.Enum):
    """What follows from the end of a worker."""

    FINAL = "final"
    CRASH = "crash"


def ending(code: int) -> Ending:
    """Whether a worker's exit code ends the job, or only this worker."""
    final = (0, MISTAKE, FAILED, INTERRUPTED, -signal.SIGINT)
    return Ending.FINAL if code in final else Ending.CRASH


def job_code(code: int) -> int:
    """The exit code of a job that a worker's final one ends."""
    return {FAILED: 1, -signal.SIGINT: INTERRUPTED}.get(code, code)


def in_words(code: int) -> str:
    """How a worker ended."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
