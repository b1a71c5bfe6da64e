"""What a run learns of its hardware: from which steps, how well, and what it keeps."""

import copy
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_jax.config import parse_config
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN
from nereus_jax.planning.calibration import Efficiencies, OperationClass
from nereus_jax.planning.calibration_record import save_efficiencies, software_versions
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.predict import predict_stage_seconds
from nereus_jax.runtime.world import form_world
from nereus_jax.trainer.calibration import (
    FILE,
    Calibration,
    StepFacts,
    make_calibration,
    wants_calibration,
)
from nereus_jax.trainer.job import Job, make_job, read_inputs
from nereus_jax.trainer.problem import longest_workload, measured_workload, plan_problem
from tests.trainer.plan_change_cases import Trainer, tiny_config

TRUE = Efficiencies.prior().replace(
    {
        OperationClass.GEMM: 0.3,
        OperationClass.MEMORY: 0.9,
        OperationClass.DECODE_MEMORY: 0.4,
        OperationClass.LAUNCH: 0.2,
        OperationClass.ALL_REDUCE_INTRA: 0.8,
    }
)


def job_of(**settings: Any) -> Job:
    config = parse_config(tiny_config(**({"calibration__mode": "on"} | settings)))
    return make_job(config, read_inputs(config), form_world(emulated_devices=8))


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of()


@pytest.fixture
def start(job: Job) -> Calibration:
    calibration, told = make_calibration(job)
    assert calibration is not None and not told
    return calibration


def facts(job: Job, start: Calibration, seed: int = 0, **changes: Any) -> StepFacts:
    """A step on hardware whose efficiencies are `TRUE`."""
    draw = np.random.default_rng(seed)
    workload = measured_workload(job.config, draw.integers(2, 7, 16), draw.integers(1, 5, 16))
    real = dataclasses.replace(start.problem, workload=workload, efficiencies=TRUE)
    seconds = predict_stage_seconds(real, job.execution)
    step = StepFacts(
        execution=job.execution,
        workload=workload,
        stage_s={stage: sum(s.values()) for stage, s in seconds.items()},
        programs=dict.fromkeys(seconds, 1),
    )
    return dataclasses.replace(step, **changes)


def test_predictions_become_right(job: Job, start: Calibration) -> None:
    known, rows = start, []
    for seed in range(80):
        known, row = known.after(facts(job, start, seed))
        rows.append(row)
    assert "calibration_mape" not in rows[0]  # the first calls of all programs
    assert rows[1]["calibration_mape"] > 0.2
    assert rows[-1]["calibration_mape"] < 0.01
    step = facts(job, start, 79)
    for stage, measured_s in step.stage_s.items():
        assert rows[-1]["stage_s_predicted"][str(stage)] == pytest.approx(measured_s, rel=0.02)
    assert rows[-1]["calibration_bias"].keys() <= {c.value for c in OperationClass}
    assert json.dumps(rows[-1])


def changed(step: StepFacts, job: Job, what: str) -> StepFacts:
    if what == "a program was compiled":
        return dataclasses.replace(step, programs={**step.programs, ACTOR_TRAIN: 2})
    choices = dict(job.execution.choices)
    choices[ACTOR_TRAIN] = dataclasses.replace(choices[ACTOR_TRAIN], microbatch_size=2)
    return dataclasses.replace(step, execution=dataclasses.replace(job.execution, choices=choices))


@pytest.mark.parametrize("what", ["a program was compiled", "the plan has changed"])
def test_first_calls_do_not_count(what: str, job: Job, start: Calibration) -> None:
    known, _ = start.after(facts(job, start))
    assert (known.efficiencies.observations == 0).all()
    slow = dict.fromkeys(facts(job, start).stage_s, 1e6)
    after, row = known.after(changed(facts(job, start, stage_s=slow), job, what))
    counted = after.efficiencies.observations.sum()
    if what == "the plan has changed":
        assert counted == 0 and "calibration_mape" not in row
    else:  # the programs of the other model-stages have run before
        assert counted == pytest.approx(len(slow) - 1)
    again, _ = after.after(changed(facts(job, start), job, what))
    assert again.efficiencies.observations.sum() == pytest.approx(counted + len(slow))


def test_a_stage_that_did_not_run_says_nothing(job: Job, start: Calibration) -> None:
    """As with recorded rollouts, where nothing is generated."""
    step = facts(job, start)
    seconds = {s: x for s, x in step.stage_s.items() if s != ACTOR_GENERATE}
    known, _ = start.after(dataclasses.replace(step, stage_s=seconds))
    known, row = known.after(dataclasses.replace(step, stage_s=seconds))
    assert set(row["stage_s_predicted"]) == {str(s) for s in seconds}
    assert known.efficiencies.observations.sum() == pytest.approx(len(seconds))


