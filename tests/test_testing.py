"""The reader of compiled programs counts what collectives are known to move."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nereus_jax.testing import collective_wire_bytes

P = PartitionSpec
F32, U8, C64, PRED = "float32", "uint8", "complex64", "bool"
Local = tuple[tuple[int, ...], str]


def wire_bytes(body: Callable[..., Any], local: Local) -> int:
    """What a body moves on a mesh a=2, b=4, where every device has a block of this shape."""
    shape, dtype = local
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    spec = P(("a", "b"))
    whole = jax.ShapeDtypeStruct(
        (8 * shape[0], *shape[1:]), dtype, sharding=NamedSharding(mesh, spec)
    )
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=P("a"), check_vma=False)
    return collective_wire_bytes(jax.jit(mapped).lower(whole).compile().as_text() or "", 8)


def ring(count: int) -> Sequence[tuple[int, int]]:
    return [(i, (i + 1) % count) for i in range(count)]


@pytest.mark.parametrize(("local", "item_bytes"), [(F32, 4), (U8, 1), (C64, 8), (PRED, 1)], ids=str)
def test_a_permutation_moves_a_block_for_each_pair(local: str, item_bytes: int) -> None:
    block = ((3, 5), local)
    assert wire_bytes(lambda x: lax.ppermute(x, ("a", "b"), ring(8)), block) == 8 * 15 * item_bytes
    # Both rows of the mesh: 0 -> 1 and 1 -> 0; what stays on its device is not moved.
    pairs = [(0, 1), (1, 0), (2, 2)]
    assert wire_bytes(lambda x: lax.ppermute(x, "b", pairs), block) == 2 * 2 * 15 * item_bytes


def test_two_permutations_are_added_and_none_is_nothing() -> None:
    def twice(x: jax.Array) -> jax.Array:
        return lax.ppermute(lax.ppermute(x, "b", [(0, 1)]) + 1, "a", [(0, 1)])

    assert wire_bytes(twice, ((3, 5), F32)) == (2 + 4) * 60
    assert wire_bytes(lambda x: x + 1, ((3, 5), F32)) == 0


def test_other_collectives_move_what_a_ring_does() -> None:
    block = ((8, 3), F32)  # 96 bytes
    # Each of 8 devices receives the blocks of the 3 others of its row.
    assert wire_bytes(lambda x: lax.all_gather(x, "b", tiled=True), block) == 8 * 3 * 96
    assert wire_bytes(lambda x: lax.all_gather(x, "a", tiled=True), block) == 8 * 1 * 96
    # A sum sends every byte around the ring twice, but for each device's own part.
    assert wire_bytes(lambda x: lax.psum(x, "b"), block) == 2 * 8 * 96 * 3 // 4
    assert wire_bytes(lambda x: lax.psum(x, ("a", "b")), block) == 2 * 8 * 96 * 7 // 8
    assert wire_bytes(lambda x: lax.psum_scatter(x, "b", tiled=True), block) == 8 * 96 * 3 // 4
    assert wire_bytes(lambda x: lax.all_to_all(x, "b", 0, 1, tiled=True), block) == 8 * 96 * 3 // 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "%p = (bf16[4]{0}, bf16[4]{0}, u32[], u32[]) collective-permute-start(%x), "
            "channel_id=1, source_target_pairs={{0,1},{1,2},{3,3}}, metadata={}",
            2 * 8,
        ),
        ("%p = f8e4m3fn[4,2] collective-permute(%x), source_target_pairs={{0,7}}", 8),
        ("%p = f32[4] collective-permute-done(%p.1)", 0),
        ("%f = f32[4] fusion(%all-gather.1), kind=kLoop, calls=%all-reduce", 0),
        ("%g = f32[16] all-gather(%x), replica_groups=[2,4]<=[4,2]T(1,0)", 8 * 48),
        ("%g = (f32[4], f32[16]) all-gather-start(%x), replica_groups=[2,4]<=[8]", 8 * 48),
        ("%r = f32[16] all-reduce(%x), replica_groups={}, to_apply=%add", 2 * 7 * 64),
        ("%r = f32[16] all-reduce-start(%x), replica_groups={{0,1},{2}}", 2 * 1 * 64),
        ("%s = ((f32[16]), f32[4]) reduce-scatter-start(%x), replica_groups=[2,4]<=[8]", 8 * 48),
        ("%r = f32[8] all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", 4 * 2 * 32),
        (
            "%g = f32[8] all-gather(%x), "
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, dimensions={0}",
            4 * 32,
        ),
        ("%b = f32[8] collective-broadcast(%x), replica_groups={{0,1,2},{3,4}}", 3 * 32),
    ],
)
def test_notations_of_other_backends(text: str, expected: int) -> None:
    assert collective_wire_bytes(f"  {text}\n", 8) == expected


def test_what_cannot_be_counted_is_an_error() -> None:
    for text in (
        "%r = f32[8] ragged-all-to-all(%x), replica_groups={}",
        "%r = token[] all-reduce(%x), replica_groups={}",
        "%r = f32[8] all-reduce(%x), replica_groups=?",
    ):
        with pytest.raises(ValueError, match=r"depends|no known size|unknown notation"):
            collective_wire_bytes(text, 8)
