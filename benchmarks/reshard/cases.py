"""What is moved: the layouts of the wire part, the tree and the pairs of the time and memory parts.

Needs jax and numpy only: the child that measures Tunix has no nereus_jax.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

AXES = ("dp", "pp", "tp")
SPECS = (P("pp", None, "tp"), P("pp", "dp", "tp"))
SHAPE = (24, 24, 24)  # every divisor of 8 and of 12 cuts it
DTYPES = ("float32", "bfloat16", "int8")
KINDS = ("subset", "superset", "overlapping", "disjoint", "reordered")


@dataclasses.dataclass(frozen=True)
class End:
    """One end of a move: a mesh and how the array is cut over it."""

    layout: tuple[int, ...]
    devices: tuple[int, ...]
    spec: P
    axes: tuple[str, ...] = AXES

    def sharding(self) -> NamedSharding:
        devices = [jax.devices()[i] for i in self.devices]
        return NamedSharding(Mesh(np.array(devices).reshape(self.layout), self.axes), self.spec)


@dataclasses.dataclass(frozen=True)
class Move:
    """One array from one end to another."""

    name: str
    source: End
    target: End
    dtype: str = "float32"


def layouts(num_devices: int) -> list[tuple[int, int, int]]:
    """All (dp, pp, tp) that use all devices."""
    cuts = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    return [
        (dp, pp, num_devices // (dp * pp))
        for dp in cuts
        for pp in cuts
        if num_devices % (dp * pp) == 0
    ]


def layout_moves(num_devices: int, num_layouts: int | None = None) -> list[Move]:
    """All ordered pairs of layouts, with each of the two specs."""
    every, devices = layouts(num_devices)[:num_layouts], tuple(range(num_devices))
    return [
        Move(
            f"{num_devices} devices, {s} -> {t}, {spec}",
            End(s, devices, spec),
            End(t, devices, spec),
        )
        for spec in SPECS
        for s in every
        for t in every
    ]


def random_moves(num_devices: int, count: int, seed: int = 0) -> list[Move]:
    """Pairs whose ends lie on other devices, or on the same in another order."""
    rng = np.random.default_rng([seed, num_devices])
    moves: list[Move] = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        source, target = _device_sets(rng, num_devices, kind)
        before, after = _random_end(rng, source), _random_end(rng, target)
        dtype = DTYPES[int(rng.integers(len(DTYPES)))]
        moves.append(Move(f"{num_devices} devices, {kind} {number}", before, after, dtype))
    return moves


def _device_sets(
    rng: np.random.Generator, num_devices: int, kind: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = [n for n in range(1, num_devices + 1) if SHAPE[0] % n == 0]
    while True:
        m, n = (int(x) for x in rng.choice(sizes, 2))
        a, b = (tuple(int(d) for d in rng.permutation(num_devices)[:k]) for k in (m, n))
        if kind == "reordered":
            b = tuple(int(d) for d in rng.permutation(a))
        common = set(a) & set(b)
        nested = common in (set(a), set(b))
        fits = {
            "subset": common == set(b) != set(a),
            "superset": common == set(a) != set(b),
            "overlapping": bool(common) and not nested,
            "disjoint": not common,
            "reordered": a != b,
        }
        if fits[kind]:
            return a, b


def _random_end(rng: np.random.Generator, devices: Sequence[int]) -> End:
    """A random layout of three axes, each of which cuts a random dim, or none."""
    every = layouts(len(devices))
    layout = every[int(rng.integers(len(every)))]
    dims: list[list[str]] = [[], [], []]
    for axis in rng.permutation(AXES):
        dim = int(rng.integers(4))  # 3: replicated over this axis
        if dim < 3:
            dims[dim].append(str(axis))
    return End(layout, tuple(devices), P(*[tuple(d) or None for d in dims]))


def tree_specs(is_small: bool) -> dict[str, tuple[tuple[int, ...], P]]:
    """Shapes and specs of a decoder's parameters, cut by fsdp and tp as Tunix cuts its Llama."""
    layers, embed, mlp, heads, vocab = (
        (2, 256, 512, 16, 1024) if is_small else (12, 768, 2048, 16, 16384)
    )
    head = embed // heads
    qkv, gate = ((embed, heads, head), P("fsdp", "tp", None)), ((embed, mlp), P("fsdp", "tp"))
    layer = {
        **{"q": qkv, "k": qkv, "v": qkv, "o": ((heads, head, embed), P("tp", None, "fsdp"))},
        **{"gate": gate, "up": gate, "down": ((mlp, embed), P("tp", "fsdp"))},
        **{"norm_1": ((embed,), P("tp")), "norm_2": ((embed,), P("tp"))},
    }
    return {
        "embed": ((vocab, embed), P("tp", "fsdp")),
        "head": ((embed, vocab), P("fsdp", "tp")),
        "norm": ((embed,), P("tp")),
        **{f"layer_{i}.{k}": v for i in range(layers) for k, v in layer.items()},
    }


Place = tuple[tuple[int, int], tuple[int, ...]]
"""(fsdp, tp) and the devices."""

ALL, LOW, HIGH = tuple(range(8)), tuple(range(4)), tuple(range(4, 8))
PAIRS: dict[str, tuple[Place, Place]] = {
    "fsdp8 → tp8": (((8, 1), ALL), ((1, 8), ALL)),
    "fsdp4·tp2 → fsdp2·tp4": (((4, 2), ALL), ((2, 4), ALL)),
    "8 → 4 devices": (((8, 1), ALL), ((4, 1), LOW)),
    "4 → 8 devices": (((4, 1), LOW), ((8, 1), ALL)),
    "8 → 4 devices, fsdp → tp": (((8, 1), ALL), ((1, 4), LOW)),
    "4 → other 4 devices, fsdp → tp": (((4, 1), LOW), ((1, 4), HIGH)),
    "4 → other 4 devices, same layout": (((4, 1), LOW), ((4, 1), HIGH)),
    "nothing moves": (((8, 1), ALL), ((8, 1), ALL)),
}
RELOCATION = "4 → other 4 devices, same layout"
UNMOVED = "nothing moves"
QUICK_PAIRS = ("fsdp8 → tp8", "8 → 4 devices, fsdp → tp")


def tree_shardings(place: Place, is_small: bool) -> dict[str, NamedSharding]:
    layout, devices = place
    mesh = Mesh(np.array([jax.devices()[i] for i in devices]).reshape(layout), ("fsdp", "tp"))
    return {k: NamedSharding(mesh, spec) for k, (_, spec) in tree_specs(is_small).items()}


def tree_abstract(place: Place, is_small: bool) -> dict[str, jax.ShapeDtypeStruct]:
    shardings = tree_shardings(place, is_small)
    return {
        k: jax.ShapeDtypeStruct(shape, np.float32, sharding=shardings[k])
        for k, (shape, _) in tree_specs(is_small).items()
    }


def tree_bytes(is_small: bool) -> int:
    return sum(4 * math.prod(shape) for shape, _ in tree_specs(is_small).values())


def lacking_bytes(x: Any, source: Sharding, target: Sharding) -> int:
    """What the target's devices lack, counted element by element."""
    held, lacking = source.devices_indices_map(x.shape), 0
    for device, index in target.devices_indices_map(x.shape).items():
        wanted = np.zeros(x.shape, bool)
        wanted[index] = True
        if device in held:
            wanted[held[device]] = False
        lacking += int(wanted.sum())
    return lacking * x.dtype.itemsize
