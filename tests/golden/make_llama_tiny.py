"""Makes `llama_tiny/`: a tiny random Llama and what transformers computes with it.

Run it in an environment with torch and transformers; the tests need only its output:
    python tests/golden/make_llama_tiny.py
"""

import pathlib
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.numpy import save_file

DIRECTORY = pathlib.Path(__file__).parent / "llama_tiny"
EOS_ID, PAD_ID, VOCAB_SIZE = 2, 0, 103
PROMPT_LENGTHS = (7, 1, 4, 9, 2, 5)
NEW_TOKENS = 24
# 4 layers, 6 query and 3 key/value heads, 103 tokens: no degree of parallelism divides them all.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 44,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "bos_token_id": 1,
}


def make_model() -> Any:
    """A random model whose logits spread over several nats, so that no two are nearly equal."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = torch.randn_like(weight)
            weight.copy_(1 + 0.2 * spread if "norm" in name else spread * weight.shape[-1] ** -0.5)
        model.lm_head.weight.mul_(2.0)
    return model


def main() -> None:
    model = make_model()
    model.save_pretrained(DIRECTORY)
    (DIRECTORY / "generation_config.json").unlink()
    rng = np.random.default_rng(0)
    rows, width = len(PROMPT_LENGTHS), max(PROMPT_LENGTHS)
    prompts = np.full((rows, width), PAD_ID, np.int32)
    logits = np.zeros((rows, width, VOCAB_SIZE), np.float32)
    generated = np.full((rows, NEW_TOKENS), PAD_ID, np.int32)
    lengths = np.zeros(rows, np.int32)
    for row, length in enumerate(PROMPT_LENGTHS):
        prompts[row, :length] = rng.integers(3, VOCAB_SIZE, length)
        ids = torch.tensor(prompts[row : row + 1, :length], dtype=torch.long)
        with torch.no_grad():
            logits[row, :length] = model(ids).logits[0].numpy()
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        new = out.sequences[0, length:].numpy()
        generated[row, : len(new)], lengths[row] = new, len(new)
        best = torch.stack(out.logits)[:, 0].topk(2).values
        print(row, new.tolist(), f"closest race {float((best[:, 0] - best[:, 1]).min()):.4f}")
    expected = {"prompts": prompts, "logits": logits, "generated": generated}
    expected["prompt_lengths"] = np.array(PROMPT_LENGTHS, np.int32)
    expected["generated_lengths"] = lengths
    save_file(expected, DIRECTORY / "expected.safetensors")
    versions = f"transformers {transformers.__version__} and torch {torch.__version__}"
    (DIRECTORY / "README.md").write_text(
        "A Llama of 4 layers with random weights, and the logits and greedy tokens that\n"
        f"{versions} compute with it (CPU, float32).\n"
        "Made by `tests/golden/make_llama_tiny.py`, read by "
        "`tests/models/test_transformers_parity.py`.\n"
    )


if __name__ == "__main__":
    main()
