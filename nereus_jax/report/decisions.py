"""decisions.jsonl: what the controller decided and why, with what came of it beside.

One object a replan. When it is known, these are added to the object, whose line is written anew:

- `transition_s_measured`: that the job stood still for the move, beside `transition_s_predicted`;
- `transition_error`: why the move did not reach its target, or not by moving state;
- `step_s_measured`: of the second step under the plan that came of it (the first has compilation in
  it), beside `step_s_target_predicted` where the job moved and `step_s_predicted` where it did not.

A replan that has been overtaken by the next one before it had an outcome has none of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereus_jax.report.jsonl import JsonlWriter, read_jsonl

SETTLED_STEPS = 2
"""Steps after a decision or a move whose seconds count as what was predicted: the first has
compilation in it."""
MOVED, FAILED, STEP = "transition_s_measured", "transition_error", "step_s_measured"


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
        self._add_outcome(MOVED, seconds)

    def transition_failed(self, error: str) -> None:
        """Adds why the move of the last decision did not come to its end."""
        self._add_outcome(FAILED, error)

    def step_measured(self, seconds: float) -> None:
        """Adds the seconds of a step under the plan of the last decision, once it has settled."""
        last = self._last
        if last is None or STEP in last:
            return
        if last.get("target") is not None and MOVED not in last and FAILED not in last:
            return  # the move is still to come
        self._steps += 1
        if self._steps == SETTLED_STEPS:
            last[STEP] = seconds
            self.replace_last(last)

    def _add_outcome(self, key: str, value: object) -> None:
        """Once: what the job does later is no outcome of this decision."""
        last = self._last
        if last is None or last.get("target") is None or key in last:
            return
        last[key] = value
        self._steps = 0
        self.replace_last(last)
