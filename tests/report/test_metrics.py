"""Metrics: flat names in both sinks, and a resume that forgets the steps to come."""

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from nereus_jax.core.errors import ConfigError
from nereus_jax.report.jsonl import read_jsonl
from nereus_jax.report.metrics import MetricsWriter, flatten, scalars

# Protobuf makes its classes at import, unseen by type checkers.
EVENT: Any = vars(event_pb2)["Event"]
SESSION_START: int = vars(event_pb2)["SessionLog"].START
ROW = {
    "step": 7,
    "kl": np.float32(0.25),
    "plan": "dp=2",
    "done": True,
    "loss": float("nan"),
    "stage_s": {"actor-GENERATE": 1.5, "actor": {"TRAIN": 2}},
}


def read_events(folder: Path) -> list[Any]:
    """The TFRecords of all event files: length (8), its checksum (4), data, checksum (4)."""
    events = []
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            events.append(EVENT.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return events


def test_flatten() -> None:
    flat = flatten(ROW)
    assert list(flat) == [
        *["step", "kl", "plan", "done", "loss"],
        *["stage_s/actor-GENERATE", "stage_s/actor/TRAIN"],
    ]
    assert scalars(flat) == {
        "kl": 0.25,
        "stage_s/actor-GENERATE": 1.5,
        "stage_s/actor/TRAIN": 2.0,
    }


def test_the_file_nests_and_tensorboard_joins_names(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.append(ROW)
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert row["stage_s"] == {"actor-GENERATE": 1.5, "actor": {"TRAIN": 2}}
    assert flatten(row) == flatten(ROW) | {"loss": None}
    values = {
        value.tag: (event.step, value.simple_value)
        for event in read_events(tmp_path / "tensorboard")
        for value in event.summary.value
    }
    assert values == {name: (7, number) for name, number in scalars(flatten(ROW)).items()}


def test_resume_purges_both_sinks(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        for step in range(4):
            writer.append({"step": step, "kl": 0.0})
    with MetricsWriter(tmp_path, tensorboard=True, keep_through=1) as writer:
        writer.append({"step": 2, "kl": 1.0})
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["kl"]) for row in rows] == [(0, 0.0), (1, 0.0), (2, 1.0)]
    starts = [
        event.step
        for event in read_events(tmp_path / "tensorboard")
        if event.session_log.status == SESSION_START
    ]
    assert starts == [0, 2]  # TensorBoard drops what it had from this step on


def test_without_tensorboard_there_is_no_folder(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.append({"step": 0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_missing_tensorboardx_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def no_tensorboard(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tensorboardX":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_tensorboard)
    with pytest.raises(ConfigError, match=r"nereus_jax\[tensorboard\]"):
        MetricsWriter(tmp_path, tensorboard=True)
    assert list(tmp_path.iterdir()) == []
