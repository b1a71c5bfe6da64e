"""Plans that are fitted to the devices that are left."""

import pytest

from nereus_jax.config import fit_plans, parse_config, plans_by_step, resolve_plan
from nereus_jax.testing import tiny_run_config


def test_a_plan_that_fits_stays_and_one_that_does_not_shrinks() -> None:
    given = tiny_run_config()
    given.plan["actor-TRAIN"] = "dp=2,pp=2,tp=1,devices=0-3"
    given.plan["critic-TRAIN"] = "dp=2,pp=1,tp=2,devices=4-7"
    given.plan["actor-GENERATE"] = "dp=4,pp=1,tp=2"
    given.plan_changes = {1: {"actor-TRAIN": "dp=3,pp=1,tp=2"}}
    config, said = fit_plans(parse_config(given), 4)
    plan = {name: str(entry) for name, entry in resolve_plan(config).items()}
    assert plan == {
        "actor-TRAIN": "dp=2,pp=2,tp=1,devices=0-3",
        "actor-GENERATE": "dp=2,pp=1,tp=2",
        "actor-SCORE": "dp=2,pp=2,tp=1,devices=0-3",
        "reference-SCORE": "dp=2,pp=2,tp=1,devices=0-3",
        "critic-TRAIN": "dp=2,pp=1,tp=2",
        "critic-SCORE": "dp=2,pp=1,tp=2",
    }
    # Degrees of 3 x 2 that divide and fit 4 devices: 3 x 1 takes most of them.
    assert str(plans_by_step(config)[1]["actor-TRAIN"]) == "dp=3,pp=1,tp=1"
    assert len(said) == 3
    wanted = "plan.critic-TRAIN: 'dp=2,pp=1,tp=2,devices=4-7' needs more than the 4 devices"
    assert sum(wanted in line for line in said) == 1
    assert said[2].startswith("plan_changes.1.actor-TRAIN:")


@pytest.mark.parametrize("num_devices", range(1, 9))
def test_every_pool_takes_the_fitted_plan(num_devices: int) -> None:
    given = tiny_run_config()
    given.plan["actor-TRAIN"] = "dp=2,pp=2,tp=2"
    config, said = fit_plans(parse_config(given), num_devices)
    entry = config.plan["actor-TRAIN"]
    assert entry.num_devices == {1: 1, 2: 2, 3: 2, 8: 8}.get(num_devices, 4)
    assert max(entry.positions) < num_devices
    assert bool(said) == (num_devices < 8)
