"""The payback policy under other gammas, on the three traces of drift_policies: simulated.

python benchmarks/gamma_sweep/run.py --traces=DIRECTORY --json=gamma_sweep.json
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from nereus_jax.control.policies import GAMMA
from nereus_jax.simulator.compare import compare

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "drift_policies"))

import traces  # pyright: ignore

GAMMAS = tuple(i / 10 for i in range(11))
FIGURES = ("mean_step_s", "transitions", "transition_share", "oom")


def sweep(directory: Path, seeds: int) -> dict[str, list[dict[str, Any]]]:
    """By trace, a row for each gamma: means over seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    names = [f"payback={gamma:g}" for gamma in GAMMAS]
    for name in traces.FILES:
        trace = traces.make_trace(directory, name)
        compared = compare(
            lambda seed, trace=trace: traces.scenario(trace, seed), names, range(seeds)
        )
        figures = compared.figures()
        found[name] = [
            {"gamma": g} | {k: figures[p][k] for k in (*FIGURES, "mean_step_s_std")}
            for g, p in zip(GAMMAS, names, strict=True)
        ]
        for row in found[name]:
            print(
                f"trace {name} (simulated) gamma {row['gamma']:.1f}: {row['mean_step_s']:7.1f} "
                f"s/step, {row['transitions']:.1f} moves, {row['oom']:.1f} OOM",
                flush=True,
            )
    return found


def draw(path: Path, means: list[float], by_trace: dict[str, list[dict[str, Any]]]) -> None:
    """Seconds a step over gamma, each curve over its least."""
    import matplotlib  # an extra of development

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    curves = {f"trace {n}": [r["mean_step_s"] for r in rows] for n, rows in by_trace.items()}
    for name, curve in (*curves.items(), ("mean", means)):
        style = "k-o" if name == "mean" else "--"
        axis.plot(GAMMAS, np.asarray(curve) / min(curve), style, label=name)
    axis.axvline(GAMMA, color="grey", linewidth=0.8)
    axis.set(xlabel="gamma", ylabel="seconds a step over the least", title="payback, simulated")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each gamma")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--figure", type=Path, help="where to draw it (needs matplotlib)")
    options = parser.parse_args()
    by_trace = sweep(options.traces, options.seeds)
    columns = np.array([[r["mean_step_s"] for r in rows] for rows in by_trace.values()])
    means = [float(x) for x in columns.mean(axis=0)]
    result = {
        "simulated": True,
        "default_over_best": means[GAMMAS.index(GAMMA)] / min(means),
        "best_gamma": GAMMAS[int(np.argmin(means))],
        "mean_step_s": dict(zip(map(str, GAMMAS), means, strict=True)),
        "traces": by_trace,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "traces"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        draw(options.figure, means, by_trace)


if __name__ == "__main__":
    main()
