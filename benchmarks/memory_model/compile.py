"""Compiles programs and writes what XLA says of their memory: one JSON row each.

python benchmarks/memory_model/compile.py cpu|h100 PROGRAMS.json ROWS.jsonl

Programs that ROWS.jsonl has already are not compiled again.
"""

import json
import sys
import time
from pathlib import Path

import jax
from cases import choice_of

from nereus_jax.runtime.compile_only import compile_only_devices
from nereus_jax.trainer.verify_plan import compile_program


def main(backend: str, source: Path, target: Path) -> None:
    programs = json.loads(source.read_text())
    done = (
        [json.loads(x)["program"] for x in target.read_text().splitlines()]
        if target.exists()
        else []
    )
    devices = jax.devices() if backend == "cpu" else compile_only_devices(8)
    for program in programs:
        if program in done:
            continue
        start_s = time.perf_counter()
        compiled = compile_program(choice_of(program), devices)
        row = {
            "program": program,
            "argument_bytes": compiled.argument_bytes,
            "result_bytes": compiled.output_bytes - compiled.alias_bytes,
            "temporary_bytes": compiled.temp_bytes,
            "compile_s": round(time.perf_counter() - start_s, 1),
        }
        with target.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
