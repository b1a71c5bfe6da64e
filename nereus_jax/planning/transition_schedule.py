"""Order and times of the operations of a transition.

List scheduling: at every moment what is ready starts, the most urgent first, if its devices are
idle and its memory is free. What only releases comes before what acquires; of equals GENERATE comes
before SCORE before TRAIN. An operation has its devices and their links to itself: a device carries
out one program at a time.

An acquisition whose memory comes from a release gets an edge from it, so that memory suffices in
every order that the edges allow, not only at the modelled times. Such an edge comes from an
operation that has ended, so the graph has no circle.
"""

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from nereus_jax.planning.transition_order import improved
from nereus_jax.planning.transition_problem import Problem, Task

RULE_TASKS = 600
"""Tasks that are scheduled in all while rules of urgency are tried: a large problem gets one."""

SEARCH_TASKS = 8000
"""Tasks that are timed in all while the best orders are improved."""

SEARCHED_TASKS = 150
"""The largest problem whose orders are improved."""

SEARCHED_ORDERS = 3
MAX_RULES = 46


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Tasks in dispatch order, and when.

    Attributes:
      order: tasks of the problem.
      start_s, end_s: by task.
      blocked: the most urgent task for which memory was not found, and the cell that lacks it;
        None: all tasks are in the order.
    """

    order: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    blocked: tuple[int, int] | None

    @property
    def seconds(self) -> float:
        """When the last task ends."""
        return max(self.end_s, default=0.0)


def make_schedule(problem: Problem) -> Schedule:
    """The best of several rules of urgency, improved by moving single tasks.

    The work is bounded by the number of tasks, never by a clock: the same problem gets the same
    schedule.
    """
    tasks = problem.tasks
    after: list[list[int]] = [[] for _ in tasks]
    for i, edges in enumerate(problem.before):
        for j in edges:
            after[j].append(i)
    tail, load = _tails(problem, after), _loads(problem)
    bound_s = max(*tail, *load, 0.0) * (1 + 1e-9)  # the longest chain, the busiest device
    found: list[Schedule] = []
    rules = itertools.chain(_rules(problem, tail, load), _random_rules(problem))
    for rule in itertools.islice(rules, MAX_RULES):
        found.append(_simulate(problem, after, rule))
        good = found[-1].blocked is None and found[-1].seconds <= bound_s
        if good or (len(found) + 1) * len(tasks) > RULE_TASKS:
            break
    found.sort(key=lambda s: (s.blocked is not None, -len(s.order), s.seconds))
    best = found[0]
    if best.blocked is None and best.seconds > bound_s and len(tasks) <= SEARCHED_TASKS:
        return _improve(problem, found, bound_s)
    return best


def _improve(problem: Problem, found: Sequence[Schedule], bound_s: float) -> Schedule:
    """The best schedule near those found; they are sorted, and the first holds all tasks."""
    best = found[0]
    for schedule in found[:SEARCHED_ORDERS]:
        if schedule.blocked is None and best.seconds > bound_s:
            order, times = improved(
                problem, schedule.order, bound_s, SEARCH_TASKS // SEARCHED_ORDERS
            )
            if times.seconds < best.seconds:
                by_start = sorted(order, key=lambda i: times.start_s[i])
                best = Schedule(
                    order=tuple(by_start), start_s=times.start_s, end_s=times.end_s, blocked=None
                )
    return best


def _tails(problem: Problem, after: Sequence[Sequence[int]]) -> list[float]:
    """Seconds from the start of each task to the end of all that depends on it."""
    tail = [0.0] * len(problem.tasks)
    for i in sorted(range(len(tail)), key=lambda i: problem.tasks[i].rank == 2)[::-1]:
        tail[i] = problem.tasks[i].seconds + max((tail[j] for j in after[i]), default=0.0)
    return tail


def _loads(problem: Problem) -> list[float]:
    """Seconds that each cell works in all."""
    load = [0.0] * len(problem.free_bytes)
    for task in problem.tasks:
        for cell in task.cells:
            load[cell] += task.seconds
    return load


def _rules(problem: Problem, tail: Sequence[float], load: Sequence[float]) -> Iterator[list[int]]:
    """Rules of urgency: the place of each task in the order of preference."""
    tasks = problem.tasks
    busiest = [max([load[c] for c in t.cells], default=0.0) for t in tasks]
    keys: tuple[Callable[[int, Task], tuple[float, ...]], ...] = (
        lambda i, t: (t.rank, -tail[i], t.draft),
        lambda i, t: (t.rank, -busiest[i], -tail[i], t.draft),
        lambda _, t: (t.rank, t.draft),
        lambda i, t: (t.rank, _net_bytes(t), -tail[i], t.draft),
        lambda _, t: (t.rank, -t.seconds, t.draft),
        lambda i, t: (t.rank, -t.draft, -tail[i]),
    )
    for key in keys:
        yield _places([key(i, task) for i, task in enumerate(tasks)])


def _random_rules(problem: Problem) -> Iterator[list[int]]:
    """Rules by chance: any order of the model-stages, any order of the tasks, in turns."""
    rng = random.Random(0)
    tasks = problem.tasks
    drafts = [*range(max((t.draft for t in tasks), default=0) + 1)]
    while True:
        rng.shuffle(drafts)
        yield _places([(drafts[t.draft],) for t in tasks])
        yield _places([(rng.random(),) for _ in tasks])


def _places(keys: Sequence[tuple[float, ...]]) -> list[int]:
    """The place of each key in ascending order; of equals the first is first."""
    place = [0] * len(keys)
    for n, i in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
        place[i] = n
    return place


def _net_bytes(task: Task) -> int:
    """What a task takes for good, on all cells."""
    return sum(b for _, b in task.takes) - sum(b for _, b in task.gives)


def _simulate(problem: Problem, after: Sequence[Sequence[int]], place: Sequence[int]) -> Schedule:
    """Starts what is ready, most urgent first, from event to event."""
    tasks, number = problem.tasks, len(problem.tasks)
    at = [0] * number
    for i, n in enumerate(place):
        at[n] = i
    open_edges = [len(edges) for edges in problem.before]
    free, busy = list(problem.free_bytes), [False] * len(problem.free_bytes)
    waiting: dict[int, list[int]] = {}
    start, end = [0.0] * number, [0.0] * number
    order: list[int] = []
    running: list[tuple[float, int]] = []
    ready = [place[i] for i in range(number) if not open_edges[i]]
    heapq.heapify(ready)
    now = 0.0

    def finish(task: Task, i: int) -> None:
        for cell in task.cells:
            busy[cell] = False
        for cell, num_bytes in task.gives:
            free[cell] += num_bytes
        if waiting:
            for cell in {*task.cells, *[c for c, _ in task.gives]}:
                for j in waiting.pop(cell, ()):
                    heapq.heappush(ready, place[j])
        for j in after[i]:
            open_edges[j] -= 1
            if not open_edges[j]:
                heapq.heappush(ready, place[j])

    while ready or running:
        while ready:
            i = at[heapq.heappop(ready)]
            task = tasks[i]
            obstacle = _obstacle(task, busy, free)
            if obstacle is not None:
                waiting.setdefault(obstacle, []).append(i)
                continue
            order.append(i)
            start[i], end[i] = now, now + task.seconds
            for cell, num_bytes in task.takes:
                free[cell] -= num_bytes
            if task.seconds:
                for cell in task.cells:
                    busy[cell] = True
                heapq.heappush(running, (end[i], i))
            else:
                finish(task, i)
        if running:
            now, i = heapq.heappop(running)
            finish(tasks[i], i)
            while running and running[0][0] <= now:
                i = heapq.heappop(running)[1]
                finish(tasks[i], i)
    blocked = min(((place[i], i, c) for c, w in waiting.items() for i in w), default=None)
    return Schedule(
        order=tuple(order),
        start_s=tuple(start),
        end_s=tuple(end),
        blocked=None if blocked is None else blocked[1:],
    )


def _obstacle(task: Task, busy: Sequence[bool], free: Sequence[int]) -> int | None:
    """A cell that is busy or has too little memory for a task; None: it can start."""
    for cell in task.cells:
        if busy[cell]:
            return cell
    for cell, num_bytes in task.takes:
        if free[cell] < num_bytes:
            return cell
    return None


def lowest_free_bytes(problem: Problem, order: Sequence[int]) -> list[int]:
    """By cell, the least memory that is ever free."""
    free, lowest = list(problem.free_bytes), list(problem.free_bytes)
    for i in order:
        for cell, num_bytes in problem.tasks[i].takes:
            free[cell] -= num_bytes
            if free[cell] < lowest[cell]:
                lowest[cell] = free[cell]
        for cell, num_bytes in problem.tasks[i].gives:
            free[cell] += num_bytes
    return lowest


def resource_edges(problem: Problem, schedule: Schedule) -> list[tuple[int, ...]]:
    """For each task the releases that must have ended for its memory, by task.

    A release counts for a task only if it is among what the task waits for; if the rest does not
    suffice, the earliest other releases of the device are waited for too.
    """
    free = list(problem.free_bytes)
    for task in problem.tasks:
        for cell, num_bytes in task.takes:
            free[cell] -= num_bytes
    tight = {cell for cell, left in enumerate(free) if left < 0}
    edges: list[tuple[int, ...]] = [()] * len(problem.tasks)
    if not tight:
        return edges
    free = list(problem.free_bytes)
    ancestors = [0] * len(problem.tasks)
    releases: dict[int, list[tuple[float, int, int]]] = {cell: [] for cell in tight}
    for i in schedule.order:
        task, known = problem.tasks[i], 0
        for j in problem.before[i]:
            known |= ancestors[j]
        added: list[int] = []
        for cell, num_bytes in task.takes:
            if cell not in tight:
                continue
            free[cell] -= num_bytes
            if free[cell] >= 0:
                continue
            given = sorted(releases[cell])
            left = free[cell] + sum([b for _, j, b in given if known >> j & 1])
            for _, j, _ in given:
                if left >= 0:
                    break
                if not known >> j & 1:
                    added.append(j)
                    known |= ancestors[j]
                    left = free[cell] + sum([b for _, k, b in given if known >> k & 1])
        ancestors[i] = known | 1 << i
        edges[i] = tuple(sorted(set(added)))
        for cell, num_bytes in task.gives:
            if cell in tight:
                releases[cell].append((schedule.end_s[i], i, num_bytes))
    return edges
