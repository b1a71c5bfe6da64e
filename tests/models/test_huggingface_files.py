"""Checkpoints made here with the package safetensors: slices, round trips, and every refusal."""

import dataclasses
import functools
import json

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.errors import ConfigError, DataError
from nereus_jax.models.huggingface import TensorSource, export_model, read_config

CONFIG = DecoderConfig(
    num_layers=3,
    embed_dim=6,
    num_heads=3,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=10,
    vocab_size=11,
    rope_theta=5e5,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_positions=32,
)
JSON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 6,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 10,
    "vocab_size": 11,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32,
    "hidden_act": "silu",
    "rope_scaling": None,
}
LAYER_SHAPES = {
    "input_layernorm": (6,),
    "self_attn.q_proj": (12, 6),
    "self_attn.k_proj": (4, 6),
    "self_attn.v_proj": (4, 6),
    "self_attn.o_proj": (6, 12),
    "post_attention_layernorm": (6,),
    "mlp.gate_proj": (10, 6),
    "mlp.up_proj": (10, 6),
    "mlp.down_proj": (6, 10),
}


def make_tensors(dtype: npt.DTypeLike = np.float32):
    """Tensors as transformers stores them, all values different."""
    shapes = {"model.embed_tokens.weight": (11, 6), "model.norm.weight": (6,)}
    shapes["lm_head.weight"] = (11, 6)
    for layer in range(3):
        for name, shape in LAYER_SHAPES.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write(directory, tensors=None, **fields):
    directory.mkdir(exist_ok=True)
    content = {k: v for k, v in (JSON | fields).items() if v is not ...}
    (directory / "config.json").write_text(json.dumps(content))
    tensors = make_tensors() if tensors is None else tensors
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def write_sharded(directory, tensors, num_files=3):
    write(directory)
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for i in range(num_files):
        name = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(list(tensors.items())[i::num_files])
        safetensors.numpy.save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def expected_leaf(tensors, leaf):
    """The leaf from whole tensors, written out for each."""

    def stack(name, transpose=True):
        parts = [tensors[f"model.layers.{i}.{name}.weight"] for i in range(3)]
        return np.stack([p.T if transpose else p for p in parts])

    return {
        "embed": lambda: tensors["model.embed_tokens.weight"],
        "layers.attn_norm": lambda: stack("input_layernorm", transpose=False),
        "layers.q": lambda: stack("self_attn.q_proj"),
        "layers.k": lambda: stack("self_attn.k_proj"),
        "layers.v": lambda: stack("self_attn.v_proj"),
        "layers.o": lambda: stack("self_attn.o_proj"),
        "layers.mlp_norm": lambda: stack("post_attention_layernorm", transpose=False),
        "layers.gate": lambda: stack("mlp.gate_proj"),
        "layers.up": lambda: stack("mlp.up_proj"),
        "layers.down": lambda: stack("mlp.down_proj"),
        "final_norm": lambda: tensors["model.norm.weight"],
        "lm_head": lambda: tensors["lm_head.weight"],
    }[leaf]()


def bits(array):
    return (array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())


@pytest.fixture(scope="module", params=[np.float32, ml_dtypes.bfloat16, np.float16])
def checkpoint(request, tmp_path_factory):
    tensors = make_tensors(request.param)
    return write(tmp_path_factory.mktemp("model") / "x", tensors), tensors


