"""What `nereus plan` prints: complete, readable, and what other commands take."""

import json

import pytest

from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import ACTOR_TRAIN, Role
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.search_plans import PlanSearch, find_plans
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.search_shortage import Shortage
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.report.plan_report import (
    gib,
    infeasible_reason,
    plans_json,
    plans_text,
    verification_text,
)

PROBLEM = PlanProblem(
    workflow=policy_gradient(
        "ppo", reward_model=False, reference=True, recompute_old_logprobs=True
    ),
    models=dict.fromkeys(Role, preset("llama3-8b")),
    workload=Workload(
        prompts=128,
        prompt_lengths=LengthHistogram.constant(512),
        response_lengths=LengthHistogram.constant(512),
        max_response_tokens=512,
        minibatch_size=64,
    ),
    hardware=load_hardware("h100"),
    num_devices=16,
)


@pytest.fixture(scope="module")
def found() -> PlanSearch:
    return find_plans(PROBLEM, top=3, apart=1e-3)


def test_json_has_the_names_that_stay(found: PlanSearch):
    report = json.loads(json.dumps(plans_json(PROBLEM, found)))
    assert {"plans", "infeasible_reason", "min_devices"} <= set(report)
    assert report["infeasible_reason"] is None
    assert report["min_devices"] < 16
    assert len(report["plans"]) == 3
    seconds = [p["step_s"] for p in report["plans"]]
    assert seconds == sorted(seconds)
    for entry in report["plans"]:
        assert {"plan", "step_s", "stage_s", "peak_memory_bytes", "dominant_term"} <= set(entry)
        assert set(entry["plan"]) == set(entry["stage_s"])
        assert 0 < entry["peak_memory_bytes"] < 80 * 2**30


def test_json_without_a_plan_says_why():
    alone = PlanProblem(**{**vars(PROBLEM), "num_devices": 1})
    report = plans_json(alone, find_plans(alone))
    assert report["plans"] == []
    assert "actor-TRAIN" in report["infeasible_reason"]
    assert report["min_devices"] > 1


def test_rates_by_hand(found: PlanSearch):
    entry = plans_json(PROBLEM, found)["plans"][0]
    step_s = entry["step_s"]
    assert entry["tokens_per_s"] == pytest.approx(128 * 1024 / step_s)
    assert entry["device_hours_per_1000_steps"] == pytest.approx(16 * step_s / 3.6)
    price = load_hardware("h100").usd_per_device_hour
    assert price is not None
    assert entry["usd_per_1000_steps"] == pytest.approx(16 * step_s / 3.6 * price)


def test_a_plan_file_is_a_plan(found: PlanSearch):
    best = found.plans[0]
    content = json.loads(json.dumps(plans_json(PROBLEM, found)))["plans"][0]["plan"]
    assert ExecutionPlan.from_json(content) == best.plan()
    for stage in best.stages:
        choice = best.plan().choices[stage.model_stage]
        assert choice.microbatch_size == stage.microbatch_size
        assert (choice.remat, choice.zero1, choice.parked) == (
            stage.remat,
            stage.zero1,
            stage.parked,
        )


def test_devices_are_named_by_the_processes_of_the_run(found: PlanSearch):
    by_four = found.plans[0].plan(4).plan
    for stage, placement in found.plans[0].plan().plan.placements.items():
        numbers = [8 * d.host + d.index for d in placement.devices]
        assert [4 * d.host + d.index for d in by_four[stage].devices] == numbers


def test_text_tells_all_model_stages_devices_and_keys(found: PlanSearch):
    text = plans_text(PROBLEM, found)
    assert "modelled" in text.splitlines()[0]
    for stage in found.plans[0].stages:
        assert f"--config.plan.{stage.model_stage}=" in text
    assert "tokens/s" in text and "device-hours" in text and "USD" in text
    assert text.count("\n  +") == 2, "two more plans, with what they cost more"
    assert "devices 0-" in text


def test_why_the_next_plan_is_slower_names_what_changed(found: PlanSearch):
    lines = [x for x in plans_text(PROBLEM, found).splitlines() if x.startswith("  +")]
    names = [str(s.model_stage) for s in found.plans[0].stages]
    for line, plan in zip(lines, found.plans[1:], strict=True):
        assert f"+{plan.step_s - found.plans[0].step_s:.2f} s" in line
        assert any(name in line for name in names)


def test_the_reason_of_a_shortage():
    one = Shortage(
        model_stage=ACTOR_TRAIN,
        needed_bytes=100 * 2**30,
        limit_bytes=70 * 2**30,
        term="optimizer",
        term_bytes=60 * 2**30,
        min_devices=3,
        advice="3 devices, or bfloat16 parameters, or more devices",
    )
    assert infeasible_reason(one) == (
        "no plan fits: actor-TRAIN needs at least 100.0 GiB on a device, of which 60.0 GiB are "
        "optimizer; plans may use 70.0 GiB; use 3 devices, or bfloat16 parameters, or more devices"
    )


def test_the_compilers_word_beside_the_models():
    text = verification_text(
        [
            {
                "model_stage": "actor-TRAIN",
                "modelled_bytes": 11 * 2**30,
                "compiled_bytes": 10 * 2**30,
                "compile_s": 7.2,
            }
        ]
    )
    row = text.splitlines()[-1].split()
    assert row == ["actor-TRAIN", "11.0", "GiB", "10.0", "GiB", "+10.0%", "7", "s"]


def test_sizes_read_well():
    assert gib(2**30 * 1.25) == "1.2 GiB"
    assert gib(2**20 * 3) == "3 MiB"
