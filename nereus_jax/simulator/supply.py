"""How many nodes a cluster could give, over time: traces of spot markets.

Known formats: the JSON of skypilot-org/spot-traces (nodes that could be had, every so many seconds)
and CSV lines of events, milliseconds, `add` or `remove`, and a node's name (uclasystem/bamboo).
"""

import bisect
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nereus_jax.core.errors import ConfigError
from nereus_jax.planning.length_traces import read_text

FORMATS = (
    'JSON with counts, {"metadata": {"gap_seconds": 300}, "data": [16, 12, ...]}, or CSV events, '
    "milliseconds,add|remove,node"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supply:
    """Nodes that are there, from each time on.

    Attributes:
      name: of the trace.
      times_s: ascending, the first is 0.
      nodes: from each of these times on.
      end_s: where the trace ends.
    """

    name: str
    times_s: tuple[float, ...]
    nodes: tuple[int, ...]
    end_s: float

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.times_s, self.times_s[1:], strict=False))
        if not self.times_s or self.times_s[0] != 0.0 or not ascending:
            raise ValueError(f"times must ascend from 0, got {self.times_s[:6]}")
        if len(self.nodes) != len(self.times_s) or min(self.nodes) < 0:
            raise ValueError("every time needs a number of nodes of at least 0")

    def at(self, time_s: float) -> int:
        """Nodes at a time; after the end as at the end."""
        return self.nodes[max(bisect.bisect_right(self.times_s, time_s) - 1, 0)]

    @property
    def most(self) -> int:
        """Of all times."""
        return max(self.nodes)

    def cut(self, start_s: float, stop_s: float) -> "Supply":
        """A window, whose start becomes time 0.

        Raises:
          ConfigError: it is empty or outside of the trace.
        """
        if not 0.0 <= start_s < stop_s <= self.end_s:
            raise ConfigError(
                f"supply {self.name}: a window must lie in 0 to {self.end_s:g} s and not be empty, "
                f"got {start_s:g} to {stop_s:g}"
            )
        inside = [
            (t - start_s, n)
            for t, n in zip(self.times_s, self.nodes, strict=True)
            if start_s < t < stop_s
        ]
        changes = [(0.0, self.at(start_s)), *inside]
        return _supply(self.name, changes, stop_s - start_s)

    def scaled(self, most: int) -> "Supply":
        """The same with other node counts: `most` where the trace has most, rounded elsewhere."""
        if most < 1:
            raise ConfigError(f"supply {self.name}: nodes must be at least 1, got {most}")
        top = max(self.most, 1)
        counts = [math.floor(n * most / top + 0.5) for n in self.nodes]
        return _supply(self.name, list(zip(self.times_s, counts, strict=True)), self.end_s)

    def stretched(self, end_s: float) -> "Supply":
        """The same in another time."""
        factor = end_s / self.end_s
        changes = [(t * factor, n) for t, n in zip(self.times_s, self.nodes, strict=True)]
        return _supply(self.name, changes, end_s)

    def at_least(self, nodes: int) -> "Supply":
        """With a few nodes that stay, whatever the market has."""
        changes = [(t, max(n, nodes)) for t, n in zip(self.times_s, self.nodes, strict=True)]
        return _supply(self.name, changes, self.end_s)

    def then(self, other: "Supply") -> "Supply":
        """This one and another one after it."""
        changes = list(zip(self.times_s, self.nodes, strict=True))
        changes += [(self.end_s + t, n) for t, n in zip(other.times_s, other.nodes, strict=True)]
        return _supply(f"{self.name} + {other.name}", changes, self.end_s + other.end_s)


def constant_supply(nodes: int, end_s: float) -> Supply:
    """Nothing changes."""
    return Supply(name=f"{nodes} nodes", times_s=(0.0,), nodes=(nodes,), end_s=end_s)


def _supply(name: str, changes: Sequence[tuple[float, int]], end_s: float) -> Supply:
    """Without times at which nothing changes."""
    kept = [changes[0]]
    for time_s, nodes in changes[1:]:
        if nodes != kept[-1][1]:
            kept.append((time_s, nodes))
    times, counts = zip(*kept, strict=True)
    return Supply(name=name, times_s=times, nodes=counts, end_s=end_s)


def read_supply(path: str | Path) -> Supply:
    """Reads a trace.

    Raises:
      ConfigError: it cannot be read, or its format is not known; the message has the formats and
        the first line that is of none of them.
    """
    path = Path(path)
    text = read_text(path)
    lines = [(i, x) for i, x in enumerate(text.splitlines(), 1) if x.strip()]
    if not lines:
        raise ConfigError(f"supply trace: {path} is empty; known formats are {FORMATS}")
    if text.lstrip().startswith("{"):
        return _from_counts(path, text, lines[0])
    return _from_events(path, lines)


def _unknown(path: Path, line: int, text: str, why: str) -> ConfigError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return ConfigError(
        f"supply trace: {path}, line {line}: {shown!r}: {why}; known formats are {FORMATS}"
    )


def _from_counts(path: Path, text: str, first: tuple[int, str]) -> Supply:
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        number = getattr(error, "lineno", first[0])
        line = text.splitlines()[number - 1]
        raise _unknown(path, number, line, f"is no JSON ({error})") from None
    try:
        gap_s = float(data["metadata"]["gap_seconds"])
        counts: list[Any] = list(data["data"])
    except (KeyError, TypeError, ValueError):
        why = "has no metadata.gap_seconds or no list data"
        raise _unknown(path, *first, why) from None
    bad = [n for n in counts if not isinstance(n, int) or isinstance(n, bool) or n < 0]
    if bad or not counts or not 0.0 < gap_s < math.inf:
        why = f"data must be whole numbers of at least 0 every gap_seconds > 0, got {bad[:1]}"
        raise _unknown(path, *first, why)
    changes = [(i * gap_s, n) for i, n in enumerate(counts)]
    return _supply(path.stem, changes, gap_s * len(counts))


def _from_events(path: Path, lines: Sequence[tuple[int, str]]) -> Supply:
    there: set[str] = set()
    changes: list[tuple[float, int]] = []
    last_ms = 0.0
    for number, line in lines:
        parts = [p.strip() for p in line.split(",")]
        if len(parts) != 3 or parts[1] not in ("add", "remove") or not parts[0].isdecimal():
            raise _unknown(path, number, line, "is no event")
        at_ms, name = float(parts[0]), parts[2]
        if at_ms < last_ms:
            raise _unknown(path, number, line, f"comes after {last_ms:g} ms: sort the lines")
        if (parts[1] == "add") == (name in there):
            which = "is there already" if name in there else "is not there"
            raise _unknown(path, number, line, f"node {name} {which}")
        last_ms = at_ms
        there ^= {name}
        if changes and changes[-1][0] == at_ms / 1e3:
            changes.pop()
        changes.append((at_ms / 1e3, len(there)))
    if changes[0][0] > 0.0:
        changes.insert(0, (0.0, 0))
    return _supply(path.stem, changes, last_ms / 1e3 + 1.0)
