"""Schedules that can be written down by hand, and one for a thousand devices."""

import math
import time
from collections.abc import Sequence

import pytest

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import DECODER_RULES, EmuSpec, LeafSpec, ShardingRules
from nereus_jax.core.errors import InfeasiblePlanError, LostStateError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.tiling import LeafTiling, tile_leaf
from nereus_jax.core.transfer import TransferSchedule
from nereus_jax.planning.transfers import plan_transfer

RULES = ShardingRules(
    mesh_axes={"layers": ("pp",), "heads": ("tp",), "vocab": ("pp", "tp")},
    axis_names=("dp", "pp", "tp"),
)


def pool(count: int, start: int = 0, per_host: int = 8) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(*divmod(i, per_host)) for i in range(start, start + count))


def leaf_of(*axes: str | None, shape: tuple[int, ...], dtype: str = "float32") -> LeafSpec:
    return LeafSpec(name="w", shape=shape, dtype=dtype, logical_axes=axes)


def tile(
    leaf: LeafSpec, mesh_shape: tuple[int, int, int], devices: Sequence[DeviceId] | None = None
) -> LeafTiling:
    chosen = pool(math.prod(mesh_shape)) if devices is None else tuple(devices)
    return tile_leaf(leaf, RULES, mesh_shape, chosen)


def sent(schedule: TransferSchedule) -> dict[tuple[int, int], int]:
    """Bytes from device to device, for devices of one host."""
    return {(a.index, b.index): n for (a, b), n in schedule.bytes_by_pair().items()}


def sent_by_device(schedule: TransferSchedule) -> dict[DeviceId, int]:
    totals = dict.fromkeys(schedule.devices, 0)
    for (sender, _), num_bytes in schedule.bytes_by_pair().items():
        totals[sender] += num_bytes
    return totals


def test_twice_as_many_tensor_parts() -> None:
    # [0:4] [4:8] -> [0:2] [2:4] [4:6] [6:8], 4 bytes each: 0 and 1 keep or get, 2 and 3 get.
    leaf = leaf_of("heads", shape=(8,))
    schedule = plan_transfer([tile(leaf, (1, 1, 2))], [tile(leaf, (1, 1, 4))])
    assert sent(schedule) == {(0, 1): 8, (1, 2): 8, (1, 3): 8}
    assert len(schedule.exchanges) == 2  # device 1 sends twice
    assert [schedule.devices[i].index for i in schedule.kept[0].copied] == [0]


def test_half_as_many_tensor_parts() -> None:
    leaf = leaf_of("heads", shape=(8,))
    schedule = plan_transfer([tile(leaf, (1, 1, 4))], [tile(leaf, (1, 1, 2))])
    assert sent(schedule) == {(1, 0): 8, (2, 1): 8, (3, 1): 8}


def test_replicas_that_stay_are_shared_and_new_ones_get_the_block() -> None:
    leaf = leaf_of("heads", shape=(8,), dtype="bfloat16")
    source, target = tile(leaf, (1, 1, 2)), tile(leaf, (2, 1, 2))
    schedule = plan_transfer([source], [target])
    assert schedule.kept[0].shared == (0, 1) and schedule.kept[0].receiving == (2, 3)
    assert sent(schedule) == {(0, 2): 8, (1, 3): 8}
    assert len(schedule.exchanges) == 1
    # Without sharing they get a copy of their own block, which moves nothing.
    copied = plan_transfer([source], [target], share=False)
    assert copied.kept[0].copied == (0, 1) and copied.kept[0].shared == ()
    assert sent(copied) == sent(schedule)


def test_nothing_moves_where_nothing_changes() -> None:
    leaf = leaf_of("heads", shape=(8,))
    schedule = plan_transfer([tile(leaf, (2, 1, 2))], [tile(leaf, (2, 1, 2))])
    assert schedule.batches == () and schedule.wire_bytes == 0
    assert schedule.kept[0].shared == (0, 1, 2, 3)


def test_a_leaf_that_zero_splits_over_the_replicas() -> None:
    # dp=4 parts of 2 elements each -> dp=2, tp=2 without ZeRO: everyone needs a half of 4.
    leaf = leaf_of("heads", shape=(8,))
    split = leaf.with_zero(RULES, (4, 1, 1))
    assert split.zero_dim == 0
    schedule = plan_transfer([tile(split, (4, 1, 1))], [tile(leaf, (2, 1, 2))])
    # Devices 0 and 2 want 0:4, devices 1 and 3 want 4:8; they hold 0:2, 2:4, 4:6, 6:8.
    assert sent(schedule) == {(1, 0): 8, (0, 2): 8, (1, 2): 8, (2, 1): 8, (3, 1): 8, (2, 3): 8}


