"""Random models made, saved and run by transformers on the spot, against what is computed here, and
what is exported here read back by transformers.

For a machine with torch and transformers: `NEREUS_TRANSFORMERS=1 pytest -m slow
tests/models/test_transformers_live.py`. Their twins for every machine read files that were made
before: `test_transformers_parity.py`.

Shapes: B rows, P prompt, V vocabulary.
"""

import importlib
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from nereus_jax.core.architectures import Head
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_GENERATE
from nereus_jax.models.decoder import Decoder, bind
from nereus_jax.models.huggingface import TensorSource, export_model
from nereus_jax.models.sampling import SamplingConfig
from nereus_jax.runtime import emu, host
from nereus_jax.runtime.engines.generate import GenerateEngine
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import take_stock

ASKED_FOR = os.environ.get("NEREUS_TRANSFORMERS", "")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# What differs from the sizes below: the three families, tied and not, every kind of frequencies.
MODELS: dict[str, dict[str, Any]] = {
    "Llama-untied": {},
    "Llama-tied": {"tie_word_embeddings": True},
    "Llama-linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "Llama-llama3": {"rope_scaling": LLAMA3, "head_dim": 16},
    "Llama-llama3-tied": {"rope_scaling": LLAMA3, "head_dim": 16, "tie_word_embeddings": True},
    "Llama-one-kv": {"num_key_value_heads": 1},
    "Qwen2-untied": {},
    "Qwen2-tied": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "Qwen2-llama3": {"rope_scaling": LLAMA3},
    "Qwen3-untied": {"head_dim": 12},
    "Qwen3-tied": {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 2},
}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 70,
    "vocab_size": 101,
    "rope_theta": 1000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
# tp that does not divide the key/value heads, and tp above them, with padded layers and replicas.
LAYOUTS = [(1, 1, 1), (1, 2, 2), (2, 1, 3), (1, 1, 6)]
TOLERANCE = 1e-4
NEW_TOKENS = 16
NEAR_TIE = 1e-3  # nats: rows whose closest race is closer are cut before it


def torch_model(name: str, head: Head = Head.LM) -> Any:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    family = name.split("-")[0]
    torch.manual_seed(len(name))
    sizes = SIZES | MODELS[name] | ({"num_labels": 1} if head is Head.SCALAR else {})
    config = getattr(transformers, f"{family}Config")(**sizes)
    kind = "ForCausalLM" if head is Head.LM else "ForSequenceClassification"
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            spread = torch.randn_like(weight)
            scale = 0.5 if "bias" in key else 1.3 * weight.shape[-1] ** -0.5
            weight.copy_(1 + 0.2 * spread if "norm" in key else spread * scale)
    return model


def prompts() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(3, 101, (4, 40)), np.array([40, 3, 17, 29])


def torch_logits(model: Any, tokens_BP: np.ndarray) -> np.ndarray:
    torch: Any = importlib.import_module("torch")
    with torch.no_grad():
        return model(torch.tensor(tokens_BP)).logits.float().numpy()


def torch_greedy(model: Any) -> list[list[int]]:
    """Responses by a full pass a token, cut before the first race that is too close to call."""
    rows = []
    for prompt, length in zip(*prompts(), strict=True):
        ids, first = prompt[:length].tolist(), length
        for _ in range(NEW_TOKENS):
            last_V = torch_logits(model, np.array([ids]))[0, -1]
            second, best = np.sort(last_V)[-2:]
            if best - second < NEAR_TIE:
                break
            ids.append(int(last_V.argmax()))
            if ids[-1] == 2:
                break
        rows.append(ids[first:])
    return rows


def site_of(layout: tuple[int, int, int], num_kv_heads: int) -> emu.Site:
    world = take_stock()
    parallel = ParallelLayout(*layout)
    placement = Placement(layout=parallel, devices=world.pool.devices[: parallel.num_devices])
    return emu.make_site(world, ACTOR_GENERATE, placement, num_kv_heads)


def logits(source: TensorSource, tokens_BP: np.ndarray) -> np.ndarray:
    site = site_of((1, 1, 1), source.config.num_kv_heads)
    params = emu.load(source.config.spec(source.head), site, source.read)
    module = nnx.eval_shape(lambda: Decoder(source.config, source.head, rngs=nnx.Rngs(0)))
    with jax.default_matmul_precision("highest"):
        return np.asarray(bind(nnx.split(module)[0], params)(jax.numpy.asarray(tokens_BP)))


