"""The cost model and its calibration against per-iteration logs of real RL runs.

python benchmarks/rl_logs/run.py --logs=DIRECTORY --json=rl_logs.json
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from logs import COLUMNS, SETUPS, Setup, read_log

from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.calibration import CLASSES, Efficiencies, OperationClass, fit, observe
from nereus_jax.planning.cost import stage_seconds

FIRST = 50
"""Iterations from which efficiencies are fitted."""
LAST = 1000
GENERATE_NOISE = 0.1
"""Relative deviation of a rollout's time: its tail is one draw of the longest response."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One model-stage of a log.

    Attributes:
      iterations: [N] numbers of the iterations, from 1.
      rows: their rows in the log.
      measured_s: [N].
    """

    setup: Setup
    stage: ModelStage
    iterations: Sequence[int]
    rows: Sequence[dict[str, str]]
    measured_s: Sequence[float]

    @classmethod
    def of(cls, setup: Setup, column: str, rows: list[dict[str, str]], last: int) -> "Series":
        kept = [(i, r) for i, r in enumerate(rows, 1) if r.get(column) and i <= last]
        return cls(
            setup=setup,
            stage=COLUMNS[column],
            iterations=[i for i, _ in kept],
            rows=[r for _, r in kept],
            measured_s=[float(r[column]) for _, r in kept],
        )

    def seconds(self, index: int, efficiencies: Efficiencies) -> dict[OperationClass, float]:
        """Modelled seconds of one iteration by class."""
        setup = self.setup
        cost = stage_seconds(
            setup.model,
            setup.head(self.stage),
            self.stage,
            setup.workload(self.stage, self.rows[index]),
            setup.machine,
            efficiencies,
            setup.layout(self.stage),
            execution=setup.execution(self.stage),
        )
        return cost.at(0)


def error_after(series: Series, first: int) -> float:
    """Mean relative error after the first iterations, with efficiencies from those only.

    The first iteration has compilation and allocations in it and does not count.
    """
    early = [k for k, i in enumerate(series.iterations) if 1 < i <= first]
    late = [k for k, i in enumerate(series.iterations) if i > first]

    def predict(efficiencies: Efficiencies) -> dict[OperationClass, np.ndarray]:
        table = [series.seconds(k, efficiencies) for k in early]
        return {c: np.array([row.get(c, 0.0) for row in table]) for c in CLASSES}

    learned = fit(predict, [series.measured_s[k] for k in early])
    errors = [sum(series.seconds(k, learned).values()) / series.measured_s[k] - 1 for k in late]
    return statistics.fmean(abs(e) for e in errors)


def online_error(series: Series, first: int) -> float:
    """Mean relative error one iteration ahead, learning from each after it was predicted."""
    known = Efficiencies.prior()
    errors: list[float] = []
    for k, iteration in enumerate(series.iterations):
        seconds = series.seconds(k, known)
        if iteration > first:
            errors.append(abs(sum(seconds.values()) / series.measured_s[k] - 1))
        known = observe(
            known,
            seconds,
            series.measured_s[k],
            first_after_compile=k == 0,
            noise=GENERATE_NOISE,
        )
    return statistics.fmean(errors)


def proportional_error(series: Series, first: int) -> float:
    """Of a time proportional to tokens, the factor from the first iterations: the simplest fit."""

    def tokens(row: dict[str, str]) -> float:
        response = float(row["response_length_mean"])
        prompt = 0.0 if series.stage.stage is Stage.GENERATE else float(row["prompt_length_mean"])
        return response + prompt

    ratios = [s / tokens(r) for s, r in zip(series.measured_s, series.rows, strict=True)]
    early = [k for k, i in enumerate(series.iterations) if 1 < i <= first]
    factor = statistics.median(ratios[k] for k in early)
    late = [k for k, i in enumerate(series.iterations) if i > first]
    return statistics.fmean(abs(factor / ratios[k] - 1) for k in late)


def measure(directory: Path, first: int, last: int) -> dict[str, Any]:
    stages: list[dict[str, Any]] = []
    for setup in SETUPS:
        path = directory / f"{setup.name}.csv"
        if not path.exists():
            raise SystemExit(f"--logs: {path} does not exist; give the directory of the logs")
        rows = read_log(path)
        for column, stage in COLUMNS.items():
            series = Series.of(setup, column, rows, last)
            if not series.measured_s:
                continue
            generate = stage.stage is Stage.GENERATE
            error = online_error(series, first) if generate else error_after(series, first)
            stages.append(
                {
                    "log": setup.name,
                    "stage": str(stage),
                    "how": "online" if generate else f"first {first}",
                    "iterations": sum(i > first for i in series.iterations),
                    "error": error,
                    "proportional_error": proportional_error(series, first),
                }
            )
            print(
                f"{setup.name:40} {stage!s:16} {stages[-1]['how']:9} error {error:6.2%}, "
                f"proportional {stages[-1]['proportional_error']:6.2%}",
                flush=True,
            )
    others = [s["error"] for s in stages if s["how"] != "online"]
    return {
        "score_train_error_max": max(others),
        "generate_online_error_max": max(s["error"] for s in stages if s["how"] == "online"),
        "stages": stages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, required=True, help="directory of the logs' CSV files")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--first", type=int, default=FIRST, help="iterations that are fitted")
    parser.add_argument("--last", type=int, default=LAST, help="last iteration that counts")
    options = parser.parse_args()
    result = measure(options.logs, options.first, options.last)
    marks = {k: result[k] for k in ("score_train_error_max", "generate_online_error_max")}
    print(json.dumps(marks, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
