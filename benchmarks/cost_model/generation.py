"""Published generation throughputs as cases that the cost model can price.

TensorRT-LLM's tables (NVIDIA/TensorRT-LLM, docs/source/performance). Newer ones keep as many
requests in flight as the cache can hold to their end (its default scheduler never evicts); older
ones state a batch that starts and ends together.
"""

import csv
import dataclasses
from pathlib import Path

import numpy as np

from nereus_jax.core.architectures import Head
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.roles import ACTOR_GENERATE
from nereus_jax.planning.calibration import Efficiencies
from nereus_jax.planning.candidates import Candidates
from nereus_jax.planning.cost import StageCost, stage_seconds
from nereus_jax.planning.cost_terms import Execution, ModelSizes, RowFill
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.workload import LengthHistogram, Workload

MAX_BATCH = 2048
"""Largest batch of the tables' engines."""

CACHE_SHARE = 0.9
"""Of the memory that the weights leave, what the cache gets by default."""

WAVES = 8
"""Requests for each slot: long enough that the first and last wave count little."""

MODELS = {  # width, layers, heads, key/value heads, feed-forward, vocabulary, matrices, head dim
    "Llama-3.1-8B": (4096, 32, 32, 8, 14336, 128_256, 3, 128),
    "Llama-3.1-70B": (8192, 80, 64, 8, 28672, 128_256, 3, 128),
    "Mistral-7B": (4096, 32, 32, 8, 14336, 32_000, 3, 128),
    "LLaMA-7B": (4096, 32, 32, 32, 11008, 32_000, 3, 128),
    "LLaMA-70B": (8192, 80, 64, 8, 28672, 32_000, 3, 128),
    "GPT-J-6B": (4096, 28, 16, 16, 16384, 50_400, 2, 256),
    "Falcon-180B": (14848, 80, 232, 8, 59392, 65_024, 2, 64),
}
HARDWARE = {
    "A100-80GB-SXM": "a100-80gb",
    "H100-80GB-SXM": "h100",
    "H200-141GB": "h200",
    "L40S": "l40s",
}
DTYPES = {"fp16": "float16", "fp8": "float8_e4m3fn"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationCase:
    """A throughput and what it was measured of; fields as in `training.Case`."""

    source: str
    hardware_key: str
    model: str
    label: str
    hardware: Hardware
    sizes: ModelSizes
    workload: Workload
    layout: Candidates
    execution: Execution
    dtype: str
    measured_s: float

    def cost(self, efficiencies: Efficiencies) -> StageCost:
        """Modelled seconds."""
        return stage_seconds(
            self.sizes,
            Head.LM,
            ACTOR_GENERATE,
            self.workload,
            self.hardware,
            efficiencies,
            self.layout,
            dtype=self.dtype,
            execution=self.execution,
        )


def generation_cases(path: Path) -> list[GenerationCase]:
    """Every generation throughput of the table."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["category"] == "generate"]
    return [_case(row) for row in rows if row["source"].startswith("NVIDIA/TensorRT-LLM")]


def _sizes(name: str) -> ModelSizes:
    width, layers, heads, kv_heads, mlp, vocab, matrices, head_dim = MODELS[name]
    query, kv = heads * head_dim, kv_heads * head_dim
    layer = 2 * width * query + 2 * width * kv + matrices * width * mlp
    return ModelSizes(
        num_layers=layers,
        embed_dim=width,
        query_dim=query,
        kv_dim=kv,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_dim=mlp,
        mlp_matrices=matrices,
        vocab_size=vocab,
        params=float(layers * layer + 2 * vocab * width),
    )


def _slots(sizes: ModelSizes, hardware: Hardware, tp: int, tokens: int, element_bytes: int) -> int:
    """Requests that the cache holds to their end."""
    left = tp * hardware.memory_bytes - sizes.params * element_bytes
    replicated = max(tp // sizes.num_kv_heads, 1)
    token_bytes = 2 * sizes.num_layers * sizes.kv_dim * element_bytes * replicated
    return max(min(int(CACHE_SHARE * left / (token_bytes * tokens)), MAX_BATCH), 1)


def _case(row: dict[str, str]) -> GenerationCase:
    sizes, hardware = _sizes(row["model"]), load_hardware(HARDWARE[row["hardware"]])
    prompt, response, tp = int(row["prompt_len"]), int(row["resp_len"]), int(row["gen_tp"])
    stated = int(float(row["mbs"])) if row["mbs"] else 0
    element_bytes = 1 if row["precision"] == "fp8" else 2
    slots = stated or _slots(sizes, hardware, tp, prompt + response, element_bytes)
    requests = slots if stated else WAVES * slots
    one = np.ones(1, np.int64)
    return GenerationCase(
        source="TensorRT-LLM" + (" (stated batch)" if stated else ""),
        hardware_key=row["hardware"],
        model=row["model"],
        label=f"tp={tp} {prompt}+{response} x{slots}",
        hardware=hardware,
        sizes=sizes,
        workload=Workload(
            prompts=requests,
            prompt_lengths=LengthHistogram.constant(prompt),
            response_lengths=LengthHistogram.constant(response),
            max_response_tokens=response,
            minibatch_size=requests,
        ),
        layout=Candidates(
            dp=one,
            pp=one,
            tp=tp * one,
            microbatch_size=slots * one,
            microbatches=one,
            accumulation=one,
            remat=np.zeros(1, np.bool_),
            zero1=np.zeros(1, np.bool_),
        ),
        execution=Execution(
            rows=RowFill.EXACT,
            static_slots=False,
            score_bytes=0.0,
            score_share=0.5,
            vocab_over_pp=False,
        ),
        dtype=DTYPES[row["precision"]],
        measured_s=requests * response / float(row["tokens_per_s_total"]),
    )
