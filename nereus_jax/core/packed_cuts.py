"""How SCORE and TRAIN cut their packed rows: what the engines do and the planner foresees."""

WIDE = 4
"""Longest sequences in a wide row: with four, best fit leaves little room whatever the lengths."""

SHORT = 4
"""Short rows in the longest sequence."""

SHORT_TOKENS = 128
"""Least columns of a short row: fewer tokens are a part of a tile of a GPU's matrix unit, and cost
as much."""

GAIN = 1.1
"""An engine takes the first of its forms, the usual one before all, that runs at most this many
times the tokens of the best: tokens of the others cost more (attention over wide rows, products of
fewer rows), and their first use compiles."""

SCORE_FLUSH_PER_RANK = 4
"""Most microbatches of a SCORE flush per pipeline rank: a bubble below 1/5, a bounded buffer."""


def short_width(length: int) -> int:
    """Columns of a short row where the longest sequence has so many tokens; 0: there are none."""
    width = -(-length // SHORT)
    return width if width >= SHORT_TOKENS else 0
