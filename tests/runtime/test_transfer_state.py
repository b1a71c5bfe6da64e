"""What transfers leave behind: shared and freed blocks, lost devices, memory, parked state."""

import logging
import math
from typing import Any

import jax
import numpy as np
import pytest

from nereus_jax.core.errors import LostStateError, ReshardError
from nereus_jax.runtime.world import take_stock
from tests.runtime.transfer_cases import (
    P,
    check_transfer,
    check_value,
    end,
    make_transfer,
    noise,
    place,
    sharding,
)

PATHS = ("host", "collective")


def pointers(array: jax.Array) -> dict[Any, int]:
    return {s.device: s.data.unsafe_buffer_pointer() for s in array.addressable_shards}


@pytest.mark.parametrize("path", PATHS)
def test_where_no_block_changes_nothing_is_compiled(
    path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    value = noise((8, 12), "float32")
    source = place(value, sharding(P("x", "z"), x=2, y=2, z=2))
    same = end(value, sharding(P(("p",), ("q",)), p=2, r=2, q=2))
    other = end(value, sharding(P("z", "x"), x=2, y=2, z=2))
    with caplog.at_level(logging.WARNING, logger="jax"), jax.log_compiles():
        transfer = make_transfer([source], [same], path=path)
        (got,) = transfer.run([source])
        assert [r for r in caplog.records if "ompil" in r.getMessage()] == []
        assert transfer.collective is None and not transfer.moves
        assert transfer.cost.compile_s == transfer.cost.first_run_s == 0
        make_transfer([source], [other], path="collective").run([source])
        assert [r for r in caplog.records if "ompil" in r.getMessage()]
    assert pointers(got) == pointers(source)
    check_value(got, value)


@pytest.mark.parametrize("path", PATHS)
def test_blocks_that_stay_are_shared_by_pointer(path: Any) -> None:
    devices = jax.devices()
    value = noise((8, 12), "float32")
    source = place(value, sharding(P("x"), devices[:4], y=2, x=2))
    target = end(value, sharding(P("x"), y=4, x=2))
    (got,) = make_transfer([source], [target], path=path).run([source])
    (own,) = make_transfer([source], [target], path=path, share=False).run([source])
    for device, pointer in pointers(source).items():
        assert pointers(got)[device] == pointer != pointers(own)[device]
    check_value(got, value)
    check_value(own, value)


@pytest.mark.parametrize("path", PATHS)
def test_donated_blocks_are_freed_unless_they_are_shared(path: Any) -> None:
    devices = jax.devices()
    values = [noise((8, 12), "float32", i) for i in range(3)]
    before = sharding(P("x"), devices[:4], y=2, x=2)
    sources = [place(v, before) for v in values]
    targets = [
        end(values[0], sharding(P("x"), y=4, x=2)),  # 4 new replicas: all old blocks stay
        end(values[1], sharding(P("x"), devices[2:6], y=2, x=2)),  # two stay
        end(values[2], sharding(P(None, "x"), devices[4:], x=4)),  # none stays
    ]
    blocks = [[s.data for s in x.addressable_shards] for x in sources]
    transfer = make_transfer(sources, targets, path=path, donate=True, max_batch_bytes=1)
    moved = transfer.run(sources)
    for got, value in zip(moved, values, strict=True):
        check_value(got, value)
    for array, old in zip(moved, blocks, strict=True):
        kept = array.sharding.device_set if array is not moved[2] else set()
        for device, block in zip(devices[:4], old, strict=True):
            assert block.is_deleted() == (device not in kept)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("returns", [False, True])
def test_survivors_rebuild_what_was_lost(path: Any, returns: bool) -> None:
    devices = jax.devices()
    value = noise((8, 12), "float32")
    source = place(value, sharding(P("x"), devices, y=4, x=2))
    names = {h: d for d, h in take_stock().handles.items()}
    gone = devices[1:4]
    chosen = devices if returns else [d for d in devices if d not in gone][:4]
    target = end(value, sharding(P(None, "x"), chosen, y=2, x=len(chosen) // 2))
    for device, block in [(s.device, s.data) for s in source.addressable_shards]:
        if device in gone:
            block.delete()
    lost = [names[d] for d in gone]
    transfer = make_transfer([source], [target], path=path, lost=lost)
    check_value(transfer.run([source])[0], value)
    assert {a for a, _ in transfer.schedule.bytes_by_pair()}.isdisjoint(lost)
    # Of the blocks at x=1 there are four copies, on the devices with odd numbers.
    with pytest.raises(LostStateError, match=r"holds \[4:8, 0:12\] of '0'"):
        make_transfer([source], [target], path=path, lost=[names[d] for d in devices[1::2]])


MB = 1 << 20
PLACES = {
    "same devices": (slice(0, 8), slice(0, 8)),
    "fewer to more": (slice(0, 4), slice(0, 8)),
    "more to fewer": (slice(0, 8), slice(2, 6)),
    "other devices": (slice(0, 4), slice(4, 8)),
}


@pytest.mark.parametrize("max_inflight_bytes", [MB // 2, 8 * MB])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("cuts", [("x", None), (None, "x")], ids=["rows", "columns"])
def test_temporaries_stay_under_a_block_and_the_bound(
    where: str, cuts: tuple[str | None, ...], max_inflight_bytes: int
) -> None:
    before, after = (jax.devices()[s] for s in PLACES[where])
    value = noise((512, 1024), "float32")  # 2 MB
    source = place(value, sharding(P("x"), before, x=len(before)))
    target = end(value, sharding(P(*cuts), after, x=len(after)))
    transfer = make_transfer([source], [target], max_inflight_bytes=max_inflight_bytes)
    collective = transfer.collective
    if not transfer.moves:
        assert collective is None and where == "same devices"
        return
    assert collective is not None and target.sharding is not None
    block_bytes = math.prod(target.sharding.shard_shape(target.shape)) * 4
    assert collective.temp_bytes <= block_bytes + max_inflight_bytes
    check_value(transfer.run([source])[0], value)


def parked(on: jax.sharding.NamedSharding) -> Any:
    return on.with_memory_kind("pinned_host")


def test_state_is_parked_and_comes_back() -> None:
    devices = jax.devices()
    value = noise((6, 10), "bfloat16")
    before, after = sharding(P("x"), devices[:2], x=2), sharding(P(None, "x"), devices[1:3], x=2)
    source = place(value, before)
    there = make_transfer([source], [end(value, parked(after))], path="auto")
    (resting,) = there.run([source])
    assert there.path == "host" and resting.sharding.memory_kind == "pinned_host"
    check_value(resting, value)
    back = make_transfer([resting], [end(value, before)], path="auto")
    (got,) = back.run([resting])
    assert back.path == "host" and got.sharding == before
    check_value(got, value)
    for ends in (([source], [end(value, parked(after))]), ([resting], [end(value, before)])):
        with pytest.raises(ReshardError, match="does not reach host memory"):
            make_transfer(*ends, path="collective")


def test_parking_without_another_cut() -> None:
    value = noise((6, 10), "float32")
    on = sharding(P("x"), jax.devices()[:2], x=2)
    source = place(value, on)
    (resting,) = make_transfer([source], [end(value, parked(on))], path="auto").run([source])
    assert resting.sharding.memory_kind == "pinned_host"
    assert {s.data.sharding.memory_kind for s in resting.addressable_shards} == {"pinned_host"}
    (got,) = make_transfer([resting], [end(value, on)], path="auto").run([resting])
    assert got.sharding.memory_kind == source.sharding.memory_kind
    check_value(got, value)


def test_one_process_of_cpu_devices_takes_the_host_path() -> None:
    value = np.arange(24, dtype=np.float32).reshape(4, 6)
    source = place(value, sharding(P("x"), jax.devices()[:2], x=2))
    target = end(value, sharding(P(None, "x"), jax.devices()[:2], x=2))
    assert make_transfer([source], [target], path="auto").path == "host"
    check_transfer([value], [source], [target])


@pytest.mark.parametrize("parks", [True, False])
def test_blocks_that_stay_on_their_device_change_memory_too(parks: bool) -> None:
    devices = jax.devices()
    value = noise((6, 10), "float32")
    before, after = sharding(P("x"), devices[:2], x=2), sharding(P("x"), devices[:4], y=2, x=2)
    source = place(value, before if parks else parked(before))
    target = end(value, parked(after) if parks else after)
    (got,) = make_transfer([source], [target], path="auto").run([source])
    kind = target.sharding.memory_kind
    assert {s.data.sharding.memory_kind for s in got.addressable_shards} == {kind}
    check_value(got, value)
    check_value(source, value)
