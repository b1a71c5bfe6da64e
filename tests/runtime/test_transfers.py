"""On 8 devices, both paths bring every bit to where it is wanted, and move no byte more."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tests.runtime.transfer_cases import (
    P,
    check_layouts,
    check_transfer,
    check_value,
    end,
    layouts,
    make_transfer,
    noise,
    place,
    sharding,
)

DTYPES = [
    "float32", "bfloat16", "float16", "int8", "bool", "uint32", "complex64", "float8_e4m3fn",
    "float8_e5m2",
]  # fmt: skip

# Several leaves take longer to compile; a quarter of the examples of the profile.
FEWER_EXAMPLES = settings().max_examples // 4


@st.composite
def shardings(draw: st.DrawFn, num_dims: int) -> NamedSharding:
    """Some of the devices in any order, as a mesh of up to three axes, some of which cut dims."""
    devices = draw(st.permutations(jax.devices()))
    sizes = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda x: math.prod(x) <= 8)
    )
    names = "abc"[: len(sizes)]
    axes: list[list[str]] = [[] for _ in range(num_dims)]
    for name in draw(st.permutations(names)):
        dim = draw(st.integers(-1, num_dims - 1))
        if dim >= 0:
            axes[dim].append(name)
    spec = PartitionSpec(*[tuple(a) if a else None for a in axes])
    chosen = devices[: math.prod(sizes)]
    return sharding(spec, chosen, **dict(zip(names, sizes, strict=True)))


@st.composite
def ends(draw: st.DrawFn) -> tuple[tuple[int, ...], NamedSharding, NamedSharding]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return shape, draw(shardings(len(shape))), draw(shardings(len(shape)))


@given(ends(), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_any_sharding_to_any_other_and_back(
    case: tuple[tuple[int, ...], NamedSharding, NamedSharding], dtype: str, seed: int
) -> None:
    shape, before, after = case
    value = noise(shape, dtype, seed)
    source = place(value, before)
    there = check_transfer([value], [source], [end(value, after)])
    moved = there.run([source])
    back = make_transfer(moved, [end(value, before)], [shape], path="auto")
    check_value(back.run(moved)[0], value)
    check_value(source, value)


@settings(max_examples=FEWER_EXAMPLES)
@given(ends(), ends(), st.sampled_from([48, 200, 1 << 20]), st.booleans())
def test_leaves_of_several_classes_at_once(
    one: tuple[tuple[int, ...], NamedSharding, NamedSharding],
    other: tuple[tuple[int, ...], NamedSharding, NamedSharding],
    max_inflight_bytes: int,
    share: bool,
) -> None:
    leaves = [(*one, "float32"), (*other, "int8"), (*one, "bfloat16")]
    values = [noise(shape, dtype, i) for i, (shape, _, _, dtype) in enumerate(leaves)]
    sources = [place(v, leaf[1]) for v, leaf in zip(values, leaves, strict=True)]
    targets = [end(v, leaf[2]) for v, leaf in zip(values, leaves, strict=True)]
    options = {"max_inflight_bytes": max_inflight_bytes, "share": share}
    check_transfer(values, sources, targets, **options)


LAYOUT_PAIRS = list(itertools.permutations(layouts(8), 2))
HANDFUL = [((2, 2, 2), (1, 2, 4)), ((1, 2, 4), (8, 1, 1)), ((8, 1, 1), (1, 4, 2))]


def test_some_layouts_of_eight_devices() -> None:
    assert set(HANDFUL) <= set(LAYOUT_PAIRS)
    assert check_layouts(HANDFUL, (8, 16, 32)) == 2 * len(HANDFUL)


@pytest.mark.slow
def test_all_layouts_of_eight_devices() -> None:
    assert len(LAYOUT_PAIRS) == 90
    assert check_layouts(LAYOUT_PAIRS, (8, 16, 32)) == 180


@pytest.mark.parametrize(
    ("before", "after", "wire_item_bytes"),
    [("float32", "bfloat16", 2), ("bfloat16", "float32", 2), ("int8", "float32", 1)],
)
@pytest.mark.parametrize("first", [0, 4])
def test_a_cast_travels_in_the_smaller_dtype(
    before: str, after: str, wire_item_bytes: int, first: int
) -> None:
    value = (np.arange(-64, 64, dtype=np.float32).reshape(8, 16) * 1.01).astype(before)
    devices = jax.devices()
    source = place(value, sharding(P("x"), devices[:4], x=4))
    target = end(value, sharding(P(None, "x"), devices[first : first + 4], x=4), after)
    transfer = check_transfer([value], [source], [target])
    lacking = 128 if first else 128 - 4 * 8  # on the same devices each has 8 elements of its own
    assert transfer.schedule.wire_bytes == lacking * wire_item_bytes


@pytest.mark.parametrize("first", [0, 4])
def test_the_number_of_programs_does_not_grow_with_the_leaves(first: int) -> None:
    devices = jax.devices()
    before = sharding(P("y", "x"), devices[:4], y=2, x=2)
    after = sharding(P("x", "y"), devices[first : first + 4], y=1, x=4)
    counts = set()
    for num_leaves in (1, 6):
        shapes = [(4, 4 + 2 * (i % 3)) for i in range(num_leaves)]
        values = [noise(s, "float32", i) for i, s in enumerate(shapes)]
        sources = [place(v, before) for v in values]
        transfer = check_transfer(values, sources, [end(v, after) for v in values])
        collective = transfer.collective
        assert collective is not None
        counts.add(tuple(p.name for p in collective.programs))
    (names,) = counts
    assert "first" in names and len(names) <= (6 if first else 2)


@pytest.mark.parametrize("first", [0, 4])
def test_many_small_groups(first: int) -> None:
    devices = jax.devices()
    value = noise((8, 40), "float32")
    source = place(value, sharding(P("x"), devices[:4], x=4))
    target = end(value, sharding(P(None, "x"), devices[first : first + 4], x=4))
    transfer = check_transfer([value], [source], [target], max_inflight_bytes=64)
    assert sum(len(b.groups) for b in transfer.schedule.batches) > 8
    check_value(make_transfer([source], [target]).run([source])[0], value)


def test_a_transfer_runs_again_with_other_values() -> None:
    devices = jax.devices()
    before, after = sharding(P("x"), devices[:4], x=4), sharding(P(None, "x"), devices[4:], x=4)
    values = [noise((8, 8), "float32", seed) for seed in range(3)]
    sources = [place(v, before) for v in values]
    transfer = make_transfer(sources[:1], [end(values[0], after)])
    moved = [transfer.run([x])[0] for x in sources]
    for got, value in zip(moved, values, strict=True):
        check_value(got, value)
    assert transfer.cost.compile_s > 0 and transfer.cost.first_run_s > 0
    assert transfer.cost.exposed_compile_s == transfer.cost.compile_s


def test_a_node_receives_a_box_once_and_passes_it_on() -> None:
    devices = jax.devices()
    value = noise((8, 12), "float32")
    source = place(value, sharding(P("x"), devices[:4], y=2, x=2))
    names = make_transfer([source], [end(value, sharding(P(), x=8))]).schedule.devices
    nodes = {device: i // 4 for i, device in enumerate(names)}
    for chosen in (devices[4:], devices, devices[2:]):
        target = end(value, sharding(P(), chosen, x=len(chosen)))
        transfer = check_transfer([value], [source], [target], nodes=nodes)
        pairs = transfer.schedule.bytes_by_pair()
        assert any(e.forwards for e in transfer.schedule.exchanges)
        assert sum(n for (a, b), n in pairs.items() if nodes[a] != nodes[b]) == value.nbytes
