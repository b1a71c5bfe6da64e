"""The arrays of a DP group and its units are two views of the same buffers."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.core.transition import Unit
from nereus_jax.runtime.emu import (
    Params,
    Site,
    group_arrays,
    group_site,
    live_bytes_per_device,
    load,
    make_site,
    units_of,
)
from nereus_jax.runtime.world import World, take_stock
from tests.runtime.transfer_cases import check_value, noise

MODEL = DecoderConfig(
    num_layers=3,
    embed_dim=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    mlp_dim=10,
    vocab_size=37,
)
SPEC = MODEL.spec(Head.LM)
VALUES = {leaf.name: noise(leaf.shape, leaf.dtype, i) for i, leaf in enumerate(SPEC)}
LAYOUTS = [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 2, 4), (3, 2, 1), (2, 1, 4)]


@pytest.fixture(scope="module")
def world() -> World:
    return take_stock()


def group(
    world: World, layout: Sequence[int], order: Sequence[int] | None = None, spec: EmuSpec = SPEC
) -> tuple[Site, Params]:
    """The arrays of a group on the first devices, or on those of these numbers."""
    degrees = ParallelLayout(*layout)
    pool = world.pool.devices
    devices = tuple(pool[i] for i in order or range(degrees.num_devices))
    placement = Placement(layout=degrees, devices=devices)
    site = make_site(world, ACTOR_TRAIN, placement, MODEL.num_kv_heads)
    return site, load(spec, site, lambda name, index: VALUES[name][index])


def pointers(arrays: Params) -> dict[tuple[str, int], int]:
    return {
        (name, shard.device.id): shard.data.unsafe_buffer_pointer()
        for name, array in arrays.items()
        for shard in array.addressable_shards
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_are_views_and_come_back_as_the_same_arrays(
    layout: tuple[int, int, int], world: World
) -> None:
    site, arrays = group(world, layout)
    units = units_of(world, site, arrays, version=7)
    dp, pp, tp = layout
    assert len(units) == dp
    wanted = pointers(arrays)
    seen = set()
    for rank, unit in enumerate(units):
        devices = site.placement.replica_devices(rank)
        assert unit.unit == Unit(model_stage=ACTOR_TRAIN, tp=tp, pp=pp, devices=devices)
        assert unit.version == 7 and unit.is_intact
        for name, blocks in unit.blocks.items():
            assert tuple(blocks) == devices
            for device, block in blocks.items():
                handle = world.handles[device]
                assert block.devices() == {handle}
                assert block.unsafe_buffer_pointer() == wanted[name, handle.id]
                seen.add((name, handle.id))
    assert seen == set(wanted)
    whole = group_site(world, [u.unit for u in units], MODEL.num_kv_heads)
    assert whole.placement == site.placement and whole.mesh == site.mesh
    again = group_arrays(world, whole, SPEC, list(reversed(units)))
    assert pointers(again) == wanted
    for name, array in again.items():
        assert array.sharding == arrays[name].sharding
        check_value(array, VALUES[name])


def test_a_unit_alone_is_a_smaller_group(world: World) -> None:
    """What a transition that destroys replicas leaves: a part of the buffers, still the state."""
    site, arrays = group(world, (3, 1, 2), order=[5, 1, 7, 2, 0, 6])
    units = units_of(world, site, arrays)
    left = [units[2], units[0]]
    small = group_site(world, [u.unit for u in left], MODEL.num_kv_heads)
    assert small.placement.layout == ParallelLayout(2, 1, 2)
    assert [d.index for d in small.placement.devices] == [0, 6, 5, 1]
    got = group_arrays(world, small, SPEC, left)
    for name, array in got.items():
        check_value(array, VALUES[name])
    every = pointers(arrays)
    assert all(every[key] == pointer for key, pointer in pointers(got).items())


def test_nothing_is_copied(world: World) -> None:
    site, arrays = group(world, (2, 2, 2))
    before = {id(x) for x in jax.live_arrays()}
    units = units_of(world, site, arrays)
    again = group_arrays(world, site, SPEC, units)
    new = [x for x in jax.live_arrays() if id(x) not in before]
    known = set(pointers(arrays).values())
    assert {s.data.unsafe_buffer_pointer() for x in new for s in x.addressable_shards} <= known
    assert live_bytes_per_device(again) == live_bytes_per_device(arrays)
    assert set(live_bytes_per_device(again).values()) == {SPEC.local_bytes(site.mesh_shape)}


def test_leaves_cut_over_dp_are_a_part_of_every_unit(world: World) -> None:
    site, _ = group(world, (2, 1, 2))
    zero = SPEC.with_zero(site.mesh_shape)
    site, arrays = group(world, (2, 1, 2), spec=zero)
    units = units_of(world, site, arrays)
    cut = [leaf.name for leaf in zero if leaf.zero_dim is not None]
    assert cut
    for name in cut:
        first, second = (np.asarray(u.blocks[name][u.unit.devices[0]]) for u in units)
        assert first.shape == second.shape and first.tobytes() != second.tobytes()
    again = group_arrays(world, site, zero, units)
    assert pointers(again) == pointers(arrays)
    for name, array in again.items():
        check_value(array, VALUES[name])


def test_a_deleted_block_breaks_its_unit_alone(world: World) -> None:
    site, arrays = group(world, (2, 1, 2))
    units = units_of(world, site, arrays)
    lost = world.handles[DeviceId(0, 3)]
    for array in arrays.values():
        for shard in array.addressable_shards:
            if shard.device == lost:
                shard.data.delete()
    assert [u.is_intact for u in units] == [True, False]
    one = group_site(world, [units[0].unit], MODEL.num_kv_heads)
    for name, array in group_arrays(world, one, SPEC, units[:1]).items():
        check_value(array, VALUES[name])


def test_units_compare_by_what_they_are(world: World) -> None:
    site, arrays = group(world, (2, 1, 1))
    first, second = (u.unit for u in units_of(world, site, arrays))
    assert first != second and dataclasses.replace(second, devices=first.devices) == first
    assert str(second) == "actor-TRAIN[pp=1,tp=1 on 0:1]"
