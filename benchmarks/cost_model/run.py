"""The cost model against published training steps and generation throughputs.

python benchmarks/cost_model/run.py --published=published.csv --json=cost_model.json \
    --figure=docs/cost_model.png
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from generation import GenerationCase, generation_cases
from training import Case, training_cases

from nereus_jax.planning.calibration import CLASSES, Efficiencies, OperationClass, fit

AnyCase = Case | GenerationCase
SPLITS = 20
TRAIN_NOISE, GENERATE_NOISE = 0.05, 0.1
"""Relative deviation of a published number from what any model could say of it."""
REPEATS_TO_JUDGE = 5
"""Least number of repeats that say how far measurements of a source scatter."""
DRAWS = 2000
LAYOUTS_TO_RANK = 5
"""Least number of different layouts of one model among which ranks mean something."""


def predict(cases: Sequence[AnyCase]) -> Callable[[Efficiencies], dict[OperationClass, np.ndarray]]:
    """Seconds of the cases by class, as `fit` wants them."""

    def seconds(efficiencies: Efficiencies) -> dict[OperationClass, np.ndarray]:
        costs = [case.cost(efficiencies).at(0) for case in cases]
        return {c: np.array([cost.get(c, 0.0) for cost in costs]) for c in CLASSES}

    return seconds


def constant_utilization(learned: Sequence[Case], case: Case) -> float:
    """Seconds of a case with the geometric mean of the utilizations of others."""

    def peak(c: Case) -> float:
        return c.devices * c.hardware.peak_flops_per_s[c.dtype]

    logs = [math.log(c.model_flops / (c.measured_s * peak(c))) for c in learned]
    return case.model_flops / (peak(case) * math.exp(statistics.fmean(logs)))


def halves(cases: Sequence[AnyCase], seed: int) -> list[tuple[list[int], list[int]]]:
    """For each hardware (learned from, predicted): the indices of two random halves."""
    by_hardware: dict[str, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        by_hardware[case.hardware_key].append(index)
    rng = np.random.default_rng(seed)
    split = []
    for _, indices in sorted(by_hardware.items()):
        order = [indices[i] for i in rng.permutation(len(indices))]
        split.append((order[: len(order) // 2], order[len(order) // 2 :]))
    return split


def held_out(
    cases: Sequence[AnyCase], splits: int, noise: float
) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
    """For each split, predicted seconds of the rows that were not learned from.

    Returns:
      (with the cost model, with a constant utilization; empty for generation).
    """
    ours: list[dict[int, float]] = []
    constant: list[dict[int, float]] = []
    for seed in range(splits):
        modelled: dict[int, float] = {}
        baseline: dict[int, float] = {}
        for learned, others in halves(cases, seed):
            known = [cases[i] for i in learned]
            efficiencies = fit(predict(known), [c.measured_s for c in known], noise=noise)
            for index in others:
                case = cases[index]
                modelled[index] = float(case.cost(efficiencies).total_s[0])
                if isinstance(case, Case):
                    steps = [c for c in known if isinstance(c, Case)]
                    baseline[index] = constant_utilization(steps, case)
        ours.append(modelled)
        constant.append(baseline)
    return ours, constant


def prior_only(cases: Sequence[AnyCase]) -> dict[int, float]:
    """Predicted seconds of all rows before anything is learned."""
    prior = Efficiencies.prior()
    return {i: float(case.cost(prior).total_s[0]) for i, case in enumerate(cases)}


def mape(cases: Sequence[AnyCase], predicted: Sequence[dict[int, float]]) -> float:
    """Mean over splits of the mean relative error."""
    return statistics.fmean(
        statistics.fmean(abs(s / cases[i].measured_s - 1) for i, s in split.items())
        for split in predicted
    )


def mape_by(
    cases: Sequence[AnyCase], predicted: Sequence[dict[int, float]], name: str
) -> dict[str, float]:
    """The mean relative error of the rows of each source or hardware."""
    errors: dict[str, list[float]] = defaultdict(list)
    for split in predicted:
        for i, seconds in split.items():
            errors[getattr(cases[i], name)].append(abs(seconds / cases[i].measured_s - 1))
    return {key: statistics.fmean(values) for key, values in sorted(errors.items())}


def means(predicted: Sequence[dict[int, float]]) -> dict[int, float]:
    """The mean over the splits in which a row was held out."""
    table: dict[int, list[float]] = defaultdict(list)
    for split in predicted:
        for i, seconds in split.items():
            table[i].append(seconds)
    return {i: statistics.fmean(values) for i, values in table.items()}


def ranks(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Ranks from 0, ties at their mean."""
    array = np.asarray(values)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    return below + (equal - 1) / 2


