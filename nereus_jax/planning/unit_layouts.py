"""Units as rows of device indices: sub-units, what stays, which units meet, who copies from whom.

A row holds the devices of one unit in rank order, so a DP group is a matrix [dp, pp * tp].
"""
# pyright: reportUnknownMemberType=false
# (numpy's own types of `where`, `unique` and `argsort` are partly unknown.)

import math

import numpy as np

from nereus_jax.planning.unit_cuts import Bools, Ints

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


def without(numbers: Ints, some: Ints) -> Ints:
    """Those of some numbers, all at least 0, that are not among others."""
    if not len(some) or not len(numbers):
        return numbers
    listed = np.zeros(int(max(numbers.max(), some.max())) + 1, np.bool_)
    listed[some] = True
    return numbers[~listed[numbers]]


def distinct(numbers: Ints) -> Ints:
    """Each number once, ascending; all are at least 0."""
    return np.flatnonzero(np.bincount(numbers)) if len(numbers) else numbers


def owner(rows: Ints, num_devices: int) -> Ints:
    """For each device the row that it is in, or -1."""
    table = np.full(num_devices, -1, np.int64)
    table[rows] = np.arange(len(rows))[:, None]
    return table


def whole(rows: Ints, alive: Bools) -> Bools:
    """For each row whether all its devices are alive."""
    return alive[rows].all(axis=1)


def meeting_groups(old_rows: Ints, new_rows: Ints, num_devices: int) -> tuple[Ints, Ints]:
    """Units joined by shared devices.

    Labels spread along the shared devices, and jump to the label of their label, until nothing
    changes.

    Args:
      old_rows, new_rows: disjoint units, and other disjoint units.
      num_devices: of the pool.

    Returns:
      For each old and for each new unit the number of its group, -1 for a unit that meets none.
      Groups are numbered in the order of their first old unit.
    """
    num_old, num_new = len(old_rows), len(new_rows)
    old_of, new_of = owner(old_rows, num_devices), owner(new_rows, num_devices)
    both = (old_of >= 0) & (new_of >= 0)
    ours, theirs = old_of[both], new_of[both] + num_old
    label = np.arange(num_old + num_new)
    while True:
        low = np.minimum(label[ours], label[theirs])
        before = label.copy()
        np.minimum.at(label, label[ours], low)
        np.minimum.at(label, label[theirs], low)
        np.minimum.at(label, ours, low)
        np.minimum.at(label, theirs, low)
        label = label[label]
        if (label == before).all():
            break
    met, first = np.zeros((2, num_old + num_new), np.bool_)
    met[ours] = met[theirs] = True
    first[label[met]] = True
    number = np.where(met, (np.cumsum(first) - 1)[label], -1)
    return number[:num_old], number[num_old:]


def spread(source_nodes: Ints, target_nodes: Ints) -> tuple[Ints, Ints]:
    """Who copies to whom.

    A node that has no source gets one copy over the slow link, the others of its units copy from
    inside the node. Copies are passed on as in a binomial tree: whoever has one gives one, so that
    the number of copies doubles each time.

    Args:
      source_nodes: the node of each unit that has the state; at least one.
      target_nodes: the node of each unit that wants it.

    Returns:
      (givers, takers): indices of units, the targets numbered after the sources; a target that
      gives has taken before.
    """
    num_sources, num_targets = len(source_nodes), len(target_nodes)
    size = int(max(source_nodes.max(), target_nodes.max(initial=0))) + 1
    order = np.argsort(target_nodes, kind="stable")
    wanting, having = (np.bincount(x, minlength=size) for x in (target_nodes, source_nodes))
    first, begin = np.cumsum(wanting) - wanting, np.cumsum(having) - having
    leaders = np.sort(order[first[(having == 0) & (wanting > 0)]])
    giver = np.full(num_sources + num_targets, -1, np.int64)
    pool = np.concatenate([np.arange(num_sources), leaders + num_sources])
    place = np.arange(num_sources, len(pool))
    giver[pool[num_sources:]] = pool[place - _givers(place, np.full(len(place), num_sources))]
    # Inside a node: its sources, or its leader, then the others.
    node = target_nodes[order]
    place = np.arange(num_targets) - first[node] + having[node]
    have = np.maximum(having, 1)[node]
    follows = place >= have
    node, place, takers, have = node[follows], place[follows], order[follows], have[follows]
    back = place - _givers(place, have)
    source_order = np.argsort(source_nodes, kind="stable")
    at_source = source_order[np.minimum(begin[node] + back, num_sources - 1)]
    at_target = order[first[node] + np.maximum(back - having[node], 0)] + num_sources
    giver[takers + num_sources] = np.where(back < having[node], at_source, at_target)
    takers = np.concatenate([leaders, takers]) + num_sources
    return giver[takers], takers


def _givers(place: Ints, sources: Ints) -> Ints:
    """How far before place `place` its giver is: sources times the largest power of 2 below it."""
    ratio = place // np.maximum(sources, 1)
    return sources << np.maximum(np.frexp(ratio.astype(np.float64))[1] - 1, 0).astype(np.int64)
