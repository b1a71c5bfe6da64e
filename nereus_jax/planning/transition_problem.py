"""The drafts of all model-stages as one scheduling problem on cells of devices.

Devices that are in the same units throughout, with the same free memory, form a cell: they are busy
at the same time and hold the same bytes, so one of them stands for all. That makes the schedule of
a thousand devices as small as that of its cells.
"""
# pyright: reportUnknownMemberType=false
# (numpy's own types of `unique` and `searchsorted` are partly unknown.)

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nereus_jax.core.transition import OperationKind
from nereus_jax.planning.transition_draft import Draft, Family, Phase, Some
from nereus_jax.planning.unit_cuts import Bools, Ints

CellBytes = list[tuple[int, int]]
"""(cell, bytes on each of its devices)."""


class Task(NamedTuple):  # thousands are made: a tuple takes a third of a dataclass's time
    """An operation as the schedule sees it.

    Attributes:
      draft: which one it is of.
      phase: which phase of the draft.
      number: in the phase.
      reads, consumes, produces: units by number in the problem.
      seconds: duration.
      cells: busy while it runs.
      takes: memory from its start on.
      gives: memory back at its end.
      rank: 0 it only releases, 1 it acquires, 2 it waits for all others.
    """

    draft: int
    phase: Phase
    number: int
    reads: tuple[int, ...]
    consumes: tuple[int, ...]
    produces: tuple[int, ...]
    seconds: float
    cells: tuple[int, ...]
    takes: CellBytes
    gives: CellBytes
    rank: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What is to be scheduled.

    Attributes:
      tasks: of each draft in local order, the drafts one after the other.
      before: for each task the tasks that must have ended (units, and readers of what it consumes).
      family_of: the family of each unit.
      row_of: its row in the family.
      base: for each draft the number of its first unit.
      free_bytes: by cell, at the start; cells are numbered by their first device.
      cell_of: [devices] the cell of each device.
    """

    tasks: tuple[Task, ...]
    before: tuple[tuple[int, ...], ...]
    family_of: tuple[Family, ...]
    row_of: tuple[int, ...]
    base: tuple[int, ...]
    free_bytes: tuple[int, ...]
    cell_of: Ints


def make_problem(drafts: Sequence[Draft], capacity: Ints, alive: Bools) -> Problem:
    """Joins drafts.

    Args:
      drafts: one for each model-stage, in the order GENERATE, SCORE, TRAIN.
      capacity: [devices] bytes that units may take.
      alive: [devices] those that can be used.
    """
    free = capacity.copy()
    for draft in drafts:
        first = draft.families[0]  # what exists at the start
        if not first.parked:
            free[first.rows] -= first.device_bytes
    cell_of = _cells(drafts, free)
    leads = alive & (cell_of == np.arange(len(cell_of)))
    family_of: list[Family] = []
    row_of: list[int] = []
    base: list[int] = []
    cells: list[list[int]] = []
    for draft in drafts:
        base.append(len(family_of))
        for family in draft.families:
            family_of += [family] * len(family.rows)
            row_of += range(len(family.rows))
            cells += _rows_of_cells(family.rows, leads)
    tasks: list[Task] = []
    for number, draft in enumerate(drafts):
        for phase in draft.phases:
            tasks += _tasks(number, phase, base[number], family_of, cells)
    return Problem(
        tasks=tuple(tasks),
        before=_before(tasks),
        family_of=tuple(family_of),
        row_of=tuple(row_of),
        base=tuple(base),
        free_bytes=tuple(free.tolist()),
        cell_of=cell_of,
    )


def _cells(drafts: Sequence[Draft], free: Ints) -> Ints:
    """For each device the first device that is in the same units and has as much memory."""
    number = len(free)
    key = np.unique(free, return_inverse=True)[1].astype(np.int64)
    size = number + 1
    for draft in drafts:
        for family in draft.families:
            if not draft.phases or not len(family.rows):
                continue
            unit = np.zeros(number, np.int64)
            unit[family.rows] = np.arange(1, len(family.rows) + 1)[:, None]
            if size > 2**62 // (len(family.rows) + 1):
                key = np.unique(key, return_inverse=True)[1].astype(np.int64)
                size = number + 1
            key = key * (len(family.rows) + 1) + unit
            size *= len(family.rows) + 1
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first[inverse]


def _rows_of_cells(rows: Ints, leads: Bools) -> list[list[int]]:
    """The cells of each unit."""
    mask = leads[rows]
    flat = rows[mask].tolist()
    ends = np.cumsum(mask.sum(axis=1)).tolist()
    return [flat[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _tasks(
    draft: int, phase: Phase, base: int, family_of: Sequence[Family], cells: Sequence[list[int]]
) -> list[Task]:
    """The operations of a phase."""
    seconds = phase.seconds.tolist()
    reads, consumes, produces = (
        _by_operation(some, base, len(seconds))
        for some in (phase.reads, phase.consumes, phase.produces)
    )
    idle = phase.kind is OperationKind.DESTROY
    tasks: list[Task] = []
    for number, duration in enumerate(seconds):
        takes: CellBytes = []
        gives: CellBytes = []
        for units, change in ((produces[number], takes), (consumes[number], gives)):
            for unit in units:
                held = family_of[unit].device_bytes
                if held:
                    change += [(c, held) for c in cells[unit]]
        busy: tuple[int, ...] = ()
        if not idle:
            units = reads[number] + consumes[number] + produces[number]
            busy = tuple(dict.fromkeys([c for u in units for c in cells[u]]))
        tasks.append(
            Task(
                draft=draft,
                phase=phase,
                number=number,
                reads=reads[number],
                consumes=consumes[number],
                produces=produces[number],
                seconds=duration,
                cells=busy,
                takes=takes,
                gives=gives,
                rank=2 if phase.after_all else 1 if takes else 0,
            )
        )
    return tasks


def _by_operation(some: Some, base: int, number: int) -> list[tuple[int, ...]]:
    """The units of each operation."""
    if not len(some):
        return [()] * number
    units: list[int] = (some.unit + base).tolist()
    if len(units) == number:
        return [(unit,) for unit in units]
    ends = np.cumsum(np.bincount(some.operation, minlength=number)).tolist()
    return [tuple(units[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def _before(tasks: Sequence[Task]) -> tuple[tuple[int, ...], ...]:
    """Data edges: the producer of each unit, and the readers of what is consumed.

    What waits for all others waits for the last operations of every other draft.
    """
    producer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    before: list[tuple[int, ...]] = []
    for i, task in enumerate(tasks):
        edges: dict[int, None] = {}
        for unit in task.reads:
            if unit in producer:
                edges[producer[unit]] = None
            readers.setdefault(unit, []).append(i)
        for unit in task.consumes:
            if unit in producer:
                edges[producer[unit]] = None
            for reader in readers.get(unit, ()):
                edges[reader] = None
        for unit in task.produces:
            producer[unit] = i
        before.append(tuple(edges))
    if any(t.rank == 2 for t in tasks):
        inner = {e for edges in before for e in edges}
        last = tuple(i for i, t in enumerate(tasks) if i not in inner and t.rank != 2)
        for i, task in enumerate(tasks):
            if task.rank == 2:
                others = (j for j in last if tasks[j].draft != task.draft)
                before[i] = tuple(dict.fromkeys((*before[i], *others)))
    return tuple(before)
