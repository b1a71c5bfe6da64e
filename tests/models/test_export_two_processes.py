"""Two processes export together what neither of them holds alone."""

import os
import pathlib
import runpy
import socket
import subprocess
import sys

import numpy as np
import pytest

from nereus_jax.models.huggingface import TensorSource

CHILD = pathlib.Path(__file__).parent / "export_child.py"
ROOT = CHILD.parents[2]
TIMEOUT_S = 300


@pytest.mark.slow
def test_arrays_over_two_processes_are_exported_by_the_first(tmp_path: pathlib.Path):
    (tmp_path / "file").write_bytes(b"")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), address, str(rank), str(tmp_path)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=TIMEOUT_S) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], outputs
    assert "file/x cannot be written: Not a directory; free space" in outputs[0][0]
    assert "file/x was not written: process 0 failed, see its error" in outputs[1][0]
    values = runpy.run_path(str(CHILD))["leaves"]()
    for name in ("spanning", "second"):
        source = TensorSource(tmp_path / name)
        assert set(source.leaf_names) == set(values)
        for leaf, value in values.items():
            got = source.read(leaf)
            assert got.view(np.uint32).tolist() == value.view(np.uint32).tolist(), (name, leaf)
    assert len(list((tmp_path / "spanning").glob("*.safetensors"))) > 3
