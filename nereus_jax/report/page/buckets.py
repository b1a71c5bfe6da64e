"""Neighbouring steps drawn as one, so that a page does not grow with the length of its run."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from nereus_jax.report.page.record import StepPoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Some steps on end.

    Attributes:
      first, stop: the step numbers that it stands for; `stop` is the next one's.
      points: its steps, at least one.
    """

    first: int
    stop: int
    points: Sequence[StepPoint]

    def mean(self, of: Callable[[StepPoint], float | None]) -> float | None:
        """The mean of what the steps have."""
        values = [v for v in map(of, self.points) if v is not None]
        return sum(values) / len(values) if values else None

    def most(self, of: Callable[[StepPoint], float | None]) -> float | None:
        """The largest of what the steps have."""
        return max((v for v in map(of, self.points) if v is not None), default=None)

    def least(self, of: Callable[[StepPoint], float | None]) -> float | None:
        """The smallest of what the steps have."""
        return min((v for v in map(of, self.points) if v is not None), default=None)

    @property
    def name(self) -> str:
        """The steps, in words."""
        if self.stop - self.first == 1:
            return f"step {self.first}"
        return f"steps {self.first}-{self.stop - 1}"


def bucket_steps(first: int, last: int, most: int) -> int:
    """Steps that are drawn as one: so few that at most `most` are drawn."""
    return max(math.ceil((last - first + 1) / most), 1)


def make_buckets(steps: Sequence[StepPoint], most: int) -> list[Bucket]:
    """Steps in order, in at most `most` buckets of equally many step numbers."""
    if not steps:
        return []
    first, last = steps[0].step, steps[-1].step
    width = bucket_steps(first, last, most)
    by_place: dict[int, list[StepPoint]] = {}
    for point in steps:
        by_place.setdefault((point.step - first) // width, []).append(point)
    return [
        Bucket(
            first=first + place * width,
            stop=min(first + (place + 1) * width, last + 1),
            points=points,
        )
        for place, points in sorted(by_place.items())
    ]
