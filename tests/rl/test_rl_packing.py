"""Packing: every sequence has a place of its own, and little room is left."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus_jax.rl.packing import pack_rows


def test_by_hand():
    packing = pack_rows(np.array([3, 5, 0, 2, 4]), 7)
    # 5 opens row A, 4 row B, 3 fits B best (3 left), 2 fits A best (2 left).
    assert packing.num_rows == 2
    assert packing.rows_B[2] == -1
    assert packing.rows_B[1] == packing.rows_B[3] != packing.rows_B[4] == packing.rows_B[0]
    assert packing.starts_B[[1, 3, 4, 0]].tolist() == [0, 5, 0, 4]


def test_the_tightest_row_with_room_is_taken():
    packing = pack_rows(np.array([8, 6, 2, 2]), 10)
    assert packing.rows_B[0] == packing.rows_B[2], "2 fits exactly behind 8"
    assert packing.rows_B[1] == packing.rows_B[3]


def test_nothing_to_pack():
    assert pack_rows(np.zeros(0, np.int32), 4, 3).num_rows == 0
    packing = pack_rows(np.zeros(2, np.int32), 4, 3)
    assert packing.num_rows == 0
    assert packing.rows_B.tolist() == [-1, -1]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    slack=st.integers(0, 60),
    groups=st.integers(1, 5),
)
def test_every_sequence_has_a_place_of_its_own(lengths: list[int], slack: int, groups: int):
    lengths_B = np.array(lengths)
    width = max(1, int(lengths_B.max())) + slack
    packing = pack_rows(lengths_B, width, groups)
    assert packing.num_rows % groups == 0
    taken = np.zeros((packing.num_rows, width), int)
    for length, row, start in zip(lengths, packing.rows_B, packing.starts_B, strict=True):
        assert (row >= 0) == (length > 0)
        if length:
            assert start + length <= width
            taken[row, start : start + length] += 1
    assert taken.max(initial=0) <= 1
    loads = taken.sum(axis=1)
    assert loads.sum() == lengths_B.sum()
    full = np.sort(loads[loads > 0])
    assert (full[1:] * 2 > width).all(), "two rows at most half full would have been one"
    fit = width // max(1, int(lengths_B.max()))
    assert (loads > 0).sum() <= -(-(lengths_B > 0).sum() // fit), "room as the programs count on"
    again = pack_rows(lengths_B.copy(), width, groups)
    np.testing.assert_array_equal(packing.rows_B, again.rows_B)
    np.testing.assert_array_equal(packing.starts_B, again.starts_B)


def test_groups_get_nearly_the_same_number_of_tokens():
    lengths_B = np.random.default_rng(0).integers(10, 100, 256)
    packing = pack_rows(lengths_B, 100, 4)
    group_B = packing.rows_B // (packing.num_rows // 4)
    tokens = np.bincount(group_B, lengths_B, 4)
    assert tokens.max() / tokens.mean() < 1.03


@pytest.mark.parametrize(
    ("lengths", "said"), [(np.array([5]), "5 tokens"), (np.ones((2, 2), int), "vector")]
)
def test_what_cannot_be_packed_is_refused(lengths: np.ndarray, said: str):
    with pytest.raises(ValueError, match=said):
        pack_rows(lengths, 4)
