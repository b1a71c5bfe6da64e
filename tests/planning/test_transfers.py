"""A schedule brings every device what it lacks, once, from the right sender, and no more."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import LostStateError
from nereus_jax.core.tiling import LeafTiling
from nereus_jax.core.transfer import Exchange, Part, TransferSchedule
from nereus_jax.planning.transfers import plan_transfer

Tilings = Sequence[LeafTiling]
ABSENT, PADDING = -2, -1


# --- what a schedule does, by carrying it out on arrays of indices ---


def blocks_of(tiling: LeafTiling) -> dict[DeviceId, np.ndarray]:
    """The flat logical index of every element of every block."""
    whole = np.arange(math.prod(tiling.shape)).reshape(tiling.shape)
    blocks = {}
    for device, position in zip(tiling.devices, tiling.positions, strict=True):
        block = np.full(tiling.local_shape, PADDING)
        part = whole[tuple(slice(*ab) for ab in tiling.box(position))]
        block[tuple(slice(n) for n in part.shape)] = part
        blocks[device] = block
    return blocks


def origin(tiling: LeafTiling, device: DeviceId) -> tuple[int, ...]:
    position = tiling.positions[tiling.devices.index(device)]
    return tuple(p * n for p, n in zip(position, tiling.local_shape, strict=True))


def where(start: Any, extent: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    corner = [int(s) - o for s, o in zip(start, origin, strict=True)]
    assert all(c >= 0 for c in corner)
    return tuple(slice(c, c + n) for c, n in zip(corner, extent, strict=True))


def carry_out(schedule: TransferSchedule) -> None:
    """Every element arrives where it is wanted, and none twice."""
    old = [blocks_of(t) for t in schedule.sources]
    wanted = [blocks_of(t) for t in schedule.targets]
    new = [
        {d: np.where(b == PADDING, PADDING, ABSENT) for d, b in blocks.items()} for blocks in wanted
    ]
    for leaf, kept in enumerate(schedule.kept):
        source, target = schedule.sources[leaf], schedule.targets[leaf]
        for device in (schedule.devices[i] for i in kept.shared):
            assert source.dtype == target.dtype and device not in schedule.lost
            new[leaf][device] = old[leaf][device]
        assert set(kept.receiving).isdisjoint(kept.shared)
        assert len(kept.receiving) + len(kept.shared) == len(target.devices)
        for row, index in enumerate(kept.copied):
            device, extent = schedule.devices[index], kept.extents[row]
            assert device not in schedule.lost and index in kept.receiving
            values = old[leaf][device][where(kept.starts[row], extent, origin(source, device))]
            put(new[leaf][device], where(kept.starts[row], extent, origin(target, device)), values)
    for batch in schedule.batches:
        for group in batch.groups:
            before = {i: {d: b.copy() for d, b in new[i].items()} for i in batch.leaves}
            for exchange in group:
                check_permutation(schedule, exchange)
                for part in exchange.parts:
                    assert part.leaf in batch.leaves
                    deliver(schedule, exchange, part, old[part.leaf], before[part.leaf], new)
    for got, expected in zip(new, wanted, strict=True):
        for device, block in expected.items():
            np.testing.assert_array_equal(got[device], block)


def check_permutation(schedule: TransferSchedule, exchange: Exchange) -> None:
    senders, receivers = zip(*exchange.pairs, strict=True)
    assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
    assert all(s != r for s, r in exchange.pairs)
    assert list(exchange.pairs) == sorted(exchange.pairs)
    assert schedule.lost.isdisjoint(schedule.devices[s] for s in senders) or exchange.forwards


def deliver(
    schedule: TransferSchedule,
    exchange: Exchange,
    part: Part,
    old: Mapping[DeviceId, np.ndarray],
    before: Mapping[DeviceId, np.ndarray],
    new: Sequence[Mapping[DeviceId, np.ndarray]],
) -> None:
    source, target = schedule.sources[part.leaf], schedule.targets[part.leaf]
    for start, pair in zip(part.starts, exchange.pairs, strict=True):
        sender, receiver = (schedule.devices[i] for i in pair)
        at, blocks = (target, before) if exchange.forwards else (source, old)
        values = blocks[sender][where(start, part.extent, origin(at, sender))]
        put(new[part.leaf][receiver], where(start, part.extent, origin(target, receiver)), values)


def put(block: np.ndarray, place: tuple[slice, ...], values: np.ndarray) -> None:
    assert values.size and (values >= 0).all() and (block[place] == ABSENT).all()
    block[place] = values


def held(tiling: LeafTiling, lost: frozenset[DeviceId] = frozenset()) -> dict[DeviceId, np.ndarray]:
    """For each device the mask of the elements that it has."""
    masks = {}
    for device, block in blocks_of(tiling).items():
        masks[device] = np.zeros(math.prod(tiling.shape), bool)
        if device not in lost:
            masks[device][block[block >= 0]] = True
    return masks


def lacking_bytes(sources: Tilings, targets: Tilings, lost: frozenset[DeviceId]) -> int:
    total = 0
    for source, target in zip(sources, targets, strict=True):
        have, item = held(source, lost), min(source.item_bytes, target.item_bytes)
        for device, mask in held(target).items():
            total += item * int((mask & ~have.get(device, np.zeros_like(mask))).sum())
    return total


def check_senders(schedule: TransferSchedule, node: Mapping[DeviceId, int]) -> None:
    """Near before far, and over the slow link once for a node, of every leaf."""
    crossed = [0] * len(schedule.sources)
    for exchange in schedule.exchanges:
        for part in exchange.parts:
            masks = held(schedule.sources[part.leaf], schedule.lost)
            for start, (s, r) in zip(part.starts, exchange.pairs, strict=True):
                sender, receiver = node[schedule.devices[s]], node[schedule.devices[r]]
                crossed[part.leaf] += part.num_elements * (sender != receiver)
                if exchange.forwards:
                    assert sender == receiver
                elif sender != receiver:
                    box = np.zeros(schedule.sources[part.leaf].shape, bool)
                    box[tuple(slice(a, a + n) for a, n in zip(start, part.extent, strict=True))] = 1
                    near = [m for d, m in masks.items() if node[d] == receiver]
                    assert not any((m & box.ravel()).all() for m in near)
    for leaf, (source, target) in enumerate(zip(schedule.sources, schedule.targets, strict=True)):
        missing = 0
        for here in set(node.values()):
            has = [m for d, m in held(source, schedule.lost).items() if node[d] == here]
            wants = [m for d, m in held(target).items() if node[d] == here]
            missing += int((any_of(wants) & ~any_of(has)).sum()) if wants else 0
        assert crossed[leaf] == missing


def any_of(masks: list[np.ndarray]) -> Any:
    return np.any(masks, axis=0) if masks else np.zeros(1, bool)


def check_bounds(schedule: TransferSchedule, max_inflight_bytes: int) -> None:
    for batch in schedule.batches:
        for group in batch.groups:
            assert 0 < schedule.group_bytes(group) <= max_inflight_bytes
            assert len({e.forwards for e in group}) == 1


def signature(schedule: TransferSchedule) -> Any:
    return [
        (e.pairs, e.forwards, [(p.leaf, p.extent, p.starts.tolist()) for p in e.parts])
        for e in schedule.exchanges
    ]


# --- random tilings ---


@st.composite
def ends(
    draw: st.DrawFn, shape: tuple[int, ...], devices: Sequence[DeviceId], dtype: str
) -> LeafTiling:
    """Any cut of a shape over any of the devices in any order, with replicas and padding."""
    chosen = draw(st.permutations(devices))[: draw(st.integers(1, len(devices)))]
    counts: list[int] = []
    for _ in shape:
        limit = len(chosen) // math.prod(counts)
        counts.append(draw(st.sampled_from([n for n in (1, 2, 3, 4) if n <= limit] or [1])))
    copies = len(chosen) // math.prod(counts)
    cells = list(itertools.product(*map(range, counts))) * copies
    local = tuple(
        -(-n // c) + draw(st.sampled_from([0, 0, 0, 2])) for n, c in zip(shape, counts, strict=True)
    )
    return LeafTiling(
        name="w",
        shape=shape,
        dtype=dtype,
        local_shape=local,
        devices=tuple(chosen[: len(cells)]),
        positions=tuple(draw(st.permutations(cells))),
    )


@dataclasses.dataclass(frozen=True)
class Case:
    sources: list[LeafTiling]
    targets: list[LeafTiling]
    node: dict[DeviceId, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    devices = tuple(DeviceId(h, i) for h in range(3) for i in range(draw(st.integers(1, 4))))
    shapes = draw(
        st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=3)
    )
    dtypes = st.sampled_from(["float32", "bfloat16", "int8"])
    pairs = [
        (draw(ends(s, devices, draw(dtypes))), draw(ends(s, devices, draw(dtypes)))) for s in shapes
    ]
    # The same tilings again: leaves of one class.
    pairs += draw(st.lists(st.sampled_from(pairs), max_size=2))
    node = {d: draw(st.integers(0, 1)) if draw(st.booleans()) else d.host for d in devices}
    return Case([a for a, _ in pairs], [b for _, b in pairs], node)


@given(cases(), st.booleans(), st.sampled_from([8, 24, 100, 1 << 20]))
def test_everything_arrives_once_and_nothing_else_moves(
    case: Case, share: bool, max_inflight_bytes: int
) -> None:
    schedule = plan_transfer(
        case.sources,
        case.targets,
        nodes=case.node,
        share=share,
        max_inflight_bytes=max_inflight_bytes,
    )
    carry_out(schedule)
    assert schedule.wire_bytes == lacking_bytes(case.sources, case.targets, frozenset())
    assert schedule.wire_bytes == sum(schedule.bytes_by_pair().values())
    check_bounds(schedule, max_inflight_bytes)
    check_senders(schedule, case.node)
    assert share or not any(k.shared for k in schedule.kept)


@given(cases(), st.data())
def test_lost_devices_never_send_and_survivors_do(case: Case, data: st.DataObject) -> None:
    devices = sorted({d for t in case.sources for d in t.devices})
    lost = frozenset(data.draw(st.lists(st.sampled_from(devices), min_size=1, max_size=3)))
    survives = [any_of(list(held(s, lost).values())) for s in case.sources]
    needed = [any_of(list(held(t).values())) for t in case.targets]
    if all((n <= s).all() for n, s in zip(needed, survives, strict=True)):
        schedule = plan_transfer(case.sources, case.targets, lost=lost)
        carry_out(schedule)
        assert schedule.wire_bytes == lacking_bytes(case.sources, case.targets, lost)
        check_senders(schedule, {d: d.host for d in schedule.devices})
    else:
        with pytest.raises(LostStateError):
            plan_transfer(case.sources, case.targets, lost=lost)


@given(cases())
def test_the_same_inputs_give_the_same_schedule(case: Case) -> None:
    plans = [plan_transfer(case.sources, case.targets, nodes=case.node) for _ in range(2)]
    fresh = [dataclasses.replace(t) for t in case.sources]
    plans.append(plan_transfer(fresh, case.targets, nodes=case.node))
    assert signature(plans[0]) == signature(plans[1]) == signature(plans[2])


@given(cases(), st.integers(1, 400))
def test_a_batch_stays_under_its_bound(case: Case, max_batch_bytes: int) -> None:
    schedule = plan_transfer(case.sources, case.targets, max_batch_bytes=max_batch_bytes)
    carry_out(schedule)
    moved = [i for batch in schedule.batches for i in batch.leaves]
    assert sorted(moved) == [i for i, k in enumerate(schedule.kept) if k.receiving]
    for batch in schedule.batches:
        targets = [case.targets[i] for i in batch.leaves]
        new_bytes = sum(math.prod(t.local_shape) * t.item_bytes for t in targets)
        assert new_bytes <= max_batch_bytes or len(targets) == 1
        assert all(schedule.kept[i].receiving == batch.receiving for i in batch.leaves)
