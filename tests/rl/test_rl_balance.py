"""Balancing rows: by hand, as a permutation, and against the bound of the greedy rule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.rl.balance import balance_rows


def test_by_hand():
    # 9 -> group 0, 8 -> group 1 (0 < 9), 5 -> group 1 (8 < 9; now full), 1 -> group 0: 10 and 13
    assert balance_rows(np.array([8, 1, 9, 5]), 2).tolist() == [2, 1, 0, 3]


def test_ties_go_to_the_earlier_row_and_the_lower_group():
    assert balance_rows(np.full(6, 4), 3).tolist() == [0, 3, 1, 4, 2, 5]
    assert balance_rows(np.arange(4), 1).tolist() == [3, 2, 1, 0]
    assert balance_rows(np.zeros(0, np.int32), 2).tolist() == []


@given(st.integers(1, 6), st.integers(0, 8), st.data())
def test_a_permutation_whose_loads_differ_by_at_most_one_row(groups: int, room: int, data):
    lengths = np.array(
        data.draw(st.lists(st.integers(0, 5000), min_size=groups * room, max_size=groups * room)),
        np.int32,
    )
    order = balance_rows(lengths, groups)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(groups * room))
    np.testing.assert_array_equal(order, balance_rows(lengths.copy(), groups))
    if room:
        loads = lengths[order].reshape(groups, room).sum(axis=1)
        in_order = np.sort(lengths)[::-1].reshape(groups, room).sum(axis=1)
        assert loads.max() <= in_order.max()  # never worse than longest rows together


def test_long_tails_are_shared_nearly_equally():
    lengths = np.random.default_rng(0).lognormal(5.0, 1.0, 512).astype(np.int32)
    loads = lengths[balance_rows(lengths, 8)].reshape(8, 64).sum(axis=1)
    unsorted = lengths.reshape(8, 64).sum(axis=1)
    assert loads.max() / loads.mean() < 1.01 < unsorted.max() / unsorted.mean()


@pytest.mark.parametrize(
    ("lengths", "groups"), [(np.ones(5), 2), (np.ones(4), 0), (np.ones((2, 2)), 2)]
)
def test_misuse_is_refused(lengths: np.ndarray, groups: int):
    with pytest.raises(ValueError, match=r"shared equally|vector"):
        balance_rows(lengths, groups)
