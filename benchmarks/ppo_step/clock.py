"""What a process measures of itself; standard library only, since the peers import it too."""

import json
import os
import resource
import sys
import time
from pathlib import Path

CLOCK_FILE = "PPO_STEP_CLOCK"
"""Environment variable: the file that `tick` appends to."""


def tick(**more: object) -> None:
    """Writes a line: wall clock, CPU seconds of all threads, and peak memory so far.

    Called once a step, always at the same point of it, so that two lines are one step apart.
    """
    line = {
        "wall_s": time.perf_counter(),
        "cpu_s": time.process_time(),
        "peak_rss_bytes": peak_rss_bytes(),
    } | more
    with Path(os.environ[CLOCK_FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def peak_rss_bytes() -> int:
    """Most memory that this process had resident."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
