"""The configurations that come with the project parse, and say what they need."""

import pathlib

import pytest

from nereus_jax.config import load_config_file, parse_config
from nereus_jax.core.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
MODEL = ROOT / "tests" / "golden" / "llama_tiny"


def test_ppo_tiny_parses() -> None:
    assert parse_config(load_config_file(str(CONFIGS / "ppo_tiny.py"))).num_steps > 0


@pytest.mark.parametrize(
    ("argument", "overrides"), [(f":{MODEL}", []), ("", [f"--config.model.path={MODEL}"])]
)
def test_ppo_smollm2_takes_the_model_either_way(argument: str, overrides: list[str]) -> None:
    config = parse_config(load_config_file(f"{CONFIGS / 'ppo_smollm2.py'}{argument}", overrides))
    assert config.model.path == str(MODEL)
    assert config.tokenizer.kind == "huggingface"


def test_ppo_smollm2_without_a_model_says_how_to_name_one() -> None:
    with pytest.raises(ConfigError, match=r"set config\.model\.path to a Hugging Face directory"):
        parse_config(load_config_file(str(CONFIGS / "ppo_smollm2.py")))