def test_what_was_learned_goes_on(job: Job, start: Calibration, tmp_path: Path) -> None:
    known = start
    for seed in range(5):
        known, _ = known.after(facts(job, start, seed))
    known.save(tmp_path)
    again, told = start.resumed(tmp_path)
    assert told == ""
    np.testing.assert_allclose(again.efficiencies.log_values, known.efficiencies.log_values)
    np.testing.assert_allclose(again.efficiencies.covariance, known.efficiencies.covariance)
    data = json.loads((tmp_path / FILE).read_text())
    assert data["hardware"] == "h100" and data["versions"] == software_versions()


def test_a_resumed_run_on_other_hardware_learns_anew(start: Calibration, tmp_path: Path) -> None:
    save_efficiencies(tmp_path / FILE, TRUE, "a100-80gb", software_versions())
    again, told = start.resumed(tmp_path)
    assert again.efficiencies is start.efficiencies
    assert "a100-80gb" in told and "h100" in told


def test_the_file_of_another_run(tmp_path: Path) -> None:
    save_efficiencies(tmp_path / FILE, TRUE, "h100", software_versions())
    calibration, _ = make_calibration(job_of(calibration__file=str(tmp_path / FILE)))
    assert calibration is not None
    assert calibration.efficiencies[OperationClass.GEMM] == pytest.approx(0.3)


@pytest.mark.parametrize("content", ["other hardware", "no file"])
def test_a_file_that_does_not_fit_is_one_line(content: str, tmp_path: Path) -> None:
    if content == "other hardware":
        save_efficiencies(tmp_path / FILE, TRUE, "a100-80gb", software_versions())
    with pytest.raises(ConfigError) as caught:
        make_calibration(job_of(calibration__file=str(tmp_path / FILE)))
    message = str(caught.value)
    assert "\n" not in message and str(tmp_path / FILE) in message
    if content == "other hardware":
        assert "a100-80gb" in message and "h100" in message


def test_unknown_devices_are_told_and_calibrate_nothing() -> None:
    auto = job_of(emulated_devices=0, transition__hardware="h101", calibration__mode="auto")
    pool = dataclasses.replace(auto.world.pool, kind="NVIDIA H101")
    auto = dataclasses.replace(auto, world=dataclasses.replace(auto.world, pool=pool))
    calibration, told = make_calibration(auto)
    assert calibration is None and "h101" in told
    wanted = job_of(transition__hardware="h101")
    with pytest.raises(ConfigError, match="h101"):
        make_calibration(wanted)


def test_which_runs_calibrate() -> None:
    def wants(kind: str, **settings: Any) -> bool:
        return wants_calibration(parse_config(tiny_config(**settings)), kind)

    assert wants("NVIDIA H100 80GB HBM3", emulated_devices=0)
    assert not wants("cpu")
    assert wants("cpu", calibration__mode="on")
    assert not wants("NVIDIA H100 80GB HBM3", emulated_devices=0, calibration__mode="off")
    assert wants("cpu", calibration__file="some.json")
    with pytest.raises(ConfigError, match=r"calibration\.file='some\.json'.*mode='off'"):
        wants("cpu", calibration__file="some.json", calibration__mode="off")


def test_the_problem_of_a_run(job: Job) -> None:
    problem = plan_problem(job, load_hardware("h100"), Efficiencies.prior())
    assert problem.workload == longest_workload(job.config)
    assert problem.workload.row_tokens == job.row_length
    short = measured_workload(job.config, np.array([2, 3]), np.array([1, 2]))
    assert short.row_tokens == job.row_length and short.mean_row_tokens == 4.0
    assert problem.num_devices == 8 and problem.workflow == job.workflow


def test_a_step_costs_little(job: Job, start: Calibration) -> None:
    """Processor time: others share the machine."""
    known, _ = start.after(facts(job, start))
    steps = [facts(job, start, seed) for seed in range(20)]
    best_s = np.inf
    for step in steps:
        begin_s = time.process_time()
        known, _ = known.after(step)
        best_s = min(best_s, time.process_time() - begin_s)
    print(f"{best_s * 1e3:.2f} ms")
    assert best_s < 5e-3


@pytest.mark.slow
def test_a_run_writes_predictions_and_what_it_learned(tmp_path: Path) -> None:
    trainer = Trainer()
    config = tiny_config(calibration__mode="on", num_steps=3, checkpoint__every=2)
    config.algorithm.kl.place = "none"
    first = trainer.run(copy.deepcopy(config), tmp_path)
    assert first.error is None
    for row in first.steps():
        assert row["stage_s_predicted"].keys() == row["stage_s"].keys()
    assert "calibration_mape" not in first.steps()[0]
    assert {"calibration_mape", "calibration_bias", "efficiency"} <= first.steps()[1].keys()
    before = json.loads((tmp_path / FILE).read_text())
    config.num_steps = 4
    second = trainer.run(config, tmp_path)
    assert second.error is None
    after = json.loads((tmp_path / FILE).read_text())
    assert after["observations"] == before["observations"], "one step: first calls only"
    assert after["efficiencies"] == pytest.approx(before["efficiencies"])
