"""Plan files in the configuration: what is read, what is refused, what fewer devices make of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.config import (
    config_to_json,
    fit_plan_files,
    load_config_file,
    parse_config,
    plan_keys,
    plans_by_step,
    read_plan_file,
    resolve_plan,
)
from nereus_jax.core.devices import DevicePool
from nereus_jax.core.errors import ConfigError
from nereus_jax.testing import tiny_run_config

STAGES = ("actor-TRAIN", "critic-TRAIN", "actor-GENERATE", "reference-SCORE", "critic-SCORE")


def entry(dp: int, devices: list[str], **choice: Any) -> dict[str, Any]:
    return {"dp": dp, "pp": 1, "tp": 1, "devices": devices, "microbatch_size": 4} | choice


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


@pytest.fixture
def plan(tmp_path: Path) -> str:
    content = {name: entry(1, ["0:1"]) for name in STAGES}
    content["actor-TRAIN"] = entry(2, ["0:2", "1:0"], microbatch_size=2, remat=True, zero1=True)
    content["actor-GENERATE"] = entry(2, ["0:0", "1:1"], microbatch_size=6)
    return write(tmp_path / "plan.json", content)


def config_with(plan_file: str = "", changes: Any = None) -> Any:
    config = tiny_run_config()
    config.num_steps = 10
    if plan_file:
        del config.plan["actor-TRAIN"], config.plan["critic-TRAIN"]
    config.plan_file = plan_file
    config.plan_changes = changes or {}
    return config


def test_files_for_the_start_and_for_changes(plan: str) -> None:
    config = parse_config(config_with(plan, {"3": plan, "5": plan}))
    assert plan_keys(config) == {
        0: ("plan_file", plan),
        3: ("plan_changes.3", plan),
        5: ("plan_changes.5", plan),
    }
    assert plans_by_step(config) == {}
    assert parse_config(config_to_json(config)) == config


def test_a_file_after_entries(plan: str) -> None:
    config = parse_config(config_with(changes={"3": {"actor-TRAIN": "dp=2"}, "5": plan}))
    assert list(plans_by_step(config)) == [3]
    assert list(plan_keys(config)) == [5]


def test_on_the_command_line(plan: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.py"
    file.write_text("from nereus_jax.testing import tiny_run_config as get_config\n")
    config = parse_config(load_config_file(str(file), [f"--config.plan_changes.1={plan}"]))
    assert plan_keys(config) == {1: ("plan_changes.1", plan)}


def test_on_the_command_line_a_file_takes_the_place_of_the_configurations_layouts(
    plan: str, tmp_path: Path
) -> None:
    file = tmp_path / "tiny.py"
    file.write_text("from nereus_jax.testing import tiny_run_config as get_config\n")
    override = f"--config.plan_file={plan}"
    config = parse_config(load_config_file(str(file), [override]))
    assert plan_keys(config) == {0: ("plan_file", plan)} and not config.plan
    with pytest.raises(ConfigError, match=r"plan_file=.* and plan\.actor-TRAIN one of them again"):
        load_config_file(str(file), [override, "--config.plan.actor-TRAIN=dp=2"])


def message(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, ["No such file", "nereus plan --out"]),
        ("no json", ["no JSON"]),
        ("[1]", ["holds no plan"]),
        ('{"actor-TRAIN": {"dp": 1}}', ["actor-TRAIN", "'pp' is missing"]),
        ('{"actor-TRIAN": {"dp": 1, "pp": 1, "tp": 1, "devices": ["0:0"]}}', ["actor-TRIAN"]),
        (
            '{"actor-TRAIN": {"dp": 1, "pp": 1, "tp": 1, "devices": ["0:0"]}}',
            ["actor-TRAIN", "microbatch_size is missing"],
        ),
    ],
    ids=["missing", "no json", "no plan", "no placement", "no model-stage", "no choice"],
)
@pytest.mark.parametrize("key", ["plan_file", "plan_changes.3"])
def test_what_cannot_be_read_is_one_line(
    key: str, content: str | None, says: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "wrong.json"
    if content is not None:
        path.write_text(content)
    config = config_with(str(path)) if key == "plan_file" else config_with(changes={3: str(path)})
    text = message(config)
    for part in (f"{key}: '{path}'", *says):
        assert part in text


def test_two_who_say_the_same(plan: str) -> None:
    config = config_with(plan)
    config.plan["actor-SCORE"] = "dp=1"
    assert "plan.actor-SCORE is given too" in message(config)


@pytest.mark.parametrize("first", [True, False])
def test_single_layouts_after_a_file(plan: str, first: bool) -> None:
    changes: dict[str, Any] = {"4": {"actor-TRAIN": "dp=2"}}
    config = config_with(plan, changes) if first else config_with(changes={"2": plan, **changes})
    assert "plan_changes.4 changes single layouts of a plan that comes from a file" in message(
        config
    )


def test_a_pool_that_has_all_devices_leaves_the_file(plan: str) -> None:
    config = parse_config(config_with(plan))
    fitted, said = fit_plan_files(config, DevicePool.uniform(2, 4))
    assert fitted == config and said == []


def test_fewer_devices_get_the_nearest_layouts_and_the_most_sparing_choices(plan: str) -> None:
    config = parse_config(config_with(plan, {"5": plan}))
    fitted, said = fit_plan_files(config, DevicePool.uniform(1, 4))
    assert plan_keys(fitted) == {}
    entries = {name: str(e) for name, e in resolve_plan(fitted).items()}
    assert entries["actor-TRAIN"] == "dp=2,pp=1,tp=1"
    assert entries["critic-TRAIN"] == "dp=1,pp=1,tp=1,devices=1"
    assert plans_by_step(fitted)[5] == resolve_plan(fitted)
    assert fitted.train.microbatch_size == 2 and fitted.train.zero1
    assert fitted.train.remat == "layer"
    assert fitted.score.microbatch_size == 4 and fitted.rollout.max_num_seqs == 6
    assert len(said) == 4 and "plan_file: actor-TRAIN" in said[1]


def test_a_plan_file_is_read_as_it_is(plan: str) -> None:
    read = read_plan_file("plan_file", plan)
    assert read.to_json() == json.loads(Path(plan).read_text()) | read.to_json()
