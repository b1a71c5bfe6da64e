"""ParallelLayout: its mesh, what it refuses, how it prints."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.layout import MESH_AXES, TP_AXES, ParallelLayout

degrees = st.integers(1, 64)


@given(dp=degrees, pp=degrees, tp=degrees, num_kv_heads=degrees)
def test_the_mesh_holds_all_devices_and_splits_only_whole_kv_heads(dp, pp, tp, num_kv_heads):
    layout = ParallelLayout(dp, pp, tp)
    sizes = dict(zip(MESH_AXES, layout.mesh_shape(num_kv_heads), strict=True))
    assert math.prod(sizes.values()) == layout.num_devices == dp * pp * tp
    assert (sizes["dp"], sizes["pp"]) == (dp, pp)
    assert math.prod(sizes[a] for a in TP_AXES) == tp
    assert num_kv_heads % sizes["kv"] == 0
    larger = [k for k in range(sizes["kv"] + 1, tp + 1) if tp % k == 0 and num_kv_heads % k == 0]
    assert not larger, "more of tp could have sharded the key/value heads"


@pytest.mark.parametrize(
    ("tp", "num_kv_heads", "kv", "kvr"),
    [(4, 8, 4, 1), (4, 2, 2, 2), (8, 1, 1, 8), (4, 6, 2, 2), (3, 8, 1, 3), (6, 6, 6, 1)],
)
def test_mesh_by_hand(tp, num_kv_heads, kv, kvr):
    assert ParallelLayout(2, 3, tp).mesh_shape(num_kv_heads) == (2, 3, kv, kvr)


@pytest.mark.parametrize("bad", [0, -1, 1.0, "2", True])
@pytest.mark.parametrize("name", ["dp", "pp", "tp"])
def test_a_degree_must_be_a_positive_integer(name, bad):
    with pytest.raises(ValueError, match=f"{name} must be a positive integer"):
        ParallelLayout(**{name: bad})


def test_text_and_order():
    assert str(ParallelLayout(2, 3, 4)) == "dp=2,pp=3,tp=4"
    assert sorted([ParallelLayout(2, 1, 1), ParallelLayout(1, 4, 1)])[0].pp == 4
