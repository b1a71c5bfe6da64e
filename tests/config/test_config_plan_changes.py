"""Changes of plan in the configuration: how they are read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.config import (
    PlanEntry,
    config_to_json,
    default_config,
    fingerprint,
    load_config_file,
    parse_config,
    plans_by_step,
)
from nereus_jax.core.errors import ConfigError
from nereus_jax.testing import tiny_run_config

TRAIN = "dp=1,pp=1,tp=2"


def config_with(changes: Any, num_steps: int = 10) -> Any:
    config = tiny_run_config()
    config.num_steps = num_steps
    config.plan_changes = changes
    return config


def test_a_change_keeps_what_it_does_not_name_and_what_falls_back_follows() -> None:
    config = config_with({"7": {"critic-SCORE": "dp=2"}, "3": {"actor_TRAIN": "dp=2,tp=2"}})
    parsed = parse_config(config)
    assert parsed.plan_changes == {
        7: {"critic-SCORE": PlanEntry(dp=2)},
        3: {"actor-TRAIN": PlanEntry(dp=2, tp=2)},
    }
    plans = plans_by_step(parsed)
    assert list(plans) == [3, 7]
    for name in ("actor-TRAIN", "actor-GENERATE", "actor-SCORE", "reference-SCORE"):
        assert plans[3][name] == plans[7][name] == PlanEntry(dp=2, tp=2)
    assert plans[3]["critic-SCORE"] == plans[3]["critic-TRAIN"] == PlanEntry()
    assert plans[7]["critic-SCORE"] == PlanEntry(dp=2)
    assert plans[7]["critic-TRAIN"] == PlanEntry()


def test_the_command_line_sets_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text("from nereus_jax.testing import tiny_run_config as get_config\n")
    overrides = ["--config.plan_changes.1.actor-TRAIN=dp=2,devices=0,3", "--config.num_steps=4"]
    parsed = parse_config(load_config_file(str(path), overrides))
    assert parsed.plan_changes == {1: {"actor-TRAIN": PlanEntry(dp=2, devices=(0, 3))}}


def test_without_changes_there_are_none() -> None:
    assert plans_by_step(parse_config(tiny_run_config())) == {}
    assert default_config().transition.to_dict() == {
        "verify": "digest",
        "way": "auto",
        "switch": "at_step",
        "hardware": "",
    }


def test_they_are_written_down_and_another_plan_is_no_other_model() -> None:
    parsed = parse_config(config_with({"3": {"actor-TRAIN": "dp=2,devices=1,4"}}))
    written = json.loads(json.dumps(config_to_json(parsed)))
    assert written["plan_changes"] == {"3": {"actor-TRAIN": "dp=2,pp=1,tp=1,devices=1,4"}}
    assert fingerprint(parsed) == fingerprint(parse_config(tiny_run_config()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param(
            {"3": {"actor-TRIAN": TRAIN}},
            ["plan_changes.3: unknown model-stage 'actor-TRIAN'", "did you mean 'actor-TRAIN'?"],
            id="unknown stage",
        ),
        pytest.param(
            {"soon": {"actor-TRAIN": TRAIN}},
            ["plan_changes", "got 'soon'", "the step before which it happens"],
            id="no step",
        ),
        pytest.param(
            {"-1": {"actor-TRAIN": TRAIN}}, ["plan_changes", "got '-1'"], id="a negative step"
        ),
        pytest.param(
            {"0": {"actor-TRAIN": TRAIN}},
            ["plan_changes.0: the run has the step boundaries 1 to 9"],
            id="step 0",
        ),
        pytest.param(
            {"10": {"actor-TRAIN": TRAIN}},
            ["plan_changes.10: the run has the step boundaries 1 to 9"],
            id="after the last step",
        ),
        pytest.param(
            {"3": {"actor-TRAIN": "dp=2,tp"}},
            ["plan_changes.3.actor-TRAIN='dp=2,tp'", "'tp' is not one of dp=N"],
            id="no layout",
        ),
        pytest.param(
            {"3": {"actor-TRAIN": "dp=2,devices=0"}},
            ["plan_changes.3.actor-TRAIN", "got 1 in 'devices='"],
            id="too few devices",
        ),
        pytest.param(
            {"3": {"actor-TRAIN": "tp=3"}},
            ["plan_changes.3.actor-TRAIN: tp=3 does not divide the 4 query heads"],
            id="tp",
        ),
        pytest.param(
            {"3": {"critic-TRAIN": "pp=3"}},
            ["plan_changes.3.critic-TRAIN: pp=3 pipeline ranks, got a model of 2 layers"],
            id="pp",
        ),
        pytest.param(
            {"3": {"actor-TRAIN": "dp=9"}},
            ["plan_changes.3.actor-TRAIN: dp=9 replicas", "algorithm.minibatch_size=8"],
            id="dp",
        ),
        pytest.param({"3": TRAIN}, ["plan_changes.3"], id="no entries"),
        pytest.param(
            {"3": {"actor-TRAIN": TRAIN}, "03": {"actor-TRAIN": "dp=1"}},
            ["plan_changes", "step 3", "twice"],
            id="one step twice",
        ),
    ],
)
def test_a_wrong_entry_is_one_line(changes: Any, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(config_with(changes))
    message = str(caught.value)
    assert "\n" not in message and caught.value.exit_code == 2
    for part in says:
        assert part in message


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("verify", "digests", ["transition.verify: ", "'digests'", "did you mean 'digest'?"]),
        ("way", "fast", ["transition.way: ", "'fast'", "'composed'"]),
        ("hardware", 3, ["transition.hardware: ", "got 3"]),
    ],
)
def test_a_wrong_option_is_one_line(key: str, value: Any, says: list[str]) -> None:
    config = tiny_run_config()
    with config.transition.ignore_type():
        config.transition[key] = value
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    for part in says:
        assert part in str(caught.value)
