"""From two tilings of a tree to the schedule of what moves between them.

Everything is closed form per leaf and device: the work grows with the boxes that move, never with
devices x devices.
"""
# pyright: reportUnknownMemberType=false
# (numpy's own types of `concatenate`, `unique` and `flatnonzero` are partly unknown.)

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.tiling import LeafTiling, device_order
from nereus_jax.core.transfer import Batch, Exchange, Ints, Kept, Part, TransferSchedule
from nereus_jax.planning.edge_coloring import color_edges
from nereus_jax.planning.pieces import ClassKey, Edges, SenderChoice, boxes, class_key, what_is_kept

MAX_INFLIGHT_BYTES = 256 << 20
"""Default of the buffers that a transition may have in flight on a device."""

MAX_INT32 = 2**31 - 1


def plan_transfer(
    sources: Sequence[LeafTiling],
    targets: Sequence[LeafTiling],
    *,
    max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
    max_batch_bytes: int | None = None,
    nodes: Mapping[DeviceId, int] | None = None,
    lost: Iterable[DeviceId] = (),
    share: bool = True,
) -> TransferSchedule:
    """The schedule that brings leaves from where they are to where they are wanted.

    Args:
      sources: the tiling of each leaf.
      targets: the tiling wanted, in the same order; devices, cut, padding and dtype may differ.
      max_inflight_bytes: bound of send and receive buffers on a device.
      max_batch_bytes: begin a new batch when the new blocks of one exceed this on a device, so
        that the old ones can be freed batch by batch; None: as few batches as possible.
      nodes: the node of each device, where links are fast; default: its host.
      lost: devices whose blocks are not there any more; the others send.
      share: hand on the blocks that do not change; else every block of the result is a new one.

    Raises:
      InfeasiblePlanError: the two ends of a leaf have other logical shapes, or a bound is too
        small to move anything.
      LostStateError: a part of a leaf was on lost devices only.
    """
    gone = frozenset(lost)
    devices = device_order((*sources, *targets))
    index = {device: i for i, device in enumerate(devices)}
    node_of = [device.host if nodes is None else nodes[device] for device in devices]
    kept: list[Kept] = []
    classes: dict[ClassKey, list[int]] = {}
    for leaf, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source.shape != target.shape:
            raise InfeasiblePlanError(
                f"{source.name!r} has shape {source.shape} but is wanted as {target.shape}; "
                f"a transition changes where a leaf lies, not what it is"
            )
        kept.append(what_is_kept(source, target, index, gone, share))
        if kept[-1].receiving and all(target.local_shape):  # nothing moves of an empty leaf
            classes.setdefault(class_key(source, target), []).append(leaf)
    choice = SenderChoice(index, node_of, gone)
    by_devices: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[Edges, list[int]]]] = {}
    for key, leaves in classes.items():
        weight = sum(_wire_bytes(sources[i], targets[i]) for i in leaves)
        edges = choice.edges(sources[leaves[0]], targets[leaves[0]], key, weight)
        alive = sorted(index[d] for d in key.source_devices if d not in gone)
        ends = tuple(alive), kept[leaves[0]].receiving
        by_devices.setdefault(ends, []).append((edges, leaves))
    schedule = TransferSchedule(
        devices=devices,
        sources=tuple(sources),
        targets=tuple(targets),
        kept=tuple(kept),
        batches=(),
        lost=gone,
    )
    batches: list[Batch] = []
    for (holding, receiving), members in by_devices.items():
        for part in _split_by_bytes(members, targets, max_batch_bytes):
            exchanges = _exchanges(part, sources, targets)
            batches.append(
                Batch(
                    leaves=tuple(sorted(i for _, leaves in part for i in leaves)),
                    holding=holding,
                    receiving=receiving,
                    groups=_groups(schedule, exchanges, max_inflight_bytes),
                )
            )
    return dataclasses.replace(schedule, batches=tuple(batches))


def _wire_bytes(source: LeafTiling, target: LeafTiling) -> int:
    return int(np.prod(target.local_shape)) * min(source.item_bytes, target.item_bytes)


def _split_by_bytes(
    members: Sequence[tuple[Edges, list[int]]],
    targets: Sequence[LeafTiling],
    max_batch_bytes: int | None,
) -> list[list[tuple[Edges, list[int]]]]:
    """Batches of (edges, leaves) whose new blocks stay under the bound, one leaf at the least."""
    batches: list[list[tuple[Edges, list[int]]]] = [[]]
    filled_bytes = 0
    for edges, leaves in members:
        batches[-1].append((edges, []))
        for leaf in leaves:
            target = targets[leaf]
            block_bytes = int(np.prod(target.local_shape)) * target.item_bytes
            full = max_batch_bytes is not None and filled_bytes + block_bytes > max_batch_bytes
            if filled_bytes and full:
                batches.append([(edges, [])])
                filled_bytes = 0
            batches[-1][-1][1].append(leaf)
            filled_bytes += block_bytes
    return [[m for m in batch if m[1]] for batch in batches]


