"""Hardware that slows down in the middle of a run: the controller sees it and decides rightly.

The job is real: it generates, trains and moves. What its model-stages are said to take is what the
cost model has for true efficiencies, which nobody tells the controller, with some noise; one of
them is halved in the middle.
"""

import copy
import dataclasses
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.ppo_tiny import get_config
from nereus_jax.config import parse_config
from nereus_jax.control.costs import Beliefs, CostFunction
from nereus_jax.core.devices import DevicePool
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import ModelStage
from nereus_jax.planning.calibration import Efficiencies, OperationClass
from nereus_jax.planning.calibration_record import save_efficiencies, software_versions
from nereus_jax.planning.workload import Workload
from nereus_jax.runtime.dispatch import Finished, run_wave
from nereus_jax.runtime.world import form_world
from nereus_jax.trainer import loop, step
from nereus_jax.trainer.job import Job, read_inputs
from nereus_jax.trainer.plan_change import PlanChange
from nereus_jax.trainer.problem import measured_workload
from nereus_jax.trainer.session import Session

pytestmark = pytest.mark.slow

HARDWARE = "h100"
SLOWER_AT, STEPS = 14, 24
NOISE = 0.02
GEMM, ALL_REDUCE = OperationClass.GEMM, OperationClass.ALL_REDUCE_INTRA
TRUE = Efficiencies.prior().replace(
    {GEMM: 1e-4, OperationClass.UNALIGNED_GEMM: 1e-4, ALL_REDUCE: 3e-3}
)
"""A small model that computes and communicates as long as a large one."""
SHARED = {
    "actor-TRAIN": "dp=2,pp=1,tp=4",
    "critic-TRAIN": "dp=2,pp=1,tp=4",
    "actor-GENERATE": "dp=8,pp=1,tp=1",
    "reference-SCORE": "dp=8,pp=1,tp=1",
    "critic-SCORE": "dp=8,pp=1,tp=1",
}
"""Much is summed over tp."""
APART = {
    "actor-TRAIN": "dp=4,pp=1,tp=1,devices=0-3",
    "critic-TRAIN": "dp=4,pp=1,tp=1,devices=4-7",
    "actor-GENERATE": "dp=8,pp=1,tp=1",
    "reference-SCORE": "dp=4,pp=1,tp=1,devices=0-3",
    "critic-SCORE": "dp=4,pp=1,tp=1,devices=4-7",
}


@dataclasses.dataclass
class World:
    """What is true of the hardware.

    Attributes:
      slower: classes whose efficiency is halved from `SLOWER_AT` on.
      job, costs, session: of the run, when it has begun.
    """

    slower: tuple[OperationClass, ...]
    job: Job | None = None
    costs: CostFunction | None = None
    session: Session | None = None

    def efficiencies(self, at: int) -> Efficiencies:
        halved = {c: TRUE[c] / 2 for c in self.slower}
        return TRUE.replace(halved) if at >= SLOWER_AT else TRUE

    @property
    def workload(self) -> Workload:
        assert self.job is not None
        config = self.job.config
        rows = config.rollout.batch_size
        most = config.data.max_prompt_length, config.rollout.max_response_length
        return measured_workload(config, *(np.full(rows, tokens) for tokens in most))

    def step_s(self, plan: ExecutionPlan, at: int) -> float:
        assert self.costs is not None and self.job is not None
        beliefs = Beliefs(efficiencies=self.efficiencies(at))
        return self.costs.price(plan, self.workload, self.job.world.pool, beliefs).step_s

    def best_s(self, plan: ExecutionPlan, at: int) -> float:
        assert self.costs is not None and self.job is not None
        beliefs = Beliefs(efficiencies=self.efficiencies(at))
        pool: DevicePool = self.job.world.pool
        found = self.costs.candidates(self.workload, pool, beliefs, current=plan, count=1)
        return found.plans[0].price.step_s

    @property
    def plan(self) -> ExecutionPlan:
        assert self.session is not None
        return self.session.job.execution

    def run_wave(
        self, works: Any, at: int, meanwhile: Callable[[], None] | None = None
    ) -> Mapping[str, Finished]:
        """A wave as it would have been timed on such hardware."""
        assert self.costs is not None
        plan, beliefs = self.plan, Beliefs(efficiencies=self.efficiencies(at))
        timed: dict[str, Finished] = {}
        for name, finished in run_wave(works, at, meanwhile).items():
            stage = ModelStage.parse(name)
            seconds = self.costs.stage_seconds(plan, stage, self.workload, beliefs)
            seed = zlib.crc32(f"{name} {at}".encode())
            noise = 1.0 + NOISE * np.random.default_rng(seed).standard_normal()
            span = finished.span
            span = dataclasses.replace(span, end_s=span.start_s + sum(seconds.values()) * noise)
            timed[name] = dataclasses.replace(finished, span=span)
        return timed


