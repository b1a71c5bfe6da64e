"""Checks and times transfers on the devices of this machine: 1, 2, 4 or 8 GPUs.

    python tests/gpu/check_transfers.py [--platform=cuda|cpu] [--json=FILE]

Parts, each in a process of its own, which is ended after --timeout seconds, so that a deadlock is
a failure with a name and not a hang:

* values: every bit of every block, on both paths, over layouts, device subsets, dtypes, casts,
  donation, exchanges in small groups, and state parked in host memory;
* cycles: transitions between changing subsets of the devices, with the collectives of a training
  step between them, with and without splitting of NCCL communicators. A communicator of a subset
  that was made on its own, found again where the others split a larger one, is a deadlock that
  some releases of XLA have (github.com/openxla/xla pull requests 36981, 37063, 39372);
* speed: seconds, GB/s and peak memory of large transitions, beside `jax.device_put`. Each is in a
  fresh process, so that its first run shows what setting up communicators costs.

Exits with 1 if a check failed. `test_transfers_twin.py` runs the same on emulated CPU devices.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nereus_jax

AXES = ("dp", "pp", "tp")
SPLITTING = "--xla_gpu_enable_nccl_comm_splitting="
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class End:
    """One end of a transition: the degrees on some devices, in their order."""

    devices: tuple[Any, ...]
    dp: int = 1
    pp: int = 1
    tp: int = 1
    memory_kind: str | None = None

    def sharding(self, spec: P) -> NamedSharding:
        handles = np.array(self.devices, dtype=object).reshape(self.dp, self.pp, self.tp)
        mesh = Mesh(handles, AXES, axis_types=(AxisType.Auto,) * 3)
        return NamedSharding(mesh, spec, memory_kind=self.memory_kind)

    def shardings(self, tree: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """One for each leaf: the kinds of cut take turns."""
        specs = itertools.cycle((P("pp", None, "tp"), P("pp", "dp", "tp"), P(("pp", "tp"))))
        return {
            name: self.sharding(next(specs) if np.ndim(leaf) else P())
            for name, leaf in tree.items()
        }


def ends_of(devices: Sequence[Any]) -> dict[str, End]:
    """Layouts on all devices and on subsets of them, for any number of devices."""
    n, every = len(devices), tuple(devices)
    half, quarter = n // 2, n // 4
    ends = {"one": End(every[:1])}
    if n >= 2:
        ends |= {
            "tp": End(every, tp=n),
            "pp": End(every, pp=n),
            "dp": End(every, dp=n),
            "reversed": End(every[::-1], tp=n),
            "first half": End(every[:half], tp=half),
            "last half": End(every[half:], pp=half),
        }
    if n >= 4:
        ends |= {
            "grid": End(every, dp=2, pp=2, tp=quarter),
            "wide": End(every, pp=2, tp=half),
            "middle": End(every[quarter : quarter + half], tp=half),
            "three": End(every[:3], tp=3),
        }
    if n >= 8:
        ends |= {"six": End(every[:6], dp=3, tp=2), "pair": End(every[5:7], dp=2)}
    return ends


# Of each pair the ends that the number of devices allows. The first ones are those of --quick.
MOVES = (
    ("first half", "last half"),
    ("first half", "tp"),
    ("wide", "first half"),
    ("grid", "wide"),
    ("six", "grid"),
    ("tp", "reversed"),
    ("tp", "pp"),
    ("one", "one"),
    ("one", "tp"),
    ("tp", "dp"),
    ("dp", "tp"),
    ("last half", "one"),
    ("first half", "middle"),
    ("middle", "pp"),
    ("grid", "three"),
    ("three", "tp"),
    ("pair", "six"),
    ("grid", "pair"),
)
NUM_QUICK_MOVES = 2

DTYPES = (
    "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3",
    "int32", "uint16", "int8", "bool", "complex64",
)  # fmt: skip
CASTS = (
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
    ("float32", "float8_e4m3fn"),
    ("float16", "bfloat16"),
    ("int8", "float32"),
)
EXTENT = 24  # 1, 2, 3, 4, 6 and 8 devices cut it


def random_bits(dtype: str, seed: int = 0) -> np.ndarray:
    """An array of any bits at all: all kinds of NaN, subnormal numbers, infinities."""
    shape = (EXTENT,) * 3
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    kind = jnp.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    bits = np.frombuffer(rng.bytes(size), np.uint8)
    return bits.view(kind).reshape(shape)


def tree_of_bits() -> dict[str, np.ndarray]:
    """A leaf of each dtype, and a scalar."""
    leaves = {d: random_bits(d, i) for i, d in enumerate(DTYPES)}
    return leaves | {"scalar": np.asarray(7, np.int32)}


def put(tree: Mapping[str, np.ndarray], end: End) -> dict[str, jax.Array]:
    shardings = end.shardings(tree)
    return {name: jax.device_put(leaf, shardings[name]) for name, leaf in tree.items()}


def differing(moved: Mapping[str, jax.Array], wanted: Mapping[str, Any], end: End) -> list[str]:
    """The leaves that are not where and what they should be, to the last bit."""
    shardings = end.shardings(wanted)
    return [
        name
        for name, values in wanted.items()
        if moved[name].sharding != shardings[name]
        or moved[name].dtype != values.dtype
        or any(
            np.asarray(shard.data).tobytes() != values[shard.index].tobytes()
            for shard in moved[name].addressable_shards
        )
    ]


def check_move(source: End, target: End, path: Any, **how: Any) -> Row:
    """Moves a tree of all dtypes, and compares every block on its device."""
    tree = tree_of_bits()
    arrays = put(tree, source)
    program = nereus_jax.TransitionProgram(arrays, target.shardings(tree), path=path, **how)
    moved = program(arrays)
    wrong = differing(moved, tree, target)
    assert not wrong, f"not bit-equal: {wrong}"
    schedule, leaves = program.schedule, jax.tree.leaves(arrays)
    for leaf in (i for batch in schedule.batches for i in batch.leaves):
        # Blocks that stay where they are belong to both ends; of others, jax knows no half.
        if not schedule.kept[leaf].shared:
            assert leaves[leaf].is_deleted() == bool(how.get("donate")), "donation"
    groups = sum(len(batch.groups) for batch in schedule.batches)
    return {"bytes": program.wire_bytes, "groups": groups}


def check_casts(source: End, target: End, path: Any) -> Row:
    """Casts on the way, against casts by numpy."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((EXTENT,) * 3) * 8
    tree = {f"{a} to {b}": values.astype(jnp.dtype(a)) for a, b in CASTS}
    wanted = {f"{a} to {b}": tree[f"{a} to {b}"].astype(jnp.dtype(b)) for a, b in CASTS}
    arrays, shardings = put(tree, source), target.shardings(tree)
    goal = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
        for name, x in wanted.items()
    }
    program = nereus_jax.TransitionProgram(arrays, goal, path=path, allow_range_loss=True)
    wrong = differing(program(arrays), wanted, target)
    assert not wrong, f"not as numpy casts: {wrong}"
    return {"bytes": program.wire_bytes}


