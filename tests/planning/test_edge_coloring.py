"""The colors of a bipartite multigraph are matchings, and as few as there can be."""

import itertools
from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.planning.edge_coloring import Edge, color_edges


def max_degree(edges: list[Edge]) -> int:
    senders = Counter(sender for sender, _ in edges)
    receivers = Counter(receiver for _, receiver in edges)
    return max([*senders.values(), *receivers.values()], default=0)


def check(edges: list[Edge]) -> None:
    colors = color_edges(edges)
    assert len(colors) == len(edges)
    assert set(colors) == set(range(max_degree(edges)))
    assert len({(c, sender) for c, (sender, _) in zip(colors, edges, strict=True)}) == len(edges)
    assert len({(c, receiver) for c, (_, receiver) in zip(colors, edges, strict=True)}) == len(
        edges
    )


@given(st.data(), st.integers(1, 12), st.integers(1, 12))
def test_colors_are_matchings_and_as_many_as_the_largest_degree(
    data: st.DataObject, senders: int, receivers: int
) -> None:
    # A device may be on both sides, and a pair may come several times.
    edge = st.tuples(st.integers(0, senders - 1), st.integers(0, receivers - 1))
    check(data.draw(st.lists(edge, max_size=120)))


@given(st.integers(1, 9), st.integers(1, 4), st.randoms(use_true_random=False))
def test_regular_graphs_in_any_order(size: int, copies: int, random: Random) -> None:
    edges = [(i, j) for i in range(size) for j in range(size)] * copies
    random.shuffle(edges)
    check(edges)
    assert set(color_edges(edges)) == set(range(size * copies))


def test_an_alternating_path_is_swapped() -> None:
    # A cycle of six: in some orders the first free color of both ends would be a third one.
    for edges in itertools.permutations([(0, 0), (1, 0), (0, 1), (2, 1), (1, 2), (2, 2)]):
        check(list(edges))


def test_no_edges_need_no_colors() -> None:
    assert color_edges([]) == []


def test_the_same_edges_get_the_same_colors() -> None:
    edges = [(i * 7 % 5, i * 3 % 4) for i in range(40)]
    assert color_edges(edges) == color_edges(list(edges))
