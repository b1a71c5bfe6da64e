"""Charts as inline SVG, legible at any width.

The drawing is stretched to the width that there is, the text is not: positions across are per
cent, heights are pixels, and what needs a path lies in a nested drawing that is stretched
(`preserveAspectRatio="none"`) with strokes that are not. Labels of the y axis stand in a margin
left of the drawing, which the style sheet leaves free. Tooltips are `<title>` elements.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from nereus_jax.report.page.markup import esc

WIDE = 1000.0
"""Width of the stretched drawing, in its own units."""
DOTS = 40
"""Points that are few enough to be marked one by one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """The plane of a chart: step `n` has the column from `n` to `n + 1`.

    Attributes:
      first, stop: of the columns.
      low, high: of the values; what lies above is cut off.
      height: in pixels.
      whole: its values are integers, and so are the marks of its axis.
    """

    first: int
    stop: int
    low: float = 0.0
    high: float = 1.0
    height: int = 190
    whole: bool = False

    def share(self, step: float) -> float:
        """Where a place on the step axis is, from 0 to 1."""
        return (step - self.first) / max(self.stop - self.first, 1)

    def x(self, step: float) -> str:
        """Across, in per cent."""
        return f"{round(100.0 * self.share(step), 2):g}%"

    def y(self, value: float) -> float:
        """Down, in pixels."""
        span = self.high - self.low
        return round(self.height * (1.0 - (value - self.low) / span), 1) if span else self.height

    def point(self, step: float, value: float) -> str:
        """A place in the stretched drawing. What is far outside stays near: numbers of any size
        are not for every renderer."""
        down = min(max(self.y(value), -10.0 * self.height), 11.0 * self.height)
        return f"{round(WIDE * self.share(step), 1):g} {down:g}"


def ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` of them if there are two.

    Args:
      low, high: the range.
      most: at least 2.
      whole: integers only.
    """
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = span / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0)]
    if whole:
        steps = [s for s in steps if s >= 1.0 and s == round(s)] or [1.0]
    for step in steps:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return [n * step for n in range(first, last + 1)] or [low]
    return [low, high]


def top(values: Iterable[float | None], *, floor: float = 0.0) -> float:
    """A round number not below the largest value; 1 where there is nothing above 0."""
    most = max((v for v in values if v is not None), default=floor)
    most = max(most, floor)
    if not most > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    steps = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0)
    return next(m * power for m in steps if m * power >= most * (1 + 1e-9) or m == steps[-1])


def chart(
    frame: Frame,
    layers: Sequence[str],
    *,
    name: str,
    title: str,
    desc: str,
    label: Callable[[float], str],
    hits: Sequence[str] = (),
) -> str:
    """A whole chart.

    Args:
      frame: its plane.
      layers: drawn in this order, over the lines of the grid.
      name: a word of its own on the page, for references.
      title: text.
      desc: what is to be seen, for those who do not see it; text.
      label: of a value at the y axis.
      hits: as `hit` makes them.
    """
    grid: list[str] = []
    for value in ticks(frame.low, frame.high, whole=frame.whole):
        y = frame.y(value)
        grid.append(f'<line class="grid" x1="0" x2="100%" y1="{y:g}" y2="{y:g}"/>')
        grid.append(f'<text class="end" x="-8" y="{y + 4:g}">{esc(label(value))}</text>')
    return (
        svg_start(name, title, desc, frame.height + 40)
        + "".join(grid)
        + "".join(layers)
        + step_axis(frame)
        + "".join(hits)
        + "</svg>"
    )


def svg_start(name: str, title: str, desc: str, height: float) -> str:
    """The beginning of a drawing with a title and a description."""
    return (
        f'<svg class="plot" role="img" width="100%" height="{height:g}" '
        f'aria-labelledby="{esc(name)}-t {esc(name)}-d"><title id="{esc(name)}-t">{esc(title)}'
        f'</title><desc id="{esc(name)}-d">{esc(desc)}</desc>'
    )


def step_axis(frame: Frame) -> str:
    """The axis of the steps below a chart."""
    bottom = frame.height
    parts = [f'<line class="axis" x1="0" x2="100%" y1="{bottom}" y2="{bottom}"/>']
    for value in ticks(frame.first, max(frame.stop - 1, frame.first), 6, whole=True):
        share = frame.share(value + 0.5)
        anchor = "start" if share < 0.03 else "end" if share > 0.97 else "mid"
        x = "0" if anchor == "start" else "100%" if anchor == "end" else frame.x(value + 0.5)
        parts.append(f'<text class="{anchor}" x="{x}" y="{bottom + 18}">{value:,.0f}</text>')
    parts.append(f'<text class="mid name" x="50%" y="{bottom + 36}">step</text>')
    return "".join(parts)


def stretched(frame: Frame, paths: str) -> str:
    """A nested drawing of the width that there is; what lies outside the plane is cut off."""
    return (
        f'<svg width="100%" height="{frame.height}" viewBox="0 0 {WIDE:g} {frame.height}" '
        f'preserveAspectRatio="none" aria-hidden="true">{paths}</svg>'
    )


Points = Sequence[tuple[float, float | None]]


def line(frame: Frame, points: Points, style: str) -> str:
    """A line through points, broken where there is no value; few points are marked.

    Args:
      frame: the plane.
      points: place on the step axis, and value.
      style: classes.
    """
    path: list[str] = []
    dots: list[tuple[float, float]] = []
    down = False
    for place, value in points:
        if value is None:
            down = False
            continue
        path.append(f"{'L' if down else 'M'}{frame.point(place, value)}")
        down = True
        if frame.low <= value <= frame.high:
            dots.append((place, value))
    drawn = stretched(frame, f'<path class="line {style}" d="{"".join(path)}"/>') if path else ""
    if len(dots) > DOTS:
        return drawn
    return drawn + "".join(
        f'<circle class="dot {style}" cx="{frame.x(x)}" cy="{frame.y(v):g}" r="3"/>'
        for x, v in dots
    )


def stairs(frame: Frame, runs: Iterable[tuple[float, float, float | None]], style: str) -> str:
    """Level lines, joined where one begins where the last one ended.

    Args:
      frame: the plane.
      runs: first place, last place, value.
      style: classes.
    """
    path: list[str] = []
    at: float | None = None
    for start, stop, value in runs:
        if value is None:
            at = None
            continue
        joined = at is not None and math.isclose(at, start)
        path.append(f"{'L' if joined else 'M'}{frame.point(start, value)}")
        path.append(f"L{frame.point(stop, value)}")
        at = stop
    if not path:
        return ""
    return stretched(frame, f'<path class="line {style}" d="{"".join(path)}"/>')


def stack(
    frame: Frame, columns: Sequence[tuple[float, float, Sequence[float]]], styles: Sequence[str]
) -> str:
    """Columns of parts on top of each other, one area a part.

    Args:
      frame: the plane.
      columns: first place, last place, and the parts from the bottom up.
      styles: classes of the parts.
    """
    areas: list[str] = []
    for part, style in enumerate(styles):
        path: list[str] = []
        for start, stop, parts in columns:
            below = sum(parts[:part])
            if not parts[part] > 0:
                continue
            low, high = frame.point(start, below), frame.point(start, below + parts[part])
            right = frame.point(stop, below + parts[part]), frame.point(stop, below)
            path.append(f"M{low}L{high}L{right[0]}L{right[1]}Z")
        if path:
            areas.append(f'<path class="area {style}" d="{"".join(path)}"/>')
    return stretched(frame, "".join(areas)) if areas else ""


def marks(frame: Frame, steps: Iterable[float], most: int) -> str:
    """Upright lines before steps, such as changes of plan; none if there are more than `most`."""
    found = list(steps)
    if len(found) > most:
        return ""
    return "".join(
        f'<line class="move" x1="{frame.x(s)}" x2="{frame.x(s)}" y1="0" y2="{frame.height}"/>'
        for s in found
    )


def cut_off(frame: Frame, places: Iterable[float]) -> str:
    """Small arrows at the upper edge, where a value lies above the plane."""
    return "".join(
        f'<svg x="{frame.x(place)}" y="0" width="1" height="1" overflow="visible" '
        f'aria-hidden="true"><path class="over" d="M-5 8L0 1L5 8Z"/></svg>'
        for place in places
    )


def hit(frame: Frame, start: float, stop: float, lines: Iterable[str]) -> str:
    """A column that says something when the pointer is on it.

    Args:
      frame: the plane.
      start, stop: places on the step axis.
      lines: text.
    """
    width = 100.0 * (frame.share(stop) - frame.share(start))
    return (
        f'<rect class="hit" x="{frame.x(start)}" width="{round(width, 2):g}%" y="0" '
        f'height="{frame.height}"><title>{esc(chr(10).join(lines))}</title></rect>'
    )


def figure(
    name: str, title: str, badge: str, body: str, *, note: str = "", wide: bool = False
) -> str:
    """A chart with its heading.

    Args:
      name: its id.
      title: text.
      badge: whether it is measured, simulated or modelled; text.
      body: legend and chart; HTML.
      note: below; text.
      wide: it takes both columns.
    """
    below = f'<p class="note">{esc(note)}</p>' if note else ""
    style = ' class="wide"' if wide else ""
    return (
        f'<figure id="{esc(name)}"{style}><figcaption><h3>{esc(title)}</h3>'
        f'<span class="badge">{esc(badge)}</span></figcaption>{body}{below}</figure>'
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """What the colours and lines are: classes and text."""
    items = "".join(
        f'<li><svg class="key" width="22" height="12" aria-hidden="true">{_key(style)}</svg>'
        f"{esc(text)}</li>"
        for style, text in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _key(style: str) -> str:
    if style.startswith("area"):
        return f'<rect class="{esc(style)}" width="22" height="12"/>'
    if style.startswith("move"):
        return f'<line class="{esc(style)}" x1="11" x2="11" y1="0" y2="12"/>'
    return f'<path class="line {esc(style)}" d="M0 6L22 6"/>'