def test_padding_of_a_vocabulary_is_never_sent() -> None:
    # 5 rows of 2: 4 parts of 2 rows, the last of padding alone -> 2 parts of 3 rows.
    leaf = leaf_of("vocab", None, shape=(5, 2), dtype="int8")
    four, two = tile(leaf, (1, 1, 4)), tile(leaf, (1, 1, 2))
    assert four.local_shape == (2, 2) and two.local_shape == (3, 2)
    assert four.box((3, 0)) == ((5, 5), (0, 2))
    assert sent(plan_transfer([four], [two])) == {(1, 0): 2, (2, 1): 2}
    # Back: device 1 has rows 3:5 and wants 2:4, device 2 wants row 4, device 3 nothing.
    assert sent(plan_transfer([two], [four])) == {(0, 1): 2, (1, 2): 2}


def test_layers_that_the_pipeline_does_not_divide() -> None:
    # 5 layers of 4 bytes: 3 + 2 -> 2 + 2 + 1.
    leaf = leaf_of("layers", None, shape=(5, 1))
    schedule = plan_transfer([tile(leaf, (1, 2, 1))], [tile(leaf, (1, 3, 1))])
    assert sent(schedule) == {(0, 1): 4, (1, 2): 4}
    parts = [p for e in schedule.exchanges for p in e.parts]
    assert sorted(start for p in parts for start in p.starts.tolist()) == [[2, 0], [4, 0]]


def test_a_cast_travels_in_the_smaller_dtype() -> None:
    wide, narrow = (leaf_of("heads", shape=(8,), dtype=d) for d in ("float32", "bfloat16"))
    for source, target in ((wide, narrow), (narrow, wide)):
        schedule = plan_transfer([tile(source, (1, 1, 1))], [tile(target, (1, 1, 2))])
        assert sent(schedule) == {(0, 1): 8}
        assert schedule.kept[0].shared == ()


def test_a_box_crosses_the_slow_link_once_and_is_cut_among_the_receivers() -> None:
    leaf = leaf_of(None, shape=(8,))
    source = tile(leaf, (2, 1, 1), pool(2))
    target = tile(leaf, (4, 1, 1), pool(4, start=8))
    schedule = plan_transfer([source], [target])
    pairs = schedule.bytes_by_pair()
    assert sum(n for (a, b), n in pairs.items() if a.host != b.host) == 32
    # Two senders share the work; each receiver gets a quarter and gives it to the three others.
    assert set(sent_by_device(schedule).values()) == {16, 24}
    assert {n for (a, b), n in pairs.items() if a.host == b.host} == {8}
    assert schedule.wire_bytes == 4 * 32
    assert [e.forwards for e in schedule.exchanges] == sorted(
        e.forwards for e in schedule.exchanges
    )


