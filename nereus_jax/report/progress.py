"""The progress of a run: a live line on a terminal, one plain line a step elsewhere.

Both show the text of `format_step`. The keys of a row that it reads, each optional:

    reward_mean                    mean reward of the step's samples
    success_rate                   share of samples at or above the success threshold, 0..1
    kl                             KL divergence to the reference, nats per response
    response_length_mean           mean length of the responses
    tokens_per_s                   prompt and response tokens of the step over its seconds
    step_s, stage_s                seconds of the step, and by stage: {"actor-GENERATE": 1.2, ...}
"""

import contextlib
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

RECENT_STEPS = 20


class ProgressReporter:
    """Shows each step as it ends; a context manager, safe to leave by Ctrl-C.

    On a terminal the last step's line stays at the bottom and messages scroll above it; there is
    no thread behind it, so nothing draws while the devices work. Elsewhere a step is one line, and
    no step has two.

    Args:
        num_steps: Steps of the whole run.
        stream: Where to write; None is the standard error.
        clock: Seconds from an arbitrary origin; for tests.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._console = Console(file=self._stream, highlight=False, markup=False, emoji=False)
        self._num_steps = num_steps
        self._clock = clock
        self._live: Live | None = None
        self._start_s = self._last_s = clock()
        self._durations_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._last_step: int | None = None

    def start(self, step: int = 0) -> None:
        """Start the clock, before the first step.

        Args:
            step: The first step of this session: 0, or where a resumed run goes on.
        """
        self._start_s = self._last_s = self._clock()
        if not self._console.is_terminal or self._live is not None:
            return
        waiting = Text(f"step {step + 1}/{self._num_steps} running")
        self._live = Live(waiting, console=self._console, auto_refresh=False)
        self._live.start(refresh=True)

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a finished step; a second row of the same step shows nothing.

        Args:
            row: The row of metrics that goes to `MetricsWriter.append`, before it is flattened.
        """
        if row["step"] == self._last_step:
            return
        self._last_step = row["step"]
        now_s = self._clock()
        self._durations_s.append(now_s - self._last_s)
        self._last_s = now_s
        remaining = self._num_steps - row["step"] - 1
        line = format_step(
            row,
            num_steps=self._num_steps,
            elapsed_s=now_s - self._start_s,
            left_s=time_left_s(self._durations_s, remaining),
        )
        if self._live is None:
            self._print(line)
        else:
            self._live.update(Text(line), refresh=True)  # wraps where the terminal is narrow

    def message(self, text: str) -> None:
        """Print a line of text; on a terminal above the live line."""
        self._print(text)

    def close(self) -> None:
        """Leave the last line on the screen and give the cursor back; may be called twice."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def __enter__(self) -> "ProgressReporter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _print(self, line: str) -> None:
        if self._live is None:
            # Who reads it may be gone, such as `tee` after Ctrl-C; the run is not to end for that.
            with contextlib.suppress(BrokenPipeError):
                print(line, file=self._stream, flush=True)
        else:
            self._live.console.print(Text(line))


def format_step(
    row: Mapping[str, Any], *, num_steps: int, elapsed_s: float, left_s: float | None = None
) -> str:
    """One line about a finished step; what the row lacks is left out.

    Args:
        row: Metrics of the step, with the key `step` (counted from 0; shown from 1).
        num_steps: Steps of the whole run.
        elapsed_s: Seconds of this session so far.
        left_s: Seconds the remaining steps should take; None when not known.

    Returns:
        Such as `step 3/100 | reward 0.512 | ... | elapsed 0:41 | left 22:10`.
    """
    parts = [f"step {row['step'] + 1}/{num_steps}"]
    for key, render in _COLUMNS:
        if row.get(key) is not None:
            parts.append(render(row[key]))
    parts.append(f"elapsed {format_duration(elapsed_s)}")
    if left_s is not None:
        parts.append(f"left {format_duration(left_s)}")
    return " | ".join(parts)


def format_duration(duration_s: float) -> str:
    """Seconds as m:ss, h:mm:ss or d days h:mm:ss."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours}:{minutes:02}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def time_left_s(durations_s: deque[float], remaining_steps: int) -> float | None:
    """Seconds that the remaining steps should take: the median recent step times their number.

    The median, since the first step of a session, and one after a transition, also compile.

    Args:
        durations_s: Seconds of the recent steps, oldest first.
        remaining_steps: Steps still to run.

    Returns:
        None before two steps are known and while some remain: the first alone says little.
    """
    if remaining_steps <= 0:
        return 0.0
    if len(durations_s) < 2:
        return None
    return statistics.median_low(durations_s) * remaining_steps


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else str(float(value))


def _render_stages(stage_s: Mapping[str, float]) -> str:
    return "s by stage: " + ", ".join(f"{name} {_number(s, 2)}" for name, s in stage_s.items())


# In the order shown; a row's key and how its value reads.
_COLUMNS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    ("reward_mean", lambda value: f"reward {_number(value, 3)}"),
    ("success_rate", lambda value: f"success {_number(100 * value, 1)} %"),
    ("kl", lambda value: f"KL {_number(value, 4)}"),
    ("response_length_mean", lambda value: f"length {_number(value, 1)} tokens"),
    ("tokens_per_s", lambda value: f"{value:,.0f} tokens/s"),
    ("step_s", lambda value: f"{_number(value, 2)} s"),
    ("stage_s", _render_stages),
)
