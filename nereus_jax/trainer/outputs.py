"""The files of a run and its progress on the screen; only process 0 writes."""

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_jax.config import RunConfig, config_to_json
from nereus_jax.control.decisions import plan_json
from nereus_jax.core.errors import ConfigError, StorageError
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.timeline import Span
from nereus_jax.report.decisions import DecisionsWriter
from nereus_jax.report.jsonl import JsonlWriter, samples_writer
from nereus_jax.report.metrics import MetricsWriter
from nereus_jax.report.progress import ProgressReporter
from nereus_jax.report.timeline import TimelineWriter

FAILURE = "failure.json"
"""Why the run ended before its last step, until it goes on."""


def check_writable(setting: str, directory: Path) -> None:
    """Creates a directory and proves that it can be written.

    Args:
      setting: that names the directory, for the error.
      directory: to look at.

    Raises:
      ConfigError: it cannot.
    """
    probe = directory / f".write-test-{uuid.uuid4().hex}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{setting} {str(directory)!r} cannot be written: {error.strerror or error}; "
            f"choose a directory that you may write to"
        ) from None


def check_unused(workdir: Path, steps: Sequence[int]) -> None:
    """Refuses a directory that holds a run, for a configuration that must not go on from one.

    Args:
      workdir: of the run.
      steps: of the checkpoints in it.

    Raises:
      ConfigError: there is a checkpoint, or a row of metrics.
    """
    metrics = workdir / "metrics.jsonl"
    if steps:
        found = f"a checkpoint of step {steps[-1]}"
    elif metrics.exists() and metrics.stat().st_size:
        found = "the metrics of a run"
    else:
        return
    raise ConfigError(
        f"{workdir} holds {found}, but checkpoint.resume='never'; choose another --workdir, or "
        f"resume='auto' to go on from it"
    )


class Outputs:
    """metrics.jsonl, samples.jsonl, timeline.jsonl, plans.jsonl, decisions.jsonl, TensorBoard,
    config.json, plan.json, failure.json, progress.

    Args:
      workdir: where the files go.
      config: of the run.
      plan: that holds, and how its model-stages run.
      device_kind: of the devices, as the backend names it.
      keep_through: last step whose rows stay in the logs; None empties them.
      keep_decisions: all of them stay: the same process took them, and goes back to an earlier step
        because of the last one.
      enabled: whether this process writes at all.
    """

    def __init__(
        self,
        workdir: Path,
        config: RunConfig,
        plan: ExecutionPlan,
        *,
        device_kind: str,
        keep_through: int | None,
        keep_decisions: bool = False,
        enabled: bool,
    ) -> None:
        self._metrics: MetricsWriter | None = None
        self._samples: JsonlWriter | None = None
        self._timeline: TimelineWriter | None = None
        self._decisions: DecisionsWriter | None = None
        self._plans: JsonlWriter | None = None
        self._progress: ProgressReporter | None = None
        self._workdir, self._device_kind = workdir, device_kind
        if not enabled:
            return
        with contextlib.suppress(FileNotFoundError):
            (workdir / FAILURE).unlink()
        _write_json(workdir / "config.json", config_to_json(config))
        _write_json(workdir / "plan.json", plan.to_json())
        self._metrics = MetricsWriter(workdir, config.report.tensorboard, keep_through=keep_through)
        self._samples = samples_writer(workdir, keep_through=keep_through)
        self._timeline = TimelineWriter(workdir, keep_through=keep_through)
        self._plans = JsonlWriter(workdir / "plans.jsonl", keep_through=keep_through)
        self._plan_from(0 if keep_through is None else keep_through + 1, plan)
        if config.control.policy:
            kept = sys.maxsize if keep_decisions else keep_through
            self._decisions = DecisionsWriter(workdir, keep_through=kept)
        self._progress = ProgressReporter(config.num_steps)

    def _plan_from(self, step: int, plan: ExecutionPlan) -> None:
        """Writes the plan that holds from a step on."""
        if self._plans is not None:
            row = {"step": step, "device_kind": self._device_kind, "plan": plan_json(plan)}
            self._plans.append(row)

    def start(self, step: int) -> None:
        """Starts the progress line at this step."""
        if self._progress is not None:
            self._progress.start(step)

    def message(self, text: str) -> None:
        """Prints a line."""
        if self._progress is not None:
            self._progress.message(text)

    def step(
        self, row: Mapping[str, Any], spans: Iterable[Span], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        """Writes a finished step."""
        if self._metrics is None or self._samples is None or self._timeline is None:
            return
        for span in spans:
            self._timeline.append(span)
        for sample in samples:
            self._samples.append(sample)
        self._metrics.append(row)
        if self._decisions is not None:
            self._decisions.step_measured(row["step_s"])
        if self._progress is not None:
            self._progress.step(row)

    def decision(self, record: Mapping[str, Any]) -> None:
        """Writes what the controller decided, and why."""
        if self._decisions is None:
            return
        self._decisions.append(record)
        self.message(f"controller: {record['verdict']} ({record['trigger']}): {record['reason']}")

    def move_failed(self, error: str) -> None:
        """Writes why a move that the controller had decided did not come to its end."""
        if self._decisions is not None:
            self._decisions.transition_failed(error)

    def transition(
        self, row: Mapping[str, Any], spans: Iterable[Span], plan: ExecutionPlan
    ) -> None:
        """Writes a change of plan that was made."""
        if self._metrics is None or self._timeline is None:
            return
        for span in spans:
            self._timeline.append(span)
        self._metrics.append(row)
        if self._decisions is not None:
            self._decisions.transition_measured(row["transition_s"])
        self._plan_from(row["step"], plan)
        _write_json(self._workdir / "plan.json", plan.to_json())
        self.message(
            f"the plan has changed in {row['transition_s']:.2f} s "
            f"({row['transition_operations']} operations, "
            f"{row['transition_wire_bytes'] / 1e6:.1f} MB moved, compilation waited for "
            f"{row['transition_compile_s']:.2f} s)"
        )

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Writes an evaluation."""
        if self._metrics is not None:
            self._metrics.append(row)
        greedy = row.get("eval_success_rate_greedy")
        self.message(
            f"evaluation after {row['eval_step']} steps | success {row['eval_success_rate']:.3f} | "
            + (f"greedy {greedy:.3f} | " if greedy is not None else "")
            + f"reward {row['eval_reward_mean']:.3f}"
        )

    def failure(self, step: int, error: Exception) -> None:
        """Writes what ended the run before this step; that this fails must not hide it."""
        if self._metrics is not None:
            said = {"step": step, "error_kind": type(error).__name__, "error": str(error)}
            with contextlib.suppress(OSError):
                _write_json(self._workdir / FAILURE, said)

    def close(self) -> None:
        """Closes the files and gives the terminal back.

        Rows are flushed as they are written, so that a disk too full to close a file loses none:
        it must not hide the error that ends the run.
        """
        for writer in (
            self._progress,
            self._metrics,
            self._samples,
            self._timeline,
            self._plans,
            self._decisions,
        ):
            if writer is not None:
                with contextlib.suppress(OSError):
                    writer.close()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}; free space or make the place "
            f"writable, then start the same command again"
        ) from error
