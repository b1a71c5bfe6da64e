"""Configuration files and the overrides of the command line."""

from pathlib import Path
from typing import Any

import pytest

from nereus_jax.config import load_config_file
from nereus_jax.core.errors import ConfigError

FILE = """
from nereus_jax.config import default_config

def get_config(size="small"):
    config = default_config()
    config.num_steps = 3
    config.model.num_layers = {"small": 2, "large": 4}[size]
    config.eval.batch_size = config.model.get_ref("num_layers") * 2
    config.plan["actor-TRAIN"] = "dp=1,pp=1,tp=1"
    config.data.task_options.name = "copy"
    return config
"""
PARTIAL = """
from ml_collections import ConfigDict
def get_config():
    config = ConfigDict({"num_steps": 3, "algorithm": {"gamma": 1}})
    config.lock()
    return config
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.py"
    path.write_text(FILE)
    return str(path)


def load_text(folder: Path, text: str, overrides: Any = ()) -> Any:
    path = folder / "other.py"
    path.write_text(text)
    return load_config_file(str(path), overrides)


def message_of(path: str, overrides: Any = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config_file(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def value_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config


def test_the_argument_after_the_colon_reaches_get_config(file: str) -> None:
    assert value_of(load_config_file(file), "model.num_layers") == 2
    assert value_of(load_config_file(file + ":large"), "model.num_layers") == 4


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["--config.num_steps=7"], "num_steps", 7),
        (["config.num_steps=7"], "num_steps", 7),
        (["num_steps=7"], "num_steps", 7),
        (["--config.num_steps", "7"], "num_steps", 7),
        (["--config.num_steps=6", "--config.num_steps=7"], "num_steps", 7),
        ({"num_steps": "7"}, "num_steps", 7),
        ({"config.num_steps": 7}, "num_steps", 7),
        (["config.model.num_layers=8"], "eval.batch_size", 16),
        (["config.rollout.batch_size=64"], "rollout.batch_size", 64),
        (["config.algorithm.kl.coef=1e-3"], "algorithm.kl.coef", 1e-3),
        (["config.algorithm.kl.coef=1"], "algorithm.kl.coef", 1.0),
        (["config.report.tensorboard=false"], "report.tensorboard", False),
        (["--noconfig.report.tensorboard"], "report.tensorboard", False),
        (["--config.train.zero1"], "train.zero1", True),
        (["config.data.prompt_field=a=b, c"], "data.prompt_field", "a=b, c"),
        (["config.rollout.stop=('a b', 'c')"], "rollout.stop", ("a b", "c")),
        (["config.rollout.stop=</s>", "config.rollout.stop=b"], "rollout.stop", ("</s>", "b")),
        (["--config.plan.actor-TRAIN=dp=2,pp=1,tp=2"], "plan.actor-TRAIN", "dp=2,pp=1,tp=2"),
        (["--config.plan.actor_TRAIN=dp=2,tp=2"], "plan.actor-TRAIN", "dp=2,tp=2"),
        (["--config.plan.critic-TRAIN", "dp=2"], "plan.critic-TRAIN", "dp=2"),
        (["config.data.task_options.digits=3"], "data.task_options.digits", 3),
        (["config.data.task_options.carry=true"], "data.task_options.carry", True),
        (["config.data.task_options.operators=+-"], "data.task_options.operators", "+-"),
        (["config.data.task_options.name=12"], "data.task_options.name", "12"),
    ],
)
def test_overrides(file: str, overrides: Any, key: str, value: Any) -> None:
    got = value_of(load_config_file(file, overrides), key)
    assert (got, type(got)) == (value, type(value))


def test_overrides_reach_keys_that_the_file_does_not_hold(tmp_path: Path) -> None:
    texts = ["seed=4", "algorithm.gamma=0.5", "algorithm.kl.coef=0.5", "plan.actor_TRAIN=dp=2"]
    config = load_text(tmp_path, PARTIAL, texts)
    assert config.to_dict() == {
        "num_steps": 3,
        "seed": 4,
        "algorithm": {"gamma": 0.5, "kl": {"coef": 0.5}},
        "plan": {"actor-TRAIN": "dp=2"},
    }


def test_an_override_replaces_the_other_spelling_of_a_model_stage(tmp_path: Path) -> None:
    text = "def get_config():\n    return {'plan': {'actor_TRAIN': 'dp=1'}}\n"
    config = load_text(tmp_path, text, ["config.plan.actor-TRAIN=dp=2"])
    assert config.plan.to_dict() == {"actor-TRAIN": "dp=2"}


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    for seed in (1, 2):
        text = f"def get_config():\n    return {{'seed': {seed}}}\n"
        assert load_text(tmp_path, text).seed == seed
    assert list(tmp_path.iterdir()) == [tmp_path / "other.py"]


def test_a_frozen_config_takes_overrides(tmp_path: Path) -> None:
    text = "from ml_collections import FrozenConfigDict\n"
    text += "def get_config():\n    return FrozenConfigDict({'seed': 1, 'model': {'path': 'x'}})\n"
    assert load_text(tmp_path, text, ["seed=2", "model.path=y"]).model.path == "y"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("config.model.num_layer=3", ["unknown key 'model.num_layer'", "'model.num_layers'?"]),
        ("config.modl.num_layers=3", ["unknown key 'modl'", "did you mean 'model'?"]),
        ("config.num_layers=3", ["did you mean 'model.num_layers'?"]),
        ("config.seed.x=3", ["'seed' holds an int >= 0", "--config.seed=VALUE"]),
        ("config.model=3", ["'model' is a section", "--config.model.KEY=VALUE", "num_layers"]),
        ("config.plan=3", ["'plan' is a section", "any"]),
        ("config.plan.actor.TRAIN=dp=1", ["may not hold a dot", "plan.actor-TRAIN"]),
        ("config.seed=abc", ["--config.seed: expected an int >= 0", "got 'abc'"]),
        ("config.seed=1.5", ["--config.seed", "got '1.5'"]),
        ("config.train.zero1=maybe", ["--config.train.zero1: expected a bool", "'maybe'"]),
        ("config.rollout.stop=a b", ["--config.rollout.stop", "quote every string"]),
        ("config.seed", ["'config.seed' has no value"]),
        ("--config.seed", ["'--config.seed' has no value"]),
        ("--noconfig.seed", ["'--noconfig.seed' has no value"]),
    ],
)
def test_a_bad_override_is_explained(file: str, override: str, parts: list[str]) -> None:
    message = message_of(file, [override])
    for part in parts:
        assert part in message


def test_one_text_is_no_list_of_overrides(file: str) -> None:
    assert "expected a list of 'config.key=value'" in message_of(file, "config.seed=1")


def test_a_section_that_is_no_section(tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    path.write_text("def get_config():\n    return {'model': 3}\n")
    assert "model: expected a section" in message_of(str(path), ["config.model.path=x"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x = 1\n", ["has no function get_config()"]),
        ("get_config = 3\n", ["has no function get_config()"]),
        ("def get_config(:\n", [".py:1: SyntaxError"]),
        ("\nimport no_such_module\n", [".py:2: ModuleNotFoundError", "no_such_module"]),
        ("def get_config():\n    return 1 / 0\n", [".py:2: ZeroDivisionError: division by zero"]),
        ("def get_config():\n    open('no/file')\n", [".py:2: FileNotFoundError"]),
        ("def get_config():\n    raise ValueError('a\\nb')\n", [".py:2: ValueError: a b"]),
        ("def get_config():\n    raise ValueError\n", [".py:2: ValueError: no message"]),
        ("import sys\ndef get_config():\n    sys.exit(3)\n", [".py:3: SystemExit: 3"]),
        ("def get_config():\n    return {'a.b': 1}\n", ["ValueError"]),
        ("def get_config():\n    pass\n", ["must return an ml_collections.ConfigDict", "None"]),
        ("def get_config(size):\n    pass\n", ["get_config(size)", ":ARGUMENT"]),
        (
            "from nereus_jax.config import default_config\n"
            "def get_config():\n    c = default_config()\n    c.model.num_layer = 3\n",
            [".py:4: AttributeError: 'num_layer' is not a key", "did you mean 'num_layers'?"],
        ),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "other.py"
    path.write_text(text)
    message = message_of(str(path))
    assert str(path) in message
    for part in parts:
        assert part in message


def test_a_missing_file_names_those_beside_it(file: str, tmp_path: Path) -> None:
    message = message_of(str(tmp_path / "rnu.py"))
    assert "does not exist" in message
    assert "run.py" in message
    assert "does not exist" in message_of(str(tmp_path))
    assert "does not exist" in message_of(str(tmp_path / "no" / "run.py"))


def test_an_argument_that_get_config_does_not_take(tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    path.write_text(PARTIAL)
    message = message_of(f"{path}:large")
    assert "get_config()" in message
    assert f"write --config={path}" in message
