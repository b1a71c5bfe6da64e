"""Which tokens end a response: the tokenizer's, those of the model's files, and rollout.stop."""

import dataclasses
import json
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from nereus_jax.config import parse_config
from nereus_jax.testing import tiny_run_config
from nereus_jax.trainer.job import _stop_ids

TOKENIZER: Any = SimpleNamespace(eos_ids=(2,), encode=lambda text, add_special_tokens: [len(text)])


@pytest.mark.parametrize(
    ("kind", "generation", "stop_ids"),
    [
        ("huggingface", {"eos_token_id": [7, 2]}, (2, 7, 5)),
        ("huggingface", {"eos_token_id": 9}, (2, 9, 5)),
        ("huggingface", {}, (2, 3, 5)),  # config.json's
        ("characters", {"eos_token_id": 9}, (2, 5)),  # other ids than the model's
    ],
)
def test_what_the_model_was_taught_to_end_with_ends_a_response(
    tmp_path: pathlib.Path, kind: Any, generation: dict[str, Any], stop_ids: tuple[int, ...]
):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 11, "eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = parse_config(tiny_run_config())
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=str(tmp_path)),
        tokenizer=dataclasses.replace(config.tokenizer, kind=kind),
        rollout=dataclasses.replace(config.rollout, stop=("#####",)),
    )
    assert _stop_ids(config, TOKENIZER) == stop_ids
