"""HTML made of text: everything that comes from files goes through `esc`."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

NONE = "–"


def esc(value: object) -> str:
    """Text that stays text, in an element and in an attribute."""
    return html.escape(str(value), quote=True)


def seconds(value: float | None) -> str:
    """Seconds with three figures: 0.0123, 1.23, 123, 12,345."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(size))
    return f"{value:.{min(max(digits, 0), 6)}f}"


def plain(value: float | None) -> str:
    """A round number, as at an axis."""
    return NONE if value is None else f"{value:,.6g}"


def count(value: float | None) -> str:
    """A number of things, with three figures where it is none."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if float(value).is_integer() else seconds(value)


def counted(number: int, name: str) -> str:
    """A number of things with their name: `1 step`, `2 steps`."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def percent(value: float | None, signed: bool = False) -> str:
    """A share."""
    if value is None:
        return NONE
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def size(num_bytes: float | None) -> str:
    """Bytes in the binary unit that reads best."""
    if num_bytes is None:
        return NONE
    for unit, one in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= one:
            return f"{num_bytes / one:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(value: float | None) -> str:
    """Seconds, with hours or minutes where they read better."""
    if value is None:
        return NONE
    if value >= 2 * 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 120 else f"{seconds(value)} s"


def table(
    name: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Iterable[int] = (0,),
    classes: Sequence[str] = (),
) -> str:
    """A table that scrolls in its own box.

    Args:
      name: its caption; text.
      head: titles of the columns; text.
      rows: cells as HTML.
      left: columns that hold words, not numbers.
      classes: of the rows, in order; empty: none has one.
    """
    words = set(left)
    kind = [' class="w"' if i in words else "" for i in range(len(head))]
    top = "".join(f'<th scope="col"{kind[i]}>{esc(h)}</th>' for i, h in enumerate(head))
    lines: list[str] = []
    for n, row in enumerate(rows):
        cells = "".join(f"<td{kind[i]}>{cell}</td>" for i, cell in enumerate(row))
        style = f' class="{classes[n]}"' if n < len(classes) and classes[n] else ""
        lines.append(f"<tr{style}>{cells}</tr>")
    box = f'<div class="scroll" role="region" aria-label="{esc(name)}" tabindex="0">'
    return (
        f"{box}<table><caption>{esc(name)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def details(summary: str, body: str, *, shown: bool = False, style: str = "") -> str:
    """A part that opens.

    Args:
      summary: its line; HTML.
      body: HTML.
      shown: whether it is open at first.
      style: its class; empty: it has none.
    """
    attributes = (f' class="{esc(style)}"' if style else "") + (" open" if shown else "")
    return f"<details{attributes}><summary>{summary}</summary>{body}</details>"


def facts(values: Mapping[str, tuple[str, str]]) -> str:
    """Figures in tiles: name -> value and what is to be known of it, both as text."""
    tiles = [
        f"<div><dt>{esc(name)}</dt><dd>{esc(value)}"
        + (f"<small>{esc(more)}</small>" if more else "")
        + "</dd></div>"
        for name, (value, more) in values.items()
    ]
    return f'<dl class="facts">{"".join(tiles)}</dl>'
