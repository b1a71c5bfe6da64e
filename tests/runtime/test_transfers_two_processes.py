"""Transfers between two processes with four devices each, and on twelve devices of one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def start_child(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("transfer_child.py"), *map(str, args)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_both_processes_get_their_blocks() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    members = [start_child("member", port, rank) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in members]
    finally:
        for process in members:
            process.kill()
    assert [process.returncode for process in members] == [0, 0], "\n".join(outputs)
    for rank, output in enumerate(outputs):
        assert f"{rank} finished" in output
        for name in ("another spec", "the other process", "more", "fewer", "reordered"):
            assert f"{name} done" in output
    # Only the process that would have to read what it does not have can say so.
    assert "is on devices of other processes" in outputs[1] and "'collective'" in outputs[1]


@pytest.mark.slow
def test_all_layouts_of_twelve_devices() -> None:
    output, _ = (child := start_child("all_layouts", 12)).communicate(timeout=580)
    assert child.returncode == 0, output
    moves = int(output.split("moves:")[1])
    assert moves == 2 * 18 * 17
