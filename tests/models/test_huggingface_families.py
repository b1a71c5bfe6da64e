"""config.json and tensors of Qwen2, Qwen3 and scaled Llamas: what is read, written and refused."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from nereus_jax.core.architectures import DecoderConfig, Head, LinearRope, Llama3Rope
from nereus_jax.core.errors import ConfigError, DataError
from nereus_jax.models.huggingface import TensorSource, export_model, read_config, read_eos_ids
from nereus_jax.models.huggingface_config import config_json

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
ROPE = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SCALED = Llama3Rope(
    factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16
)


def content_of(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json as transformers writes it; `...` leaves a field out."""
    content = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 10,
        "vocab_size": 11,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
    }
    return {k: v for k, v in (content | changes).items() if v is not ...}


def read(directory: pathlib.Path, family: str, **changes: Any) -> DecoderConfig:
    (directory / "config.json").write_text(json.dumps(content_of(family, **changes)))
    return read_config(directory)


def random_leaves(config: DecoderConfig, head: Head = Head.LM) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {leaf.name: rng.random(leaf.shape, np.float32) for leaf in config.spec(head)}


def test_qwen2(tmp_path: pathlib.Path):
    window = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}
    config = read(tmp_path, "Qwen2", **window)
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (True, False, 2)
    assert read(tmp_path, "Qwen2", layer_types=["full_attention"] * 2) == config


def test_qwen3(tmp_path: pathlib.Path):
    config = read(tmp_path, "Qwen3", head_dim=6, attention_bias=False)
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (False, True, 6)
    # What transformers takes for a field that is left out is not what a Llama has.
    assert read(tmp_path, "Qwen3").head_dim == 128
    many = read(tmp_path, "Qwen3", num_key_value_heads=..., num_attention_heads=32)
    assert many.num_kv_heads == 32
    assert read(tmp_path, "Qwen2", num_key_value_heads=None).num_kv_heads == 4


def test_rope_scaling_where_transformers_4_and_5_write_it(tmp_path: pathlib.Path):
    for kind in ({"rope_type": "llama3"}, {"type": "llama3"}):
        config = read(tmp_path, "Llama", rope_scaling={**kind, **ROPE})
        assert (config.rope_scaling, config.rope_theta) == (SCALED, 1e6)
    five = {"rope_type": "llama3", "rope_theta": 1e6, **ROPE}
    assert read(tmp_path, "Llama", rope_theta=..., rope_parameters=five) == config
    linear = read(tmp_path, "Qwen3", rope_scaling={"type": "linear", "factor": 2})
    assert linear.rope_scaling == LinearRope(factor=2.0)
    assert read(tmp_path, "Llama", rope_scaling={"rope_type": "default"}).rope_scaling is None
    length = ROPE | {"original_max_position_embeddings": ...}
    given = {"rope_type": "llama3", **{k: v for k, v in length.items() if v is not ...}}
    config = read(tmp_path, "Llama", rope_scaling=given)
    assert config.rope_scaling == dataclasses.replace(SCALED, original_max_positions=64)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Gemma", {}, "GemmaForCausalLM is not supported; supported: LlamaForCausalLM, Qwen2F.*"),
        ("Qwen2", {"use_sliding_window": True}, "use_sliding_window = True is .*supported: False"),
        ("Qwen3", {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ("Qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types = .* is not supported"),
        ("Llama", {"sliding_window": 4096}, "sliding_window = 4096 is not .*supported: None"),
        ("Qwen3", {"attention_bias": True}, "attention_bias = True is not .*supported: False"),
        ("Llama", {"mlp_bias": True}, "mlp_bias = True is not supported; supported: False"),
        ("Llama", {"rope_scaling": {"type": "yarn"}}, "rope_scaling of type 'yarn' .*'llama3'"),
        ("Qwen2", {"rope_scaling": {"rope_type": "dynamic"}}, "'dynamic' is .* 'default', 'linear"),
        ("Qwen3", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters .*'longrope'"),
        ("Llama", {"rope_scaling": {"rope_type": "linear"}}, "'linear' lacks the field factor"),
        ("Llama", {"rope_scaling": {"type": "llama3", **ROPE, "factor": "8"}}, "factor of rope_sc"),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "json: factor must be posit"),
        (
            "Llama",
            {"rope_scaling": {"type": "llama3", **ROPE, "high_freq_factor": 1}},
            "high_freq_factor must be above low_freq_factor 1.0, got 1.0",
        ),
        (
            "Qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "full_attention in rope_parameters is not supported",
        ),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor in"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: pathlib.Path, family: str, changes: dict[str, Any], message: str
):
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path, family, **changes)
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("head", list(Head), ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": SCALED},
        {"rope_scaling": LinearRope(factor=3.0)},
        {"qkv_bias": True},
        {"qk_norm": True, "head_dim": 6, "tie_embeddings": False},
    ],
)
def test_a_written_config_is_the_same_when_read(
    tmp_path: pathlib.Path, head: Head, changes: dict[str, Any]
):
    config = dataclasses.replace(read(tmp_path, "Llama"), **changes)
    content = config_json(config, head, "float32")
    for places in ((), ("rope_parameters",), ("rope_scaling", "rope_theta")):  # both, 4, 5
        left = {k: v for k, v in content.items() if k not in places}
        (tmp_path / "config.json").write_text(json.dumps(left))
        assert read_config(tmp_path) == config


