"""Arrays to move, and an oracle of what has to move, for the tests of transfers."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nereus_jax.core.devices import DeviceId
from nereus_jax.planning.transfers import plan_transfer
from nereus_jax.runtime.parking import is_parked
from nereus_jax.runtime.tilings import Tiler
from nereus_jax.runtime.transfers import Path, Transfer
from nereus_jax.runtime.world import take_stock
from nereus_jax.testing import collective_wire_bytes

LAYOUT_AXES = ("dp", "pp", "tp")
P = PartitionSpec


def sharding(
    spec: PartitionSpec, devices: Sequence[Any] | None = None, **axes: int
) -> NamedSharding:
    """A spec on a mesh of some devices (all of them, if not given) with these axes."""
    chosen = np.array(jax.devices() if devices is None else devices, dtype=object)
    return NamedSharding(Mesh(chosen.reshape(tuple(axes.values())), tuple(axes)), spec)


def noise(shape: Sequence[int], dtype: str, seed: int = 0) -> np.ndarray:
    """Any bits: negative zeros, infinities, subnormals, NaNs with payloads."""
    kind = jnp.dtype(dtype)
    rng = np.random.default_rng(seed)
    count = math.prod(shape)
    if kind == np.bool_:
        return rng.integers(0, 2, tuple(shape)).astype(bool)
    raw = rng.integers(0, 256, count * kind.itemsize, np.uint8)
    values = raw.view(kind).copy()
    if count > 1 and jnp.issubdtype(kind, jnp.floating):
        values[0], values[1] = -0.0, np.nan
    return values.reshape(tuple(shape))


def bits(x: Any) -> np.ndarray:
    """The bytes of an array, of its shape and one more dim."""
    values = np.ascontiguousarray(np.asarray(x))
    return values.reshape(*values.shape, 1).view(np.uint8)


def check_same(got: Any, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    np.testing.assert_array_equal(bits(got), bits(expected))


def check_value(got: jax.Array, expected: np.ndarray) -> None:
    """Every block of this process is that part of the value, and the padding is zero."""
    whole = np.zeros(got.shape, expected.dtype)
    whole[tuple(slice(n) for n in expected.shape)] = expected
    for shard in got.addressable_shards:
        check_same(shard.data, whole[shard.index])


def padded(shape: Sequence[int], on: NamedSharding) -> tuple[int, ...]:
    """The shape with every dim a multiple of its parts."""
    parts = [1] * len(shape)
    for dim, axes in enumerate(on.spec):
        names = axes if isinstance(axes, tuple) else (axes,)
        parts[dim] = math.prod(on.mesh.shape[a] for a in names if a is not None)
    return tuple(-(-n // p) * p for n, p in zip(shape, parts, strict=True))


def place(value: np.ndarray, on: NamedSharding) -> jax.Array:
    """A value, padded with zeros as far as its sharding needs."""
    whole = np.zeros(padded(value.shape, on), value.dtype)
    whole[tuple(slice(n) for n in value.shape)] = value
    array = jax.make_array_from_callback(whole.shape, on, lambda i: whole[i], dtype=value.dtype)
    check_value(array, value)
    return array


def end(array: np.ndarray | jax.Array, on: NamedSharding, dtype: Any = None) -> Any:
    """Where a value of this logical shape is wanted."""
    return jax.ShapeDtypeStruct(padded(array.shape, on), dtype or array.dtype, sharding=on)


def make_transfer(
    sources: Sequence[jax.Array],
    targets: Sequence[jax.ShapeDtypeStruct],
    logical_shapes: Sequence[tuple[int, ...]] | None = None,
    *,
    path: Path = "collective",
    donate: bool = False,
    **options: Any,
) -> Transfer:
    """A transfer; leaves are named by their number, `options` are those of `plan_transfer`."""
    handles = dict(take_stock().handles)
    tiler = Tiler({handle: device for device, handle in handles.items()})
    shapes = logical_shapes or [x.shape for x in sources]

    def tile(leaves: Sequence[Any]) -> list[Any]:
        return [
            tiler.tile(str(i), x.shape, str(x.dtype), x.sharding, shape)
            for i, (x, shape) in enumerate(zip(leaves, shapes, strict=True))
        ]

    schedule = plan_transfer(tile(sources), tile(targets), **options)
    used = {d: handles[d] for d in schedule.devices}
    parked = any(is_parked(x.sharding) for x in sources)
    return Transfer(schedule, targets, used, path=path, donate=donate, parked=parked)


def moved_bytes(transfer: Transfer) -> int:
    """What the compiled programs of a transfer say that they move."""
    collective = transfer.collective
    programs = collective.programs if collective is not None else ()
    return sum(
        collective_wire_bytes(p.compiled.as_text() or "", len(p.on.devices))
        for p in programs
        if p.name != "first"
    )


def lacking_bytes(
    sources: Sequence[jax.Array],
    targets: Sequence[jax.ShapeDtypeStruct],
    logical_shapes: Sequence[tuple[int, ...]] | None = None,
    lost: Iterable[Any] = (),
) -> int:
    """What the devices of the targets have not, by jax's own account of who holds what."""
    shapes = logical_shapes or [x.shape for x in sources]
    total = 0
    for source, target, shape in zip(sources, targets, shapes, strict=True):
        assert target.sharding is not None
        have = source.sharding.devices_indices_map(source.shape)
        want = target.sharding.devices_indices_map(target.shape)
        item_bytes = min(source.dtype.itemsize, target.dtype.itemsize)
        for device, wanted in want.items():
            total += item_bytes * _volume(shape, wanted)
            if device in have and device not in lost:
                total -= item_bytes * _volume(shape, wanted, have[device])
    return total