def test_config(tmp_path):
    assert read_config(write(tmp_path / "x")) == CONFIG
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}, "rope_theta": ...}
    config = read_config(write(tmp_path / "x", **nested))
    assert config == dataclasses.replace(CONFIG, rope_theta=7e5)
    absent = {"num_key_value_heads": ..., "head_dim": None, "rope_theta": ..., "hidden_act": ...}
    config = read_config(write(tmp_path / "x", **absent, tie_word_embeddings=...))
    defaults = {"num_kv_heads": 3, "head_dim": 2, "rope_theta": 10_000.0}
    assert config == dataclasses.replace(CONFIG, **defaults)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            "MistralForCausalLM is not supported; supp.*Llama",
        ),
        ({"architectures": ...}, r"architecture \(none\) is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters of type 'yarn'"),
        ({"rope_parameters": "yarn"}, "rope_parameters must be an object"),
        ({"attention_bias": True}, "attention_bias = True is not supported; supported: False"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": ...}, "lacks the field hidden_size"),
        ({"rms_norm_eps": ...}, "lacks the field rms_norm_eps"),
        ({"hidden_size": "6"}, "hidden_size must be a positive int, got '6'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive int, got 0"),
        ({"rope_theta": "big"}, "rope_theta must be a number, got 'big'"),
        ({"num_key_value_heads": 2}, r"config\.json: num_heads 3 is not a multiple"),
    ],
)
def test_config_errors(tmp_path, fields, message):
    with pytest.raises(DataError, match=message) as caught:
        read_config(write(tmp_path / "x", **fields))
    assert "\n" not in str(caught.value)


