"""Our shard arithmetic is JAX's: boxes, padded and local shapes, bytes; the leaf table."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.emu_spec import DECODER_RULES, DTYPE_BYTES, EmuSpec, LeafSpec
from nereus_jax.core.layout import MESH_AXES, ParallelLayout
from nereus_jax.runtime.emu import partition_spec

LAYOUTS = [
    ParallelLayout(dp, pp, tp)
    for dp, pp, tp in itertools.product(range(1, 9), repeat=3)
    if dp * pp * tp <= 8
]
LOGICAL_AXES = (None, "embed", *DECODER_RULES.mesh_axes)


@st.composite
def leaves(draw: st.DrawFn) -> LeafSpec:
    axes = draw(st.permutations(LOGICAL_AXES))
    # A mesh axis shards one dim at most: of the axes that tp splits, keep the first.
    kept: list[str | None] = []
    used: set[str] = set()
    for axis in axes[: draw(st.integers(1, 3))]:
        mesh_axes = DECODER_RULES(axis)
        kept.append(None if used.intersection(mesh_axes) else axis)
        used.update(mesh_axes)
    shape = tuple(draw(st.integers(1, 40)) for _ in kept)
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    return LeafSpec(name="x", shape=shape, dtype=dtype, logical_axes=tuple(kept))


meshes = st.tuples(st.sampled_from(LAYOUTS), st.sampled_from([1, 2, 4, 6, 8])).map(
    lambda pair: pair[0].mesh_shape(pair[1])
)


def check_against_jax(leaf: LeafSpec, mesh_shape: tuple[int, ...]) -> None:
    devices = np.array(jax.devices("cpu")[: math.prod(mesh_shape)]).reshape(mesh_shape)
    sharding = NamedSharding(Mesh(devices, MESH_AXES), partition_spec(leaf, DECODER_RULES))
    padded = leaf.padded_shape(DECODER_RULES, mesh_shape)
    indices = sharding.devices_indices_map(padded)  # raises if a dim does not divide
    for coordinates in np.ndindex(*mesh_shape):
        index = indices[devices[coordinates]]
        expected = tuple(s.indices(n)[:2] for s, n in zip(index, padded, strict=True))
        assert leaf.box(DECODER_RULES, mesh_shape, coordinates) == expected
    assert leaf.local_shape(DECODER_RULES, mesh_shape) == sharding.shard_shape(padded)


@given(leaves(), meshes, st.booleans())
def test_boxes_are_those_of_named_sharding(leaf, mesh_shape, zero):
    leaf = leaf.with_zero(DECODER_RULES, mesh_shape) if zero else leaf
    check_against_jax(leaf, mesh_shape)


@given(leaves(), meshes)
def test_padding_is_less_than_one_shard_of_each_dim(leaf, mesh_shape):
    padded = leaf.padded_shape(DECODER_RULES, mesh_shape)
    local = leaf.local_shape(DECODER_RULES, mesh_shape)
    shards = leaf.num_shards(DECODER_RULES, mesh_shape)
    for dim, wide, here, count in zip(leaf.shape, padded, local, shards, strict=True):
        assert wide == here * count
        assert 0 <= wide - dim < count
    size = DTYPE_BYTES[leaf.dtype]
    assert leaf.local_bytes(DECODER_RULES, mesh_shape) == math.prod(local) * size
    assert leaf.num_bytes == math.prod(leaf.shape) * size


@given(leaves(), meshes)
def test_zero_splits_over_dp_without_more_padding(leaf, mesh_shape):
    zero = leaf.with_zero(DECODER_RULES, mesh_shape)
    dp = mesh_shape[0]
    assert zero.padded_shape(DECODER_RULES, mesh_shape) == leaf.padded_shape(
        DECODER_RULES, mesh_shape
    )
    whole = leaf.local_bytes(DECODER_RULES, mesh_shape)
    if zero.zero_dim is None:
        assert zero == leaf
        assert dp == 1 or all(n % dp for n in leaf.local_shape(DECODER_RULES, mesh_shape))
    else:
        assert zero.local_bytes(DECODER_RULES, mesh_shape) * dp == whole
        assert zero.with_zero(DECODER_RULES, mesh_shape).zero_dim == zero.zero_dim


CONFIG = DecoderConfig(
    num_layers=5,
    embed_dim=26,
    num_heads=12,
    num_kv_heads=6,
    head_dim=4,
    mlp_dim=50,
    vocab_size=51,
)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_leaf_of_a_decoder_on_every_layout(layout, zero):
    mesh_shape = layout.mesh_shape(CONFIG.num_kv_heads)
    spec = CONFIG.spec(Head.LM)
    spec = spec.with_zero(mesh_shape) if zero else spec
    for leaf in spec:
        check_against_jax(leaf, mesh_shape)
    total = sum(leaf.local_bytes(DECODER_RULES, mesh_shape) for leaf in spec)
    assert spec.local_bytes(mesh_shape) == total
    assert total * layout.num_devices >= spec.num_elements * 4


def test_boxes_by_hand():
    # 51 rows over pp * kv * kvr = 2 * 2 * 2 are 56, 7 each; major first
    embed = CONFIG.spec(Head.LM)["embed"]
    assert embed.padded_shape(DECODER_RULES, (1, 2, 2, 2)) == (56, 26)
    assert embed.box(DECODER_RULES, (1, 2, 2, 2), (0, 1, 0, 1)) == ((35, 42), (0, 26))
    # 5 layers over pp 2 are 6, 3 each; ZeRO cuts the last dim that dp 2 divides
    norm = CONFIG.spec(Head.LM)["layers.attn_norm"].with_zero(DECODER_RULES, (2, 2, 1, 1))
    assert norm.zero_dim == 1
    assert norm.box(DECODER_RULES, (2, 2, 1, 1), (1, 1, 0, 0)) == ((3, 6), (13, 26))
    # the dp rank is the minor part where a dim is split already
    keys = CONFIG.spec(Head.LM)["layers.k"].with_zero(DECODER_RULES, (2, 1, 2, 2))
    assert keys.box(DECODER_RULES, (2, 1, 2, 2), (1, 0, 1, 0)) == ((0, 5), (0, 26), (18, 24))


def test_a_spec_finds_its_leaves_by_name():
    spec = CONFIG.spec(Head.LM, "bfloat16")
    assert spec["embed"].shape == (51, 26)
    assert {leaf.dtype for leaf in spec} == {"bfloat16"}
    with pytest.raises(KeyError):
        spec["nowhere"]
    with pytest.raises(ValueError, match="not unique"):
        EmuSpec(leaves=(spec["embed"], spec["embed"]))
    with pytest.raises(ValueError, match="against axes"):
        dataclasses.replace(spec["embed"], shape=(51,))


@pytest.mark.parametrize("tied", [True, False])
def test_num_params_by_hand(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    layer = 2 * 26 + 2 * 26 * 48 + 2 * 26 * 24 + 3 * 26 * 50
    body = 51 * 26 + 5 * layer + 26
    assert config.layer_params() == layer
    assert config.num_params(Head.LM) == body + (0 if tied else 51 * 26)
    assert config.num_params(Head.SCALAR) == body + 26
    assert config.kv_bytes_per_token("bfloat16") == 2 * 5 * 6 * 4 * 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_layers": 0}, "num_layers must be positive"),
        ({"norm_eps": 0.0}, "norm_eps must be positive"),
        ({"num_kv_heads": 5}, "not a multiple"),
        ({"head_dim": 3}, "even"),
    ],
)
def test_impossible_sizes_are_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(CONFIG, **change)
