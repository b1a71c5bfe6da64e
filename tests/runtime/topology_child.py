"""Transfers between 8 H100s that are not there: `topology_child.py compiled|lowered`.

`compiled` takes XLA's compiler for GPUs, which comes with jax's CUDA plugin and needs no GPU for
it; `lowered` stops at StableHLO for GPUs, which every jax makes. Prints one JSON row for each case.
"""

import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.transfer import TransferSchedule
from nereus_jax.planning.transfers import MAX_INFLIGHT_BYTES, plan_transfer
from nereus_jax.runtime.compile_only import compile_only_devices
from nereus_jax.runtime.executor import CollectiveTransfer
from nereus_jax.runtime.tilings import Tiler
from nereus_jax.testing import collective_wire_bytes

NUM_GPUS = 8

P = PartitionSpec
# The leaves of a model in training: layers, vocabulary, ZeRO and low precision.
LEAVES: dict[str, tuple[tuple[int, ...], str, PartitionSpec]] = {
    "layers": ((8, 1536, 2048), "bfloat16", P("pp", None, "tp")),
    "moments": ((8, 1536, 2048), "float32", P("pp", "dp", "tp")),
    "embedding": ((12288, 512), "float32", P(("pp", "tp"))),
    "scales": ((2048,), "bfloat16", P("tp")),
    "quantized": ((8, 768, 2048), "float8_e4m3fn", P("pp", None, "tp")),
    "mask": ((8, 64), "bool", P("pp")),
    "scaled": ((12288, 64), "float8_e4m3", P(("pp", "tp"))),
    "step": ((), "int32", P()),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Degrees, and the numbers of the devices; default: the first ones."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    devices: tuple[int, ...] = ()

    def shardings(self, devices: Sequence[Any]) -> dict[str, NamedSharding]:
        shape = (self.dp, self.pp, self.tp)
        numbers = self.devices or range(math.prod(shape))
        chosen = np.array([devices[i] for i in numbers], dtype=object).reshape(shape)
        mesh = Mesh(chosen, ("dp", "pp", "tp"), axis_types=(AxisType.Auto,) * 3)
        return {name: NamedSharding(mesh, spec) for name, (_, _, spec) in LEAVES.items()}


@dataclasses.dataclass(frozen=True)
class Case:
    source: Layout
    target: Layout
    max_inflight_bytes: int = MAX_INFLIGHT_BYTES
    cast: bool = False


CASES = {
    "dp to pp": Case(Layout(dp=2, pp=2, tp=2), Layout(pp=4, tp=2)),
    "tp to pp": Case(Layout(tp=8), Layout(pp=2, tp=4)),
    "pp to tp": Case(Layout(pp=4, tp=2), Layout(pp=2, tp=4)),
    "to tp alone": Case(Layout(dp=2, pp=2, tp=2), Layout(tp=8)),
    "replicate": Case(Layout(tp=8), Layout(dp=8)),
    "cut replicas": Case(Layout(dp=8), Layout(pp=2, tp=4)),
    "other order": Case(Layout(tp=8), Layout(tp=8, devices=(7, 6, 5, 4, 3, 2, 1, 0))),
    "fewer devices": Case(Layout(pp=4, tp=2), Layout(pp=2, tp=2)),
    "more devices": Case(Layout(tp=4), Layout(tp=8)),
    "6 to 8": Case(Layout(dp=3, tp=2), Layout(pp=2, tp=4)),
    "other devices": Case(Layout(tp=4), Layout(pp=2, tp=2, devices=(4, 5, 6, 7))),
    "same blocks elsewhere": Case(Layout(pp=2, tp=2), Layout(pp=2, tp=2, devices=(4, 5, 6, 7))),
    "some others": Case(Layout(pp=2, tp=2), Layout(tp=4, devices=(2, 3, 4, 5))),
    "cast": Case(Layout(tp=4), Layout(pp=2, tp=4), cast=True),
    "groups": Case(Layout(dp=2, pp=2, tp=2), Layout(pp=4, tp=2), max_inflight_bytes=8 << 20),
    "groups of others": Case(Layout(pp=4, tp=2), Layout(tp=4), max_inflight_bytes=8 << 20),
}


def schedule_of(case: Case, devices: Sequence[Any]) -> TransferSchedule:
    tiler = Tiler({device: DeviceId(0, i) for i, device in enumerate(devices)})
    source, target = case.source.shardings(devices), case.target.shardings(devices)
    narrow: dict[str, str] = {"float32": "bfloat16"} if case.cast else {}
    return plan_transfer(
        [
            tiler.tile(name, shape, dtype, source[name])
            for name, (shape, dtype, _) in LEAVES.items()
        ],
        [
            tiler.tile(name, shape, narrow.get(dtype, dtype), target[name])
            for name, (shape, dtype, _) in LEAVES.items()
        ],
        max_inflight_bytes=case.max_inflight_bytes,
    )


def new_block_bytes(schedule: TransferSchedule) -> int:
    """The new blocks on a device, if it gets one of every leaf."""
    return sum(math.prod(t.local_shape) * t.item_bytes for t in schedule.targets)


def row(name: str, devices: Sequence[Any]) -> dict[str, Any]:
    """What the programs of a case do, as their text says, and what the schedule wanted."""
    case = CASES[name]
    schedule = schedule_of(case, devices)
    handles = {DeviceId(0, i): device for i, device in enumerate(devices)}
    start_s = time.perf_counter()
    transfer = CollectiveTransfer(schedule, {d: handles[d] for d in schedule.devices})
    wire_bytes: dict[str, int] = {}
    buffer_bytes, has_float8 = 0, False
    for program in transfer.programs:
        text, count = program.compiled.as_text(), len(program.on.devices)
        assert text is not None
        read = wire_bytes_of_stablehlo if "stablehlo." in text else collective_wire_bytes
        found = read(text, count)
        wire_bytes[program.name] = wire_bytes.get(program.name, 0) + found
        permutes = [x for x in text.splitlines() if re.search(PERMUTES, x)]
        has_float8 |= any("f8" in x.lower() for x in permutes)
        memory = program.compiled.memory_analysis()
        if program.name == "permute" and memory is not None:
            sizes = memory.argument_size_in_bytes + memory.output_size_in_bytes
            buffer_bytes = max(buffer_bytes, sizes)
    return {
        "case": name,
        "programs": [p.name for p in transfer.programs],
        "groups": sum(len(b.groups) for b in schedule.batches),
        "exchanges": len(schedule.exchanges),
        "schedule_bytes": schedule.wire_bytes,
        "first_bytes": 4 * sum(len(p) for p in {e.pairs for e in schedule.exchanges}),
        "wire_bytes": wire_bytes,
        "sends_float8": has_float8,
        "temp_bytes": transfer.temp_bytes,
        "buffer_bytes": buffer_bytes,
        "new_block_bytes": new_block_bytes(schedule),
        "max_inflight_bytes": case.max_inflight_bytes,
        "seconds": round(time.perf_counter() - start_s, 2),
    }


PERMUTES = r"""collective[-_]permute(-start)?"?\("""
PERMUTE = re.compile(
    r'"stablehlo\.collective_permute"\(.*?source_target_pairs = dense<(.*?)> : tensor<(\d+)x2xi64>'
    r".*?-> tensor<([^>]*)>"
)
OTHER_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "broadcast")


