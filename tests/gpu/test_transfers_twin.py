"""The checks of `check_transfers.py`: on emulated CPU devices, and with `-m gpu` on GPUs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("check_transfers.py")


def run(file: Path, *arguments: str) -> list[dict[str, Any]]:
    paths = (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_llvm_disable_expensive_passes=true"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), f"--json={file}", *arguments],
        capture_output=True,
        text=True,
        timeout=3600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_transfers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_checks_pass_on_emulated_devices(tmp_path: Path) -> None:
    rows = run(tmp_path / "rows.json", "--platform=cpu", "--quick")
    assert all(row["ok"] for row in rows)
    assert {row["part"] for row in rows} == {
        "values",
        "cycles, splitting",
        "cycles, no splitting",
        "speed",
    }
    assert all(row["bytes"] > 0 for row in rows)
    assert all(row["seconds"] > 0 and row["device_put_s"] > 0 for row in rows if "seconds" in row)


def test_a_check_that_does_not_end_is_a_failure_with_a_name() -> None:
    checks = script()
    part = checks.Part("values", ("--part=values",))
    (row,) = checks.run_part(part, ["--platform=cpu"], timeout_s=0.01)
    assert not row["ok"]
    assert row["check"] == "the start"
    assert "no end after 0.01 s" in row["error"]
    assert "FAILED" in checks.table([row])


def test_a_child_that_dies_is_a_failure() -> None:
    checks = script()
    rows = checks.run_part(checks.Part("values", ("--part=none",)), [], timeout_s=60)
    assert [row["ok"] for row in rows] == [False]
    assert "exit code 2" in rows[0]["error"]


def test_bits_that_differ_are_found() -> None:
    checks = script()
    import jax

    end = checks.ends_of(jax.devices("cpu"))["tp"]
    tree = checks.tree_of_bits()
    arrays = checks.put(tree, end)
    assert checks.differing(arrays, tree, end) == []
    changed = tree["bfloat16"].copy()
    changed.view("uint16")[-1, -1, -1] ^= 1
    assert checks.differing(arrays, tree | {"bfloat16": changed}, end) == ["bfloat16"]


@pytest.mark.gpu
def test_the_checks_pass_on_gpus(tmp_path: Path) -> None:
    rows = run(tmp_path / "rows.json", "--platform=cuda", "--mib=64")
    assert all(row["ok"] for row in rows)
    assert {"cycles, splitting", "cycles, no splitting"} <= {row["part"] for row in rows}