def _exchanges(
    members: Sequence[tuple[Edges, list[int]]],
    sources: Sequence[LeafTiling],
    targets: Sequence[LeafTiling],
) -> list[Exchange]:
    """All boxes of some classes in as few permutations as their shapes allow.

    Boxes that every leaf has in the same shape may share a permutation; permutations of several
    classes between the same pairs become one.
    """
    merged: dict[tuple[bool, tuple[tuple[int, int], ...]], list[Part]] = {}
    for edges, leaves in members:
        if not len(edges):
            continue
        starts: list[Ints] = []
        extents: list[Ints] = []
        for leaf in leaves:
            start, stop = boxes(edges, sources[leaf], targets[leaf])
            starts.append(start)
            extents.append(stop - start)
        for chosen in _rounds(edges, np.concatenate(extents, axis=1)):
            pairs = [(int(edges.senders[e]), int(edges.receivers[e])) for e in chosen]
            order = sorted(range(len(pairs)), key=pairs.__getitem__)
            rows = [chosen[i] for i in order]
            key = bool(edges.forwards[rows[0]]), tuple(pairs[i] for i in order)
            for leaf, start, extent in zip(leaves, starts, extents, strict=True):
                shape = tuple(int(n) for n in extent[rows[0]])
                if all(shape):
                    merged.setdefault(key, []).append(
                        Part(leaf=leaf, extent=shape, starts=start[rows])
                    )
    exchanges = [
        Exchange(pairs=pairs, parts=tuple(parts), forwards=forwards)
        for (forwards, pairs), parts in merged.items()
    ]
    return sorted(exchanges, key=lambda e: e.forwards)


def _rounds(edges: Edges, extents: Ints) -> list[list[int]]:
    """Edges whose boxes have the same shapes, cut into permutations."""
    signature = np.concatenate([edges.forwards[:, None], extents], axis=1)
    _, kinds = np.unique(signature, axis=0, return_inverse=True)
    rounds: list[list[int]] = []
    for kind in range(int(kinds.max()) + 1):
        rows = np.flatnonzero(kinds == kind)
        pairs = [(int(edges.senders[e]), int(edges.receivers[e])) for e in rows]
        colors = color_edges(pairs)
        by_color: dict[int, list[int]] = {}
        for row, color in zip(rows, colors, strict=True):
            by_color.setdefault(color, []).append(int(row))
        rounds += [by_color[color] for color in sorted(by_color)]
    return rounds


def _groups(
    schedule: TransferSchedule, exchanges: Sequence[Exchange], max_inflight_bytes: int
) -> tuple[tuple[Exchange, ...], ...]:
    """Exchanges cut and grouped so that the buffers of a group stay under the bound."""
    groups: list[list[Exchange]] = []
    filled_bytes = 0
    for exchange in exchanges:
        for piece in _cut_exchange(schedule, exchange, max_inflight_bytes // 2):
            buffer_bytes = 2 * schedule.payload_bytes(piece)
            full = filled_bytes + buffer_bytes > max_inflight_bytes
            # What is passed on must have arrived: a group holds one kind or the other.
            if not groups or full or groups[-1][-1].forwards != piece.forwards:
                groups.append([])
                filled_bytes = 0
            groups[-1].append(piece)
            filled_bytes += buffer_bytes
    return tuple(tuple(g) for g in groups)


def _cut_exchange(
    schedule: TransferSchedule, exchange: Exchange, max_payload_bytes: int
) -> list[Exchange]:
    cut: list[Part] = []
    for part in exchange.parts:
        item_bytes = schedule.wire_item_bytes(part.leaf)
        if item_bytes > max_payload_bytes:
            raise InfeasiblePlanError(
                f"max_inflight_bytes={2 * max_payload_bytes} has no room for one element of "
                f"{schedule.sources[part.leaf].name!r}; it must be at least {2 * item_bytes}"
            )
        cut += _cut_part(part, min(max_payload_bytes // item_bytes, MAX_INT32))
    pieces: list[list[Part]] = []
    filled_bytes = 0
    for part in cut:
        part_bytes = part.num_elements * schedule.wire_item_bytes(part.leaf)
        if not pieces or filled_bytes + part_bytes > max_payload_bytes:
            pieces.append([])
            filled_bytes = 0
        pieces[-1].append(part)
        filled_bytes += part_bytes
    return [dataclasses.replace(exchange, parts=tuple(parts)) for parts in pieces]


def _cut_part(part: Part, max_elements: int) -> list[Part]:
    """Slabs of a box, each of at most so many elements: whole rows of the leading dims."""
    if part.num_elements <= max_elements:
        return [part]
    dim = next(i for i, n in enumerate(part.extent) if n > 1)
    row = part.num_elements // part.extent[dim]
    length = max(max_elements // row, 1)
    slabs: list[Part] = []
    for offset in range(0, part.extent[dim], length):
        extent = list(part.extent)
        extent[dim] = min(length, part.extent[dim] - offset)
        starts = part.starts.copy()
        starts[:, dim] += offset
        slabs += _cut_part(Part(leaf=part.leaf, extent=tuple(extent), starts=starts), max_elements)
    return slabs
