"""Fits the parameters of the simulated cluster, and prints the error of every fit.

python benchmarks/truth/fit.py --profiles=DIRECTORY --published=FILE --logs=DIRECTORY --write
"""

import argparse
import csv
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from curve_fits import Error, fit_kernels, fit_link, hardware_of, read_collectives, read_profile
from rl_runs import BLOCK, FIRST, error_after, logged_stages

from nereus_jax.core.hardware import Link
from nereus_jax.core.roles import Stage
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.simulator.curves import (
    KernelCurve,
    LinkCurve,
    MemoryScatter,
    Overheads,
    Scatter,
    Truth,
)

Curve = TypeVar("Curve", KernelCurve, LinkCurve)
TARGET = Path(__file__).resolve().parents[2] / "nereus_jax" / "simulator" / "truth.json"
LEAST_EFA_BYTES = 1e5
"""Two rows of the table below that say 3 and 6 ms for a few kilobytes: set-up, not messages."""
HOST_SHARE = 0.8

ASSUMED = Truth(
    kernels={},
    links={},
    scatter=Scatter(
        score_std=0.0,
        train_std=0.0,
        generate_std=0.0,
        device_std=0.01,
        node_std=0.02,
        drift_std=0.0,
        drift_period_s=4 * 3600.0,
        network_std=0.10,
        straggler_rate=0.002,
        straggler_factor=1.3,
    ),
    memory=MemoryScatter(temporaries_std=0.03, fragmentation=0.03, fragmentation_steps=50.0),
    overheads=Overheads(
        compile_s=15.0,
        compile_std=0.4,
        compile_slowdown=0.02,
        setup_s=3.0,
        operation_s=0.02,
        uplink_share=0.8,
        restart_s=60.0,
        storage_bytes_per_s=1e9,
    ),
    sources=(
        "kernels a100, h100: products and elementwise kernels of Llama-2 7B and 70B, medians, of "
        "microsoft/vidur (MIT); other: their geometric mean",
        "attention: assumed, after the curves of FlashAttention-2 (Dao 2023) on A100: 70 % of the "
        "peak in long sequences, half of it at 512 tokens",
        "links intra_node: all-reduces in a DGX A100 and H100 of microsoft/vidur (MIT)",
        "links inter_node: bandwidth of all-reduces of 32 B200 over EFA (stas00/ml-engineering, "
        "network, CC BY-SA 4.0), small messages as between DGX A100 in microsoft/vidur (MIT)",
        "links host: assumed, 80 % of the link",
        "scatter of stages and drift: iterations 2 to 50 of PPO and GRPO of DeepSeek 7B on 8 "
        "MI300X (yushengsu-thu/verl_training_log)",
        "scatter of devices, nodes, network and stragglers: assumed; nodes after the spread "
        "between GPUs of one kind that Sinha et al. 2022 report",
        "memory: temporaries as the benchmark memory_model finds its model off; fragmentation "
        "assumed",
        "overheads: assumed; XLA programs of billions of parameters with scanned layers",
    ),
)
"""What no published measurement says, and where everything comes from."""


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The geometric mean, parameter by parameter."""
    first = curves[0]
    names = [f.name for f in dataclasses.fields(first)]
    values = {
        n: _rounded(math.exp(np.mean([math.log(getattr(c, n)) for c in curves]))) for n in names
    }
    return dataclasses.replace(first, **values)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def fit_inter(profiles: Path, published: Path) -> tuple[LinkCurve, Error, Error]:
    """Between nodes: the shape for small messages of one cluster, the bandwidth of another."""
    table = read_collectives(profiles, "a100")
    outside = table[(table[:, 1] == 1) & (table[:, 0] > 1)]
    unknown = Link(bytes_per_s=25e9, latency_s=12e-6)
    shape, small = fit_link(outside[:, 2:], unknown, outside[:, 0])
    hardware = load_hardware("b200")
    rows: list[tuple[float, float]] = []
    with published.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["category"] == "collective" and "EFA" in row["hardware"]:
                whole, seconds = float(row["bytes"]), 1e-3 * float(row["latency_ms"])
                if whole > LEAST_EFA_BYTES:
                    rows.append((whole / hardware.devices_per_node, seconds))
    large, error = fit_link(np.array(rows), hardware.inter_node, np.full(len(rows), 4.0))
    return dataclasses.replace(shape, share=large.share), small, error


def fit(profiles: Path, published: Path, logs: Path) -> Truth:
    """All parameters; prints the errors."""
    kernels: dict[str, KernelCurve] = {}
    intra: list[LinkCurve] = []
    for kind in ("a100", "h100"):
        hardware = hardware_of(kind)
        kernels[kind], products, elementwise = fit_kernels(read_profile(profiles, kind), hardware)
        table = read_collectives(profiles, kind)
        inside = table[(table[:, 0] == table[:, 1]) & (table[:, 0] > 1)]
        curve, error = fit_link(inside[:, 2:], hardware.intra_node, inside[:, 0])
        intra.append(curve)
        _print(f"{kind} products", products)
        _print(f"{kind} elementwise, a layer", elementwise)
        _print(f"{kind} all-reduce in a node", error)
    kernels["other"] = mean_curve(list(kernels.values()))
    inter, small, large = fit_inter(profiles, published)
    _print("all-reduce between nodes, two ranks", small)
    _print("all-reduce between nodes, B200", large)
    links = {
        "intra_node": mean_curve(intra),
        "inter_node": mean_curve([inter]),
        "host": LinkCurve(share=HOST_SHARE, half_bytes=1.0, ramp=1.0, hop_s=1e-5),
    }
    kernels = {name: mean_curve([curve]) for name, curve in kernels.items()}
    truth = dataclasses.replace(ASSUMED, kernels=kernels, links=links)
    return dataclasses.replace(truth, scatter=_scatter(truth, logs))


def _scatter(truth: Truth, logs: Path) -> Scatter:
    """What the logs' first iterations scatter about the truth."""
    spreads: dict[Stage, list[float]] = {stage: [] for stage in Stage}
    drifts: list[float] = []
    for stage in logged_stages(logs, truth, FIRST):
        found = error_after(stage, stage.fitted(FIRST), 2)
        spreads[stage.stage.stage].append(found["spread"])
        noise = found["spread"] ** 2 / BLOCK
        drifts.append(math.sqrt(max(found["drift"] ** 2 - noise, 0.0)))

    def rms(values: Sequence[float]) -> float:
        return _rounded(math.sqrt(float(np.mean(np.square(values)))))

    return dataclasses.replace(
        truth.scatter,
        score_std=rms(spreads[Stage.SCORE]),
        train_std=rms(spreads[Stage.TRAIN]),
        generate_std=rms(spreads[Stage.GENERATE]),
        drift_std=rms(drifts),
    )


def _print(name: str, error: Error) -> None:
    print(f"{name:40} mean error {error.mean:6.1%} of {error.count}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=Path, required=True, help="directory of Vidur's medians")
    parser.add_argument("--published", type=Path, required=True, help="table of measurements")
    parser.add_argument("--logs", type=Path, required=True, help="directory of the RL logs")
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name}")
    options = parser.parse_args()
    truth = fit(options.profiles, options.published, options.logs)
    text = json.dumps(truth.to_json(), indent=1) + "\n"
    if options.write:
        TARGET.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
