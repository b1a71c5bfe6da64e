"""The digest of a state is one number for all layouts, and another one for any other state.

The reference is the same sum in plain numpy over the whole leaf, which knows no mesh.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import ml_dtypes
import numpy as np
import pytest

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.emu_spec import EmuSpec, LeafSpec
from nereus_jax.core.errors import DigestError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.runtime.digests import PLACES, SEEDS, Digest, compare_digests, state_digests
from nereus_jax.runtime.emu import Site, load, make_site
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import World, take_stock
from tests.runtime.transfer_cases import noise

# 3 layers, 37 entries and 10 columns are padded by most layouts; 2 heads are shared by tp=4.
MODEL = DecoderConfig(
    num_layers=3,
    embed_dim=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    mlp_dim=10,
    vocab_size=37,
)
NAMES = ("embed", "layers.q", "layers.k", "layers.gate", "layers.down", "final_norm")
SPEC = EmuSpec(leaves=tuple(MODEL.spec(Head.LM)[name] for name in NAMES))
LAYOUTS = [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 2, 4), (3, 2, 1), (1, 3, 2)]
Values = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def programs() -> ProgramCache:
    return ProgramCache()


@pytest.fixture(scope="module")
def world() -> World:
    return take_stock()


def some_values(spec: EmuSpec) -> Values:
    return {leaf.name: noise(leaf.shape, leaf.dtype, i) for i, leaf in enumerate(spec)}


def site_of(world: World, layout: Sequence[int], first: int = 0) -> Site:
    degrees = ParallelLayout(*layout)
    devices = world.pool.devices[first : first + degrees.num_devices]
    placement = Placement(layout=degrees, devices=devices)
    return make_site(world, ACTOR_TRAIN, placement, MODEL.num_kv_heads)


def digests(
    site: Site, spec: EmuSpec, values: Values, programs: ProgramCache
) -> Mapping[str, Digest]:
    arrays = load(spec, site, lambda name, index: values[name][index])
    return state_digests(site, spec, arrays, programs)


def mix(x: np.ndarray) -> np.ndarray:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


def expected(value: np.ndarray) -> Digest:
    """The sum over all elements, in 64 bits that never overflow."""
    width = value.dtype.itemsize
    if value.dtype == bool:
        bits = value.astype(np.uint64)
    else:
        bits = value.view(f"u{width}").astype(np.uint64)
    index = np.indices(value.shape).astype(np.uint64)
    place = np.zeros(value.shape, np.uint64)
    for dim in range(value.ndim):
        place = (place + index[dim] * np.uint64(PLACES[dim])) % np.uint64(2**32)
    sums = [int(mix(bits ^ mix((mix(place) + s) % 2**32)).sum() % 2**32) for s in SEEDS]
    return sums[0], sums[1]


def test_it_is_the_sum_over_the_whole_leaf_on_every_layout(
    world: World, programs: ProgramCache
) -> None:
    values = some_values(SPEC)
    wanted = {name: expected(value) for name, value in values.items()}
    assert len(set(wanted.values())) == len(wanted)
    for layout in LAYOUTS:
        assert digests(site_of(world, layout), SPEC, values, programs) == wanted
    shifted = site_of(world, (1, 2, 2), first=3)
    assert digests(shifted, SPEC, values, programs) == wanted


def test_leaves_cut_over_dp_have_the_same_digest(world: World, programs: ProgramCache) -> None:
    values = some_values(SPEC)
    wanted = {name: expected(value) for name, value in values.items()}
    cut = 0
    for layout in ((2, 2, 2), (4, 1, 2), (3, 2, 1)):
        site = site_of(world, layout)
        zero = SPEC.with_zero(site.mesh_shape)
        cut += sum(leaf.zero_dim is not None for leaf in zero)
        assert digests(site, zero, values, programs) == wanted
    assert cut >= 6


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32", "int8", "bool"])
def test_every_width_is_read_bit_by_bit(dtype: str, world: World, programs: ProgramCache) -> None:
    leaf = LeafSpec(name="x", shape=(3, 5), dtype=dtype, logical_axes=("layers", "mlp"))
    spec = EmuSpec(leaves=(leaf,))
    value = noise(leaf.shape, dtype)
    wanted = {"x": expected(value)}
    assert digests(site_of(world, (1, 2, 2)), spec, {"x": value}, programs) == wanted
    assert digests(site_of(world, (1, 1, 1)), spec, {"x": value}, programs) == wanted


def changed(kind: str, value: np.ndarray) -> np.ndarray:
    """The value with one thing wrong."""
    new = value.copy()
    flat = new.reshape(-1).view(np.uint32)
    if kind == "a bit":
        flat[17] ^= 1
    elif kind == "the sign of zero":
        assert new.reshape(-1)[0] == 0.0
        flat[0] ^= 1 << 31
    elif kind == "the payload of a NaN":
        assert math.isnan(new.reshape(-1)[1])
        flat[1] ^= 1
        assert math.isnan(new.reshape(-1)[1])
    elif kind == "two layers swapped":
        new[[0, 1]] = new[[1, 0]]
    elif kind == "two columns swapped":
        new[..., [0, 1]] = new[..., [1, 0]]
    elif kind == "a block of zeros":
        new[1] = 0
    else:
        assert kind == "a block written twice"
        new[2] = new[1]
    return new


@pytest.mark.parametrize(
    "kind",
    [
        "a bit",
        "the sign of zero",
        "the payload of a NaN",
        "two layers swapped",
        "two columns swapped",
        "a block of zeros",
        "a block written twice",
    ],
)
def test_what_a_transfer_can_do_wrong_is_seen(
    kind: str, world: World, programs: ProgramCache
) -> None:
    name = "layers.gate"
    spec = EmuSpec(leaves=(SPEC[name],))
    value = noise(spec[name].shape, "float32", 3)
    site = site_of(world, (2, 2, 2))
    before = digests(site, spec, {name: value}, programs)
    after = digests(site, spec, {name: changed(kind, value)}, programs)
    compare_digests("actor-TRAIN", before, before)
    with pytest.raises(DigestError, match=f"actor-TRAIN: '{name}' has changed"):
        compare_digests("actor-TRAIN", before, after)


def test_the_exchange_of_equal_halves_of_two_leaves_is_seen() -> None:
    before = {"a": (1, 2), "b": (3, 4)}
    with pytest.raises(DigestError, match="'a' has changed"):
        compare_digests("s", before, {"a": (3, 4), "b": (1, 2)})
    with pytest.raises(DigestError, match=r"'b' has changed: .* it is None"):
        compare_digests("s", before, {"a": (1, 2)})
    with pytest.raises(DigestError, match="'c' has changed: its digest was None"):
        compare_digests("s", before, before | {"c": (0, 0)})


def with_a_wrong_block(array: jax.Array, place: int) -> jax.Array:
    """The array with one bit of one device's block changed."""
    blocks = [s.data for s in sorted(array.addressable_shards, key=lambda s: s.device.id)]
    wrong = np.array(blocks[place])
    wrong.reshape(-1).view(np.uint32)[0] ^= 1
    blocks[place] = jax.device_put(wrong, blocks[place].device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, blocks)


