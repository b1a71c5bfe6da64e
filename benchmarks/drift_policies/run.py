"""Policies on three drift traces, on a simulated cluster.

python benchmarks/drift_policies/run.py --traces=DIRECTORY --json=drift_policies.json

DIRECTORY has supply/, lengths/ and requests/ with the files that traces.py names; README.md says
where they come from.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import traces

from nereus_jax.core.workflow import ALGORITHMS
from nereus_jax.simulator.compare import ALL, Comparison, compare

OTHERS = {"vs_dp_only": "dp_only", "vs_any_gain": "any_gain", "vs_every_k": "every_k"}
NOTICE_S = 120.0
"""That AWS gives before it takes a spot instance back."""
DRAWN = {"dp_only": "tab:red", "payback": "tab:blue", "oracle": "black"}
PARTS = {
    "transitions_s": "transitions",
    "losses_s": "lost devices",
    "refused_s": "refused moves",
    "mispredicted_s": "mispredicted plans",
    "late_s": "late reaction",
}


def marks(compared: Mapping[str, Comparison]) -> dict[str, float]:
    """The worst of the traces."""
    figures = {name: c.figures() for name, c in compared.items()}

    def mean(trace: str, policy: str) -> float:
        value = figures[trace][policy]["mean_step_s"]
        assert value is not None
        return value

    found = {
        mark: min(1.0 - mean(t, "payback") / mean(t, other) for t in figures)
        for mark, other in OTHERS.items()
    }
    found["gap_to_oracle"] = max(mean(t, "payback") / mean(t, "oracle") - 1.0 for t in figures)
    found["oracle_gain_share"] = min(
        (mean(t, "dp_only") - mean(t, "payback")) / (mean(t, "dp_only") - mean(t, "oracle"))
        for t in figures
    )
    found["oom"] = max(sum(r.oom for r in c.runs["payback"]) for c in compared.values())
    return found


def gaps_table(compared: Comparison) -> str:
    """The parts of each policy's gap to the oracle, in seconds a step."""
    lines = [f"{'s/step over the oracle':22}" + "".join(f"{v:>20}" for v in PARTS.values())]
    for name, parts in compared.gaps().items():
        lines.append(f"{name:22}" + "".join(f"{parts[k]:20.1f}" for k in PARTS))
    return "\n".join(lines) + "\n"


def draw(path: Path, compared: Mapping[str, Comparison]) -> None:
    """Steps of the first seed above, means of all seeds with the parts of their gaps below."""
    import matplotlib  # an extra of development

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(compared), figsize=(4.6 * len(compared), 6.6))
    for (name, found), upper, lower in zip(compared.items(), axes[0], axes[1], strict=True):
        every = {**found.runs, "oracle": found.bounds}
        pool = upper.twinx()
        rows = every["oracle"][0].steps
        pool.fill_between(
            [r.step for r in rows], [len(r.pool) for r in rows], step="mid", alpha=0.12, color="k"
        )
        pool.set(ylim=(0, 80), yticks=[0, 16, 32])
        pool.set_ylabel("GPUs", loc="bottom")
        for policy, color in DRAWN.items():
            steps = every[policy][0].steps
            style = "--" if policy == "oracle" else "-"
            upper.plot(
                [r.step for r in steps], [r.step_s for r in steps], style, color=color, label=policy
            )
        upper.set(title=f"trace {name}, simulated", xlabel="step")
        upper.set_ylabel("seconds of a step")
        upper.set_ylim(0, 1.25 * upper.get_ylim()[1])
        _bars(lower, found)
    axes[0][0].legend(fontsize=8, loc="upper left", ncols=3)
    handles, labels = axes[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=9)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=100)


def _bars(axis: Any, found: Comparison) -> None:
    figures, gaps = found.figures(), found.gaps()
    base = figures["oracle"]["mean_step_s"]
    names = list(gaps)
    axis.barh(names, [base] * len(names), color="lightgrey", label="oracle")
    left = [base or 0.0] * len(names)
    for part, label in PARTS.items():
        widths = [max(gaps[n][part], 0.0) for n in names]
        axis.barh(names, widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="seconds a step, mean of all seeds (simulated)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each policy")
    parser.add_argument(
        "--notice", action="store_true", help=f"nodes go {NOTICE_S:.0f} s after a notice"
    )
    parser.add_argument(
        "--algorithm", default="ppo", choices=sorted(ALGORITHMS), help="default ppo"
    )
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--figure", type=Path, help="where to draw it (needs matplotlib)")
    options = parser.parse_args()
    compared: dict[str, Comparison] = {}
    wall_s: dict[str, float] = {}
    for name in traces.FILES:
        trace = traces.make_trace(options.traces, name, NOTICE_S * options.notice)
        start = time.perf_counter()
        compared[name] = compare(
            lambda seed, trace=trace: traces.scenario(trace, seed, options.algorithm),
            ALL,
            range(options.seeds),
        )
        wall_s[name] = (time.perf_counter() - start) / options.seeds
        print(f"trace {name}: nodes {trace.nodes}, {[(c.at, c.nodes) for c in trace.changes]}")
        print(compared[name].table())
        print(gaps_table(compared[name]), flush=True)
    result: dict[str, Any] = {
        "simulated": True,
        "algorithm": options.algorithm,
        "notice_s": NOTICE_S * options.notice,
        **marks(compared),
        "wall_s_per_seed": wall_s,
        "traces": {name: c.to_json() for name, c in compared.items()},
    }
    print(json.dumps({k: v for k, v in result.items() if k != "traces"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        draw(options.figure, compared)


if __name__ == "__main__":
    main()