def check_parking(source: End, target: End) -> Row:
    """From the devices to host memory and back to other ones."""
    tree = tree_of_bits()
    away = dataclasses.replace(source, memory_kind="pinned_host")
    parked = nereus_jax.reshard(put(tree, source), away.shardings(tree), donate=True)
    wrong = differing(parked, tree, away)
    assert not wrong, f"not bit-equal in host memory: {wrong}"
    back = nereus_jax.reshard(parked, target.shardings(tree), donate=True)
    wrong = differing(back, tree, target)
    assert not wrong, f"not bit-equal after the return: {wrong}"
    return {"bytes": 2 * sum(x.nbytes for x in tree.values())}


@contextmanager
def checking(name: str) -> Iterator[Row]:
    """Prints that a check begins, and what came of it; a failure does not end the others."""
    print(json.dumps({"begin": name}), flush=True)
    row: Row = {"check": name, "ok": True}
    start_s = time.perf_counter()
    try:
        yield row
    except Exception as error:
        row |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    row["total_s"] = round(time.perf_counter() - start_s, 3)
    print(json.dumps(row), flush=True)


def values(devices: Sequence[Any], is_quick: bool) -> None:
    """The part `values`."""
    ends = ends_of(devices)
    moves = [(a, b) for a, b in MOVES if a in ends and b in ends]
    if is_quick:
        moves = moves[:NUM_QUICK_MOVES]
    for number, (a, b) in enumerate(moves):
        how: dict[str, Any] = {"donate": number % 2 == 1}
        if number % 3 == 2:
            how["max_inflight_bytes"] = 64 << 10
        for path in ("collective", "host"):
            with checking(f"{a} -> {b}, {path}") as row:
                row |= check_move(ends[a], ends[b], path, **how)
    a, b = moves[0]
    for path in ("collective", "host"):
        with checking(f"casts, {a} -> {b}, {path}") as row:
            row |= check_casts(ends[a], ends[b], path)
    with checking(f"parked, {a} -> host -> {b}") as row:
        row |= check_parking(ends[a], ends[b])