def rank_correlations(cases: Sequence[Case], predicted: dict[int, float]) -> list[dict[str, Any]]:
    """Spearman's over the layouts of one model, of seconds a token and device.

    Models with data parallelism only have no layouts to choose from and are left out. `perfect` is
    what a model would reach that is right but for the scatter of the source's repeats.
    """
    scatter = repeat_scatter(cases)
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i in predicted:
        sizes, case = cases[i].sizes, cases[i]
        shape = (sizes.embed_dim, sizes.num_layers, sizes.num_heads)
        groups[(case.source, case.hardware_key, shape, case.section)].append(i)
    found = []
    for (source, _, (width, layers, _), _), members in sorted(groups.items(), key=str):
        degrees = {int(cases[i].layout.pp[0] * cases[i].layout.tp[0]) for i in members}
        labels = {cases[i].label for i in members}
        if len(labels) < LAYOUTS_TO_RANK or degrees == {1}:
            continue
        work = [cases[i].workload.prompts / cases[i].devices for i in members]
        measured = [cases[i].measured_s / w for i, w in zip(members, work, strict=True)]
        modelled = [predicted[i] / w for i, w in zip(members, work, strict=True)]
        correlation = np.corrcoef(ranks(measured), ranks(modelled))[0, 1]
        perfect = perfect_correlation(modelled, scatter[source]) if source in scatter else None
        found.append(
            {
                "model": f"{source}, {layers} layers of {width}",
                "rows": len(members),
                "layouts": len(labels),
                "spread": max(measured) / min(measured),
                "correlation": float(correlation),
                "perfect": perfect,
            }
        )
    return found


def repeats(cases: Sequence[Case]) -> dict[str, list[list[float]]]:
    """By source, the seconds of what was measured twice or more: the same model, heads included,
    layout, batch and engine."""
    same: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for case in cases:
        key = (case.source, case.hardware_key, case.label, case.sizes, case.workload.prompts)
        same[(*key, case.execution)].append(case.measured_s)
    found: dict[str, list[list[float]]] = defaultdict(list)
    for key, seconds in same.items():
        if len(seconds) > 1:
            found[key[0]].append(seconds)
    return found


def repeat_spread(cases: Sequence[Case]) -> float | None:
    """Mean over what was measured twice or more, of slowest over fastest."""
    every = [x for of_source in repeats(cases).values() for x in of_source]
    return statistics.fmean(max(x) / min(x) for x in every) if every else None


def repeat_scatter(cases: Sequence[Case]) -> dict[str, float]:
    """By source with enough repeats, the pooled standard deviation of their logarithm."""
    found: dict[str, float] = {}
    for source, rows in repeats(cases).items():
        if len(rows) >= REPEATS_TO_JUDGE:
            logs = [np.log(x) for x in rows]
            squares = sum(float(((x - x.mean()) ** 2).sum()) for x in logs)
            found[source] = math.sqrt(squares / sum(len(x) - 1 for x in logs))
    return found


def perfect_correlation(modelled: Sequence[float], scatter: float) -> float:
    """What a model would reach that is right but for the scatter of measurements: the mean of its
    rank correlation with itself under such a scatter."""
    rng, own = np.random.default_rng(0), np.log(np.asarray(modelled))
    noisy = own + rng.normal(0.0, scatter, (DRAWS, len(own)))
    return float(np.mean([np.corrcoef(ranks(own), ranks(x))[0, 1] for x in noisy]))


