"""Published training steps on the simulated cluster: a check of what was fitted to other things.

The steps and how their engines run are those of `benchmarks/cost_model`.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from nereus_jax.core.layout import ParallelLayout
from nereus_jax.simulator.curves import Truth
from nereus_jax.simulator.operations import Device
from nereus_jax.simulator.passes import train_s
from nereus_jax.simulator.stage_run import StageRun, StepRows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cost_model"))

from training import Case, training_cases  # pyright: ignore


def seconds(case: Case, truth: Truth) -> float:
    """Simulated, without scatter."""
    c, workload = case.layout, case.workload
    run = StageRun(
        sizes=case.sizes,
        train=True,
        layout=ParallelLayout(dp=int(c.dp[0]), pp=int(c.pp[0]), tp=int(c.tp[0])),
        microbatch_size=int(c.microbatch_size[0]),
        flush=int(c.microbatches[0]),
        remat=bool(c.remat[0]),
        zero1=bool(c.zero1[0]),
        execution=case.execution,
        minibatch_size=workload.minibatch_size,
        room_tokens=workload.max_response_tokens,
        prompt_tokens=1,
    )
    device = Device(
        hardware=case.hardware,
        truth=truth,
        dtype=case.dtype,
        devices_per_node=case.hardware.devices_per_node,
    )
    rows = StepRows(
        prompts=np.ones(workload.rows, np.int64),
        responses=np.full(workload.rows, workload.max_response_tokens),
    )
    return train_s(run, device, rows, np.ones((run.layout.dp, run.layout.pp)))


def errors(cases: Iterable[Case], truth: Truth) -> dict[str, dict[str, float]]:
    """By cluster: mean error with one factor for the cluster, that factor, that error of a constant
    utilization, and the number of steps."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.hardware_key, []).append(case)
    found: dict[str, dict[str, float]] = {}
    for key, group in groups.items():
        measured = np.array([c.measured_s for c in group])
        modelled = np.array([seconds(c, truth) for c in group])
        peaks = np.array([c.hardware.peak_flops_per_s[c.dtype] * c.devices for c in group])
        constant = np.array([c.model_flops for c in group]) / peaks
        factor = float(np.median(measured / modelled))
        found[key] = {
            "error": float(np.abs(factor * modelled / measured - 1.0).mean()),
            "factor": factor,
            "constant_error": float(
                np.abs(np.median(measured / constant) * constant / measured - 1.0).mean()
            ),
            "steps": len(group),
        }
    return found


def read_cases(path: Path) -> list[Case]:
    """The steps of a table."""
    return training_cases(path)
