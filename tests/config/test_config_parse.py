"""From a ConfigDict to a RunConfig: defaults, types, bounds and checks between fields."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import config_dict

from nereus_jax.config import (
    KLConfig,
    OptimizerConfig,
    PlanEntry,
    RunConfig,
    config_to_json,
    default_config,
    fingerprint,
    parse_config,
    resolve_plan,
)
from nereus_jax.core.errors import ConfigError

# The smallest configuration, as flat dotted keys.
SMALLEST: dict[str, Any] = {
    "num_steps": 3,
    "model.num_layers": 2,
    "model.embed_dim": 16,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 4,
    "model.mlp_dim": 32,
    "data.train": "task:copy",
    "data.eval": "task:copy",
    "data.max_prompt_length": 8,
    "reward.function": "package.module.reward",
    "rollout.batch_size": 32,
    "rollout.max_response_length": 8,
    "algorithm.minibatch_size": 16,
    "actor_optimizer.learning_rate": 1e-3,
    "critic_optimizer.learning_rate": 1e-3,
    "train.microbatch_size": 4,
    "plan.actor-TRAIN": "dp=2,pp=1,tp=2",
    "plan.critic-TRAIN": "dp=1,pp=2,tp=1",
}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        section = tree
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return tree


def smallest(**changes: Any) -> Any:
    """SMALLEST with changes, whose keys have '__' for '.'; a change to ... drops the key."""
    flat = SMALLEST | {key.replace("__", "."): value for key, value in changes.items()}
    return config_dict.ConfigDict(nested({k: v for k, v in flat.items() if v is not ...}))


def message_of(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_partial_config_gets_the_defaults() -> None:
    run = parse_config(smallest())
    assert (run.num_steps, run.seed, run.emulated_devices) == (3, 0, 0)
    assert run.model.rope_theta == 10000.0
    assert run.model.tie_embeddings
    assert run.algorithm.kl == KLConfig()
    assert run.actor_optimizer == OptimizerConfig(learning_rate=1e-3)
    assert (run.actor_optimizer.b2, run.critic_optimizer.b2) == (0.95, 0.95)
    assert run.eval.num_prompts == 200
    assert run.plan["actor-TRAIN"] == PlanEntry(dp=2, tp=2)
    assert hash(run) == hash(parse_config(smallest()))


def test_the_default_config_holds_all_keys_and_takes_no_others() -> None:
    config = default_config()
    assert config.model.num_layers == 0
    assert config.rollout.batch_size is None
    with pytest.raises(AttributeError, match="num_layer"):
        config.model.num_layer = 3
    for key, value in SMALLEST.items():
        *parents, last = key.split(".")
        section: Any = config
        for name in parents:
            section = section[name]
        section[last] = value
    config.data.task_options.digits = 3
    run = parse_config(config)
    assert run == dataclasses.replace(
        parse_config(smallest()), data=dataclasses.replace(run.data, task_options={"digits": 3})
    )


def test_an_unset_default_config_names_what_is_missing() -> None:
    message = message_of(default_config())
    assert message.startswith("num_steps is not set")
    assert "config.num_steps" in message


def test_a_reference_and_numpy_numbers_are_values() -> None:
    config = smallest(seed=np.int64(4), algorithm__gamma=np.float32(0.5))
    config.eval = config_dict.ConfigDict({"batch_size": config.rollout.get_ref("batch_size")})
    run = parse_config(config)
    assert (run.eval.batch_size, run.seed, run.algorithm.gamma) == (32, 4, 0.5)
    config.warmup = config_dict.ConfigDict({"num_steps": config_dict.required_placeholder(int)})
    assert parse_config(config).warmup.num_steps == 0


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("model.num_layer", 3, ["'model.num_layer'", "did you mean 'model.num_layers'?"]),
        ("model.num_layer", 3, ["Known keys of 'model': path, preset, num_layers, embe"]),
        ("algorithm.kl.coeff", 1.0, ["'algorithm.kl.coeff'", "mean 'algorithm.kl.coef'?"]),
        ("algorithm.kl.coeff", 1.0, ["Known keys of 'algorithm.kl': coef, place, estimator"]),
        ("algoritm", 1, ["'algoritm'", "mean 'algorithm'?", "Known keys at the top: num_steps"]),
        ("num_layers", 1, ["unknown key 'num_layers'", "mean 'model.num_layers'?"]),
        ("zzz", 1, ["unknown key 'zzz'. Known keys at the top"]),
        ("model", 3, ["model: expected a section", "got 3 (int)"]),
        ("plan", "dp=1", ["plan: expected a section", "'dp=1' (str)"]),
        ("num_steps", ..., ["num_steps is not set", "set config.num_steps to an int >= 1"]),
        ("data.train", ..., ["data.train is not set"]),
        ("num_steps", 3.0, ["num_steps: expected an int >= 1", "got 3.0 (float)"]),
        ("num_steps", True, ["num_steps: expected an int >= 1", "got True (bool)"]),
        ("num_steps", 0, ["num_steps must be an int >= 1, got 0"]),
        ("seed", -1, ["seed must be an int >= 0 and <= 4294967295, got -1"]),
        ("algorithm.clip", "0.2", ["algorithm.clip: expected a float > 0", "'0.2' (str)"]),
        ("algorithm.clip", True, ["algorithm.clip: expected a float > 0"]),
        ("algorithm.gamma", 1.5, ["algorithm.gamma must be a float >= 0 and <= 1, got 1.5"]),
        ("algorithm.kl.coef", float("nan"), ["algorithm.kl.coef must be", "got nan"]),
        ("reward.success_threshold", float("inf"), ["must be a float that is finite, got inf"]),
        ("actor_optimizer.b1", 1, ["actor_optimizer.b1 must be a float >= 0 and < 1, got 1"]),
        ("algorithm.correction_cap", 0.5, ["algorithm.correction_cap must be a float >= 1"]),
        ("rollout.top_p", 0.0, ["rollout.top_p must be a float > 0 and <= 1, got 0.0"]),
        ("rollout.temperature", 0, ["rollout.temperature", "do not explore", "eval.temperature"]),
        ("rollout.stop", "x", ["rollout.stop: expected a tuple of strings", "'x' (str)"]),
        ("rollout.stop", ("a", 3), ["rollout.stop: expected a tuple of strings"]),
        ("rollout.stop", ("a", ""), ["rollout.stop holds an empty string"]),
        ("train.zero1", 1, ["train.zero1: expected a bool, got 1 (int)"]),
        ("prompt\nfield", 1, ["unknown key 'prompt\\nfield'"]),
        ("tokenizer.characters", 3, ["tokenizer.characters: expected a string"]),
        ("model.param_dtype", "bf16", ["expected one of 'float32', 'bfloat16', got 'bf16'"]),
        ("model.compute_dtype", "bfloat_16", ["did you mean 'bfloat16'?"]),
        (
            "algorithm.name",
            "a\nb",
            [
                "algorithm.name: expected one of 'ppo', 'grpo', 'rloo', 'reinforce_pp', "
                "'remax', got 'a\\nb'"
            ],
        ),
        ("algorithm.name", 1, ["'reinforce_pp', 'remax', got 1 (int)"]),
        ("data.task_options", {"a": {"b": 1}}, ["data.task_options.a: expected a bool, int"]),
        ("data.task_options", 3, ["data.task_options: expected a section"]),
    ],
)
def test_a_wrong_key_or_value_is_named(key: str, value: Any, parts: list[str]) -> None:
    flat = {k: v for k, v in SMALLEST.items() if not k.startswith(key + ".")} | {key: value}
    message = message_of(nested({k: v for k, v in flat.items() if v is not ...}))
    for part in parts:
        assert part in message


CROSS_CHECKS: list[tuple[dict[str, Any], list[str]]] = [
    ({"model__mlp_dim": ...}, ["neither 'path' nor all sizes", "missing mlp_dim", "model.path"]),
    ({"model__path": "nowhere"}, ["model.path: expected a directory", "'nowhere'", "not exist"]),
    ({"model__path": __file__}, ["exists but is not such a thing"]),
    ({"model__num_kv_heads": 3}, ["num_kv_heads=3", "num_heads=4", "allowed: 1, 2, 4"]),
    ({"model__head_dim": 5}, ["model.head_dim must be even", "got 5", "such as 6"]),
    ({"model__max_positions": 15}, ["8 + ", "= 16 tokens", "model.max_positions=15"]),
    ({"data__train": ""}, ["data.train is empty", "task:NAME"]),
    ({"data__eval": "task: "}, ["data.eval='task: ' names no task"]),
    ({"data__eval": "no.jsonl"}, ["data.eval: expected a .jsonl", ".parquet", "'no.jsonl'"]),
    ({"data__prompt_field": "a+ "}, ["data.prompt_field='a+ ' names no field"]),
    (
        {"data__train": __file__, "data__answer_field": "", "warmup__num_steps": 1},
        ["warmup.num_steps > 0 trains on the answers", "data.answer_field is ''"],
    ),
    ({"tokenizer__kind": "huggingface"}, ["tokenizer.kind='huggingface' needs a directory"]),
    (
        {"tokenizer__kind": "huggingface", "tokenizer__path": "nowhere"},
        ["tokenizer.path: expected a tokenizer directory"],
    ),
    ({"reward__function": ""}, ["exactly one of 'function' and 'model_path'", "got '' and ''"]),
    ({"reward__model_path": "x"}, ["exactly one of 'function' and 'model_path'"]),
    ({"reward__function": "reward"}, ["dotted name", "'reward'"]),
    ({"reward__function": "a.b c"}, ["dotted name", "'a.b c'"]),
    (
        {"reward__function": "", "reward__model_path": "nowhere"},
        ["reward.model_path: expected a reward model directory"],
    ),
    ({"plan__reward-SCORE": "dp=1"}, ["plan.reward-SCORE", "reward.model_path is empty"]),
    (
        {"rollout__kv_cache_tokens": 20, "rollout__kv_page_tokens": 7},
        ["rollout.kv_cache_tokens=20 does not hold one row", "at least 21, or to 0"],
    ),
    ({"rollout__source": "recorded"}, ["needs rollout.recorded_dir"]),
    (
        {"rollout__source": "recorded", "rollout__recorded_dir": "nowhere"},
        ["rollout.recorded_dir: expected a rollout directory"],
    ),
    (
        {"rollout__source": "recorded", "rollout__recorded_dir": ".", "rollout__record": True},
        ["would record the recording"],
    ),
    (
        {"algorithm__minibatch_size": 12},
        ["minibatch_size=12 does not divide rollout.batch_size=32", "8 or 16"],
    ),
    (
        {"algorithm__kl__coef": 0, "algorithm__kl__controller": "adaptive"},
        ["algorithm.kl.coef must be > 0"],
    ),
    (
        {"plan__actor-TRAIN": "dp=17"},
        ["plan.actor-TRAIN: dp=17 replicas", "minibatch_size=16 rows", "at most dp=16"],
    ),
    ({"plan__actor-GENERATE": "dp=1,tp=3"}, ["plan.actor-GENERATE: tp=3", "4 query heads"]),
    ({"plan__critic-TRAIN": "pp=3"}, ["plan.critic-TRAIN: pp=3", "2 layers"]),
    ({"plan__critic-TRAIN": ...}, ["plan: 'critic-TRAIN' is missing", "dp=1,pp=1,tp=1"]),
    ({"plan__critic-TRAIN": "dp=x"}, ["plan.critic-TRAIN='dp=x'"]),
    ({"plan__critic-TRAIN": 2}, ["plan.critic-TRAIN: expected a string", "got 2 (int)"]),
    ({"plan__actor-TRIAN": "dp=2"}, ["unknown model-stage 'actor-TRIAN'", "mean 'actor-TRAIN'?"]),
    ({"plan__actor_TRAIN": "dp=2"}, ["plan: 'actor-TRAIN' is given in two spellings"]),
]


@pytest.mark.parametrize(("changes", "parts"), CROSS_CHECKS)
def test_fields_that_do_not_fit_together(changes: dict[str, Any], parts: list[str]) -> None:
    message = message_of(smallest(**changes))
    for part in parts:
        assert part in message


def test_a_kv_cache_of_one_row_in_whole_pages_is_allowed() -> None:
    run = parse_config(smallest(rollout__kv_cache_tokens=21, rollout__kv_page_tokens=7))
    assert run.rollout.kv_cache_tokens == 21


def test_greedy_evaluation_is_allowed() -> None:
    assert parse_config(smallest(eval__temperature=0)).eval.temperature == 0.0


def test_files_that_exist_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    changes = {"model__path": str(tmp_path), "tokenizer__kind": "huggingface"}
    sizes = {key.replace(".", "__"): 0 for key in SMALLEST if key.startswith("model.")}
    run = parse_config(smallest(data__train=str(tmp_path / "train.jsonl"), **sizes, **changes))
    assert run.model.path == str(tmp_path)


def test_missing_model_stages_fall_back(tmp_path: Path) -> None:
    actor, critic = PlanEntry(dp=2, tp=2), PlanEntry(pp=2)
    assert resolve_plan(parse_config(smallest())) == {
        "actor-GENERATE": actor,
        "actor-SCORE": actor,
        "reference-SCORE": actor,
        "critic-SCORE": critic,
        "actor-TRAIN": actor,
        "critic-TRAIN": critic,
    }
    reward: dict[str, Any] = {"reward__function": "", "reward__model_path": str(tmp_path)}
    assert "plan: 'reward-SCORE' is missing" in message_of(smallest(**reward))
    # The reward model has heads of its own: tp=3 is not held against the actor's four.
    run = parse_config(smallest(**reward, **{"plan__reward-SCORE": "tp=3,devices=0,2,4"}))
    assert resolve_plan(run)["reward-SCORE"] == PlanEntry(tp=3, devices=(0, 2, 4))


def test_an_underscore_spells_a_model_stage_too() -> None:
    config = smallest(**{"plan__actor-TRAIN": ..., "plan__actor_TRAIN": "dp=4"})
    assert parse_config(config).plan["actor-TRAIN"] == PlanEntry(dp=4)


def test_json_round_trip() -> None:
    options: dict[str, Any] = {"digits": [1, 2], "carry": True}
    run = parse_config(smallest(data__task_options=options, rollout__stop=["a", "b"]))
    assert run.rollout.stop == ("a", "b")
    values = config_to_json(run)
    assert values["plan"] == {"actor-TRAIN": "dp=2,pp=1,tp=2", "critic-TRAIN": "dp=1,pp=2,tp=1"}
    assert values["data"]["task_options"] == {"digits": [1, 2], "carry": True}
    again = parse_config(values)
    assert isinstance(again, RunConfig)
    assert again == run


def test_the_fingerprint_covers_the_model_only(tmp_path: Path) -> None:
    base = fingerprint(parse_config(smallest()))
    # A constant, because it identifies checkpoints of earlier runs.
    assert base == "80439cede0416008"
    same = {
        "model__compute_dtype": "bfloat16",
        "model__max_positions": 64,
        "seed": 1,
        "plan__actor-TRAIN": "dp=1",
    }
    for key, value in same.items():
        assert fingerprint(parse_config(smallest(**{key: value}))) == base
    other = {
        "model__num_layers": 4,
        "model__tie_embeddings": False,
        "model__param_dtype": "bfloat16",
        "tokenizer__characters": "ab",
    }
    for key, value in other.items():
        assert fingerprint(parse_config(smallest(**{key: value}))) != base
    moved: list[str] = []
    for place in ("here", "there"):
        model = tmp_path / place / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        moved.append(fingerprint(parse_config(smallest(model__path=str(model)))))
    assert moved[0] == moved[1] != base


def test_no_jax_is_loaded() -> None:
    code = (
        "import sys, nereus_jax.config; "
        "print([name for name in sys.modules if name.partition('.')[0] in ('jax', 'jaxlib')])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.strip() == "[]"
