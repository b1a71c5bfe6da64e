"""Rollout: checks at construction, row operations, and the file form (bits stay equal)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from nereus_jax.core.errors import DataError
from nereus_jax.rl.rollout import Rollout


def make_rollout(num_rows: int = 3, policy_version: int = 7) -> Rollout:
    """P = 4, T = 3: lengths cycle through (4, 3), (1, 2), (2, 0)."""
    prompt = np.resize(np.array([4, 1, 2], np.int32), num_rows)
    response = np.resize(np.array([3, 2, 0], np.int32), num_rows)
    logprobs = -np.linspace(0.1, 1.0, num_rows * 3, dtype=np.float32).reshape(num_rows, 3)
    return Rollout(
        tokens_BS=np.arange(num_rows * 7, dtype=np.int32).reshape(num_rows, 7),
        prompt_lengths_B=prompt,
        response_lengths_B=response,
        logprobs_BT=np.where(np.arange(3)[None, :] < response[:, None], logprobs, np.float32(0)),
        finished_B=response == 2,
        sample_indices_B=np.arange(num_rows, dtype=np.int64) + 2**40,
        policy_version=policy_version,
    )


def assert_equal(a: Rollout, b: Rollout) -> None:
    for field in dataclasses.fields(Rollout):
        x, y = np.asarray(getattr(a, field.name)), np.asarray(getattr(b, field.name))
        assert x.dtype == y.dtype, field.name
        np.testing.assert_array_equal(x, y, err_msg=field.name)


def test_derived_quantities():
    rollout = make_rollout()
    assert (rollout.num_rows, rollout.prompt_width, rollout.response_width) == (3, 4, 3)
    assert rollout.mask_BT.tolist() == [[True] * 3, [True, True, False], [False] * 3]
    assert rollout.lengths_B.tolist() == [7, 3, 2]
    assert rollout.num_tokens == 12  # 7 + 3 + 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens_BS", np.zeros((3, 7), np.int64), "must be numpy int32, got int64"),
        ("tokens_BS", [[0] * 7] * 3, "must be numpy int32, got list"),
        ("logprobs_BT", np.zeros((3, 3), np.float64), "must be numpy float32"),
        ("finished_B", np.zeros(3, np.int32), "must be numpy bool"),
        ("finished_B", np.zeros((3, 1), np.bool_), "rank 1"),
        ("sample_indices_B", np.zeros(2, np.int64), "as many rows"),
        ("logprobs_BT", np.zeros((3, 8), np.float32), "wider than"),
        ("policy_version", -1, "policy_version"),
        ("prompt_lengths_B", np.array([4, 5, 2], np.int32), r"row 1 .* outside 0\.\.4"),
        ("prompt_lengths_B", np.array([4, 0, 2], np.int32), "row 1 .* without a prompt"),
        ("response_lengths_B", np.array([4, 2, 0], np.int32), r"row 0 .* outside 0\.\.3"),
        ("response_lengths_B", np.array([3, 1, 0], np.int32), "row 1 .* beyond its response"),
        ("logprobs_BT", np.full((3, 3), np.nan, np.float32), "row 0 .* not finite"),
    ],
)
def test_a_malformed_rollout_is_refused_in_one_line(field: str, value: object, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        dataclasses.replace(make_rollout(), **{field: value})
    assert "\n" not in str(caught.value)


def test_take_by_rows_order_and_mask():
    rollout = make_rollout(6)
    order = np.array([5, 3, 1, 0, 2, 4])
    assert_equal(rollout.take(order).take(np.argsort(order)), rollout)
    assert rollout.take(rollout.response_lengths_B > 2).num_rows == 2


def test_save_and_load_leave_bits_equal(tmp_path: Path):
    path = tmp_path / "new folder" / "step 3.rollout"  # numpy must not append .npz by itself
    make_rollout(1).save(path)
    make_rollout().save(path)  # replaces
    assert_equal(Rollout.load(path), make_rollout())
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "rollout.npz"
    make_rollout().save(path)

    def disk_full(file: object, **arrays: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", disk_full)
    with pytest.raises(OSError, match="No space"):
        make_rollout(1).save(path)
    assert_equal(Rollout.load(path), make_rollout())
    assert len(list(tmp_path.iterdir())) == 1


def rewrite(path: Path, **changes: object) -> None:
    with np.load(path) as file:
        arrays = {**file, **changes}
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})


@pytest.mark.parametrize("keep", [0, 1, 30, 300, -1])
def test_a_truncated_file_is_a_data_error(tmp_path: Path, keep: int):
    path = tmp_path / "rollout.npz"
    make_rollout().save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="cannot be read") as caught:
        Rollout.load(path)
    assert "\n" not in str(caught.value)


def test_flipped_bits_are_a_data_error(tmp_path: Path):
    path = tmp_path / "rollout.npz"
    make_rollout().save(path)
    content = bytearray(path.read_bytes())
    content[content.index(make_rollout().tokens_BS.tobytes()) + 9] ^= 0xFF  # the CRC fails
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="cannot be read"):
        Rollout.load(path)


def test_other_files_are_data_errors(tmp_path: Path):
    path = tmp_path / "rollout.npz"
    with pytest.raises(DataError, match="does not exist: record it first"):
        Rollout.load(path)
    with pytest.raises(DataError, match="does not exist"):
        Rollout.load(tmp_path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))  # an .npy, not an .npz
    with pytest.raises(DataError, match="cannot be read"):
        Rollout.load(path)
    make_rollout().save(path)
    rewrite(path, format_version=np.int64(99))
    with pytest.raises(DataError, match="format version 99, expected 1"):
        Rollout.load(path)
    rewrite(path, format_version=np.int64(1), tokens_BS=np.array([[None]], object))
    with pytest.raises(DataError, match="allow_pickle"):
        Rollout.load(path)
    make_rollout().save(path)
    rewrite(path, finished_B=None)
    with pytest.raises(DataError, match="finished_B"):
        Rollout.load(path)
