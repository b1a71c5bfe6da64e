"""Positions of a plan on the devices of a pool with holes and with state."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.control.device_assignment import Held, assign, group_node_size, spread
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement


def host_of(device: DeviceId) -> int:
    return device.host


def devices(text: str) -> tuple[DeviceId, ...]:
    return tuple(DeviceId.parse(x) for x in text.split())


def held(old: tuple[DeviceId, ...], layout: tuple[int, int, int], new=None, first=0) -> Held:
    source = ParallelLayout(*layout)
    return Held(
        old=Placement(layout=source, devices=old),
        layout=ParallelLayout(*(new or layout)),
        first=first,
        num_bytes=1e9,
    )


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
)
def test_every_device_has_one_place_and_as_many_groups_as_can_be_are_whole(counts, block, state):
    there = [DeviceId(h, i) for h, n in enumerate(counts) for i in range(n)]
    old = tuple(there[: len(there) // block * block])
    holding = [held(old, (len(old) // block, 1, block))] if state and old else []
    order = assign(there, host_of, [block], holding)
    assert sorted(order) == sorted(there)
    whole = sum(n // block for n in counts)
    groups = [order[i : i + block] for i in range(0, len(order) - block + 1, block)]
    assert [len({d.host for d in g}) == 1 for g in groups[:whole]] == [True] * whole


def test_a_node_with_a_hole_comes_last():
    there = devices("0:0 0:1 0:3 1:0 1:1 1:2 1:3")
    assert assign(there, host_of, [2]) == devices("1:0 1:1 1:2 1:3 0:0 0:1 0:3")


def test_what_is_left_over_makes_smaller_groups():
    """6 and 7 devices, groups of 4 and of 2: one of 4 a node, one more of 2 each, one alone."""
    there = [DeviceId(h, i) for h, n in enumerate((6, 7)) for i in range(n)]
    order = assign(there, host_of, [2, 4])
    assert [d.host for d in order] == [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1]


def test_units_stay_where_they_are():
    """Replicas lie 1, 0 in the old plan: the new one, with the same degrees, takes them so."""
    old = devices("1:0 1:1 1:2 1:3 0:0 0:1 0:2 0:3")
    assert assign(sorted(old), host_of, [4], [held(old, (2, 1, 4))]) == old
    # Also inside a node.
    turned = devices("0:2 0:3 0:0 0:1")
    assert assign(sorted(turned), host_of, [2], [held(turned, (2, 1, 2))]) == turned


def test_a_pipeline_keeps_its_order_when_a_replica_goes():
    """pp 2 over two nodes: node 1 has the first layers, and is asked for them again."""
    old = devices("1:0 1:1 0:0 0:1 3:0 3:1 2:0 2:1")  # 2 replicas of pp=2, tp=2
    left = [d for d in old if d.host in (0, 1)]
    assert assign(left, host_of, [2], [held(old, (2, 2, 2), (1, 2, 2))]) == devices(
        "1:0 1:1 0:0 0:1"
    )


def test_lanes_that_change_places_are_followed():
    """The state of the first lane was on node 1, that of the second on node 0."""
    a, b = devices("1:0 1:1"), devices("0:0 0:1")
    there = sorted(a + b)
    order = assign(there, host_of, [2], [held(a, (1, 1, 2)), held(b, (1, 1, 2), first=2)])
    assert order == a + b


def test_torn_groups_are_seen():
    near = Placement(layout=ParallelLayout(1, 1, 4), devices=devices("0:0 0:1 0:2 0:3"))
    torn = Placement(layout=ParallelLayout(1, 1, 4), devices=devices("0:0 0:1 0:2 1:0"))
    one = Placement(layout=ParallelLayout(2, 1, 1), devices=devices("0:0 1:0"))
    assert group_node_size(near, host_of, 8) == 8
    assert group_node_size(torn, host_of, 8) == 1
    assert group_node_size(one, host_of, 8) == 8
    halves = Placement(layout=ParallelLayout(1, 1, 4), devices=devices("0:0 0:1 1:0 1:1"))
    assert group_node_size(halves, host_of, 8) == 2


@pytest.mark.parametrize("block", [1, 8])
def test_a_thousand_devices_take_milliseconds(block):
    there = tuple(DeviceId(h, i) for h, i in itertools.product(range(128), range(8)))
    layout = (1024 // 16, 2, 8)
    old = (*there[512:], *there[:512])
    start_s = time.process_time()
    order = assign(there, host_of, [block], [held(old, layout), held(old, layout)])
    assert time.process_time() - start_s < 0.5
    assert block == 1 or order == old


def test_blocks_are_dealt_to_the_nodes_in_turn() -> None:
    """Whole blocks first; of a node of three devices one is left over for the end."""
    there = devices("0:0 0:1 0:2 0:3 1:0 1:1 1:2 2:0 2:1 2:2 2:3")
    assert spread(there, host_of, 2) == devices("0:0 0:1 1:0 1:1 2:0 2:1 0:2 0:3 2:2 2:3 1:2")
    assert spread(there, host_of, 8) == there
