"""Times of operations in a given dispatch order, and small changes to the order that shorten them.

In a given order every operation starts as soon as what it waits for has ended, its devices have
done what was dispatched before, and its memory is free. Every schedule that could be best is what
some order gives, so a search over orders can reach the optimum.
"""

import dataclasses
import random
from collections.abc import Sequence

from nereus_jax.planning.transition_problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Timing:
    """When tasks run.

    Attributes:
      start_s, end_s: by task.
      cause: for each task the one whose end let it start, -1 for none.
      seconds: when the last one ends.
    """

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    cause: tuple[int, ...]
    seconds: float


def timing(problem: Problem, order: Sequence[int]) -> Timing | None:
    """Times of all tasks in dispatch order; None: memory does not suffice for this order."""
    tasks, number = problem.tasks, len(problem.tasks)
    start, end, cause = [0.0] * number, [0.0] * number, [-1] * number
    free = list(problem.free_bytes)
    user: dict[int, int] = {}
    taker: dict[int, float] = {}
    pending: dict[int, list[tuple[float, int, int]]] = {}
    for i in order:
        task = tasks[i]
        now, why = 0.0, -1
        for j in problem.before[i]:
            if end[j] > now or why < 0:
                now, why = max(now, end[j]), j
        for cell in task.cells:
            j = user.get(cell, -1)
            if j >= 0 and end[j] > now:
                now, why = end[j], j
        for cell, needed in task.takes:
            now = max(now, taker.get(cell, 0.0))
            left = free[cell]
            for ended, j, given in pending.get(cell, ()):
                if ended <= now:
                    left += given
                elif left < needed:
                    now, why = ended, j
                    left += given
            if left < needed:
                return None
        for cell, needed in task.takes:
            waiting = pending.get(cell)
            if waiting:
                free[cell] += sum([given for ended, _, given in waiting if ended <= now])
                pending[cell] = [x for x in waiting if x[0] > now]
            free[cell] -= needed
            taker[cell] = now
        start[i], end[i], cause[i] = now, now + task.seconds, why
        if task.seconds:
            for cell in task.cells:
                user[cell] = i
        for cell, given in task.gives:
            waiting = pending.setdefault(cell, [])
            waiting.append((end[i], i, given))
            waiting.sort()
    return Timing(
        start_s=tuple(start), end_s=tuple(end), cause=tuple(cause), seconds=max(end, default=0.0)
    )


def improved(
    problem: Problem, order: Sequence[int], bound_s: float, max_tasks: int
) -> tuple[list[int], Timing]:
    """A better dispatch order, found by moving single tasks, with what they need, to other places.

    Args:
      problem: the tasks.
      order: a dispatch order for which memory suffices.
      bound_s: no order is faster; the search ends there.
      max_tasks: tasks that may be timed in all.

    Returns:
      The best order found, with its times; the same for the same input.
    """
    rng = random.Random(0)
    current = list(order)
    now = timing(problem, current)
    assert now is not None
    best, best_order = now, current
    ancestors = _ancestors(problem)
    for _ in range(max_tasks // max(len(order), 1)):
        if best.seconds <= bound_s:
            break
        if rng.random() < 0.5:
            moved = _earlier(current, now, ancestors, rng)
        else:
            moved = _later(current, ancestors, rng)
        found = timing(problem, moved)
        if found is None:
            continue
        if found.seconds <= now.seconds or rng.random() < 0.02:  # now and then out of a dead end
            current, now = moved, found
        if found.seconds < best.seconds:
            best, best_order = found, moved
    return best_order, best


def _ancestors(problem: Problem) -> list[int]:
    """For each task the set of those that it waits for, as the bits of a number."""
    ancestors = [0] * len(problem.tasks)
    late = [i for i, task in enumerate(problem.tasks) if task.rank == 2]
    for i in [*(i for i, task in enumerate(problem.tasks) if task.rank != 2), *late]:
        for j in problem.before[i]:
            ancestors[i] |= ancestors[j] | 1 << j
    return ancestors


def _earlier(
    order: list[int], times: Timing, ancestors: Sequence[int], rng: random.Random
) -> list[int]:
    """The order with a task that delays the end, and what it needs, before an earlier one."""
    path = [max(order, key=lambda i: times.end_s[i])]
    while times.cause[path[-1]] >= 0:
        path.append(times.cause[path[-1]])
    at = rng.randrange(len(path))
    place = {i: n for n, i in enumerate(order)}
    task = path[at]
    if not place[task]:
        return order
    cause = times.cause[task]
    to = place[cause] if cause >= 0 and rng.random() < 0.4 else rng.randrange(place[task])
    front = ancestors[task] | 1 << task
    if rng.random() < 0.5:  # with what freed its memory and its devices, and what that needs
        for i in path[at + 1 :]:
            if place[i] <= to:
                break
            front |= ancestors[i] | 1 << i
    middle = order[to : place[task] + 1]
    needed = [i for i in middle if front >> i & 1]
    rest = [i for i in middle if not front >> i & 1]
    return [*order[:to], *needed, *rest, *order[place[task] + 1 :]]


def _later(order: list[int], ancestors: Sequence[int], rng: random.Random) -> list[int]:
    """The order with any task, and what depends on it, after a later one."""
    begin, end = sorted((rng.randrange(len(order)), rng.randrange(len(order))))
    back = 1 << order[begin]
    for i in order[begin + 1 : end + 1]:
        if ancestors[i] & back:
            back |= 1 << i
    middle = order[begin : end + 1]
    needed = [i for i in middle if back >> i & 1]
    rest = [i for i in middle if not back >> i & 1]
    return [*order[:begin], *rest, *needed, *order[end + 1 :]]
