"""What the benchmarks of running jobs share: a job as a user starts it, its rows, the report."""

import importlib.metadata
import json
import os
import platform
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


def train_command(config: str, workdir: Path, settings: Mapping[str, Any]) -> list[str]:
    """`nereus train` with this interpreter, to be run in `ROOT`."""
    command = [sys.executable, "-m", "nereus_jax.cli", "train", f"--config={config}"]
    command += [f"--workdir={workdir}"]
    return command + [f"--config.{key}={value}" for key, value in settings.items()]


def rows_of(workdir: Path, name: str) -> list[Row]:
    """The rows of a file of a run; none if there is none."""
    path = workdir / f"{name}.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def children_cpu_s() -> float:
    """CPU seconds of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_report(path: Path, marks: Mapping[str, Any], detail: Mapping[str, Any]) -> None:
    """The marks and their detail, with the machine, to a file; the marks to the screen."""
    where = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "jax": importlib.metadata.version("jax"),
    }
    report = {**marks, "detail": {**detail, **where}}
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(marks))
