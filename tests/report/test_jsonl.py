"""Rows survive a crash, a resume and a full disk."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.errors import DataError, NereusError, StorageError
from nereus_jax.report import jsonl
from nereus_jax.report.jsonl import (
    JsonlWriter,
    encode_row,
    read_jsonl,
    samples_writer,
    truncate_jsonl,
)


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def row_line(step: int) -> str:
    return json.dumps({"step": step}) + "\n"


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(path)]


def test_a_row_is_on_disk_before_close(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "rows.jsonl") as writer:
        writer.append({"step": 0, "text": "é"})
        assert (tmp_path / "rows.jsonl").read_text() == '{"step": 0, "text": "é"}\n'


def test_numpy_values_and_numbers_that_are_not_finite(tmp_path: Path) -> None:
    row = {
        "step": np.int64(1),
        "loss": np.float32(0.5),
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "lengths": np.array([1, 2]),
        "ok": np.bool_(True),
        "nested": {"list": [1.0, -np.inf]},
    }
    assert encode_row(row).decode() == (
        '{"step": 1, "loss": 0.5, "nan": null, "inf": null, "lengths": [1, 2], "ok": true, '
        '"nested": {"list": [1.0, null]}}\n'
    )


@given(st.text(st.characters(categories=None)))  # lone surrogates too
def test_any_text_is_one_line_and_comes_back(text: str) -> None:
    line = encode_row({"step": 0, "text": text})
    assert line.count(b"\n") == 1 and b"\r" not in line
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert json.loads(line)["text"] == expected


def test_what_is_no_json_is_a_type_error(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "rows.jsonl") as writer:
        with pytest.raises(TypeError, match="object"):
            writer.append({"step": 0, "value": object()})
        with pytest.raises(ValueError, match="needs the key 'step'"):
            writer.append({"value": 0})
    assert read_jsonl(tmp_path / "rows.jsonl") == []


def test_truncate_keeps_order_cuts_later_steps_and_the_torn_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", *map(row_line, [0, 2, 1, 3, 2]), '{"step": 4, "tex')
    assert truncate_jsonl(path, after=2) == 1
    assert path.read_text() == "".join(map(row_line, [0, 2, 1, 2]))
    assert os.listdir(tmp_path) == ["rows.jsonl"]


@given(st.lists(st.integers(-5, 20)), st.integers(-6, 21), st.integers(0, 10))
def test_truncate_property(all_steps: list[int], after: int, torn_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        written: list[bytes] = []
        patch.setattr(jsonl, "_replace_atomically", lambda _, content: written.append(content))
        patch.setattr(Path, "exists", lambda _: True)
        text = "".join(map(row_line, all_steps)) + row_line(99)[:torn_bytes]
        patch.setattr(Path, "read_bytes", lambda _: text.encode())
        cut = truncate_jsonl(Path("rows.jsonl"), after=after)
    kept = [step for step in all_steps if step <= after]
    assert written == ["".join(map(row_line, kept)).encode()]
    assert cut == len(all_steps) - len(kept)


def test_truncate_takes_another_key_and_a_missing_file(tmp_path: Path) -> None:
    assert truncate_jsonl(tmp_path / "none.jsonl", after=3) == 0
    path = write_lines(tmp_path / "rows.jsonl", '{"sample": 1}\n', '{"sample": 7}\n')
    assert truncate_jsonl(path, key="sample", after=1) == 1
    assert read_jsonl(path) == [{"sample": 1}]


@pytest.mark.parametrize("bad", ["{torn\n", "3\n", '{"other": 1}\n', '{"step": null}\n', "\n"])
def test_a_foreign_line_is_a_data_error_and_nothing_is_cut(tmp_path: Path, bad: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", row_line(0), bad, row_line(9))
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2"):
        truncate_jsonl(path, after=1)
    assert path.read_bytes() == before


def test_resume_cuts_and_goes_on_and_a_fresh_start_empties(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write_lines(path, *map(row_line, range(4)), '{"st')
    with samples_writer(tmp_path, keep_through=1) as writer:
        writer.append({"step": 2})
    assert steps(path) == [0, 1, 2]
    with samples_writer(tmp_path) as writer:
        writer.append({"step": 0})
    assert steps(path) == [0]


def test_a_full_disk_is_a_storage_error_that_names_the_file() -> None:
    writer = JsonlWriter(Path("/dev/full"))
    with pytest.raises(StorageError, match="cannot write /dev/full: No space left") as caught:
        writer.append({"step": 0})
    assert isinstance(caught.value, NereusError) and isinstance(caught.value, OSError)
    assert "\n" not in str(caught.value) and "to resume" in str(caught.value)
    writer.close()
    writer.close()


def test_a_row_cut_short_by_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    class FullAfter:
        """A raw file on a disk that takes 5 more bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 5

        def write(self, data: memoryview) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            self.room -= (written := self.file.write(data[: self.room]))
            return written

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    with JsonlWriter(tmp_path / "rows.jsonl") as writer:
        writer.append({"step": 0})
        real, writer._file = writer._file, FullAfter(writer._file)  # type: ignore[assignment]
        with pytest.raises(StorageError):
            writer.append({"step": 1})
        writer._file = real
        writer.append({"step": 2})
    assert (tmp_path / "rows.jsonl").read_text() == row_line(0) + row_line(2)


def test_a_failed_truncation_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = write_lines(tmp_path / "rows.jsonl", *map(row_line, range(3)))
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StorageError, match=r"rows\.jsonl: No space left"):
        truncate_jsonl(path, after=0)
    assert steps(path) == [0, 1, 2]
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_a_missing_folder_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        JsonlWriter(tmp_path / "none" / "rows.jsonl")
