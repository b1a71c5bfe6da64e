"""Child: memory of a move.

    memory.py host|device_put PAIR OUTPUT [--quick]      growth of this process's peak, by one call
    memory.py collective all OUTPUT [--quick]            temporaries of the compiled programs

The parent sets XLA_FLAGS.
"""

import argparse
import json
import math
import resource
from pathlib import Path
from typing import Any

import cases
import jax
import numpy as np

from nereus_jax import TransitionProgram

INFLIGHT_BYTES = 16 << 20
"""Bound of the buffers in flight: small, so that temporaries have to respect it."""


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def fill(x: jax.ShapeDtypeStruct, value: float) -> jax.Array:
    """Block by block, so that making the source leaves no peak behind."""
    assert x.sharding is not None
    blocks = []
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        extent = [len(range(*s.indices(n))) for s, n in zip(index, x.shape, strict=True)]
        blocks.append(jax.device_put(np.full(extent, value, x.dtype), device))
        blocks[-1].block_until_ready()
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks)


def measure_peak(method: str, pair: str, is_small: bool) -> dict[str, Any]:
    """What a call adds to the memory of the process, at its peak; the result is in it."""

    def build(source: Any, target: Any) -> Any:
        if method == "device_put":
            return lambda tree: jax.device_put(tree, target)
        return TransitionProgram(source, target, path="host")

    ends = cases.PAIRS[pair]
    source, target = cases.tree_abstract(ends[0], is_small), cases.tree_shardings(ends[1], is_small)
    # A first call with one small leaf: what libraries load on first use is no part of the move.
    small = {"norm": source["norm"]}
    tree = {"norm": fill(small["norm"], 1.0)}
    jax.block_until_ready(build(small, {"norm": target["norm"]})(tree))
    move = build(source, target)
    values = {name: float(i + 1) for i, name in enumerate(source)}
    tree = {name: fill(x, values[name]) for name, x in source.items()}
    before, peak_before = resident_bytes(), peak_bytes()
    moved = move(tree)
    jax.block_until_ready(moved)
    peak = peak_bytes()
    assert all(
        (np.asarray(s.data) == values[name]).all()
        for name, x in moved.items()
        for s in x.addressable_shards
    )
    return {
        "tree_bytes": cases.tree_bytes(is_small),
        "resident_before_bytes": before,
        "peak_before_bytes": peak_before,
        "peak_bytes": peak,
        "growth_bytes": peak - before,
    }


def measure_temporaries(is_small: bool) -> dict[str, Any]:
    """Temporaries on a device against its new blocks and the bound of buffers in flight."""
    pairs: dict[str, Any] = {}
    for name, ends in cases.PAIRS.items():
        if is_small and name not in cases.QUICK_PAIRS:
            continue
        source = cases.tree_abstract(ends[0], is_small)
        target = cases.tree_shardings(ends[1], is_small)
        program = TransitionProgram(
            source, target, path="collective", max_inflight_bytes=INFLIGHT_BYTES
        )
        new = sum(
            math.prod(target[k].shard_shape(x.shape)) * x.dtype.itemsize for k, x in source.items()
        )
        pairs[name] = {
            "temp_bytes": program.temp_bytes,
            "new_blocks_bytes": new,
            "inflight_bytes": INFLIGHT_BYTES,
            "over_bound": program.temp_bytes / (new + INFLIGHT_BYTES),
            "over_inflight": program.temp_bytes / INFLIGHT_BYTES,
        }
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=["host", "device_put", "collective"])
    parser.add_argument("pair", choices=[*cases.PAIRS, "all"])
    parser.add_argument("output", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.method == "collective":
        result = measure_temporaries(arguments.quick)
    else:
        result = measure_peak(arguments.method, arguments.pair, arguments.quick)
    arguments.output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
