"""Policies side by side, the oracle, and other systems as plans and rules."""

import json

import pytest

from nereus_jax.control.costs import Beliefs
from nereus_jax.control.policies import POLICIES
from nereus_jax.core.errors import ConfigError, InfeasiblePlanError
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_TRAIN, Stage
from nereus_jax.simulator.compare import ALL, Comparison, check_policies, compare
from nereus_jax.simulator.peers import PEERS, peer
from nereus_jax.simulator.scenario import Scenario
from nereus_jax.simulator.setup import first_pool
from tests.simulator.scenarios import make_trace, small_scenario


def scenario(seed: int) -> Scenario:
    trace = make_trace((1.5, 1), (2.5, 2), steps=4, tokens=(150.0, 900.0))
    return small_scenario(trace, seed=seed, prompts=64)


NAMES = ("dp_only", "any_gain", "payback", "verl_like")


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return compare(scenario, [*NAMES, "oracle"], [0])


def test_every_policy_runs(compared: Comparison) -> None:
    assert tuple(compared.runs) == NAMES
    for runs in (*compared.runs.values(), compared.bounds):
        assert len(runs) == 1 and not any(r.failure for r in runs)
    figures = compared.figures()
    assert set(figures) == {*NAMES, "oracle"}
    names = {
        "mean_step_s",
        "total_s",
        "gpu_hours",
        "transitions",
        "transition_share",
        "oom",
        "gap_to_oracle",
    }
    for own in figures.values():
        assert set(own) == names | {f"{n}_std" for n in names}


def test_nobody_beats_the_oracle(compared: Comparison) -> None:
    for runs in compared.runs.values():
        for run, bound in zip(runs, compared.bounds, strict=True):
            assert bound.total_s <= run.total_s
    assert all(r.oom == 0 for r in compared.bounds)
    assert all(f["gap_to_oracle"] >= 0.0 for f in compared.figures().values())  # type: ignore[operator]


def test_the_parts_of_a_gap_add_up_to_it(compared: Comparison) -> None:
    figures, gaps = compared.figures(), compared.gaps()
    assert set(gaps) == set(compared.runs)
    for name, parts in gaps.items():
        own, best = figures[name]["mean_step_s"], figures["oracle"]["mean_step_s"]
        assert own is not None and best is not None
        assert sum(parts.values()) == pytest.approx(own - best)


def test_the_figures_are_json_and_say_that_they_are_simulated(compared: Comparison) -> None:
    data = json.loads(json.dumps(compared.to_json()))
    assert data["simulated"] is True
    assert data["policies"]["payback"]["mean_step_s"] > 0.0
    assert len(data["runs"]) == len(NAMES) + 1
    assert all(run["simulated"] is True for run in data["runs"])
    table = compared.table()
    assert "simulated" in table.splitlines()[0]
    assert len(table.splitlines()) == 2 + len(NAMES)


@pytest.mark.slow
def test_all_of_them_on_two_seeds() -> None:
    compared = compare(scenario, ["all", *PEERS], range(2))
    assert set(compared.runs) == {*POLICIES, *PEERS}
    for runs in compared.runs.values():
        for run, bound in zip(runs, compared.bounds, strict=True):
            assert not run.failure and bound.total_s <= run.total_s
    assert set(compared.figures()) == {*ALL, *PEERS}


def test_plans_of_other_systems() -> None:
    made = scenario(0)
    pool = first_pool(made).devices
    _, split = peer("openrlhf_like", made)
    homes = [set(split.plan[s].devices) for s in (ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_TRAIN)]
    assert [len(h) for h in homes] == [4, 2, 2]
    assert set().union(*homes) == set(pool) and not homes[0] & homes[1]
    _, together = peer("verl_like", made)
    for plan in (split, together):
        assert all(p.layout.pp == 1 for p in plan.plan.placements.values())
        price = made.costs.price(
            plan, made.cluster.workload_of(made.rows(0), 1.25), made.cluster.pool, Beliefs()
        )
        assert price.fits
    assert all(set(p.devices) == set(pool) for p in together.plan.placements.values())
    rules, _ = peer("checkpoint_restart", made)
    assert rules.by_checkpoint and rules.name == "checkpoint_restart"
    rules, plan = peer("dynarl_like", made)
    assert rules.settings.policy.same_degrees and any(s.stage is Stage.TRAIN for s in plan.choices)


def test_a_split_that_does_not_fit() -> None:
    tight = small_scenario(make_trace(), memory_share=0.12)
    with pytest.raises(InfeasiblePlanError, match="GiB short of a device; use more devices"):
        peer("openrlhf_like", tight)


def test_names_are_checked() -> None:
    assert check_policies(["payback=0.4", "oracle", "verl_like"]) == (
        "payback=0.4",
        "oracle",
        "verl_like",
    )
    assert check_policies(["all", "static"]) == ALL
    with pytest.raises(ConfigError, match=r"policy 'best' is not known; use one of static, .*all"):
        check_policies(["best"])
    with pytest.raises(ConfigError, match="gamma must be in"):
        check_policies(["payback=2"])
    with pytest.raises(ConfigError, match="seeds must be at least 1"):
        compare(scenario, ["static"], [])