def test_config_file_errors(tmp_path):
    with pytest.raises(DataError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "must hold a JSON object, got list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(DataError, match=message):
            read_config(tmp_path)


def test_every_leaf_is_the_stacked_transpose(checkpoint):
    directory, tensors = checkpoint
    source = TensorSource(directory)
    assert source.config == CONFIG
    assert source.head is Head.LM
    assert set(source.leaf_names) == {spec.name for spec in CONFIG.spec(Head.LM)}
    for spec in CONFIG.spec(Head.LM):
        leaf = source.read(spec.name)
        assert leaf.shape == spec.shape == source.shape(spec.name)
        assert bits(leaf) == bits(expected_leaf(tensors, spec.name))
        assert leaf.flags.c_contiguous and leaf.flags.writeable


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_slice_equals_the_slice_of_the_whole(checkpoint, data):
    source = TensorSource(checkpoint[0])
    name = data.draw(st.sampled_from(source.leaf_names))
    bounds = [
        sorted(data.draw(st.tuples(st.integers(0, d), st.integers(0, d))))
        for d in source.shape(name)
    ]
    index = tuple(slice(a, b) for a, b in bounds)
    assert bits(source.read(name, index)) == bits(source.read(name)[index])


def test_a_wide_leaf_is_copied_in_strips(tmp_path):
    wide = {"intermediate_size": 700}
    tensors = make_tensors()
    for layer in range(3):
        for name, shape in (("gate", (700, 6)), ("up", (700, 6)), ("down", (6, 700))):
            values = np.arange(4200, dtype=np.float32).reshape(shape) + layer
            tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"] = values
    source = TensorSource(write(tmp_path / "x", tensors, **wide))
    for name in ("layers.gate", "layers.down"):
        assert bits(source.read(name)) == bits(expected_leaf(tensors, name))


def test_a_sharded_checkpoint_reads_the_same(tmp_path):
    tensors = make_tensors(ml_dtypes.bfloat16)
    source = TensorSource(write_sharded(tmp_path / "x", tensors))
    for name in source.leaf_names:
        assert bits(source.read(name)) == bits(expected_leaf(tensors, name))


def test_layers_of_different_dtypes_are_read_in_the_widest(tmp_path):
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors = make_tensors(ml_dtypes.bfloat16)
    tensors[name] = tensors[name].astype(np.float32)
    leaf = TensorSource(write(tmp_path / "x", tensors)).read("layers.q")
    assert leaf.dtype == np.float32
    assert np.array_equal(leaf, expected_leaf(tensors, "layers.q"))


def test_tied_embeddings_have_no_head(tmp_path):
    tensors = make_tensors()
    stored_all_the_same = TensorSource(write(tmp_path / "x", tensors, tie_word_embeddings=True))
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    source = TensorSource(write(tmp_path / "y", tensors, tie_word_embeddings=True))
    for s in (source, stored_all_the_same):
        assert "lm_head" not in s.leaf_names
    with pytest.raises(DataError, match=r"lacks lm_head\.weight"):
        TensorSource(write(tmp_path / "z", tensors))


def test_a_reward_model(tmp_path):
    tensors = make_tensors()
    del tensors["lm_head.weight"]
    tensors["score.weight"] = np.arange(6, dtype=np.float32).reshape(1, 6)
    kind = {"architectures": ["LlamaForSequenceClassification"]}
    source = TensorSource(write(tmp_path / "x", tensors, **kind), Head.SCALAR)
    assert source.read("scalar_head").tolist() == [[0], [1], [2], [3], [4], [5]]
    with pytest.raises(DataError, match="a LlamaForCausalLM is needed here"):
        TensorSource(tmp_path / "x", Head.LM)
    with pytest.raises(
        DataError, match="head of kind lm; a LlamaForSequenceClassification is needed"
    ):
        TensorSource(write(tmp_path / "y"), Head.SCALAR)
    tensors["score.weight"] = np.zeros((2, 6), np.float32)
    with pytest.raises(DataError, match=r"score\.weight has shape \[2, 6\], .* asks for \[1, 6\]"):
        TensorSource(write(tmp_path / "x", tensors, **kind))


def test_index_of_the_wrong_rank(checkpoint):
    with pytest.raises(ValueError, match=r"layers\.q has 3 dims"):
        TensorSource(checkpoint[0]).read("layers.q", (slice(0, 1),))


def test_tensors_that_do_not_fit(tmp_path):
    tensors = make_tensors()
    gone = {k: v for k, v in tensors.items() if "down_proj" not in k and "up_proj" not in k}
    with pytest.raises(
        DataError, match=r"lacks model\.layers\.0\.mlp\.down_proj.*and 3 more tensors"
    ):
        TensorSource(write(tmp_path / "x", gone))
    with pytest.raises(DataError, match=r"holds model\.layers\.2\.inp.*and 6 more tensors, which"):
        TensorSource(write(tmp_path / "x", tensors, num_hidden_layers=2))
    bias = tensors | {"model.layers.0.self_attn.q_proj.bias": np.zeros(12, np.float32)}
    with pytest.raises(DataError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.bias"):
        TensorSource(write(tmp_path / "x", bias))
    with pytest.raises(DataError, match=r"embed_tokens\.weight has shape \[11, 6\].*\[12, 6\]"):
        TensorSource(write(tmp_path / "x", tensors, vocab_size=12))
    integers = tensors | {"model.norm.weight": np.zeros(6, np.int32)}
    with pytest.raises(DataError, match=r"model\.norm\.weight is stored as I32; supported: F64"):
        TensorSource(write(tmp_path / "x", integers))


def test_damaged_files(tmp_path):
    path = write(tmp_path / "x") / "model.safetensors"
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for content, message in (
        (whole[:-1], r"is truncated: .* ends at byte \d+, the file has \d+"),
        (whole[:start], "is truncated"),
        (whole[:50], r"is truncated or not a safetensors file \(50 bytes\)"),
        (b"", r"is truncated or not a safetensors file \(0 bytes\)"),
        (b"version https://git-lfs.github.com/spec/v1", "not a safetensors file"),
        (whole[:8] + b"x" + whole[9:], "malformed safetensors header"),
        (whole.replace(b"[11,6]", b"[11,7]"), r"malformed .* bytes for shape \(11, 7\)"),
        (whole.replace(b'"shape"', b'"shapE"'), "malformed safetensors header"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            TensorSource(tmp_path / "x")
        assert "\n" not in str(caught.value)


def test_missing_files(tmp_path):
    directory = write(tmp_path / "x")
    (directory / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"neither model\.safetensors nor"):
        TensorSource(directory)
    (directory / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"only pytorch_model\.bin, a pickle, which can run any code"
    ):
        TensorSource(directory)
    directory = write_sharded(tmp_path / "y", make_tensors())
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DataError, match=r"model-00002-of-00003\.safetensors does not exist"):
        TensorSource(directory)
    index = directory / "model.safetensors.index.json"
    for weight_map, message in (
        ({"a": "../x/model.safetensors"}, "is not the name of a file beside it"),
        ([], "has no weight_map"),
        ({"a": "model-00001-of-00003.safetensors"}, "lacks"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(DataError, match=message):
            TensorSource(directory)


@pytest.mark.parametrize("as_functions", [False, True])
def test_import_then_export_is_bit_equal(checkpoint, tmp_path, as_functions):
    directory, tensors = checkpoint
    source = TensorSource(directory)
    leaves = {
        name: functools.partial(source.read, name) if as_functions else source.read(name)
        for name in source.leaf_names
    }
    dtype = tensors["lm_head.weight"].dtype.name
    export_model(tmp_path / "out", source.config, leaves, dtype)
    exported = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert {n: bits(t) for n, t in exported.items()} == {n: bits(t) for n, t in tensors.items()}
    again = TensorSource(tmp_path / "out", Head.LM)
    assert again.config == CONFIG
    assert all(bits(again.read(n)) == bits(source.read(n)) for n in source.leaf_names)
    assert not list((tmp_path / "out").glob("*.partial"))


def test_export_rounds_to_nearest_even(tmp_path):
    source = TensorSource(write(tmp_path / "x"))
    leaves = {name: source.read(name) for name in source.leaf_names}
    leaves["final_norm"] = np.array([1.00390625, 1.01171875, 1, 2, 3, 4], np.float32)  # two ties
    export_model(tmp_path / "out", CONFIG, leaves, "bfloat16")
    norm = TensorSource(tmp_path / "out").read("final_norm")
    assert norm.astype(np.float32).tolist() == [1.0, 1.015625, 1, 2, 3, 4]


def test_export_of_tied_and_scalar_models(tmp_path):
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    for head in Head:
        rng = np.random.default_rng(1)
        leaves = {s.name: rng.random(s.shape, np.float32) for s in config.spec(head)}
        export_model(tmp_path / head, config, leaves, head=head)
        source = TensorSource(tmp_path / head, head)
        assert source.config == config
        assert all(np.array_equal(source.read(n), leaves[n]) for n in leaves)


def test_export_copies_the_tokenizer(tmp_path):
    directory = write(tmp_path / "x", eos_token_id=[2, 5], bos_token_id=1, pad_token_id=None)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).write_text(name)
    source = TensorSource(directory)
    leaves = {name: source.read(name) for name in source.leaf_names}
    export_model(tmp_path / "out", CONFIG, leaves, tokenizer_directory=directory)
    out = {p.name for p in (tmp_path / "out").iterdir()}
    assert out == {p.name for p in directory.iterdir()}
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "chat_template.jinja"
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["eos_token_id"] == [2, 5]
    assert content["bos_token_id"] == 1
    assert "pad_token_id" not in content


def test_export_errors(tmp_path):
    source = TensorSource(write(tmp_path / "x"))
    leaves = {name: source.read(name) for name in source.leaf_names}
    with pytest.raises(ConfigError, match="one of float32, bfloat16, float16, got 'int8'"):
        export_model(tmp_path / "out", CONFIG, leaves, "int8")
    with pytest.raises(
        ValueError, match=r"layers\.q must have shape \(3, 6, 12\), got \(3, 12, 6\)"
    ):
        wrong = leaves | {"layers.q": leaves["layers.q"].swapaxes(1, 2)}
        export_model(tmp_path / "out", CONFIG, wrong)
    del leaves["embed"]
    with pytest.raises(ValueError, match="without the leaves embed"):
        export_model(tmp_path / "out", CONFIG, leaves)
    assert not (tmp_path / "out" / "model.safetensors").exists()
