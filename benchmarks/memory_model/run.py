"""The memory model against XLA's own count, and against published peaks.

python benchmarks/memory_model/run.py --json=memory.json [--published=FILE.csv] [--work=DIR]

Programs are compiled in processes of their own: small ones for emulated CPU devices, and 8B ones
for H100s that are not there, where XLA's compiler for GPUs is installed (extra gpu-compile).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cases
import numpy as np
from fit import predict, read_rows
from published import compare
from published import read_rows as read_published

from nereus_jax.planning.memory_coefficients import COEFFICIENTS, Coefficients
from nereus_jax.planning.search_problem import HEADROOM
from nereus_jax.runtime.compile_only import has_gpu_compiler

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEST_SEED = 2
"""Coefficients were fitted to programs of seed 1."""
COUNTS = {"train": 22, "score": 12, "generate": 12}
QUICK = {"train": 1, "score": 1, "generate": 1}


def compile_all(backend: str, programs: list[cases.Program], work: Path) -> list[dict[str, Any]]:
    """What XLA says of each program; rows that the directory has already are kept."""
    source, target = work / f"{backend}_programs.json", work / f"{backend}_rows.jsonl"
    source.write_text(json.dumps(programs))
    # Buffers are assigned before LLVM starts, so that its optimizations change none of them.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        ),
        "XLA_FLAGS": flags if backend == "cpu" else "",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [sys.executable, str(HERE / "compile.py"), backend, str(source), str(target)]
    run = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr[-3000:]}")
    return [row for row in read_rows(target) if row["program"] in programs]


def judge(rows: list[dict[str, Any]], coefficients: Coefficients) -> dict[str, Any]:
    """Errors of arguments, temporaries and their sum."""
    report: list[dict[str, Any]] = []
    for row in rows:
        memory = predict(row["program"], coefficients)
        argument = float(memory.argument_bytes[0])
        temporary = float(memory.temporary_bytes[0])
        truth = row["argument_bytes"] + row["result_bytes"] + row["temporary_bytes"]
        total = float((memory.held_bytes + memory.working_bytes)[0])
        report.append(
            {
                "program": row["program"],
                "argument_difference_bytes": argument - row["argument_bytes"],
                "temporary_bytes": [temporary, row["temporary_bytes"]],
                "temporary_error": temporary / row["temporary_bytes"] - 1,
                "total_error": total / truth - 1,
            }
        )
    return {"rows": report, "by_stage": _by_stage(report), **_summary(report)}


def _summary(report: list[dict[str, Any]]) -> dict[str, Any]:
    errors = np.array([abs(r["temporary_error"]) for r in report])
    return {
        "programs": len(report),
        "arguments_exact": sum(r["argument_difference_bytes"] == 0 for r in report),
        "temp_median_error": float(np.median(errors)),
        "temp_max_error": float(errors.max()),
        "sum_most_under": float(min(r["total_error"] for r in report)),
        "sum_under_headroom": sum(r["total_error"] < -HEADROOM for r in report),
    }


def _by_stage(report: list[dict[str, Any]]) -> dict[str, Any]:
    stages = sorted({r["program"]["stage"].split("-")[1] for r in report})
    return {
        stage: _summary([r for r in report if r["program"]["stage"].endswith(stage)])
        for stage in stages
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--published", type=Path, help="CSV with a column mem_gb; see README")
    parser.add_argument("--work", type=Path, help="keeps compiled rows between runs")
    parser.add_argument(
        "--quick", action="store_true", help="one program a stage, to prove it runs"
    )
    arguments = parser.parse_args()
    counts = QUICK if arguments.quick else COUNTS
    with tempfile.TemporaryDirectory() as scratch:
        work = arguments.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        small = cases.small_programs(TEST_SEED, **counts)
        cpu = judge(compile_all("cpu", small, work), COEFFICIENTS["cpu"])
        h100: dict[str, Any] | None = None
        if has_gpu_compiler() and not arguments.quick:
            rows = compile_all("h100", list(cases.H100_TEST), work)
            h100 = judge(rows, COEFFICIENTS["gpu"])
    published = compare(read_published(arguments.published)) if arguments.published else None
    report = {
        "temp_median_error": cpu["temp_median_error"],
        "temp_max_error": cpu["temp_max_error"],
        "oom_rows_caught": published and published["oom_rows_caught"],
        "false_infeasible_share": published and published["false_infeasible_share"],
        "h100_temp_median_error": h100 and h100["temp_median_error"],
        "h100_temp_max_error": h100 and h100["temp_max_error"],
        "detail": {"cpu": cpu, "h100": h100, "published": published},
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for backend, part in (("cpu", cpu), ("h100", h100)):
        if part is not None:
            print(backend, {k: v for k, v in part.items() if k not in ("rows", "by_stage")})
            print("  ", part["by_stage"])
    if published is not None:
        for row in published["rows"]:
            error = "  OOM" if row["error"] is None else f"{row['error']:+5.0%}"
            word = "  called infeasible" if row["called_infeasible"] else ""
            print(f"{error}  {row['modelled_gib']:6.1f} GiB  {row['engine']}: {row['row']}{word}")
        print({k: v for k, v in published.items() if k != "rows"})


if __name__ == "__main__":
    main()