def greedy(source: TensorSource, layout: tuple[int, int, int]) -> list[list[int]]:
    site = site_of(layout, source.config.num_kv_heads)
    engine = GenerateEngine(
        prefill_rows=2,
        config=source.config,
        site=site,
        dtype="float32",
        precision="highest",
        programs=ProgramCache(),
    )
    tokens_BP, lengths_B = prompts()
    tokens_BP = tokens_BP * (np.arange(40)[None, :] < lengths_B[:, None])
    sampling = SamplingConfig(temperature=0.0, stop_ids=(2,), pad_id=0, max_tokens=NEW_TOKENS)
    params = emu.load(source.config.spec(Head.LM), site, source.read)
    arrays = engine.dispatch(params, tokens_BP, lengths_B, np.arange(4), 0, sampling)
    out = host.fetch(arrays)
    return [out["tokens"][row, : out["lengths"][row]].tolist() for row in range(4)]


def tensors_of(directory: pathlib.Path) -> dict[str, tuple[str, bytes]]:
    return {
        name: (str(x.dtype), x.tobytes())
        for path in sorted(directory.glob("*.safetensors"))
        for name, x in safetensors.numpy.load_file(path).items()
    }


def check_export(source: TensorSource, directory: pathlib.Path, dtype: str) -> None:
    """Import -> a layout -> export in several files -> transformers: nothing changes."""
    transformers: Any = importlib.import_module("transformers")
    site = site_of((1, 2, 2), source.config.num_kv_heads)
    params = emu.load(source.config.spec(source.head, dtype), site, source.read)
    export_model(
        directory,
        source.config,
        params,
        dtype,
        head=source.head,
        tokenizer_directory=source.directory,
        max_file_bytes=30_000,
    )
    assert len(list(directory.glob("*.safetensors"))) > 3
    assert tensors_of(directory) == tensors_of(source.directory)
    assert TensorSource(directory, source.head).config == source.config
    tokens_BP = prompts()[0]
    kind = "CausalLM" if source.head is Head.LM else "SequenceClassification"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    outputs = []
    for path in (source.directory, directory):
        model, report = auto.from_pretrained(path, dtype=dtype, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert (
            model.config.rope_parameters
            == auto.from_pretrained(source.directory).config.rope_parameters
        )
        outputs.append(torch_logits(model.eval(), tokens_BP))
    np.testing.assert_array_equal(*outputs)


if ASKED_FOR:  # defined only where asked for: an unmet wish is no skipped test

    @pytest.mark.slow
    @pytest.mark.parametrize("name", MODELS)
    def test_a_random_model_is_the_same_here_and_there(name: str, tmp_path: pathlib.Path) -> None:
        model = torch_model(name)
        model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
        source = TensorSource(tmp_path / "theirs", Head.LM)
        tokens_BP = prompts()[0]
        worst = np.abs(logits(source, tokens_BP) - torch_logits(model, tokens_BP)).max()
        wanted = torch_greedy(model)
        print(f"{name}: logits {worst:.1e}, {sum(map(len, wanted))} greedy tokens")
        assert worst <= TOLERANCE
        assert sum(map(len, wanted)) > 2 * NEW_TOKENS
        for layout in LAYOUTS:
            if layout[2] > 1 and source.config.num_heads % layout[2]:
                continue
            got = greedy(source, layout)
            assert [g[: len(w)] for g, w in zip(got, wanted, strict=True)] == wanted, layout
        check_export(source, tmp_path / "float32", "float32")

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["Llama-llama3", "Qwen2-tied", "Qwen3-untied"])
    def test_bfloat16_files_come_back_bit_for_bit(name: str, tmp_path: pathlib.Path) -> None:
        torch: Any = importlib.import_module("torch")
        torch_model(name).to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
        check_export(TensorSource(tmp_path / "theirs"), tmp_path / "ours", "bfloat16")

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["Llama-untied", "Qwen2-untied", "Qwen3-untied"])
    def test_reward_models(name: str, tmp_path: pathlib.Path) -> None:
        model = torch_model(name, Head.SCALAR)
        model.save_pretrained(tmp_path / "theirs")
        source = TensorSource(tmp_path / "theirs", Head.SCALAR)
        tokens_BP = prompts()[0]
        last_B = logits(source, tokens_BP)[:, -1]
        np.testing.assert_allclose(last_B, torch_logits(model, tokens_BP)[:, 0], atol=TOLERANCE)
        check_export(source, tmp_path / "float32", "float32")

    @pytest.mark.slow
    def test_frequencies_written_by_transformers_4_are_read(tmp_path: pathlib.Path) -> None:
        torch_model("Llama-llama3").save_pretrained(tmp_path)
        config = TensorSource(tmp_path).config
        content = json.loads((tmp_path / "config.json").read_text())
        parameters = content.pop("rope_parameters")
        content["rope_theta"] = parameters.pop("rope_theta")
        content["rope_scaling"] = parameters
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert TensorSource(tmp_path).config == config
