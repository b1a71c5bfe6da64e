"""Plans of whole jobs: they can be placed and run, fit, and cost what the cost model says."""

import dataclasses

import numpy as np
import pytest

from nereus_jax.config.plan_entry import parse_plan_entry
from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.devices import DevicePool
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import ACTOR_TRAIN, Role
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.cost_step import step_seconds
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.search import find_best
from nereus_jax.planning.search_plans import PlannedStep, config_overrides, find_plans
from nereus_jax.planning.search_problem import PlanProblem, Pricer
from nereus_jax.planning.search_shortage import min_devices
from nereus_jax.planning.search_waves import Wave
from nereus_jax.planning.workload import LengthHistogram, Workload

PPO7 = policy_gradient("ppo", reward_model=True, reference=True, recompute_old_logprobs=True)
PPO = policy_gradient("ppo", reward_model=False, reference=True, recompute_old_logprobs=True)
REMAX = policy_gradient("remax", reward_model=True, reference=True, recompute_old_logprobs=True)


def problem(name: str = "llama3-8b", devices: int = 32, workflow=PPO7, **changes) -> PlanProblem:
    base = PlanProblem(
        workflow=workflow,
        models=dict.fromkeys(Role, preset(name)),
        workload=Workload(
            prompts=256,
            prompt_lengths=LengthHistogram.constant(512),
            response_lengths=LengthHistogram(lengths=(256, 512, 1024), weights=(0.5, 0.3, 0.2)),
            max_response_tokens=1024,
            minibatch_size=128,
        ),
        hardware=load_hardware("h100"),
        num_devices=devices,
    )
    return dataclasses.replace(base, **changes)


CASES = {
    "8b on a node": problem(devices=8),
    "8b on 32": problem(),
    "8b on 7 of 8": problem(devices=7),
    "8b on 60": problem(devices=60),
    "70b on 64": problem("llama3-70b", 64),
    "no parking": problem(park=False),
    "remax": problem(workflow=REMAX),
}


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request) -> tuple[PlanProblem, tuple[PlannedStep, ...]]:
    found = find_plans(CASES[request.param], top=4)
    assert found.shortage is None
    return CASES[request.param], found.plans


def test_best_first_and_all_different(case):
    _, plans = case
    seconds = [p.step_s for p in plans]
    assert seconds == sorted(seconds) and len(seconds) == 4
    keys = {
        tuple((s.model_stage, s.layout, s.first_device, s.lane) for s in p.stages) for p in plans
    }
    assert len(keys) == len(plans)


