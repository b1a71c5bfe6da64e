"""Learns the memory model's coefficients of a backend from compiled programs.

python benchmarks/memory_model/fit.py ROWS.jsonl [--start=gpu] [--hold=0.1]

Least squares of log(predicted / compiled) with a soft l1 loss; `--hold` is how firmly each
logarithm holds to the start's, for few programs. Prints the table for `memory_coefficients.py`.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from cases import candidate_of, choice_of
from scipy.optimize import least_squares

from nereus_jax.core.roles import Stage
from nereus_jax.planning.memory import MemoryModel, StageMemory
from nereus_jax.planning.memory_coefficients import COEFFICIENTS, Coefficients

LOSS_SCALE = 0.05
SMALLEST, LARGEST = 0.01, 10.0
PARTS = {Stage.TRAIN: "train", Stage.SCORE: "score", Stage.GENERATE: "generate"}


def predict(program: dict[str, Any], coefficients: Coefficients) -> StageMemory:
    """The memory model's word on a program."""
    choice = choice_of(program)
    return MemoryModel(coefficients=coefficients, options=choice.options).stage_memory(
        choice.model,
        choice.head,
        choice.model_stage,
        choice.workload,
        candidate_of(choice),
        param_dtype=choice.param_dtype,
        compute_dtype=choice.compute_dtype,
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fit_part(
    rows: list[dict[str, Any]], start: Coefficients, part: str, hold: float
) -> Coefficients:
    """The coefficients of one stage; the others stay."""
    own = getattr(start, part)
    names = [f.name for f in dataclasses.fields(own)]
    origin = np.log([max(getattr(own, n), SMALLEST) for n in names])
    truth = np.array([row["temporary_bytes"] for row in rows], np.float64)

    def made(logs: np.ndarray) -> Coefficients:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        return dataclasses.replace(start, **{part: dataclasses.replace(own, **values)})

    def errors(logs: np.ndarray) -> np.ndarray:
        coefficients = made(logs)
        temps = [predict(row["program"], coefficients).temporary_bytes[0] for row in rows]
        return np.concatenate([np.log(np.array(temps) / truth), hold * (logs - origin)])

    bounds = np.log(SMALLEST) - 1e-9, np.log(LARGEST)
    solved = [
        least_squares(
            errors,
            np.clip(
                origin + np.random.default_rng(seed).normal(0, 0.2 * (seed > 0), len(names)),
                *bounds,
            ),
            loss="soft_l1",
            f_scale=LOSS_SCALE,
            bounds=bounds,
        )
        for seed in range(4)
    ]
    return made(min(solved, key=lambda s: s.cost).x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--start", default="cpu", choices=sorted(COEFFICIENTS))
    parser.add_argument("--hold", type=float, default=0.01)
    arguments = parser.parse_args()
    rows, coefficients = read_rows(arguments.rows), COEFFICIENTS[arguments.start]
    for stage, part in PARTS.items():
        some = [r for r in rows if r["program"]["stage"].endswith(stage.value)]
        if some:
            coefficients = fit_part(some, coefficients, part, arguments.hold)
        errors = [
            predict(r["program"], coefficients).temporary_bytes[0] / r["temporary_bytes"] - 1
            for r in some
        ]
        size = np.abs(errors) if errors else np.zeros(1)
        print(f"# {part}: {len(some)} programs, median {np.median(size):.3f}, max {size.max():.3f}")
        for field in dataclasses.fields(getattr(coefficients, part)):
            print(f"    {field.name}={getattr(getattr(coefficients, part), field.name):.3f},")


if __name__ == "__main__":
    main()
