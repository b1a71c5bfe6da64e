"""What the figures of one run share: its steps as they are drawn, and marks at changes of plan."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from nereus_jax.report.page.buckets import Bucket, make_buckets
from nereus_jax.report.page.markup import counted, seconds
from nereus_jax.report.page.outcome import Outcome, outcomes
from nereus_jax.report.page.plot import Frame, cut_off, hit, marks
from nereus_jax.report.page.record import RunRecord, StepPoint

MOST_MARKS = 60
"""Changes of plan that are marked; more would be a hatching."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """A run that is drawn.

    Attributes:
      run: it has at least one step.
      key: begins the ids of its figures.
      buckets: its steps.
      found: what came of its decisions.
    """

    run: RunRecord
    key: str
    buckets: Sequence[Bucket]
    found: Sequence[Outcome]

    @property
    def badge(self) -> str:
        """Said on every figure."""
        return "simulated" if self.run.simulated else "measured"

    def frame(self, high: float, low: float = 0.0, height: int = 190) -> Frame:
        """A plane over all steps."""
        return Frame(
            first=self.buckets[0].first,
            stop=self.buckets[-1].stop,
            low=low,
            high=high,
            height=height,
        )

    def points(self, of: Callable[[Bucket], float | None]) -> list[tuple[float, float | None]]:
        """A value a bucket, in its middle."""
        return [((b.first + b.stop) / 2, of(b)) for b in self.buckets]

    def marks(self, frame: Frame) -> str:
        """The changes of plan."""
        return marks(frame, (plan.step for plan in self.run.changes), MOST_MARKS)

    def over(self, frame: Frame, of: Callable[[Bucket], float | None]) -> str:
        """Arrows where values lie above the plane."""
        places = [place for place, v in self.points(of) if v is not None and v > frame.high]
        return cut_off(frame, places)

    def hits(self, frame: Frame, lines: Callable[[Bucket], Iterable[str]]) -> list[str]:
        """A tooltip a bucket: its steps, what is given, and changes of plan."""
        made: list[str] = []
        changes = list(self.run.changes)
        for bucket in self.buckets:
            said = [bucket.name, *lines(bucket)]
            while changes and changes[0].step < bucket.stop:
                change = changes.pop(0)
                took = "" if change.seconds is None else f" in {seconds(change.seconds)} s"
                said.append(f"plan changed before step {change.step}{took}")
            made.append(hit(frame, bucket.first, bucket.stop, said))
        return made


def make_scene(run: RunRecord, key: str, most: int) -> Scene:
    """A run with at most so many points a line."""
    return Scene(run=run, key=key, buckets=make_buckets(run.steps, most), found=outcomes(run))


def settled_mean(bucket: Bucket, of: Callable[[StepPoint], float | None]) -> float | None:
    """The mean over the steps without compilation; where there is none, over all."""
    settled = [p for p in bucket.points if p.settled]
    return dataclasses.replace(bucket, points=settled or bucket.points).mean(of)


def settled_values(scene: Scene, of: Callable[[StepPoint], float | None]) -> list[float]:
    """Of the steps without compilation, bucket by bucket."""
    settled = [b for b in scene.buckets if any(p.settled for p in b.points)]
    return [v for v in (settled_mean(b, of) for b in settled) if v is not None]


def change_key(scene: Scene) -> list[tuple[str, str]]:
    """The entry of a legend for changes of plan, where there are any."""
    return [("move", "plan changed")] if scene.run.changes else []


def drawn_together(scene: Scene) -> bool:
    """Whether a point stands for several steps."""
    return any(b.stop - b.first > 1 for b in scene.buckets)


def about_compilation(scene: Scene, arrows: str) -> str:
    """What compilation does to the seconds that are drawn; empty: there was none.

    Args:
      scene: the run.
      arrows: those of its chart.
    """
    unsettled = sum(not p.settled for p in scene.run.steps)
    if not unsettled:
        return ""
    said = (
        f"In {unsettled} of {counted(len(scene.run.steps), 'step')} programs ran for the first "
        "time, with their compilation"
    )
    return said + ("; an arrow marks what is above the chart." if arrows else ".")
