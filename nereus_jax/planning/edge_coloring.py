"""Edge coloring of a bipartite multigraph: the fewest rounds for a set of transfers.

In one round a device sends to at most one and receives from at most one. By König's theorem the
largest number of transfers at any device is also enough rounds; alternating paths reach it.
"""

from collections.abc import Sequence

Edge = tuple[int, int]


def color_edges(edges: Sequence[Edge]) -> list[int]:
    """The round of each (sender, receiver); rounds are 0 .. max degree - 1.

    Each edge is added in turn. If its sender misses color a and its receiver misses color b, and
    there is no color that both miss, a and b are swapped along the path of these two colors that
    starts at the receiver; it cannot reach the sender, since the graph is bipartite.
    """
    at_sender: dict[int, dict[int, int]] = {}  # sender -> color -> edge
    at_receiver: dict[int, dict[int, int]] = {}
    colors = [-1] * len(edges)
    for index, (sender, receiver) in enumerate(edges):
        used_out = at_sender.setdefault(sender, {})
        used_in = at_receiver.setdefault(receiver, {})
        free_out, free_in = _first_free(used_out), _first_free(used_in)
        if free_out in used_in and free_in in used_out:
            _swap(edges, colors, at_sender, at_receiver, receiver, free_out, free_in)
            color = free_out
        else:
            # The smallest that is free on both sides; one of the two candidates is.
            color = min(c for c in (free_out, free_in) if c not in used_in and c not in used_out)
        colors[index] = color
        used_out[color] = used_in[color] = index
    return colors


def _first_free(used: dict[int, int]) -> int:
    color = 0
    while color in used:
        color += 1
    return color


def _swap(
    edges: Sequence[Edge],
    colors: list[int],
    at_sender: dict[int, dict[int, int]],
    at_receiver: dict[int, dict[int, int]],
    receiver: int,
    color: int,
    other: int,
) -> None:
    """Swaps two colors on the path that leaves `receiver` by `color`."""
    path: list[int] = []
    at, node, wanted = at_receiver, receiver, color
    while (edge := at[node].get(wanted)) is not None:
        path.append(edge)
        at, node = (
            (at_sender, edges[edge][0]) if at is at_receiver else (at_receiver, edges[edge][1])
        )
        wanted = other if wanted == color else color
    for edge in path:
        del at_sender[edges[edge][0]][colors[edge]]
        del at_receiver[edges[edge][1]][colors[edge]]
    for edge in path:
        colors[edge] = other if colors[edge] == color else color
        at_sender[edges[edge][0]][colors[edge]] = edge
        at_receiver[edges[edge][1]][colors[edge]] = edge
