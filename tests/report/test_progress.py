"""The progress line: its text, and both ways to show it (a real terminal through a pty)."""

import contextlib
import io
import os
import pty
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from nereus_jax.report.progress import (
    ProgressReporter,
    format_duration,
    format_step,
    time_left_s,
)

ROW = {
    "step": 2,
    "reward_mean": 0.5125,
    "success_rate": 0.25,
    "kl": 0.01234,
    "response_length_mean": 31.26,
    "tokens_per_s": 12345.6,
    "step_s": 3.5,
    "stage_s": {"actor-GENERATE": 1.5, "actor-TRAIN": 1.234},
}
LINE = (
    "step 3/100 | reward 0.512 | success 25.0 % | KL 0.0123 | length 31.3 tokens | "
    "12,346 tokens/s | 3.50 s | s by stage: actor-GENERATE 1.50, actor-TRAIN 1.23 | "
    "elapsed 0:41 | left 22:10"
)


def ticks() -> Iterator[float]:
    return iter(float(second) for second in range(1000))


def test_format_step() -> None:
    assert format_step(ROW, num_steps=100, elapsed_s=41.0, left_s=1330.0) == LINE


def test_format_step_leaves_out_what_is_not_there() -> None:
    row = {"step": 0, "kl": None, "reward_mean": float("nan")}
    assert format_step(row, num_steps=5, elapsed_s=0) == "step 1/5 | reward nan | elapsed 0:00"


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90061, "1 d 1:01:01")],
)
def test_format_duration(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


def test_time_left_is_not_moved_by_a_step_that_compiles() -> None:
    assert time_left_s(deque([60.0]), 10) is None
    assert time_left_s(deque([60.0, 2.0]), 10) == 20.0
    assert time_left_s(deque([2.0, 60.0, 3.0]), 10) == 30.0
    assert time_left_s(deque([60.0]), 0) == 0.0


def test_plain_is_one_line_a_step_and_no_control_characters() -> None:
    stream = io.StringIO()
    with ProgressReporter(3, stream=stream, clock=ticks().__next__) as reporter:
        reporter.start()
        reporter.message("reading prompts")
        reporter.step(ROW | {"step": 0, "plan": "[bold]" * 50})
        reporter.step({"step": 0})
        reporter.step({"step": 1})
        reporter.message("saved [3]")
    first, *others = stream.getvalue().splitlines()
    assert first == "reading prompts"
    assert others[0].startswith("step 1/3 | reward 0.512") and len(others[0]) > 150
    assert others[1:] == ["step 2/3 | elapsed 0:02 | left 0:01", "saved [3]"]


class Terminal:
    """A terminal of the system: `stream` writes to it, `text` closes it and returns all it got.

    A thread reads: the system's buffer is small, and a writer to a full one would wait for ever.
    """

    def __init__(self) -> None:
        self._reader, writer = pty.openpty()
        self.stream = os.fdopen(writer, "w")
        self._chunks: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: the writer has closed it
            while chunk := os.read(self._reader, 4096):
                self._chunks.append(chunk)

    def text(self) -> str:
        self.stream.close()
        self._thread.join(timeout=30)
        return b"".join(self._chunks).decode()

    def close(self) -> None:
        self.text()
        os.close(self._reader)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_terminal_has_a_live_line_with_the_same_text(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with ProgressReporter(100, stream=terminal.stream, clock=ticks().__next__) as reporter:
        reporter.start(2)
        reporter.step(ROW)
        reporter.message("saved")
    text = terminal.text()
    assert "step 3/100 running" in text
    assert LINE.split(" | elapsed")[0] in text
    assert "saved" in text
    assert "\x1b[2K" in text  # the line is erased and drawn again in place
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")  # the cursor goes and comes back


def test_a_narrow_terminal_wraps_and_loses_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with ProgressReporter(100, stream=terminal.stream, clock=ticks().__next__) as reporter:
        reporter.start(2)
        reporter.step(ROW)
    words = terminal.text().split()
    assert " ".join(LINE.split(" | elapsed")[0].split()[-4:]) in " ".join(words)
    assert "elapsed" in words


def test_ctrl_c_gives_the_cursor_back(terminal: Terminal) -> None:
    reporter = ProgressReporter(9, stream=terminal.stream)
    with pytest.raises(KeyboardInterrupt), reporter:
        reporter.start()
        reporter.step({"step": 0})
        raise KeyboardInterrupt
    reporter.close()
    assert terminal.text().rstrip().endswith("\x1b[?25h")
