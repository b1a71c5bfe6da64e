"""The timeline file and its Perfetto export, against a trace worked out by hand."""

import dataclasses
import json
from pathlib import Path

import pytest

from nereus_jax.core.errors import DataError
from nereus_jax.core.timeline import Span
from nereus_jax.report.timeline import TimelineWriter, read_timeline, to_perfetto

GENERATE = Span(
    name="actor-GENERATE",
    kind="stage",
    start_s=100.5,
    end_s=102.0,
    devices=("cpu:10", "cpu:2"),
    step=0,
)
EDGE = Span(
    name="actor TRAIN->GENERATE",
    kind="weight_edge",
    start_s=100.0,
    end_s=100.5,
    devices=("cpu:2",),
    step=0,
    bytes=4096,
)
SAVE = Span(name="checkpoint", kind="host", start_s=102.0, end_s=102.25, devices=(), step=1)


def test_round_trip(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path) as writer:
        for span in (GENERATE, EDGE, SAVE):
            writer.append(span)
    assert read_timeline(tmp_path / "timeline.jsonl") == (GENERATE, EDGE, SAVE)


def test_resume_cuts_later_steps(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path) as writer:
        writer.append(EDGE)
        writer.append(SAVE)
    again = dataclasses.replace(SAVE, start_s=103.0, end_s=104.0)
    with TimelineWriter(tmp_path, keep_through=0) as writer:
        writer.append(again)
    assert read_timeline(tmp_path / "timeline.jsonl") == (EDGE, again)


def test_a_foreign_file_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "kl": 0.1}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1, is no span"):
        read_timeline(path)


def test_perfetto() -> None:
    trace = json.loads(json.dumps(to_perfetto([GENERATE, EDGE, SAVE]), allow_nan=False))
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "host", 1: "cpu:2", 2: "cpu:10"}
    assert [e for e in events if e["ph"] == "X"] == [
        {
            **{"name": "actor-GENERATE", "cat": "stage", "ph": "X", "pid": 0, "tid": track},
            **{"ts": 0.5e6, "dur": 1.5e6, "args": {"step": 0}},
        }
        for track in (2, 1)
    ] + [
        {
            **{"name": "actor TRAIN->GENERATE", "cat": "weight_edge", "ph": "X", "pid": 0},
            **{"tid": 1, "ts": 0.0, "dur": 0.5e6, "args": {"step": 0, "bytes": 4096}},
        },
        {
            **{"name": "checkpoint", "cat": "host", "ph": "X", "pid": 0, "tid": 0},
            **{"ts": 2e6, "dur": 0.25e6, "args": {"step": 1}},
        },
    ]


def test_perfetto_of_nothing() -> None:
    assert [e["args"] for e in to_perfetto([])["traceEvents"]] == [
        {"name": "host"},
        {"sort_index": 0},
    ]