def test_plans_can_be_placed(case):
    job, plans = case
    pool = DevicePool.uniform(-(-job.num_devices // 8), 8)
    for planned in plans:
        plan = planned.plan().plan
        plan.check_pool(pool)
        assert set(plan.placements) == set(job.workflow.model_stages)
        for stage, placement in plan.placements.items():
            job.models[stage.role].check_layout(placement.layout)
            tp = placement.layout.tp
            for start in range(0, len(placement.devices), tp):
                nodes = {d.host for d in placement.devices[start : start + tp]}
                assert len(nodes) == 1, "tensor parallelism stays inside a node"


def test_lanes_of_a_wave_are_disjoint_and_the_others_share(case):
    _, plans = case
    for planned in plans:
        for a in planned.stages:
            for b in planned.stages:
                overlap = bool(set(a.positions) & set(b.positions))
                if a.wave == b.wave:
                    assert overlap == (a.lane == b.lane)


def test_every_device_has_the_memory(case):
    job, plans = case
    for planned in plans:
        by_hand = np.zeros(job.num_devices)
        for place in range(job.num_devices):
            here = [s for s in planned.stages if place in s.positions]
            by_hand[place] = sum(s.resident_bytes for s in here) + max(
                (s.working_bytes for s in here), default=0.0
            )
        np.testing.assert_allclose(planned.device_bytes, by_hand)
        assert planned.peak_memory_bytes <= job.limit_bytes


def test_kinds_of_bytes_are_what_a_model_stage_holds_and_works_with(case):
    _, plans = case
    for stage in plans[0].stages:
        total = stage.resident_bytes + stage.working_bytes
        assert sum(stage.memory.values()) == pytest.approx(total)


def test_a_step_takes_what_its_critical_path_takes(case):
    """The cost model's own critical path, over the devices of the plan."""
    job, plans = case
    for planned in plans:
        calls = {s.model_stage: job.calls(s.model_stage) for s in planned.stages}
        path = step_seconds(
            job.workflow,
            {s.model_stage: s.seconds / calls[s.model_stage] for s in planned.stages},
            {s.model_stage: s.positions for s in planned.stages},
        )
        assert planned.step_s == pytest.approx(path.step_s)


def test_the_global_batch_is_kept(case):
    job, plans = case
    for planned in plans:
        for s in planned.stages:
            if s.model_stage.stage is ACTOR_TRAIN.stage:
                rows = s.layout.dp * s.microbatch_size * s.microbatches * s.accumulation
                assert rows == job.workload.minibatch_size


def test_the_configuration_takes_the_overrides(case):
    _, plans = case
    keys = config_overrides(plans[0])
    for stage in plans[0].stages:
        entry = parse_plan_entry(keys[f"plan.{stage.model_stage}"])
        assert (entry.dp, entry.pp, entry.tp) == (
            stage.layout.dp,
            stage.layout.pp,
            stage.layout.tp,
        )
        assert entry.positions == tuple(stage.positions)


def test_same_problem_same_plans():
    first, second = (find_plans(problem(), top=3).plans for _ in range(2))
    assert first == second


def test_parking_only_helps():
    with_it, without = (find_plans(problem(park=p), 1).plans[0].step_s for p in (True, False))
    assert with_it <= without


def test_more_devices_never_take_longer():
    """8, 16, 32: cells of the smaller pools are cells of the larger ones."""
    seconds = [find_plans(problem(devices=n), 1).plans[0].step_s for n in (8, 16, 32)]
    assert seconds == sorted(seconds, reverse=True)


def test_seven_of_eight_devices_are_used_as_well_as_can_be():
    """A minibatch of 128 does not divide by 7; the plan is no slower than that of 4 devices."""
    seven, four = (find_plans(problem(devices=n), 1).plans[0] for n in (7, 4))
    assert seven.step_s <= four.step_s
    train = next(s for s in seven.stages if s.model_stage == ACTOR_TRAIN)
    assert 128 % train.layout.dp == 0


def test_what_does_not_fit_is_explained():
    job = problem("llama3-70b", 4)
    found = find_plans(job)
    assert not found.plans
    assert found.shortage is not None
    assert found.shortage.model_stage == ACTOR_TRAIN
    assert found.shortage.needed_bytes > found.shortage.limit_bytes
    assert found.shortage.term == "optimizer"
    smallest = found.shortage.min_devices
    assert smallest is not None and smallest > 4
    assert find_plans(dataclasses.replace(job, num_devices=smallest), 1).plans


def test_the_smallest_number_of_devices_is_the_smallest():
    job = problem(devices=8)
    smallest = min_devices(job)
    assert smallest is not None
    assert find_plans(dataclasses.replace(job, num_devices=smallest), 1).plans
    assert not find_plans(dataclasses.replace(job, num_devices=smallest - 1), 1).plans


def test_all_together_may_not_fit_what_each_does_alone():
    """Without parking the resident weights of seven model-stages are too much."""
    job = problem(devices=8)
    smallest = min_devices(job)
    assert smallest is not None
    tight = dataclasses.replace(job, num_devices=smallest, park=False)
    shortage = find_plans(tight).shortage
    assert shortage is not None
    assert shortage.model_stage is None
    assert "wait on the host" in shortage.advice
    assert shortage.min_devices is not None and shortage.min_devices > smallest


def test_a_model_that_fits_nothing():
    huge = DecoderConfig(
        num_layers=2,
        embed_dim=2**20,
        num_heads=2,
        num_kv_heads=1,
        head_dim=128,
        mlp_dim=2**20,
        vocab_size=2**20,
    )
    shortage = find_plans(problem(devices=8, models=dict.fromkeys(Role, huge))).shortage
    assert shortage is not None
    assert shortage.min_devices is None


def test_a_role_without_a_model_is_named():
    with pytest.raises(ConfigError, match="reward"):
        problem(models={r: preset("llama3-8b") for r in Role if r is not Role.REWARD})


def test_small_models_next_to_large_ones():
    """A reward model of 1B parameters is priced by its own sizes."""
    models = dict.fromkeys(Role, preset("llama3-8b")) | {Role.REWARD: preset("llama3.2-1b")}
    mixed = find_plans(problem(models=models), 1).plans[0]
    same = find_plans(problem(), 1).plans[0]
    assert mixed.step_s < same.step_s


def test_a_slow_host_makes_parking_dear():
    """With a host link of 1 MB/s nothing is parked that need not be."""
    h100 = load_hardware("h100")
    slow = Hardware(**{**vars(h100), "host": Link(bytes_per_s=1e6, latency_s=0.0)})
    planned = find_plans(problem(hardware=slow), 1).plans[0]
    assert not any(s.parked for s in planned.stages)


def test_what_fits_no_device_is_left_out_before_it_is_priced_and_never_missed():
    job = problem()
    limit, node = job.limit_bytes, job.hardware.devices_per_node
    plans, counts = [], []
    for pricer in (Pricer(job), Pricer(job, limit)):
        waves = [[pricer.price(stage).options for stage in wave] for wave in job.waves()]
        made = [Wave(wave, job.num_devices, node, limit) for wave in waves]
        plans.append(find_best(made, limit))
        counts.append(sum(len(options.candidates) for wave in waves for options in wave))
    every, fitting = plans
    assert every is not None
    assert fitting is not None
    assert (every.seconds, every.peak_bytes) == (fitting.seconds, fitting.peak_bytes)
    assert counts[1] < counts[0]
