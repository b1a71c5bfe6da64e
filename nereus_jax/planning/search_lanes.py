"""How the devices of a pool are shared out among the model-stages of a wave.

The model-stages of a wave do not depend on each other. Those in one lane run one after the other on
its devices; lanes are disjoint and run at the same time. Widths of lanes are whole cells: an eighth
of the pool, a quarter for more than two model-stages, or a little more so that cells and nodes
divide each other.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

PARTS_OF_FEW, PARTS_OF_MANY, FEW = 8, 4, 2
"""Parts that a pool is cut into for few and for many model-stages: 8 and 41 ways to share it out
among two and among four."""

Subset = tuple[int, ...]
"""Positions in a wave of the model-stages in one lane, ascending."""

Lanes = tuple[tuple[Subset, int], ...]
"""A lane layout: the model-stages of each lane, and its cells."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cells:
    """A pool as cells.

    Attributes:
      size: devices of a cell.
      count: cells; a lane that has all of them has the devices that are left over, too.
      num_devices: of the pool.
    """

    size: int
    count: int
    num_devices: int

    def width(self, cells: int) -> int:
        """Devices of a lane of so many cells."""
        return self.num_devices if cells == self.count else cells * self.size

    @property
    def widths(self) -> list[int]:
        """Of all lanes, ascending."""
        return [self.width(n + 1) for n in range(self.count)]


def make_cells(num_devices: int, devices_per_node: int, model_stages: int = 1) -> Cells:
    """The cells for a wave of so many model-stages: whole nodes or equal parts of one."""
    needed = -(-num_devices // (PARTS_OF_FEW if model_stages <= FEW else PARTS_OF_MANY))
    if needed >= devices_per_node:
        size = -(-needed // devices_per_node) * devices_per_node
    else:
        size = min(d for d in range(needed, devices_per_node + 1) if devices_per_node % d == 0)
    size = min(size, num_devices)
    return Cells(size=size, count=num_devices // size, num_devices=num_devices)


@functools.cache
def lane_layouts(model_stages: int, cells: int) -> tuple[Lanes, ...]:
    """All lane layouts of so many model-stages, fewer lanes first."""
    by_lanes = sorted(_partitions(model_stages), key=len)
    return tuple(
        tuple((tuple(lane), n) for lane, n in zip(lanes, widths, strict=True))
        for lanes in by_lanes
        for widths in _compositions(cells, len(lanes))
    )


def _partitions(count: int) -> Iterator[list[list[int]]]:
    """All ways to put so many model-stages into lanes, in a fixed order."""
    if count == 0:
        yield []
        return
    for smaller in _partitions(count - 1):
        for i in range(len(smaller)):
            yield [lane + [count - 1] if j == i else lane for j, lane in enumerate(smaller)]
        yield [*smaller, [count - 1]]


def _compositions(cells: int, lanes: int) -> Iterator[tuple[int, ...]]:
    """All ways to give every lane at least one cell, all cells given away."""
    for cut in itertools.combinations(range(1, cells), lanes - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cut, cells)))


@functools.cache
def subsets(count: int) -> tuple[Subset, ...]:
    """All sets of positions that a lane can have, each after those it is put together from."""
    sets = [tuple(i for i in range(count) if bits >> i & 1) for bits in range(1, 1 << count)]
    return tuple(sorted(sets, key=lambda s: (len(s), s)))