def _volume(shape: Sequence[int], *boxes: tuple[slice, ...]) -> int:
    masks = [np.zeros(tuple(shape), bool) for _ in boxes]
    for mask, box in zip(masks, boxes, strict=True):
        mask[box] = True
    return int(np.logical_and.reduce(masks).sum())


def check_transfer(
    values: Sequence[np.ndarray],
    sources: Sequence[jax.Array],
    targets: Sequence[jax.ShapeDtypeStruct],
    **options: Any,
) -> Transfer:
    """Both paths bring the values, and the programs move what is lacking and no more."""
    shapes = [v.shape for v in values]
    for path in ("host", "collective"):
        transfer = make_transfer(sources, targets, shapes, path=path, **options)
        for got, target, value in zip(transfer.run(sources), targets, values, strict=True):
            assert got.sharding == target.sharding
            check_value(got, value if value.dtype == target.dtype else value.astype(target.dtype))
    handles = take_stock().handles
    lost: Iterable[DeviceId] = options.get("lost", ())
    expected = lacking_bytes(sources, targets, shapes, [handles[d] for d in lost])
    assert moved_bytes(transfer) == transfer.schedule.wire_bytes == expected
    return transfer


def layouts(num_devices: int) -> list[tuple[int, ...]]:
    """All (dp, pp, tp) with this product."""
    sizes = range(1, num_devices + 1)
    return [x for x in itertools.product(sizes, repeat=3) if math.prod(x) == num_devices]


def check_layouts(pairs: Iterable[tuple[Any, Any]], shape: tuple[int, ...]) -> int:
    """Moves one array between layouts, by two specs; how many moves these were."""
    value = noise(shape, "float32")
    count = 0
    for (before, after), spec in itertools.product(
        pairs, (P("pp", None, "tp"), P("pp", "dp", "tp"))
    ):
        ends = [sharding(spec, **dict(zip(LAYOUT_AXES, x, strict=True))) for x in (before, after)]
        source = place(value, ends[0])
        check_transfer([value], [source], [end(value, ends[1])])
        count += 1
    return count
