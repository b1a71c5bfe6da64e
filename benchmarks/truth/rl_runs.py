"""The stages of real RL runs on the simulated cluster, beside their logs.

The runs, their set-ups and their logs are those of `benchmarks/rl_logs`.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.cost_terms import ModelSizes
from nereus_jax.simulator.curves import Truth
from nereus_jax.simulator.decoding import generate_s
from nereus_jax.simulator.operations import Device
from nereus_jax.simulator.passes import score_s, train_s
from nereus_jax.simulator.stage_run import EngineOverheads, StageRun, StepRows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl_logs"))

from logs import COLUMNS, SETUPS, Setup, read_log  # pyright: ignore

FIRST = 50
"""Iterations that are fitted."""
BLOCK = 10
"""Iterations whose mean is followed: slower changes are drift."""

NAMES = {
    "rl_verl_ppo_deepseek7b_8xMI300X": "PPO 7B",
    "rl_verl_grpo_deepseek7b_8xMI300X": "GRPO 7B",
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoggedStage:
    """A model-stage of a run.

    Attributes:
      setup: of the run.
      stage: which.
      rows: [N] of the log.
      measured_s: [N].
      truth: parameters of the simulated cluster.
    """

    setup: Setup
    stage: ModelStage
    rows: Sequence[dict[str, str]]
    measured_s: np.ndarray
    truth: Truth

    def run(self, index: int, overheads: EngineOverheads) -> StageRun:
        """As it ran in an iteration."""
        setup, stage = self.setup, self.stage
        c, workload = setup.layout(stage), setup.workload(stage, self.rows[index])
        return StageRun(
            sizes=ModelSizes.of(setup.model, setup.head(stage)),
            train=stage.stage is Stage.TRAIN,
            layout=ParallelLayout(dp=int(c.dp[0]), pp=1, tp=int(c.tp[0])),
            microbatch_size=int(c.microbatch_size[0]),
            flush=1,
            remat=True,
            zero1=False,
            execution=setup.execution(stage),
            overheads=overheads,
            minibatch_size=workload.minibatch_size,
            room_tokens=workload.max_response_tokens,
            prompt_tokens=workload.prompt_lengths.max,
        )

    @functools.cache  # noqa: B019 - as long as the benchmark runs
    def step_rows(self, index: int) -> StepRows:
        """The rows of an iteration: the histogram that its mean and longest stand for, drawn
        without scatter, in an order of no meaning."""
        workload = self.setup.workload(self.stage, self.rows[index])
        count = workload.rows
        shares = (np.arange(count) + 0.5) / count
        responses = workload.response_lengths.quantile(shares).astype(np.int64)
        order = np.random.default_rng(index).permutation(count)
        prompts = np.full(count, round(workload.prompt_lengths.mean))
        return StepRows(prompts=prompts, responses=responses[order])

    def seconds(self, index: int, overheads: EngineOverheads) -> float:
        """Simulated, without scatter."""
        setup = self.setup
        device = Device(
            hardware=setup.machine,
            truth=self.truth,
            devices_per_node=setup.machine.devices_per_node,
        )
        run, rows = self.run(index, overheads), self.step_rows(index)
        slow = np.ones((run.layout.dp, 1))
        if self.stage.stage is Stage.GENERATE:
            return generate_s(run, device, rows, slow)
        return (train_s if run.train else score_s)(run, device, rows, slow)

    def fitted(self, first: int) -> EngineOverheads:
        """What the engine takes beside the curves, from iterations 2 to `first`; the first one has
        compilation and allocation in it."""
        early = range(1, first)
        measured = self.measured_s[early.start : early.stop]
        base = np.array([self.seconds(i, EngineOverheads()) for i in early])
        if self.stage.stage is not Stage.GENERATE:
            return EngineOverheads(factor=float(np.median(measured / base)))
        kinds = (EngineOverheads(decode_step_s=1e-3), EngineOverheads(decode_row_s=1e-3))
        parts = [1e3 * (np.array([self.seconds(i, k) for i in early]) - base) for k in kinds]
        table = np.stack(parts, axis=1) / measured[:, None]
        step_s, row_s = nnls(table, 1.0 - base / measured)[0]
        return EngineOverheads(decode_step_s=float(step_s), decode_row_s=float(row_s))


def logged_stages(directory: Path, truth: Truth, last: int) -> list[LoggedStage]:
    """The stages of the runs whose set-up and devices are stated."""
    found: list[LoggedStage] = []
    for setup in SETUPS:
        if setup.name not in NAMES:
            continue
        path = directory / f"{setup.name}.csv"
        if not path.exists():
            raise SystemExit(f"--logs: {path} does not exist; give the directory of the logs")
        rows = read_log(path)[:last]
        for column, stage in COLUMNS.items():
            if rows[0].get(column):
                measured = np.array([float(r[column]) for r in rows])
                found.append(
                    LoggedStage(
                        setup=setup, stage=stage, rows=rows, measured_s=measured, truth=truth
                    )
                )
    return found


def error_after(stage: LoggedStage, overheads: EngineOverheads, first: int) -> dict[str, float]:
    """Of the iterations after the first ones: the mean error, and what scatters about the truth.

    `spread_first` is of the iterations that were fitted, `spread` of those after `first`: standard
    deviations of the logarithm of measured over simulated seconds, from one iteration to the next
    (differences over sqrt 2), so that slow drift is no part of them.
    """
    modelled = np.array([stage.seconds(i, overheads) for i in range(len(stage.rows))])
    off = np.log(stage.measured_s / modelled)
    return {
        "error": statistics.fmean(np.abs(modelled / stage.measured_s - 1.0)[first:].tolist()),
        "spread_first": _spread(off[1:FIRST]),
        "spread": _spread(off[first:]),
        "drift": float(np.std(_means(off[first:], BLOCK))),
    }


def _spread(logs: np.ndarray) -> float:
    return float(np.std(np.diff(logs)) / np.sqrt(2.0))


def _means(values: np.ndarray, count: int) -> np.ndarray:
    """Of blocks of so many."""
    whole = len(values) // count * count
    return values[:whole].reshape(-1, count).mean(axis=1)
