"""What the tests of transfers run in processes of their own: FUNCTION ARGUMENTS."""

import itertools
import sys

import jax
import numpy as np

import nereus_jax
from nereus_jax.core.errors import ReshardError
from tests.runtime.transfer_cases import P, check_layouts, check_value, layouts, place, sharding


def all_layouts(num_devices: str) -> None:
    """Every pair of layouts of so many devices, in this process."""
    jax.config.update("jax_num_cpu_devices", int(num_devices))
    pairs = itertools.permutations(layouts(int(num_devices)), 2)
    print("moves:", check_layouts(pairs, (12, 24, 36)))


def member(port: str, rank: str) -> None:
    """One of two processes with four devices each."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    value = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    first, second, some = devices[:4], devices[4:], [devices[i] for i in (0, 1, 4, 5)]
    rows, columns = P("x"), P(None, "x")
    cases = {
        "another spec": (sharding(rows, devices, x=2, y=4), sharding(columns, devices, x=8)),
        "the other process": (sharding(rows, first, x=2, y=2), sharding(columns, second, x=4)),
        "more": (sharding(P("x", "y"), first, x=2, y=2), sharding(columns, devices, y=2, x=4)),
        "fewer": (sharding(columns, devices, x=8), sharding(rows, some, x=2, y=2)),
        "reordered": (sharding(columns, devices, x=8), sharding(columns, devices[::-1], x=8)),
    }
    for name, (before, after) in cases.items():
        source = {"w": place(value, before), "b": place(value[0], sharding(P(), devices, x=8))}
        target = {"w": after, "b": sharding(P("x"), devices, x=8)}
        program = nereus_jax.TransitionProgram(source, target)
        assert program.path == "collective" and program.wire_bytes, name
        moved = program(source)
        check_value(moved["w"], value)
        check_value(moved["b"], value[0])
        check_value(nereus_jax.reshard(moved["w"], before), value)
        print(name, "done", flush=True)
    before, after = cases["the other process"]
    try:
        nereus_jax.TransitionProgram(place(value, before), after, path="host")
    except ReshardError as error:
        print(error)
    print(rank, "finished")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    globals()[sys.argv[1]](*sys.argv[2:])
