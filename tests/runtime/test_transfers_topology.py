"""Transfers compiled for 8 H100s that are not there.

XLA's compiler for GPUs comes with jax's CUDA plugin and needs no GPU. Where the plugin is not
installed there is no such compiler, and the same programs are lowered for GPUs to StableHLO.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.runtime.compile_only import has_gpu_compiler

ROOT = Path(__file__).resolve().parents[2]
HOW = ["lowered"]
if has_gpu_compiler():
    HOW.append("compiled")
CASES = (
    "dp to pp",
    "tp to pp",
    "pp to tp",
    "to tp alone",
    "replicate",
    "cut replicas",
    "other order",
    "fewer devices",
    "more devices",
    "6 to 8",
    "other devices",
    "same blocks elsewhere",
    "some others",
    "cast",
    "groups",
    "groups of others",
)
STAGED = ("fewer devices", "more devices", "other devices", "groups of others")


@functools.cache
def rows(how: str) -> dict[str, dict[str, Any]]:
    """What the child found out, by case; it fails if a program does not compile."""
    run = subprocess.run(
        [sys.executable, "tests/runtime/topology_child.py", how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(
                (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""))
            ),
            "XLA_FLAGS": "",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # compiling needs neither cuDNN nor a driver
        },
    )
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {row["case"]: row for row in found}


@pytest.mark.parametrize("how", HOW)
def test_every_case_is_there(how: str) -> None:
    assert tuple(rows(how)) == CASES


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_programs_for_gpus_move_what_the_schedule_says(how: str, case: str) -> None:
    row = rows(how)[case]
    by_program = dict(row["wire_bytes"])
    assert row["schedule_bytes"] > 0
    assert by_program.pop("first") == row["first_bytes"]
    assert sum(by_program.values()) == row["schedule_bytes"]
    assert not row["sends_float8"]  # NCCL does not know every kind of it: they go as integers
    carriers = {name for name, moved in by_program.items() if moved}
    assert carriers == ({"permute"} if "permute" in by_program else {"fused"})


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_programs_for_gpus_have_small_temporaries(how: str, case: str) -> None:
    row = rows(how)[case]
    if how == "lowered":  # what is not compiled has none, only its groups
        assert row["temp_bytes"] == row["buffer_bytes"] == 0
        assert (row["groups"] > 2) == case.startswith("groups")
        return
    assert row["temp_bytes"] <= row["new_block_bytes"] + row["max_inflight_bytes"]
    if case.startswith("groups"):
        assert row["temp_bytes"] <= row["max_inflight_bytes"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", STAGED)
def test_buffers_for_gpus_stay_under_the_bound(how: str, case: str) -> None:
    row = rows(how)[case]
    assert "permute" in row["programs"]
    offsets_bytes = 64
    assert row["buffer_bytes"] <= row["max_inflight_bytes"] + offsets_bytes
    assert (row["buffer_bytes"] > 0) == (how == "compiled")