def run(
    plan: Mapping[str, str], world: World, workdir: Path, patch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """Decisions of a run that begins under a plan."""
    known = workdir / "known.json"
    workdir.mkdir()
    save_efficiencies(known, TRUE, HARDWARE, software_versions())
    config = get_config()
    config.num_steps = STEPS
    config.warmup.num_steps = 0
    config.rollout.batch_size, config.algorithm.minibatch_size = 32, 16
    config.train.microbatch_size = 4
    # All rows are as long as they can be: what the controller measures is what `World` prices.
    config.data.max_prompt_length = config.data.task_options.digits + 1
    config.rollout.ignore_eos = True
    config.eval.every, config.report.tensorboard = 0, False
    config.control.policy, config.checkpoint.every = "payback", 8
    config.transition.hardware, config.calibration.file = HARDWARE, str(known)
    for stage in list(config.plan):
        del config.plan[stage]
    for stage, layout in plan.items():
        config.plan[stage] = layout
    real = loop.make_adaptation

    def make_adaptation(job: Job, *others: Any) -> Any:
        made = real(job, *others)
        world.job, world.costs = job, made.controller.costs
        return made

    def one_step(session: Any, state: Any) -> None:
        world.session = session
        take_step(session, state)

    take_step = loop.step_or_move
    patch.setattr(loop, "make_adaptation", make_adaptation)
    patch.setattr(loop, "step_or_move", one_step)
    patch.setattr(step, "run_wave", world.run_wave)
    # However long its programs take to compile on this machine, a move is made at the next step.
    patch.setattr(PlanChange, "is_ready", lambda self: True)
    checked = parse_config(copy.deepcopy(config))
    loop.train(checked, read_inputs(checked), form_world(emulated_devices=8), workdir / "run")
    path = workdir / "run" / "decisions.jsonl"
    rows = [json.loads(line) for line in (workdir / "run" / "metrics.jsonl").open()]
    assert [row["step"] for row in rows if "policy_loss" in row] == list(range(STEPS))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_where_another_plan_does_without_what_is_slow_the_job_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(slower=(ALL_REDUCE,))
    decisions = run(SHARED, world, tmp_path / "moves", monkeypatch)
    first = decisions[0]
    assert first["trigger"] == f"efficiency {ALL_REDUCE.value}"
    assert SLOWER_AT < first["step"] <= SLOWER_AT + 5
    assert first["verdict"] == "admit" and "transition_s_measured" in first
    assert first["payback_steps"] <= first["gamma"] * first["horizon_steps"]
    # As good as any plan is on the hardware as it is now, and it was left for a reason.
    now_s = world.step_s(world.plan, STEPS)
    assert now_s <= 1.05 * world.best_s(world.plan, STEPS)
    assert first["step_s_predicted"] > 2 * now_s
    assert first["step_s_target_predicted"] == pytest.approx(now_s, rel=0.2)


def test_where_all_plans_need_what_is_slow_the_job_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(slower=(GEMM, OperationClass.UNALIGNED_GEMM))
    decisions = run(APART, world, tmp_path / "stays", monkeypatch)
    first = decisions[0]
    assert GEMM.value in first["trigger"] and first["trigger"].startswith("efficiency ")
    assert SLOWER_AT < first["step"] <= SLOWER_AT + 5
    assert {d["verdict"] for d in decisions} <= {"keep", "reject"}
    assert world.step_s(world.plan, STEPS) <= 1.05 * world.best_s(world.plan, STEPS)
    truth_s = world.step_s(world.plan, STEPS)
    assert first["step_s_predicted"] == pytest.approx(truth_s, rel=0.2)