def test_no_architecture_has_both_biases_and_norms(tmp_path: pathlib.Path):
    config = dataclasses.replace(read(tmp_path, "Llama"), qkv_bias=True, qk_norm=True)
    with pytest.raises(
        ConfigError, match=r"no Hugging Face arch.*export a model of Llama, Qwen2, Q"
    ):
        export_model(tmp_path / "out", config, random_leaves(config))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("head", list(Head), ids=str)
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_biases_and_norms_come_back_from_files(tmp_path: pathlib.Path, family: str, head: Head):
    config = read(tmp_path, family, head_dim=4)
    leaves = random_leaves(config, head)
    export_model(tmp_path / "out", config, leaves, head=head)
    source = TensorSource(tmp_path / "out", head)
    assert source.config == config
    for name, value in leaves.items():
        np.testing.assert_array_equal(source.read(name), value, err_msg=name)
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    name = {"Qwen2": "k_proj.bias", "Qwen3": "k_norm.weight"}[family]
    own = {"Qwen2": "layers.k_bias", "Qwen3": "layers.k_norm"}[family]
    np.testing.assert_array_equal(stored[f"model.layers.1.self_attn.{name}"], leaves[own][1])


def test_a_model_of_another_family_does_not_fit(tmp_path: pathlib.Path):
    """Biases are no matter of taste: they must be there for Qwen2, and not for Llama."""
    config = read(tmp_path, "Qwen2")
    export_model(tmp_path, config, random_leaves(config))
    (tmp_path / "config.json").write_text(json.dumps(content_of("Llama", tie_word_embeddings=True)))
    with pytest.raises(DataError, match=r"model\.safetensors holds .*k_proj\.bias.* more tensors"):
        TensorSource(tmp_path)
    config = read(tmp_path, "Llama")
    export_model(tmp_path, config, random_leaves(config))
    (tmp_path / "config.json").write_text(json.dumps(content_of("Qwen2", tie_word_embeddings=True)))
    with pytest.raises(DataError, match=r"model\.safetensors lacks .*k_proj\.bias.*3 more tensors"):
        TensorSource(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "eos_ids"),
    [
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 2}, (5, 7)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({}, {"eos_token_id": [2, 3]}, (2, 3)),
        (None, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
    ],
)
def test_eos_ids(
    tmp_path: pathlib.Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    eos_ids: tuple[int, ...],
):
    (tmp_path / "config.json").write_text(json.dumps(content_of("Llama", **config)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_ids(tmp_path) == eos_ids


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("</s>", "generation_config.json: eos_token_id must be an id or a list of ids, got '</s>'"),
        ([2, 11], "eos_token_id 11 is no token of the model, ids are below 11"),
    ],
)
def test_eos_ids_that_are_none(tmp_path: pathlib.Path, value: object, message: str):
    (tmp_path / "config.json").write_text(json.dumps(content_of("Llama")))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(DataError, match=message):
        read_eos_ids(tmp_path)


@pytest.mark.parametrize("family", ["llama_tiny", "llama3_tiny", "qwen2_tiny", "qwen3_tiny"])
def test_files_of_transformers_are_exported_bit_for_bit(tmp_path: pathlib.Path, family: str):
    source = TensorSource(GOLDEN / family)
    leaves = {name: source.read(name) for name in source.leaf_names}
    dtype = leaves["embed"].dtype.name
    export_model(tmp_path, source.config, leaves, dtype, tokenizer_directory=source.directory)
    assert TensorSource(tmp_path).config == source.config
    theirs, ours = (
        safetensors.numpy.load_file(path / "model.safetensors")
        for path in (source.directory, tmp_path)
    )
    assert {n: (x.dtype, x.tobytes()) for n, x in ours.items()} == {
        n: (x.dtype, x.tobytes()) for n, x in theirs.items()
    }
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["eos_token_id"], content["pad_token_id"]) == (2, 0)
