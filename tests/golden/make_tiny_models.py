"""Makes the directories beside it: tiny random models, and what transformers computes with them.

Run it in an environment with torch and transformers; the tests need only its output:
    python tests/golden/make_tiny_models.py [NAME ...]
"""

import dataclasses
import pathlib
import sys
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent
EOS_ID, PAD_ID = 2, 0
NEW_TOKENS = 24
CLOSEST_RACE = 0.002  # nats between the two likeliest tokens: no rounding turns that around


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiny:
    """A model to make; `sizes` go to the configuration of transformers."""

    kind: str
    text: str
    sizes: dict[str, Any]
    seed: int = 0
    head_gain: float = 2.0  # spreads the logits over several nats
    layer_gain: float = 1.0  # a tied model needs more, or it only repeats its last token
    dtype: torch.dtype = torch.float32  # of the file: weights are rounded to it before anything
    prompt_lengths: tuple[int, ...] = (7, 1, 4, 9, 2, 5)


# 4 layers, 6 query and 3 key/value heads, and an odd vocabulary: no degree of parallelism divides
# them all.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "bos_token_id": 1,
}
SMALL: dict[str, Any] = {**SIZES, "intermediate_size": 20, "vocab_size": 61}
MODELS = {
    "llama_tiny": Tiny(
        kind="Llama",
        text="A Llama",
        sizes={
            **SIZES,
            "hidden_size": 24,
            "head_dim": 8,
            "intermediate_size": 44,
            "vocab_size": 103,
            "rope_theta": 500.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    # Waves of 6 to 664 positions: one stays, one is blended, two are stretched.
    "llama3_tiny": Tiny(
        kind="Llama",
        text="A Llama with tied embeddings and the rotary frequencies of Llama 3.1",
        sizes={
            **SMALL,
            "hidden_size": 12,
            "head_dim": 8,
            "rope_theta": 500.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        seed=13,
        layer_gain=2.0,
        dtype=torch.bfloat16,
    ),
    # No head_dim in config.json: 24 / 6.
    "qwen2_tiny": Tiny(
        kind="Qwen2",
        text="A Qwen2",
        sizes={
            **SMALL,
            "hidden_size": 24,
            "rope_theta": 300.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        layer_gain=2.0,
        dtype=torch.bfloat16,
    ),
    "qwen3_tiny": Tiny(
        kind="Qwen3",
        text="A Qwen3",
        sizes={
            **SMALL,
            "hidden_size": 14,
            "head_dim": 4,
            "rope_theta": 300.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        dtype=torch.bfloat16,
    ),
}


def make_model(tiny: Tiny) -> Any:
    """A random model whose logits spread over several nats, so that no two are nearly equal."""
    torch.manual_seed(tiny.seed)
    config = getattr(transformers, f"{tiny.kind}Config")(**tiny.sizes)
    model = getattr(transformers, f"{tiny.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = torch.randn_like(weight)
            if "norm" in name:
                weight.copy_(1 + 0.2 * spread)
            else:
                width = 4 if "bias" in name else weight.shape[-1]
                gain = tiny.layer_gain if "layers" in name else 1.0
                weight.copy_(spread * width**-0.5 * gain)
        model.lm_head.weight.mul_(tiny.head_gain)
        for weight in model.parameters():
            weight.copy_(weight.to(tiny.dtype))
    return model


def respond(model: Any, ids: torch.Tensor) -> tuple[np.ndarray, float]:
    """The greedy response to one prompt [1, P], and how close its closest race was, in nats."""
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack(out.logits)[:, 0].topk(2).values
    return out.sequences[0, ids.shape[1] :].numpy(), float((best[:, 0] - best[:, 1]).min())


def expect(model: Any, tiny: Tiny) -> dict[str, np.ndarray]:
    """Prompts, and the logits and responses of the model."""
    rng = np.random.default_rng(0)
    lengths_B, vocab_size = tiny.prompt_lengths, tiny.sizes["vocab_size"]
    rows, width = len(lengths_B), max(lengths_B)
    prompts = np.full((rows, width), PAD_ID, np.int32)
    logits = np.zeros((rows, width, vocab_size), np.float32)
    generated = np.full((rows, NEW_TOKENS), PAD_ID, np.int32)
    lengths = np.zeros(rows, np.int32)
    for row, length in enumerate(lengths_B):
        prompts[row, :length] = rng.integers(3, vocab_size, length)
        ids = torch.tensor(prompts[row : row + 1, :length], dtype=torch.long)
        with torch.no_grad():
            logits[row, :length] = model(ids).logits[0].numpy()
        new, race = respond(model, ids)
        generated[row, : len(new)], lengths[row] = new, len(new)
        print(row, new.tolist(), f"closest race {race:.4f}")
        if race < CLOSEST_RACE:
            raise SystemExit("two tokens are nearly equally likely: take another seed")
    expected = {"prompts": prompts, "logits": logits, "generated": generated}
    expected["prompt_lengths"] = np.array(lengths_B, np.int32)
    expected["generated_lengths"] = lengths
    return expected


def main(names: list[str]) -> None:
    for name in names or list(MODELS):
        tiny, directory = MODELS[name], HERE / name
        model = make_model(tiny)
        expected = expect(model, tiny)
        model.to(tiny.dtype).save_pretrained(directory)
        (directory / "generation_config.json").unlink()
        save_file(expected, directory / "expected.safetensors")
        versions = f"transformers {transformers.__version__} and torch {torch.__version__}"
        (directory / "README.md").write_text(
            f"{tiny.text} of 4 layers with random weights, and the logits and greedy tokens that\n"
            f"{versions} compute with it (CPU, float32).\n"
            "Made by `tests/golden/make_tiny_models.py`, read by "
            "`tests/models/test_transformers_parity.py`.\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
