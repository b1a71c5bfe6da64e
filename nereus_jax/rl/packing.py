"""Sharing sequences among rows of a fixed width, so that little of them is padding.

Shapes: B sequences, N packed rows.
"""

import bisect
import dataclasses

import numpy as np

from nereus_jax.rl.balance import balance_rows


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Where every sequence lies.

    Attributes:
      num_rows: N, a multiple of the number of groups; group g has rows g * N / groups and on.
      rows_B: int64, the packed row of each sequence; -1 for an empty one.
      starts_B: int64, its first column.
    """

    num_rows: int
    rows_B: np.ndarray
    starts_B: np.ndarray


def pack_rows(
    lengths_B: np.ndarray, width: int, num_groups: int = 1, max_rows: int | None = None
) -> Packing:
    """Puts sequences into as few rows as best-fit decreasing finds, rows shared evenly by groups.

    Longest sequence first, into the fullest row that has room; ties go to the earlier sequence and
    the earlier row, so that every process finds the same. Then rows are dealt to the groups
    (`balance_rows`): as many for each, with nearly the same number of tokens. No row but the
    emptiest ones is less than half full, and where sequences are at most width / k long all rows
    but one hold at least k of them.

    Args:
      lengths_B: integers >= 0, tokens of each sequence; one without tokens gets no place.
      width: columns of a packed row, at least the longest sequence.
      num_groups: >= 1.
      max_rows: most rows, all groups together; a sequence that they have no room for gets no
        place. None: as many as it takes.

    Raises:
      ValueError: lengths are not a vector, or a sequence is longer than a row.

    Source: Johnson, "Near-optimal bin packing algorithms" (1973), best fit decreasing.
    """
    lengths_B = np.asarray(lengths_B)
    if lengths_B.ndim != 1:
        raise ValueError(f"lengths must be a vector, got shape {lengths_B.shape}")
    if lengths_B.size and int(lengths_B.max()) > width:
        raise ValueError(f"a sequence of {int(lengths_B.max())} tokens, but rows have {width}")
    rows_B = np.full(lengths_B.shape, -1, np.int64)
    starts_B = np.zeros(lengths_B.shape, np.int64)
    loads: list[int] = []
    room: list[tuple[int, int]] = []  # (columns left, row), ascending
    for b in np.argsort(-lengths_B.astype(np.int64), kind="stable").tolist():
        length = int(lengths_B[b])
        if not length:
            break
        place = bisect.bisect_left(room, (length, -1))
        if place < len(room):
            left, row = room.pop(place)
        elif max_rows is None or len(loads) < max_rows:
            left, row = width, len(loads)
            loads.append(0)
        else:
            continue
        rows_B[b], starts_B[b] = row, loads[row]
        loads[row] += length
        bisect.insort(room, (left - length, row))
    num_rows = num_groups * -(-len(loads) // num_groups)
    order_N = balance_rows(
        np.pad(np.array(loads, np.int64), (0, num_rows - len(loads))), num_groups
    )
    new_rows_N = np.empty(num_rows, np.int64)
    new_rows_N[order_N] = np.arange(num_rows)
    placed_B = rows_B >= 0
    rows_B[placed_B] = new_rows_N[rows_B[placed_B]]
    return Packing(num_rows=num_rows, rows_B=rows_B, starts_B=starts_B)