@pytest.mark.parametrize(
    ("layout", "name", "wrong", "named"),
    [
        # The copies of a replica; every device of the replica that is wrong is in its copy.
        pytest.param((2, 2, 2), "layers.gate", 6, {4, 5, 6, 7}, id="replica"),
        # 2 key/value heads on tp=4: ranks 0 and 1 hold the first, 2 and 3 the second.
        pytest.param((1, 1, 4), "layers.k", 1, {1, 3}, id="shared heads"),
        pytest.param((2, 2, 2), "final_norm", 3, {3}, id="replicated"),
    ],
)
def test_a_copy_that_differs_is_named(
    layout: tuple[int, int, int],
    name: str,
    wrong: int,
    named: set[int],
    world: World,
    programs: ProgramCache,
) -> None:
    spec = EmuSpec(leaves=(MODEL.spec(Head.LM)[name],))
    site = site_of(world, layout)
    values = some_values(spec)
    arrays = load(spec, site, lambda leaf, index: values[leaf][index])
    state_digests(site, spec, arrays, programs)
    arrays = {name: with_a_wrong_block(arrays[name], wrong)}
    with pytest.raises(DigestError, match=f"actor-TRAIN: the copies of '{name}' differ") as caught:
        state_digests(site, spec, arrays, programs)
    devices = ", ".join(f"0:{i}" for i in sorted(named))
    assert f"that on {devices} is not the one on 0:0" in str(caught.value)


def test_bytes_of_padding_are_not_looked_at(world: World, programs: ProgramCache) -> None:
    """A layer that only fills up the last pipeline rank is no part of the state."""
    leaf = LeafSpec(name="x", shape=(3, 2), dtype="bfloat16", logical_axes=("layers", None))
    spec, site = EmuSpec(leaves=(leaf,)), site_of(world, (1, 2, 1))
    value = noise((3, 2), "bfloat16")
    whole = np.concatenate([value, np.ones((1, 2), ml_dtypes.bfloat16)])
    array = jax.device_put(whole, site.leaf_sharding(leaf, spec.rules))
    assert state_digests(site, spec, {"x": array}, programs) == {"x": expected(value)}
