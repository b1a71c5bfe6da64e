"""decisions.jsonl: what the controller decided and why, with what came of it beside."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereus_jax.report.jsonl import JsonlWriter, read_jsonl

SETTLED_STEPS = 2
"""Steps after a decision or a move whose seconds count as what was predicted: the first has
compilation in it."""


class DecisionsWriter(JsonlWriter):
    """Writes a line a replan, and adds to the last one what was measured afterwards.

    Args:
      workdir: of the run.
      keep_through: as in `JsonlWriter`.
    """

    def __init__(self, workdir: Path, *, keep_through: int | None = None) -> None:
        super().__init__(workdir / "decisions.jsonl", keep_through=keep_through)
        rows = read_jsonl(self.path)
        self._last: dict[str, Any] | None = dict(rows[-1]) if rows else None
        self._steps = 0

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes a decision."""
        super().append(row)
        self._last, self._steps = dict(row), 0

    def transition_measured(self, seconds: float) -> None:
        """Adds the seconds that the move of the last decision took."""
        if self._last is not None and self._last.get("target") is not None:
            self._last["transition_s_measured"] = seconds
            self._steps = 0
            self.replace_last(self._last)

    def step_measured(self, step: int, seconds: float) -> None:
        """Adds the seconds of a step under the plan of the last decision, once it has settled.

        Args:
          step: its number.
          seconds: of it.
        """
        last = self._last
        if last is None or step < last["step"] or "step_s_measured" in last:
            return
        if last.get("target") is not None and "transition_s_measured" not in last:
            return  # the move is still to come
        self._steps += 1
        if self._steps == SETTLED_STEPS:
            last["step_s_measured"] = seconds
            self.replace_last(last)