def wire_bytes_of_stablehlo(text: str, num_devices: int) -> int:
    """Bytes that devices send each other; another reader than that of compiled programs."""
    assert f"num_partitions = {num_devices}" in text
    for name in OTHER_COLLECTIVES:
        assert f'"stablehlo.{name}"' not in text, name
    found = PERMUTE.findall(text)
    assert len(found) == text.count("stablehlo.collective_permute")
    total = 0
    for pairs, count, kind in found:
        numbers = [int(n) for n in re.findall(r"\d+", pairs)]
        assert len(numbers) == 2 * int(count)
        sent = sum(a != b for a, b in zip(numbers[::2], numbers[1::2], strict=True))
        *dims, item = kind.split("x")
        bits = re.search(r"\d+", item)  # i1, ui8, bf16, f8E4M3FN
        assert bits is not None
        total += sent * math.prod(int(n) for n in dims) * max(int(bits[0]) // 8, 1)
    return total


class Lowered:
    """In the place of `jax.jit`: what would be compiled for the CPU is lowered for GPUs."""

    def __init__(self, function: Any, **how: Any) -> None:
        self._jitted = JIT(function, **how)
        self._text = ""

    def lower(self, *arguments: Any) -> "Lowered":
        lowered = self._jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
        self._text = lowered.as_text()
        return self

    def compile(self) -> "Lowered":
        return self

    def as_text(self) -> str:
        return self._text

    def memory_analysis(self) -> None:
        """Nothing is known of it before compilation."""


JIT = jax.jit


def main(how: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    if how == "lowered":
        jax.config.update("jax_num_cpu_devices", NUM_GPUS)
        with mock.patch.object(jax, "jit", Lowered):
            for name in CASES:
                print(json.dumps(row(name, jax.devices())), flush=True)
        return
    devices = compile_only_devices(NUM_GPUS)
    assert len(devices) == NUM_GPUS
    for name in CASES:
        print(json.dumps(row(name, devices)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
