"""Sub-units, groups and trees of copies, by hand and against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.planning.unit_layouts import (
    common_degrees,
    meeting_groups,
    same_rows,
    split_rows,
    spread,
)


@pytest.mark.parametrize(
    ("old", "new", "sub"),
    [
        ((4, 1), (2, 1), (2, 1)),
        ((4, 2), (2, 4), (2, 2)),
        ((6, 4), (4, 6), (2, 2)),
        ((3, 1), (2, 1), (1, 1)),
        ((8, 3), (12, 9), (4, 3)),
    ],
)
def test_t_sub_has_the_common_divisors(
    old: tuple[int, int], new: tuple[int, int], sub: tuple[int, int]
) -> None:
    assert common_degrees(old, new) == common_degrees(new, old) == sub


def test_split_by_hand() -> None:
    # pp=2, tp=4 on devices 0 to 7, rank (p, t) on 4 p + t, into pp=1, tp=2: sub-unit (a, b) takes
    # p = a and t in (b, 2 + b): the ranks whose blocks lie inside the halves of tp=2.
    rows = np.arange(8)[None]
    assert split_rows(rows, (4, 2), (2, 1)).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    # pp=4 into pp=2: ranks 0 and 2 hold the first quarter of the first and of the second half.
    assert split_rows(np.arange(4)[None], (1, 4), (1, 2)).tolist() == [[0, 2], [1, 3]]
    assert split_rows(rows, (4, 2), (4, 2)).tolist() == rows.tolist()


def test_same_rows() -> None:
    old, new = np.array([[0, 1], [2, 3]]), np.array([[2, 3], [1, 0], [0, 1], [4, 5]])
    assert same_rows(old, new, 6).tolist() == [1, -1, 0, -1]
    assert same_rows(old, np.array([[0], [1]]), 6).tolist() == [-1, -1]
    assert same_rows(old[:0], new, 6).tolist() == [-1] * 4


@st.composite
def disjoint_rows(draw: st.DrawFn) -> np.ndarray:
    size = draw(st.integers(1, 4))
    number = draw(st.integers(1, 12 // size))
    return np.array(draw(st.permutations(range(12)))[: size * number]).reshape(number, size)


@given(disjoint_rows(), disjoint_rows())
def test_groups_are_the_connected_ones(old: np.ndarray, new: np.ndarray) -> None:
    found = np.concatenate(meeting_groups(old, new, 12))
    units = [set(row) for row in [*old.tolist(), *new.tolist()]]
    group = list(range(len(units)))
    for _ in units:
        for i, j in itertools.product(range(len(units)), repeat=2):
            if units[i] & units[j]:
                group[i] = group[j] = min(group[i], group[j])
    for i, j in itertools.combinations(range(len(units)), 2):
        together = found[i] >= 0 and found[i] == found[j]
        assert together == (group[i] == group[j])
    numbers = [int(n) for n in found[: len(old)] if n >= 0]
    assert list(dict.fromkeys(numbers)) == sorted(set(numbers)) == list(range(len(set(numbers))))


nodes = st.lists(st.integers(0, 3), max_size=12)


@given(nodes.filter(len), nodes)
def test_copies_cross_to_a_node_once_and_double(sources: list[int], targets: list[int]) -> None:
    give, take = spread(np.array(sources), np.array(targets, np.int64))
    node = [*sources, *targets]
    assert sorted(take.tolist()) == list(range(len(sources), len(node)))
    have = set(range(len(sources)))
    round_of = dict.fromkeys(have, 0)
    given_in = dict.fromkeys(range(len(node)), 0)
    crossings: dict[int, int] = {}
    for giver, taker in zip(give.tolist(), take.tolist(), strict=True):
        assert giver in have
        have.add(taker)
        given_in[giver] = max(given_in[giver], round_of[giver]) + 1
        round_of[taker] = given_in[giver]
        if node[giver] != node[taker]:
            crossings[node[taker]] = crossings.get(node[taker], 0) + 1
    assert crossings == dict.fromkeys(set(targets) - set(sources), 1)


def test_a_copy_doubles_in_every_round() -> None:
    give, take = spread(np.array([0]), np.array([0] * 7))
    assert give.tolist() == [0, 0, 1, 0, 1, 2, 3]
    assert take.tolist() == [1, 2, 3, 4, 5, 6, 7]
