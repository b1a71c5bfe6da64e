"""The timeline of a run: `timeline.jsonl`, and its export to Perfetto (https://ui.perfetto.dev)."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nereus_jax.core.errors import DataError
from nereus_jax.core.timeline import Span
from nereus_jax.report.jsonl import JsonlWriter, read_jsonl

HOST_TRACK = "host"


class TimelineWriter:
    """Appends spans to `timeline.jsonl`; a context manager.

    Args:
        workdir: The run's folder, which exists.
        keep_through: On a resume, the last step whose spans stay; None starts afresh.

    Raises:
        StorageError, DataError: As `JsonlWriter`.
    """

    def __init__(self, workdir: Path, *, keep_through: int | None = None) -> None:
        self._jsonl = JsonlWriter(Path(workdir) / "timeline.jsonl", keep_through=keep_through)

    def append(self, span: Span) -> None:
        """Write one span.

        Raises:
            StorageError: As `JsonlWriter.append`.
        """
        self._jsonl.append(dataclasses.asdict(span))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._jsonl.close()

    def __enter__(self) -> "TimelineWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_timeline(path: Path) -> tuple[Span, ...]:
    """The spans of a `timeline.jsonl`, without a torn last line.

    Raises:
        DataError: The file holds something else than spans.
        FileNotFoundError: There is no such file.
    """
    spans: list[Span] = []
    for number, row in enumerate(read_jsonl(path), 1):
        try:
            spans.append(Span(**{**row, "devices": tuple(row["devices"])}))
        except (KeyError, TypeError, AssertionError) as error:
            raise DataError(
                f"{path}, line {number}, is no span ({error}): got the keys {sorted(row)}; "
                "give a timeline.jsonl of a run of this version"
            ) from error
    return tuple(spans)


def to_perfetto(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans as a Chrome trace, one track per device and one for the host's own work.

    Times start at the earliest span, in microseconds. Source: the Trace Event Format (complete
    events `X`, metadata events `M`), which Perfetto and chrome://tracing open.

    Args:
        spans: In any order; those of one device should not overlap, unless one holds the other.

    Returns:
        An object for `json.dump`.
    """
    tracks = _tracks(spans)
    origin_s = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for name, track in tracks.items():
        common = {"ph": "M", "pid": 0, "tid": track}
        events.append({**common, "name": "thread_name", "args": {"name": name}})
        events.append({**common, "name": "thread_sort_index", "args": {"sort_index": track}})
    for span in spans:
        args = {"step": span.step} | ({} if span.bytes is None else {"bytes": span.bytes})
        events.extend(
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": (span.start_s - origin_s) * 1e6,
                "dur": span.duration_s * 1e6,
                "pid": 0,
                "tid": tracks[device],
                "args": args,
            }
            for device in span.devices or (HOST_TRACK,)
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _tracks(spans: Iterable[Span]) -> dict[str, int]:
    """Track numbers: the host first, then the devices in natural order (0:2 before 0:10)."""
    devices = {device for span in spans for device in span.devices}

    def natural(name: str) -> list[tuple[int, str]]:
        # re.split with a group alternates text and digits, so like meets like.
        return [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]

    return {name: track for track, name in enumerate([HOST_TRACK, *sorted(devices, key=natural)])}
