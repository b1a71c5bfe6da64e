"""A world of processes is formed anew while all of them live."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("world_child.py")


def test_a_process_leaves_and_another_one_joins() -> None:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = [str(s.getsockname()[1]) for s in (first, second)]
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(rank), *ports],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    deadline_s = time.monotonic() + 300
    while any(c.poll() is None for c in children) and not any(c.poll() for c in children):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    for child in children:  # one that failed leaves the others waiting
        child.kill()
    ended = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], ended
    assert [out.splitlines()[-1:] for out, _ in ended] == [["joined"], ["left"], ["joined"]]