def train_like(end: End) -> Callable[[jax.Array], jax.Array]:
    """A program with the collectives of a step: sums over each axis, then over all of them."""

    def body(x: jax.Array) -> jax.Array:
        for axes in ("tp", "dp", "pp", AXES):
            x = x + jax.lax.psum(x, axes)
        return x

    mesh = end.sharding(P()).mesh
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    return jax.jit(mapped)


SUBSETS = (
    "one", "pair", "first half", "last half", "middle", "three", "six", "grid", "tp"
)  # fmt: skip


def cycles(devices: Sequence[Any], is_quick: bool) -> None:
    """The part `cycles`: a walk over subsets of the devices, in an order that is always the same.

    It begins on small subsets, so that their communicators exist before those of larger ones.
    """
    ends = ends_of(devices)
    names = [name for name in SUBSETS if name in ends]
    num_hops, dtypes = (4, ("float8_e5m2",)) if is_quick else (300, DTYPES[:4])
    tree = {d: random_bits(d) for d in dtypes}
    programs: dict[tuple[str, str], nereus_jax.TransitionProgram] = {}
    steps = {name: train_like(ends[name]) for name in names}
    rng = np.random.default_rng(0)
    here, state = names[0], put(tree, ends[names[0]])
    with checking(f"{num_hops} transitions between {len(names)} subsets") as row:
        for hop in range(num_hops):
            others = [n for n in names if n != here] or names
            there = others[hop] if hop < len(others) else others[int(rng.integers(len(others)))]
            print(json.dumps({"begin": f"hop {hop}: {here} -> {there}"}), flush=True)
            if (here, there) not in programs:
                programs[here, there] = nereus_jax.TransitionProgram(
                    state, ends[there].shardings(tree), path="collective", donate=hop % 2 == 0
                )
            state = programs[here, there](state)
            end = ends[there]
            n = len(end.devices)
            x = jax.device_put(np.ones((n, 4), np.float32), end.sharding(P(AXES)))
            summed = np.asarray(steps[there](x))
            factor = (1 + end.tp) * (1 + end.dp) * (1 + end.pp) * (1 + n)
            assert (summed == factor).all(), f"sums on {there} are {summed[:, 0]}, not {factor}"
            here = there
        wrong = differing(state, tree, ends[here])
        assert not wrong, f"not bit-equal after {num_hops} transitions: {wrong}"
        row["bytes"] = sum(p.wire_bytes for p in programs.values())
        row["programs"] = len(programs)


SPEED = {
    "tp -> pp": ("tp", "pp"),
    "dp -> tp": ("dp", "tp"),
    "first half -> all": ("first half", "tp"),
    "all -> first half": ("pp", "first half"),
    "half -> other half": ("first half", "last half"),
    "park": ("one", "one"),
}
QUICK_SPEED = 3


