"""Units as rows of device indices: sub-units, what stays, which units meet, who copies from whom.

A row holds the devices of one unit in rank order, so a DP group is a matrix [dp, pp * tp].
"""
# pyright: reportUnknownMemberType=false
# (numpy's own types of `where`, `unique` and `flatnonzero` are partly unknown.)

import math
from collections.abc import Mapping, Sequence

import numpy as np

from nereus_jax.planning.unit_bytes import Bools, Ints

Degrees = tuple[int, int]
"""(tp, pp) of a unit."""


def common_degrees(old: Degrees, new: Degrees) -> Degrees:
    """(tp, pp) of T_sub: the largest layout that both units split into."""
    return math.gcd(old[0], new[0]), math.gcd(old[1], new[1])


def split_rows(rows: Ints, degrees: Degrees, sub: Degrees) -> Ints:
    """The devices of the sub-units that units split into.

    Rank (p, t) of a unit becomes rank (p // kp, t // kt) of sub-unit (p % kp, t % kt), where kp and
    kt are how many times smaller the sub-unit's degrees are: a device's block is then a part of its
    sub-unit's block, and only what is around it must come.

    Args:
      rows: [units, pp * tp].
      degrees: of the units.
      sub: of the sub-units; its degrees divide those of the units.

    Returns:
      [units * kp * kt, sub pp * sub tp], the sub-units of a unit side by side.
    """
    (tp, pp), (sub_tp, sub_pp) = degrees, sub
    kp, kt = pp // sub_pp, tp // sub_tp
    ranks = rows.reshape(len(rows), sub_pp, kp, sub_tp, kt)
    return ranks.transpose(0, 2, 4, 1, 3).reshape(len(rows) * kp * kt, sub_pp * sub_tp)


def same_rows(old: Ints, new: Ints, num_devices: int) -> Ints:
    """For each new row the index of the old row with the same devices in the same order, or -1."""
    if old.shape[1:] != new.shape[1:] or not len(old):
        return np.full(len(new), -1, np.int64)
    by_first = np.full(num_devices, -1, np.int64)
    by_first[old[:, 0]] = np.arange(len(old))
    found = by_first[new[:, 0]]
    return np.where((found >= 0) & (old[found] == new).all(axis=1), found, -1)


def owner(rows: Ints, num_devices: int) -> Ints:
    """For each device the row that it is in, or -1."""
    table = np.full(num_devices, -1, np.int64)
    table[rows] = np.arange(len(rows))[:, None]
    return table


def whole(rows: Ints, alive: Bools) -> Bools:
    """For each row whether all its devices are alive."""
    return alive[rows].all(axis=1)


def meeting_groups(
    old_of: Ints, new_of: Ints, num_old: int, num_new: int
) -> list[tuple[list[int], list[int]]]:
    """Units joined by shared devices: the old and the new ones of every connected group.

    Args:
      old_of, new_of: [devices] the old and the new unit of each device, or -1.
      num_old, num_new: how many there are.

    Returns:
      The groups that have both, in the order of their first old unit.
    """
    both = np.flatnonzero((old_of >= 0) & (new_of >= 0))
    pairs = np.unique(old_of[both] * num_new + new_of[both])
    parent = list(range(num_old + num_new))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    ends = [(p // num_new, num_old + p % num_new) for p in pairs.tolist()]
    for a, b in ends:
        x, y = root(a), root(b)
        if x != y:
            parent[max(x, y)] = min(x, y)
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for a in dict.fromkeys(a for a, _ in ends):
        groups.setdefault(root(a), ([], []))[0].append(a)
    for b in sorted({b for _, b in ends}):
        groups[root(b)][1].append(b - num_old)
    return list(groups.values())


def spread(
    sources: Sequence[int], targets: Sequence[int], node_of: Mapping[int, int] | Sequence[int]
) -> list[tuple[int, int]]:
    """Who copies to whom: (source, target) pairs, a target that copies on comes earlier.

    A node that has no source gets one copy over the slow link, the others of its units copy from
    inside the node. Copies are passed on as in a binomial tree: whoever has one gives one, so that
    the number of copies doubles each time.

    Args:
      sources: units that have the state; at least one.
      targets: units that want it.
      node_of: the node of every unit.
    """
    local: dict[int, list[int]] = {}
    for unit in sources:
        local.setdefault(node_of[unit], []).append(unit)
    wanting: dict[int, list[int]] = {}
    for unit in targets:
        wanting.setdefault(node_of[unit], []).append(unit)
    leaders = [units.pop(0) for node, units in wanting.items() if node not in local]
    pairs = _binomial(list(sources), leaders)
    local |= {node_of[leader]: [leader] for leader in leaders}
    for node, units in wanting.items():
        pairs += _binomial(local[node], units)
    return pairs


def _binomial(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int]]:
    have = [*sources, *targets]
    pairs: list[tuple[int, int]] = []
    givers = len(sources)
    for i in range(len(sources), len(have)):
        if i >= 2 * givers:
            givers *= 2
        pairs.append((have[i - givers], have[i]))
    return pairs
