"""Child: seconds of moving a tree between layouts, methods in turn.

    times.py METHODS OUTPUT [--repeats=N] [--quick]

METHODS, separated by commas: device_put, host, collective (both of this project), orbax, tunix.
Run by the interpreter that has them; nothing else is imported. The parent sets XLA_FLAGS.
"""

import argparse
import gc
import importlib.metadata
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np

Tree = dict[str, Any]
Move = Callable[[Tree], Tree]


def device_put(source: Tree, target: Tree, scratch: Path) -> tuple[Move, Any]:
    del source, scratch
    return lambda tree: jax.device_put(tree, target), None


def planned(path: Any) -> Callable[[Tree, Tree, Path], tuple[Move, Any]]:
    def build(source: Tree, target: Tree, scratch: Path) -> tuple[Move, Any]:
        from nereus_jax import TransitionProgram

        del scratch
        program = TransitionProgram(source, target, path=path)
        program.compile()
        return program, program

    return build


def orbax(source: Tree, target: Tree, scratch: Path) -> tuple[Move, Any]:
    """Saves and restores, each time in a new directory, which is removed outside of the timing."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    wanted = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target[k]) for k, x in source.items()
    }

    def move(tree: Tree) -> Tree:
        path = Path(tempfile.mkdtemp(dir=scratch)) / "tree"
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, wanted)

    return move, None


def tunix(source: Tree, target: Tree, scratch: Path) -> tuple[Move, Any]:
    from tunix.rl import reshard  # pyright: ignore[reportMissingImports]

    del source, scratch
    return lambda tree: reshard.reshard_pytree(tree, target), None


METHODS = {
    "device_put": device_put,
    "host": planned("host"),
    "collective": planned("collective"),
    "orbax": orbax,
    "tunix": tunix,
}


def check(moved: Tree, target: Tree, host: dict[str, np.ndarray], method: str) -> None:
    """Raises unless every block is the right one, bit by bit."""
    for name, x in moved.items():
        right = x.sharding.is_equivalent_to(target[name], x.ndim) and all(
            np.array_equal(np.asarray(s.data), host[name][s.index]) for s in x.addressable_shards
        )
        if not right:
            raise AssertionError(f"{method} moved {name} wrongly")


def measure(
    ends: tuple[cases.Place, cases.Place],
    methods: list[str],
    host: dict[str, np.ndarray],
    repeats: int,
    is_small: bool,
) -> dict[str, Any]:
    source, target = (cases.tree_shardings(end, is_small) for end in ends)
    base = jax.device_put(host, source)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=source)
    seconds: dict[str, list[float]] = {m: [] for m in methods}
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        abstract = cases.tree_abstract(ends[0], is_small)
        built = {m: METHODS[m](abstract, target, Path(scratch)) for m in methods}
        for number in range(repeats + 1):
            turn = number % len(methods)
            for method in methods[turn:] + methods[:turn]:
                # New arrays for each call: jax keeps a value that it gathered once on its array.
                tree = jax.block_until_ready(copy(base))
                start_s = time.perf_counter()
                moved = built[method][0](tree)
                jax.block_until_ready(moved)
                took_s = time.perf_counter() - start_s
                if number:
                    seconds[method].append(took_s)
                else:
                    check(moved, target, host, method)
                del tree, moved
                gc.collect()
                for used in Path(scratch).iterdir():
                    shutil.rmtree(used)
        for method, (_, program) in built.items():
            if program is not None:
                details[method] = {
                    "compile_s": program.cost.compile_s,
                    "set_up_s": program.cost.set_up_s,
                    "first_run_s": program.cost.first_run_s,
                    "wire_bytes": program.wire_bytes,
                    "exchanges": len(program.schedule.exchanges),
                    "programs": [name for name, _ in program.compiled],
                }
    medians = {m: statistics.median(s) for m, s in seconds.items()}
    return {
        "median_s": medians,
        "over_device_put": {m: s / medians["device_put"] for m, s in medians.items()},
        "seconds": seconds,
        "programs": details,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods")
    parser.add_argument("output", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    is_small, methods = arguments.quick, arguments.methods.split(",")
    rng = np.random.default_rng(0)
    host = {
        k: rng.standard_normal(shape, np.float32)
        for k, (shape, _) in cases.tree_specs(is_small).items()
    }
    pairs: dict[str, Any] = {}
    for name, ends in cases.PAIRS.items():
        if is_small and name not in cases.QUICK_PAIRS:
            continue
        pairs[name] = measure(ends, methods, host, arguments.repeats, is_small)
        ratios = {m: round(r, 2) for m, r in pairs[name]["over_device_put"].items()}
        print(f"{name}: over device_put {ratios}", flush=True)
    packages = ("jax", "jaxlib", "orbax-checkpoint", "google-tunix")
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    versions = {"python": platform.python_version(), **{p: found.get(p) for p in packages}}
    arguments.output.write_text(json.dumps({"pairs": pairs, "versions": versions}))


if __name__ == "__main__":
    main()