@pytest.mark.parametrize("num_new", [8, 16, 24])
@pytest.mark.parametrize("first_new", [0, 8])
def test_senders_share_the_load(num_new: int, first_new: int) -> None:
    # 8 replicas feed others, on hosts of their own or (host 0 being large) on the same one.
    leaf = leaf_of("layers", None, shape=(8, 16))
    old = pool(8)
    new = pool(num_new, start=8) if first_new else pool(8 + num_new, per_host=64)[8:]
    for mesh_shape in ((num_new, 1, 1), (num_new // 8, 8, 1), (num_new // 2, 2, 1)):
        schedule = plan_transfer([tile(leaf, (8, 1, 1), old)], [tile(leaf, mesh_shape, new)])
        by_device = sent_by_device(schedule)
        loads = [by_device[d] for d in old]
        assert max(loads) <= 1.5 * sum(loads) / len(loads)


def test_many_leaves_share_the_permutations_of_one() -> None:
    leaves = [leaf_of("heads", None, shape=(8, n)) for n in (1, 3, 5)] * 4
    ends = [tile(x, (2, 1, 4)) for x in leaves], [tile(x, (4, 1, 2)) for x in leaves]
    one = plan_transfer(ends[0][:1], ends[1][:1])
    many = plan_transfer(*ends)
    assert {e.pairs for e in many.exchanges} == {e.pairs for e in one.exchanges}
    assert len(many.exchanges) == len(one.exchanges)
    assert len(many.batches) == 1


def test_a_small_bound_cuts_boxes_into_slabs() -> None:
    leaf = leaf_of("heads", None, shape=(4, 6))
    source, target = tile(leaf, (1, 1, 1)), tile(leaf, (1, 1, 2))
    schedule = plan_transfer([source], [target], max_inflight_bytes=2 * 4 * 4)
    extents = [p.extent for e in schedule.exchanges for p in e.parts]
    assert extents == [(1, 4), (1, 2), (1, 4), (1, 2)]
    assert all(schedule.group_bytes(g) <= 32 for b in schedule.batches for g in b.groups)
    with pytest.raises(InfeasiblePlanError, match=r"no room for one element of 'w'.*at least 8"):
        plan_transfer([source], [target], max_inflight_bytes=6)


def test_another_shape_is_refused() -> None:
    one, other = (tile(leaf_of(None, shape=(n,)), (1, 1, 1)) for n in (3, 4))
    with pytest.raises(InfeasiblePlanError, match=r"'w' has shape \(3,\) but is wanted as \(4,\)"):
        plan_transfer([one], [other])


def test_survivors_send_in_the_place_of_lost_devices() -> None:
    leaf = leaf_of("heads", shape=(8,))
    source, target = tile(leaf, (2, 1, 2)), tile(leaf, (1, 1, 2))
    schedule = plan_transfer([source], [target], lost=[DeviceId(0, 0)])
    assert sent(schedule) == {(2, 0): 16}  # 0 lives again, empty
    with pytest.raises(LostStateError, match=r"holds \[4:8\] of 'w'.*on 0:1, 0:3; restore"):
        plan_transfer([source], [target], lost=[DeviceId(0, 1), DeviceId(0, 3)])


def test_what_is_lost_but_not_needed_is_no_error() -> None:
    leaf = leaf_of("vocab", shape=(5,))
    source = tile(leaf, (1, 1, 4))  # the last of 4 parts is padding
    schedule = plan_transfer([source], [tile(leaf, (1, 1, 2))], lost=[DeviceId(0, 3)])
    assert all(pair[0].index != 3 for pair in schedule.bytes_by_pair())


def llama_like() -> EmuSpec:
    layers, embed, heads, kv, head, mlp, vocab = 32, 4096, 32, 8, 128, 14336, 128256
    table: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
        "embed": ((vocab, embed), ("vocab", None)),
        "head": ((embed, vocab), (None, "vocab")),
        "final_norm": ((embed,), (None,)),
        "layers.norm1": ((layers, embed), ("layers", None)),
        "layers.norm2": ((layers, embed), ("layers", None)),
        "layers.q": ((layers, embed, heads, head), ("layers", None, "heads", None)),
        "layers.k": ((layers, embed, kv, head), ("layers", None, "kv_heads", None)),
        "layers.v": ((layers, embed, kv, head), ("layers", None, "kv_heads", None)),
        "layers.o": ((layers, heads, head, embed), ("layers", "heads", None, None)),
        "layers.gate": ((layers, embed, mlp), ("layers", None, "mlp")),
        "layers.up": ((layers, embed, mlp), ("layers", None, "mlp")),
        "layers.down": ((layers, mlp, embed), ("layers", "mlp", None)),
    }
    return EmuSpec(
        leaves=tuple(
            LeafSpec(name=name, shape=shape, dtype="bfloat16", logical_axes=axes)
            for name, (shape, axes) in table.items()
        )
    )


def volume(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(max(stop - start, 0) for start, stop in box)


def lacking_bytes(source: LeafTiling, target: LeafTiling) -> int:
    had = dict(zip(source.devices, source.positions, strict=True))
    total = 0
    for device, position in zip(target.devices, target.positions, strict=True):
        box = target.box(position)
        total += volume(box)
        if device in had:
            pairs = zip(box, source.box(had[device]), strict=True)
            total -= volume([(max(a, c), min(b, d)) for (a, b), (c, d) in pairs])
    return total * target.item_bytes


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ParallelLayout(16, 8, 8), ParallelLayout(64, 1, 16)),
        pytest.param(ParallelLayout(32, 4, 8), ParallelLayout(128, 1, 8), marks=pytest.mark.slow),
        pytest.param(ParallelLayout(8, 16, 8), ParallelLayout(7, 16, 8), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_thousand_devices_are_planned_in_seconds(
    before: ParallelLayout, after: ParallelLayout
) -> None:
    spec = llama_like()
    meshes = [layout.mesh_shape(8) for layout in (before, after)]
    tilings = [
        [tile_leaf(x, DECODER_RULES, m, pool(math.prod(m))) for x in spec.with_zero(m)]
        for m in meshes
    ]
    start_s = time.perf_counter()
    schedule = plan_transfer(*tilings)
    seconds = time.perf_counter() - start_s
    print(f"{before} -> {after}: {seconds:.2f} s, {len(schedule.exchanges)} permutations")
    assert seconds < 20
    expected = sum(lacking_bytes(a, b) for a, b in zip(*tilings, strict=True))
    assert schedule.wire_bytes == expected > 0
    assert all(sender != receiver for sender, receiver in schedule.bytes_by_pair())
