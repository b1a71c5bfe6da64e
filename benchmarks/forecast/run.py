"""Are violations of memory seen before they come, and how often is there a false alarm?

python benchmarks/forecast/run.py --lengths=DIRECTORY --requests=DIRECTORY --json=forecast.json
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from curves import Curve, Histogram, read_curves, read_histogram, synthetic

from nereus_jax.control.forecast import ForecastSettings, make_forecast

ROWS = 512
CUT_TOKENS = 32_768
STARTS = (1.2, 1.5, 2.0)
GROWTH = 1.25
IN_TIME, JUDGED = 3, 20
"""Steps ahead that an alarm must be, and steps that it is judged by."""
TUNED_SEEDS, HELD_OUT_SEEDS = range(4), range(200, 208)
SIMPLE_SHARE = 0.8

Foresees = Callable[[Sequence[float], Sequence[float], float], bool]
"""Whether a cap may be exceeded soon, from the means and the longest responses so far."""


@dataclasses.dataclass(kw_only=True)
class Score:
    """What became of the violations and alarms of some runs."""

    in_time: int = 0
    late: int = 0
    missed: int = 0
    false: int = 0
    too_early: int = 0
    steps: int = 0

    def add(self, other: "Score") -> None:
        for field in dataclasses.fields(self):
            name = field.name
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def marks(self) -> dict[str, Any]:
        violations = self.in_time + self.late + self.missed
        return {
            "caught": self.in_time / violations if violations else None,
            "false_alarms_per_100_steps": 100 * self.false / self.steps,
            "violations": violations,
            **dataclasses.asdict(self),
        }


def by_forecast(settings: ForecastSettings) -> Foresees:
    def foresees(means: Sequence[float], longest: Sequence[float], cap: float) -> bool:
        return make_forecast(means, longest, CUT_TOKENS, settings).crossing_step(cap) is not None

    return foresees


def by_share(means: Sequence[float], longest: Sequence[float], cap: float) -> bool:
    return longest[-1] > SIMPLE_SHARE * cap


def observe(curve: Curve, histogram: Histogram, seed: int) -> tuple[list[float], list[float]]:
    """Mean and longest response of each step."""
    rng = np.random.default_rng(seed)
    means: list[float] = []
    longest: list[float] = []
    for mean in curve.means:
        rows = np.minimum(histogram.draw(float(mean), ROWS, rng), CUT_TOKENS)
        means.append(float(rows.mean()))
        longest.append(float(rows.max()))
    return means, longest


def play(
    means: Sequence[float], longest: Sequence[float], foresees: Foresees, start: float
) -> Score:
    """One run over a curve, from a cap of so many times the first longest response."""
    score = Score(steps=len(means))
    cap = start * longest[0]
    for t in range(len(means)):
        violated = longest[t] > cap
        if violated and t < IN_TIME:
            score.too_early += 1
        elif violated:
            score.missed += 1
        seen = means[: t + 1], longest[: t + 1]
        if not violated and not foresees(*seen, cap):
            continue
        if not violated:
            after = [v for v in range(t + 1, min(t + 1 + JUDGED, len(means))) if longest[v] > cap]
            if not after:
                score.false += 1
            elif after[0] < IN_TIME:
                score.too_early += 1
            elif after[0] - t >= IN_TIME:
                score.in_time += 1
            else:
                score.late += 1
        cap *= GROWTH
        while cap < CUT_TOKENS and (longest[t] > cap or foresees(*seen, cap)):
            cap *= GROWTH
    return score


def measure(
    curves: Sequence[Curve], histogram: Histogram, foresees: Foresees, seeds: Sequence[int] | None
) -> dict[str, Any]:
    """The marks of all curves, of the two parts, and of each curve."""
    total, parts = Score(), {True: Score(), False: Score()}
    rows: dict[str, Any] = {}
    for curve in curves:
        own = Score()
        chosen = seeds if seeds is not None else TUNED_SEEDS if curve.tuned else HELD_OUT_SEEDS
        for seed in chosen:
            seen = observe(curve, histogram, seed)
            for start in STARTS:
                own.add(play(*seen, foresees, start))
        rows[curve.name] = own.marks()
        total.add(own)
        parts[curve.tuned].add(own)
    apart = {
        name: part.marks()
        for name, part in zip(("tuned", "held_out"), (parts[True], parts[False]), strict=True)
        if part.steps
    }
    return {**total.marks(), **apart, "curves": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=Path, help="directory of the curves")
    parser.add_argument("--requests", type=Path, help="directory of the histogram")
    parser.add_argument("--synthetic", action="store_true", help="made-up curves instead")
    parser.add_argument("--only-tuned", action="store_true", help="the part for choosing settings")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    if options.synthetic:
        curves, histogram = synthetic()
    elif options.lengths and options.requests:
        curves, histogram = read_curves(options.lengths), read_histogram(options.requests)
    else:
        parser.error("give --lengths and --requests, or --synthetic")
    if options.only_tuned:
        curves = [c for c in curves if c.tuned]
    result = measure(curves, histogram, by_forecast(ForecastSettings()), None)
    result["simple_rule"] = measure(curves, histogram, by_share, None)
    result["settings"] = dataclasses.asdict(ForecastSettings())
    for name, found in (("forecast", result), ("80 % of the cap", result["simple_rule"])):
        for part in ("tuned", "held_out"):
            if part in found:
                marks = found[part]
                print(
                    f"{name:16} {part:9} caught {marks['in_time']} of {marks['violations']}, "
                    f"late {marks['late']}, missed {marks['missed']}, false {marks['false']} in "
                    f"{marks['steps']} steps: {marks['false_alarms_per_100_steps']:.2f} per 100"
                )
    print(json.dumps({k: result[k] for k in ("caught", "false_alarms_per_100_steps")}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
