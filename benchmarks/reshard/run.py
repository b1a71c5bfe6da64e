"""Moving arrays between layouts: bytes over the wire, seconds, and memory, against others.

python benchmarks/reshard/run.py --json=reshard.json --figure=reshard.png [--tunix-python=PATH]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAST_COMPILE = " --xla_backend_optimization_level=0"
"""Collectives and buffers are the same, so it will do for what is compiled only. Not for what runs:
code of this level flushes subnormal numbers of bfloat16 to zero."""


def child_environment(num_devices: int, flags: str = "") -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}{flags}",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
    }


def run_child(
    script: str, arguments: list[str], environment: dict[str, str], python: str = sys.executable
) -> int:
    """The exit code; negative where a signal ended the child. Exceptions of a child are fatal."""
    command = [python, str(HERE / script), *arguments]
    child = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if child.returncode > 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{child.stderr[-3000:]}")
    return child.returncode


def measure_wire(what: str, num_devices: int, scratch: Path, quick: bool) -> dict[str, Any]:
    """Every move of `wire.py`, and those on which the process was aborted."""
    output = scratch / f"{what}_{num_devices}.jsonl"
    environment = child_environment(num_devices, FAST_COMPILE if what == "xla" else "")
    moves: dict[int, dict[str, Any]] = {}
    aborted: list[str] = []
    start = 0
    while True:
        options = [what, str(num_devices), str(output), f"--start={start}"]
        code = run_child("wire.py", options + ["--quick"] * quick, environment)
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        moves = {r["number"]: r for r in rows if "wire_bytes" in r}
        if code == 0:
            return {"moves": list(moves.values()), "aborted": aborted}
        if what != "xla" or "number" not in rows[-1] or rows[-1]["number"] in moves:
            raise SystemExit(f"wire.py {' '.join(options)} was ended by signal {-code}")
        aborted.append(rows[-1]["name"])
        start = rows[-1]["number"] + 1


def wire_ratios(moves: list[dict[str, Any]]) -> list[float]:
    """Sorted; moves of which no device lacks anything have no ratio."""
    return sorted(m["wire_bytes"] / m["lacking_bytes"] for m in moves if m["lacking_bytes"])


def summarize_wire(ours: list[dict[str, Any]], xla: list[dict[str, Any]]) -> dict[str, Any]:
    our_moves = [m for part in ours for m in part["moves"]]
    xla_moves = [m for part in xla for m in part["moves"]]
    ratios, xla_ratios = wire_ratios(our_moves), wire_ratios(xla_moves)
    gathered = [m for m in our_moves if m["device_put_gathers"]]
    put = [m["array_bytes"] / m["lacking_bytes"] for m in gathered if m["lacking_bytes"]]
    return {
        "moves": len(our_moves),
        "moves_with_ratio": len(ratios),
        "sent_though_nothing_lacks": [
            m["name"] for m in our_moves if m["wire_bytes"] and not m["lacking_bytes"]
        ],
        "above_minimum": [m for m in our_moves if m["wire_bytes"] != m["lacking_bytes"]],
        "not_as_planned": [m for m in our_moves if m["wire_bytes"] != m["planned_bytes"]],
        "not_bit_equal": {
            path: [m["name"] for m in our_moves if not m["equal"][path]]
            for path in ("collective", "host", "device_put")
        },
        "xla_moves": len(xla_moves),
        "xla_moves_with_ratio": len(xla_ratios),
        "xla_aborted": [name for part in xla for name in part["aborted"]],
        "xla_at_minimum": sum(r <= 1 for r in xla_ratios),
        "xla_median": statistics.median(xla_ratios),
        "device_put_gathers": len(gathered),
        "device_put_host_read_over_min_median": statistics.median(put),
        "device_put_host_read_over_min_max": max(put),
        "ratios": ratios,
        "xla_ratios": xla_ratios,
    }


def measure_times(
    methods: str, python: str, scratch: Path, repeats: int, quick: bool
) -> dict[str, Any]:
    output = scratch / "times.json"
    environment = child_environment(8)
    if python != sys.executable:  # it has packages of its own
        del environment["PYTHONPATH"]
    options = [methods, str(output), f"--repeats={repeats}"] + ["--quick"] * quick
    if run_child("times.py", options, environment, python):
        raise SystemExit("times.py was ended by a signal")
    return json.loads(output.read_text())


def summarize_times(ours: dict[str, Any], tunix: dict[str, Any] | None) -> dict[str, Any]:
    """Geometric means over the pairs of which something moves, with and without the relocation."""
    moving = [name for name in ours["pairs"] if name != cases.UNMOVED]
    cut = [name for name in moving if name != cases.RELOCATION]

    def over(name: str, method: str, base: str = "device_put") -> float:
        medians = ours["pairs"][name]["median_s"]
        return medians[method] / medians[base]

    def speedup_vs_tunix(name: str, method: str) -> float:
        assert tunix is not None
        return tunix["pairs"][name]["over_device_put"]["tunix"] / over(name, method)

    found: dict[str, Any] = {}
    for label, names in (("all", moving), ("without_relocation", cut)):
        found[label] = {
            f"{method}_over_device_put": mean([over(n, method) for n in names])
            for method in ("host", "collective", "orbax")
        } | {
            f"{method}_speedup_vs_orbax": mean([over(n, "orbax", method) for n in names])
            for method in ("host", "collective")
        }
        if tunix is not None:
            found[label] |= {
                "tunix_over_device_put": mean(
                    [tunix["pairs"][n]["over_device_put"]["tunix"] for n in names]
                )
            } | {
                f"{method}_speedup_vs_tunix": mean([speedup_vs_tunix(n, method) for n in names])
                for method in ("host", "collective")
            }
    return found


def mean(ratios: list[float]) -> float:
    return statistics.geometric_mean(ratios)


def measure_peaks(scratch: Path, quick: bool) -> dict[str, Any]:
    peaks: dict[str, Any] = {}
    for name in cases.QUICK_PAIRS[:1] if quick else cases.PAIRS:
        peaks[name] = {}
        for method in ("host", "device_put"):
            output = scratch / "peak.json"
            options = [method, name, str(output)] + ["--quick"] * quick
            if run_child("memory.py", options, child_environment(8)):
                raise SystemExit("memory.py was ended by a signal")
            found = json.loads(output.read_text())
            found["over_tree"] = found["growth_bytes"] / found["tree_bytes"]
            peaks[name][method] = found
    return peaks


def measure_temporaries(scratch: Path, quick: bool) -> dict[str, Any]:
    output = scratch / "temporaries.json"
    options = ["collective", "all", str(output)] + ["--quick"] * quick
    if run_child("memory.py", options, child_environment(8, FAST_COMPILE)):
        raise SystemExit("memory.py was ended by a signal")
    return json.loads(output.read_text())


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(14, 4.8), constrained_layout=True, gridspec_kw={"width_ratios": [4, 9]}
    )
    wire = report["detail"]["wire"]
    for label, color, ratios in (
        ("XLA, jit with out_shardings", "C1", wire["xla_ratios"]),
        ("Nereus, collective path", "C0", wire["ratios"]),
    ):
        share = [100 * (i + 1) / len(ratios) for i in range(len(ratios))]
        left.plot(share, ratios, color=color, linewidth=2.5, label=f"{label} ({len(ratios)} moves)")
    left.set_yscale("log")
    left.set_ylim(0.8, 1.25 * max(*wire["xla_ratios"], 16))
    left.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    left.minorticks_off()
    left.set_xlabel("moves, sorted, %")
    left.set_ylabel("bytes over the wire / bytes that devices lack")
    left.set_title("Bytes in the compiled programs, 8 and 12 devices", fontsize=10)
    left.legend(loc="upper left", fontsize=8)
    left.grid(alpha=0.3)

    pairs = {n: p for n, p in report["detail"]["times"]["pairs"].items() if n != cases.UNMOVED}
    tunix = report["detail"]["tunix"]
    bars = [("host", "Nereus, host path", "C0"), ("collective", "Nereus, collective path", "C9")]
    bars += [("tunix", "Tunix reshard_pytree", "C2")] if tunix else []
    bars += [("orbax", "Orbax save + restore", "C3")]
    width = 0.8 / len(bars)
    for number, (method, label, color) in enumerate(bars):
        heights = [
            (tunix if method == "tunix" else report["detail"]["times"])["pairs"][n][
                "over_device_put"
            ][method]
            for n in pairs
        ]
        at = [i + (number - (len(bars) - 1) / 2) * width for i in range(len(pairs))]
        drawn = right.bar(at, heights, width, bottom=0, color=color, label=label)
        labels = [f"{h:.0f}" if h >= 10 else f"{h:.1f}" for h in heights]
        right.bar_label(drawn, labels, fontsize=7, padding=1)
    right.axhline(1, color="black", linewidth=1, zorder=0.5, label="jax.device_put")
    right.set_xlim(-0.6, len(pairs) - 0.4)
    right.set_yscale("log")
    right.set_ylim(0.25, 100)
    right.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    right.minorticks_off()
    right.set_xticks(
        range(len(pairs)),
        [n.replace(", ", ",\n").replace("tp2 → ", "tp2 →\n") for n in pairs],
        fontsize=8,
    )
    right.set_ylabel("time / device_put's time")
    tree_mb = cases.tree_bytes(report["detail"]["quick"]) / 1e6
    right.set_title(
        f"{tree_mb:.0f} MB on 8 emulated CPU devices of one process: says nothing about GPUs",
        fontsize=10,
    )
    right.legend(loc="upper left", fontsize=8, ncols=3)
    right.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few small moves, under a minute")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--figure", type=Path, help="draw the results (needs matplotlib)")
    parser.add_argument("--tunix-python", help="interpreter that has google-tunix; it is measured")
    arguments = parser.parse_args()
    quick, repeats = arguments.quick, 2 if arguments.quick else 7
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        # What is counted may share the cores; what is timed runs alone.
        with ThreadPoolExecutor(2) as pool:
            ours = [pool.submit(measure_wire, "ours", n, scratch, quick) for n in (12, 8)]
            temporaries = pool.submit(measure_temporaries, scratch, quick)
            xla = [pool.submit(measure_wire, "xla", n, scratch, quick) for n in (12, 8)]
            wire = summarize_wire([f.result() for f in ours], [f.result() for f in xla])
        methods = "device_put,host,collective,orbax"
        times = measure_times(methods, sys.executable, scratch, repeats, quick)
        tunix = None
        if arguments.tunix_python is not None:
            python = arguments.tunix_python
            tunix = measure_times("device_put,tunix", python, scratch, repeats, quick)
        peaks = measure_peaks(scratch, quick)
    means = summarize_times(times, tunix)
    report = {
        "wire_over_min_max": max(wire["ratios"]),
        "wire_over_min_median": statistics.median(wire["ratios"]),
        "xla_wire_over_min_max": max(wire["xla_ratios"]),
        "host_time_over_device_put_geomean": means["all"]["host_over_device_put"],
        "collective_time_over_device_put_geomean": means["all"]["collective_over_device_put"],
        "speedup_vs_tunix_geomean": means["all"].get("host_speedup_vs_tunix"),
        "speedup_vs_orbax_geomean": means["all"]["host_speedup_vs_orbax"],
        "peak_over_tree_max": max(p["host"]["over_tree"] for p in peaks.values()),
    }
    print(json.dumps(report | {"means": means}, indent=2))
    report["detail"] = {
        "quick": quick,
        "wire": wire,
        "means": means,
        "times": times,
        "tunix": tunix,
        "peaks": peaks,
        "temporaries": temporaries.result(),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.figure:
        draw(report, arguments.figure)


if __name__ == "__main__":
    main()
