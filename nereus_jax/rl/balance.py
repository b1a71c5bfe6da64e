"""Sharing rows among data-parallel groups so that each has nearly the same number of tokens.

Shapes: B rows.
"""

import heapq

import numpy as np


def balance_rows(lengths_B: np.ndarray, num_groups: int) -> np.ndarray:
    """Orders rows so that num_groups consecutive blocks of equal size have nearly equal length.

    Longest row first to the least-loaded group that still has room; ties go to the earlier row and
    the lower group, so that every process finds the same order. Rows inside a block come longest
    first: the k-th microbatches of all groups are alike too.

    Args:
        lengths_B: integers >= 0, tokens (or any cost) per row.
        num_groups: >= 1, divides B.

    Returns:
        int64 [B], a permutation: new row i is old row permutation[i].

    Raises:
        ValueError: lengths are not a vector, or num_groups does not divide B.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies" (1969), longest processing time
    first; departure: groups have equal row counts, which SPMD batches need.
    """
    lengths_B = np.asarray(lengths_B)
    if lengths_B.ndim != 1:
        raise ValueError(f"lengths must be a vector, got shape {lengths_B.shape}")
    num_rows = lengths_B.shape[0]
    if num_groups < 1 or num_rows % num_groups:
        raise ValueError(f"{num_rows} rows cannot be shared equally among {num_groups} groups")
    room = num_rows // num_groups
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    open_groups = [(0, group) for group in range(num_groups)]  # (load, group): a valid heap
    for row in np.argsort(-lengths_B.astype(np.int64), kind="stable").tolist():
        load, group = heapq.heappop(open_groups)
        groups[group].append(row)
        if len(groups[group]) < room:
            heapq.heappush(open_groups, (load + int(lengths_B[row]), group))
    return np.array([row for group in groups for row in group], dtype=np.int64)