@functools.cache
def generator(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[], jax.Array]:
    """Makes an array whose entries follow from their place: the same under every sharding."""

    def make() -> jax.Array:
        at = [jax.lax.broadcasted_iota(jnp.uint32, shape, d) for d in range(len(shape))]
        mixed = (at[0] * 131 + at[1]) * 8191 + at[2]
        return ((mixed * jnp.uint32(2654435761)) >> 16).astype(jnp.float32)

    return jax.jit(make, out_shardings=sharding)


@jax.jit
def is_equal(x: jax.Array, y: jax.Array) -> jax.Array:
    return (x == y).all()


def peak_bytes(devices: Sequence[Any]) -> int | None:
    """The most that was in use on a device so far; None where the backend does not count it."""
    stats = [device.memory_stats() for device in devices]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks) if peaks else None


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median of some runs, each until its results are there."""
    found: list[float] = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start_s)
    return statistics.median(found)


def check_speed(name: str, devices: Sequence[Any], mib: int, repeats: int) -> Row:
    """Times a transition of `mib` MiB a device at the smaller end.

    The donating program runs first: its peak is the lower one, and its first run pays for the
    communicators.
    """
    source, target = (ends_of(devices)[e] for e in SPEED[name])
    if name == "park":
        target = dataclasses.replace(target, memory_kind="pinned_host")
    num_leaves, rows, columns = 8, 8, 1024
    smaller = min(len(set(e.devices)) // e.dp for e in (source, target))
    size = mib * (1 << 20) * smaller // (4 * num_leaves * rows * columns)
    shape = rows, max(size // 8, 1) * 8, columns
    tree = {f"leaf {i}": np.broadcast_to(np.float32(0), shape) for i in range(num_leaves)}
    held, wanted = source.shardings(tree), target.shardings(tree)

    def make() -> dict[str, jax.Array]:
        return {n: generator(shape, held[n])() for n in tree}

    state = make()
    donating = nereus_jax.TransitionProgram(state, wanted, donate=True)
    donating.compile()
    before = peak_bytes(devices)
    start_s = time.perf_counter()
    moved = jax.block_until_ready(donating(state))
    first_s = time.perf_counter() - start_s
    peak_donating = peak_bytes(devices)
    if name != "park":  # host memory cannot be compared on the device
        for leaf, array in moved.items():
            same = is_equal(array, generator(shape, wanted[leaf])())
            assert bool(same), f"{leaf} is not what it was"
    del moved, state

    state = make()
    program = nereus_jax.TransitionProgram(state, wanted)
    ours_s = seconds(lambda: program(state), repeats)
    peak = peak_bytes(devices)
    start_s = time.perf_counter()
    jax.block_until_ready(jax.device_put(state, wanted))
    put_first_s = time.perf_counter() - start_s
    put_s = seconds(lambda: jax.device_put(state, wanted), repeats)
    cost = donating.cost
    num_bytes = donating.wire_bytes or sum(x.nbytes for x in state.values())
    return {
        "path": donating.path,
        "bytes": num_bytes,
        "seconds": ours_s,
        "GB/s": num_bytes / ours_s / 1e9,
        "device_put_s": put_s,
        "compile_s": cost.compile_s,
        "set_up_s": cost.set_up_s,
        "first_s": first_s,
        "device_put_first_s": put_first_s,
        "old_block_bytes": sum(math.prod(s.shard_shape(shape)) * 4 for s in held.values()),
        "new_block_bytes": sum(math.prod(s.shard_shape(shape)) * 4 for s in wanted.values()),
        "peak_before_bytes": before,
        "peak_donating_bytes": peak_donating,
        "peak_bytes": peak,
        "peak_device_put_bytes": peak_bytes(devices),
    }


def speed(devices: Sequence[Any], names: Sequence[str], mib: int, repeats: int) -> None:
    """The part `speed`."""
    ends = ends_of(devices)
    for name in names:
        if set(SPEED[name]) <= set(ends):
            with checking(name) as row:
                row |= check_speed(name, devices, mib, repeats)


@dataclasses.dataclass(frozen=True)
class Part:
    """What one child process does."""

    name: str
    arguments: tuple[str, ...]
    xla_flags: str = ""


def parts_of(is_quick: bool) -> list[Part]:
    """All of them; but for --quick, each timed transition has a fresh process."""
    groups = [list(SPEED)[-QUICK_SPEED:]] if is_quick else [[name] for name in SPEED]
    return [
        Part("values", ("--part=values",)),
        Part("cycles, splitting", ("--part=cycles",), f"{SPLITTING}true"),
        Part("cycles, no splitting", ("--part=cycles",), f"{SPLITTING}false"),
        *(Part("speed", ("--part=speed", *(f"--case={n}" for n in group))) for group in groups),
    ]


def run_part(part: Part, arguments: Sequence[str], timeout_s: float) -> list[Row]:
    """Its checks; one that did not end, for whatever reason, is among them as failed."""
    env = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {part.xla_flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # NCCL takes memory of its own
    }
    command = [sys.executable, __file__, *arguments, *part.arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with subprocess.Popen(command, stdout=out, stderr=err, env=env) as process:
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
                process.kill()
        out.seek(0)
        lines = [json.loads(line) for line in out if line.startswith("{") and line.endswith("}\n")]
        err.seek(0)
        trouble = err.read()[-2000:]
    rows = [{"part": part.name} | line for line in lines if "check" in line]
    if code != 0:
        begun = [line["begin"] for line in lines if "begin" in line] or ["the start"]
        what = f"no end after {timeout_s:g} s" if code is None else f"exit code {code}"
        error = f"{what} in: {begun[-1]}\n{trouble}"
        rows.append({"part": part.name, "check": begun[-1], "ok": False, "error": error})
    return rows


COLUMNS = (
    "part", "check", "ok", "bytes", "seconds", "GB/s", "device_put_s", "set_up_s", "first_s",
    "peak_donating_bytes", "peak_bytes", "total_s",
)  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """The rows, for people."""

    def text(value: Any) -> str:
        if isinstance(value, bool):
            return "ok" if value else "FAILED"
        return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)

    cells = [list(COLUMNS), *([text(row.get(c)) for c in COLUMNS] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def run_as_child(flags: argparse.Namespace) -> None:
    """One part, in this process."""
    jax.config.update("jax_platforms", flags.platform)
    if flags.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", flags.devices or 8)
    found = jax.devices()[: flags.devices]
    devices = found[: 1 << min(len(found).bit_length() - 1, 3)]
    if flags.part == "values":
        values(devices, flags.quick)
    elif flags.part == "cycles":
        cycles(devices, flags.quick)
    else:
        mib = flags.mib or (1 if flags.platform == "cpu" else 1024)
        speed(devices, flags.case, mib, repeats=3 if flags.quick else 7)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all parts, or as a child one of them."""
    parser = argparse.ArgumentParser(description="Checks and times transfers between devices.")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--devices", type=int, help="use the first so many; on the CPU 8")
    parser.add_argument("--mib", type=int, help="of a transition that is timed, on a device")
    parser.add_argument("--quick", action="store_true", help="a few of each, small")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, of each part")
    parser.add_argument("--part", choices=("values", "cycles", "speed"), help=argparse.SUPPRESS)
    parser.add_argument("--case", action="append", default=[], help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.part:
        run_as_child(flags)
        return 0
    passed_on = [f"--platform={flags.platform}", *(["--quick"] if flags.quick else [])]
    passed_on += [f"--devices={flags.devices}"] if flags.devices else []
    passed_on += [f"--mib={flags.mib}"] if flags.mib else []
    rows: list[Row] = []
    for part in parts_of(flags.quick):
        rows += run_part(part, passed_on, flags.timeout)
    print(table(rows))
    for row in (r for r in rows if not r["ok"]):
        print(f"\nFAILED {row['part']}: {row['check']}\n{row['error']}")
    if flags.json:
        flags.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows and all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