def draw(path: Path, panels: Sequence[tuple[str, Sequence[AnyCase], dict[int, float]]]) -> None:
    """A scatter plot of held-out predictions against measurements."""
    import matplotlib  # an extra of development

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 5.5))
    for axis, (title, cases, predicted) in zip(axes, panels, strict=True):
        by_source: dict[str, list[int]] = defaultdict(list)
        for i in predicted:
            by_source[f"{cases[i].source}, {cases[i].hardware_key[:22]}"].append(i)
        for label, members in sorted(by_source.items()):
            axis.scatter(
                [cases[i].measured_s for i in members],
                [predicted[i] for i in members],
                s=12,
                alpha=0.7,
                label=label,
            )
        ends = [min(c.measured_s for c in cases), max(c.measured_s for c in cases)]
        axis.plot(ends, ends, color="black", linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=title)
        axis.set(xlabel="measured, s", ylabel="modelled, held out, s")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def table(
    cases: Sequence[AnyCase], ours: Sequence[dict[int, float]], other: Sequence[dict[int, float]]
) -> list[dict[str, Any]]:
    """Errors by source and hardware."""
    found = []
    for name in ("source", "hardware_key"):
        constant = mape_by(cases, other, name) if other and other[0] else {}
        for key, error in mape_by(cases, ours, name).items():
            rows = sum(getattr(c, name) == key for c in cases)
            found.append({"of": key, "rows": rows, "mape": error, "constant": constant.get(key)})
    return found


def show(result: dict[str, Any]) -> None:
    for title in ("training", "generation"):
        print(f"\n{title}: held-out error, mean of the splits (of a constant utilization)")
        for row in result[title]:
            constant = "" if row["constant"] is None else f" ({row['constant']:.1%})"
            print(f"  {row['of'][:60]:60} {row['rows']:4} rows {row['mape']:6.1%}{constant}")
    print("\nranks of the layouts of one model")
    for row in result["ranks"]:
        print(
            f"  {row['model']:40} {row['rows']:3} rows, slowest/fastest {row['spread']:.2f}: "
            f"{row['correlation']:.2f}"
            + ("" if row["perfect"] is None else f" (a perfect model: {row['perfect']:.2f})")
        )
    print()


def measure(path: Path, splits: int) -> tuple[dict[str, Any], list[Any]]:
    steps, rollouts = training_cases(path), generation_cases(path)
    ours, constant = held_out(steps, splits, TRAIN_NOISE)
    generated, _ = held_out(rollouts, splits, GENERATE_NOISE)
    ranked = rank_correlations(steps, means(ours))
    rows = sum(r["rows"] for r in ranked)
    weighted = sum(r["correlation"] * r["rows"] for r in ranked)
    result = {
        "mape_train": mape(steps, ours),
        "mape_train_over_constant": mape(steps, ours) / mape(steps, constant),
        "mape_generate": mape(rollouts, generated),
        "mape_live": None,
        "rank_correlation": weighted / rows if rows else None,
        "mape_train_prior": mape(steps, [prior_only(steps)]),
        "mape_generate_prior": mape(rollouts, [prior_only(rollouts)]),
        "repeat_spread": repeat_spread(steps),
        "repeat_scatter": repeat_scatter(steps),
        "splits": splits,
        "training": table(steps, ours, constant),
        "generation": table(rollouts, generated, []),
        "ranks": ranked,
    }
    panels = [
        ("training steps", steps, means(ours)),
        ("generation", rollouts, means(generated)),
    ]
    return result, panels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", type=Path, required=True, help="CSV of measurements")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--figure", type=Path, help="where to write the scatter plot, a .png")
    parser.add_argument("--splits", type=int, default=SPLITS, help="random halves")
    parser.add_argument("--live", type=Path, help="what live.py has written, for mape_live")
    options = parser.parse_args()
    if not options.published.is_file():
        parser.error(f"--published: {options.published} is no file; give a CSV of measurements")
    result, panels = measure(options.published, options.splits)
    if options.live:
        result["mape_live"] = json.loads(options.live.read_text())["mape_live"]
    show(result)
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, list)}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.figure:
        draw(options.figure, panels)


if __name__ == "__main__":
    main()
