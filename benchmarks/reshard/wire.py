"""Child: bytes over the wire, over the bytes that the destinations lack. One JSON line per move.

    wire.py (ours|xla) NUM_DEVICES OUTPUT [--start=I] [--quick]

The parent sets XLA_FLAGS. `xla` may die: XLA of jax 0.12 aborts the process on some moves. A line
is written before and after each, so that the parent knows which.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import cases
import jax
import numpy as np

from nereus_jax import TransitionProgram
from nereus_jax.testing import collective_wire_bytes


def make(move: cases.Move) -> tuple[jax.Array, np.ndarray]:
    """An array of random bits, and the same on the host."""
    dtype = jax.numpy.dtype(move.dtype)
    rng = np.random.default_rng(0)
    size = int(np.prod(cases.SHAPE)) * dtype.itemsize
    host = np.frombuffer(rng.bytes(size), dtype).reshape(cases.SHAPE)
    return jax.device_put(host, move.source.sharding()), host


def is_equal(x: jax.Array, host: np.ndarray, target: Any) -> bool:
    """Every bit of every block, replicas included, on the sharding that was asked for."""
    return x.sharding.is_equivalent_to(target, x.ndim) and all(
        np.asarray(s.data).tobytes() == np.ascontiguousarray(host[s.index]).tobytes()
        for s in x.addressable_shards
    )


def program_bytes(compiled: jax.stages.Compiled) -> int:
    devices = jax.tree.leaves(compiled.output_shardings)[0].device_set
    return collective_wire_bytes(compiled.as_text() or "", len(devices))


def measure_ours(move: cases.Move) -> dict[str, Any]:
    array, host = make(move)
    target = move.target.sharding()
    program = TransitionProgram(array, target, path="collective")
    wire = sum(program_bytes(c) for name, c in program.compiled if name != "first")
    equal = {"collective": is_equal(program(array), host, target)}
    equal["host"] = is_equal(TransitionProgram(array, target, path="host")(array), host, target)
    put = jax.device_put(array, target)
    equal["device_put"] = is_equal(put, host, target)
    return {
        "wire_bytes": wire,
        "planned_bytes": program.wire_bytes,
        "lacking_bytes": cases.lacking_bytes(array, array.sharding, target),
        "array_bytes": array.nbytes,
        # jax keeps the value that it gathered: device_put read the whole array to the host.
        "device_put_gathers": getattr(array, "_npy_value", None) is not None,
        "equal": equal,
    }


def measure_xla(move: cases.Move) -> dict[str, Any]:
    source, target = move.source.sharding(), move.target.sharding()
    x = jax.ShapeDtypeStruct(cases.SHAPE, move.dtype, sharding=source)
    compiled = jax.jit(lambda x: x, out_shardings=target).lower(x).compile()
    return {
        "wire_bytes": program_bytes(compiled),
        "lacking_bytes": cases.lacking_bytes(x, source, target),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["ours", "xla"])
    parser.add_argument("num_devices", type=int)
    parser.add_argument("output", type=Path)
    parser.add_argument("--start", type=int, default=0, help="number of the first move")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    n, quick = arguments.num_devices, arguments.quick
    assert len(jax.devices()) == n
    moves = cases.layout_moves(n, 3 if quick else None)
    if arguments.what == "ours":
        moves += cases.random_moves(n, 10 if quick else 100)
    measure = measure_ours if arguments.what == "ours" else measure_xla
    with arguments.output.open("a") as output:
        for number, move in list(enumerate(moves))[arguments.start :]:
            head = {"number": number, "name": move.name}
            print(json.dumps(head), file=output, flush=True)
            print(json.dumps(head | measure(move)), file=output, flush=True)
        print(json.dumps({"done": len(moves)}), file=output)


if __name__ == "__main__":
    main()
