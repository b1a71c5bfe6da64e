"""Programs whose memory the model is fitted to and tested on: random models, layouts, shapes.

A program is a dict that JSON holds; the same seed gives the same programs.
"""

import random
from typing import Any

import numpy as np

from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.presets import PRESETS
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.candidates import Candidates
from nereus_jax.planning.memory_terms import EngineOptions
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.trainer.verify_plan import ProgramChoice

Program = dict[str, Any]

SMALL_MODELS: tuple[dict[str, Any], ...] = (
    {"num_layers": 4, "embed_dim": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
    | {"mlp_dim": 704, "vocab_size": 4096, "tie_embeddings": False},
    {"num_layers": 8, "embed_dim": 192, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32}
    | {"mlp_dim": 512, "vocab_size": 8192},
    {"num_layers": 6, "embed_dim": 384, "num_heads": 12, "num_kv_heads": 4, "head_dim": 32}
    | {"mlp_dim": 1024, "vocab_size": 2048, "tie_embeddings": False},
    {"num_layers": 3, "embed_dim": 512, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
    | {"mlp_dim": 1408, "vocab_size": 12000, "qkv_bias": True},
    {"num_layers": 5, "embed_dim": 320, "num_heads": 10, "num_kv_heads": 2, "head_dim": 48}
    | {"mlp_dim": 900, "vocab_size": 6000, "tie_embeddings": False, "qk_norm": True},
    {"num_layers": 10, "embed_dim": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    | {"mlp_dim": 384, "vocab_size": 1000},
)
LAYOUTS = (
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (1, 1, 4),
    (2, 2, 1),
    (2, 1, 2),
    (1, 2, 2),
    (1, 4, 1),
    (2, 2, 2),
    (4, 1, 1),
    (1, 3, 1),
    (1, 1, 6),
    (4, 2, 1),
)
LENGTHS = (96, 128, 192, 256, 384, 512, 640, 768, 1024)
MOST_TOKENS = 1536
"""Of a microbatch: larger programs of the same kind tell nothing new, and take longer."""
SCORES = ("actor-SCORE", "reference-SCORE", "critic-SCORE", "reward-SCORE")


def small_programs(seed: int, train: int, score: int, generate: int) -> list[Program]:
    """Float32 programs for emulated CPU devices."""
    rng = random.Random(seed)
    stages = [
        *("actor-TRAIN" if rng.random() < 0.75 else "critic-TRAIN" for _ in range(train)),
        *(rng.choice(SCORES) for _ in range(score)),
        *("actor-GENERATE" for _ in range(generate)),
    ]
    return [_small(rng, stage) for stage in stages]


def _small(rng: random.Random, stage: str) -> Program:
    while True:
        model, (dp, pp, tp) = rng.choice(SMALL_MODELS), rng.choice(LAYOUTS)
        if model["num_heads"] % tp == 0 and pp <= model["num_layers"]:
            break
    length, size, times = rng.choice(LENGTHS), rng.choice((1, 2, 4)), rng.choice((1, 2, 4, 8))
    size = size if size * length <= MOST_TOKENS else 1
    program: Program = {
        "model": model,
        "stage": stage,
        "layout": [dp, pp, tp],
        "rows": dp * size * times,
        "prompt": length // 4,
        "response": length - length // 4,
        "microbatch_size": size,
        "microbatches": times if pp > 1 else 1,
        "param_dtype": "float32",
        "compute_dtype": "float32",
        "token_chunk": rng.choice((256, 1024)),
    }
    if stage.endswith("TRAIN"):
        program["remat"], program["zero1"] = rng.random() < 0.5, rng.random() < 0.4
        if pp > 1 and times > 1 and rng.random() < 0.4:
            program["microbatches"] = times // 2
    elif stage.endswith("GENERATE"):
        program["rows"] *= 2
        program["microbatch_size"] = max(program["rows"] // dp // rng.choice((1, 1, 2, 4)), pp)
    return program


def option_programs(seed: int, each: int) -> list[Program]:
    """Programs of engines that are set otherwise: paged caches, no loop over layers, wide rows.

    Nothing was fitted to such programs.
    """
    rng = random.Random(seed)
    programs: list[Program] = []
    for _ in range(each):
        paged = _small(rng, "actor-GENERATE")
        longest, slots = paged["prompt"] + paged["response"], paged["microbatch_size"]
        pages = max(-(-longest // 16), int(slots * longest * rng.uniform(0.2, 0.6)) // 16)
        programs.append(paged | {"kv_cache_tokens": 16 * pages, "kv_page_tokens": 16})
        programs.append(_small(rng, "actor-GENERATE") | {"unrolled": True})
        programs.append(_small(rng, "actor-TRAIN") | {"unrolled": True})
        for stage in ("actor-TRAIN", "actor-SCORE"):
            wide = _small(rng, stage)
            while wide["microbatch_size"] == 1:
                wide = _small(rng, stage)
            programs.append(wide | {"wide": True})
    return programs


def _large(
    stage: str, layout: tuple[int, int, int], rows: int, size: int, **changes: Any
) -> Program:
    program = {
        "model": "llama3-8b",
        "stage": stage,
        "layout": list(layout),
        "rows": rows,
        "prompt": 512,
        "response": 1536,
        "microbatch_size": size,
        "microbatches": -(-rows // layout[0] // size) if layout[1] > 1 else 1,
        "param_dtype": "float32",
        "compute_dtype": "bfloat16",
        "token_chunk": 1024,
    }
    return program | changes


SHORT = {"prompt": 256, "response": 768}

MEDIUM = {"prompt": 512, "response": 1024}
BRIEF = {"prompt": 128, "response": 384}
EVEN = {"prompt": 512, "response": 512}

H100_FIT: tuple[Program, ...] = (
    _large("actor-TRAIN", (1, 1, 8), 8, 1, remat=True),
    _large("actor-TRAIN", (1, 1, 8), 1, 1, remat=True),
    _large("actor-TRAIN", (1, 2, 4), 8, 1, remat=True),
    _large("actor-TRAIN", (2, 1, 4), 8, 1, zero1=True),
    _large("actor-TRAIN", (1, 4, 2), 8, 1, remat=True, **SHORT),
    _large("actor-TRAIN", (4, 1, 2), 8, 1, remat=True, zero1=True),
    _large("actor-TRAIN", (2, 2, 2), 8, 1, remat=True, microbatches=2, **BRIEF),
    _large("critic-TRAIN", (1, 1, 8), 4, 2),
    _large("actor-SCORE", (1, 1, 1), 8, 2),
    _large("actor-SCORE", (1, 1, 4), 16, 4, **SHORT),
    _large("actor-SCORE", (1, 2, 1), 16, 2),
    _large("actor-SCORE", (1, 2, 4), 32, 4, **SHORT),
    _large("actor-SCORE", (1, 8, 1), 32, 1, **SHORT),
    _large("reference-SCORE", (1, 1, 2), 16, 8, **BRIEF),
    _large("reference-SCORE", (1, 4, 1), 8, 1),
    _large("critic-SCORE", (1, 1, 1), 8, 2),
    _large("critic-SCORE", (1, 1, 8), 32, 8, **BRIEF),
    _large("critic-SCORE", (1, 2, 2), 8, 1),
    _large("critic-SCORE", (1, 4, 1), 16, 2, **SHORT),
    _large("reward-SCORE", (1, 1, 4), 8, 4),
    _large("actor-SCORE", (1, 1, 1), 8, 8, **MEDIUM),
    _large("actor-SCORE", (1, 1, 1), 64, 64, **MEDIUM),
    _large("actor-SCORE", (1, 1, 1), 16, 16),
    _large("actor-SCORE", (1, 1, 2), 48, 48, prompt=128, response=256),
    _large("reference-SCORE", (1, 1, 1), 32, 32, **BRIEF),
    _large("critic-SCORE", (1, 1, 2), 32, 32),
    _large("critic-SCORE", (1, 1, 4), 64, 64, **SHORT),
    _large("actor-SCORE", (1, 8, 1), 64, 2, **EVEN),
    _large("actor-SCORE", (1, 8, 1), 64, 1, **EVEN),
    _large("critic-SCORE", (1, 8, 1), 64, 2, **EVEN),
    _large("actor-SCORE", (1, 4, 1), 32, 2, **EVEN),
    _large("actor-SCORE", (1, 2, 1), 16, 2, **EVEN),
    _large("actor-SCORE", (1, 2, 4), 64, 8, **EVEN),
    _large("critic-SCORE", (1, 4, 2), 64, 4, **EVEN),
    _large("reference-SCORE", (1, 4, 1), 32, 8, **EVEN),
    _large("actor-GENERATE", (1, 1, 2), 16, 16),
    _large("actor-GENERATE", (1, 1, 8), 64, 64, **SHORT),
    _large("actor-GENERATE", (1, 2, 2), 32, 16),
)
H100_TEST: tuple[Program, ...] = (
    _large("actor-TRAIN", (2, 1, 4), 8, 2, remat=True),
    _large("actor-TRAIN", (1, 2, 2), 8, 1, remat=True, microbatches=4, **SHORT),
    _large("critic-TRAIN", (2, 1, 4), 8, 2, remat=True, **SHORT),
    _large("actor-TRAIN", (1, 1, 8), 8, 1),
    _large("actor-SCORE", (1, 1, 2), 8, 1),
    _large("actor-SCORE", (1, 2, 2), 16, 2, **SHORT),
    _large("reward-SCORE", (2, 1, 2), 16, 4, **SHORT),
    _large("actor-GENERATE", (1, 1, 4), 64, 64),
    _large("actor-GENERATE", (2, 1, 1), 32, 8, **SHORT),
    _large("actor-GENERATE", (1, 4, 1), 32, 32, **SHORT),
)


def choice_of(program: Program) -> ProgramChoice:
    """What the compiler is asked for."""
    model = program["model"]
    return ProgramChoice(
        model=PRESETS[model] if isinstance(model, str) else DecoderConfig(**model),
        model_stage=ModelStage.parse(program["stage"]),
        workload=Workload(
            prompts=program["rows"],
            prompt_lengths=LengthHistogram.constant(program["prompt"]),
            response_lengths=LengthHistogram.constant(program["response"]),
            max_response_tokens=program["response"],
            minibatch_size=program["rows"],
        ),
        layout=ParallelLayout(*program["layout"]),
        microbatch_size=program["microbatch_size"],
        microbatches=program["microbatches"],
        remat=program.get("remat", False),
        zero1=program.get("zero1", False),
        param_dtype=program["param_dtype"],
        compute_dtype=program["compute_dtype"],
        options=EngineOptions(
            token_chunk=program["token_chunk"],
            kv_cache_tokens=program.get("kv_cache_tokens", 0),
            kv_page_tokens=program.get("kv_page_tokens", 32),
            unrolled_generate=program.get("unrolled", False),
            unrolled_train=program.get("unrolled", False),
        ),
        wide=program.get("wide", False),
    )


def candidate_of(choice: ProgramChoice) -> Candidates:
    """The same as the memory model has it: one candidate, cut as the engines cut it."""
    layout = choice.layout
    rows = -(-choice.workload.rows // layout.dp)
    size = min(choice.microbatch_size, rows)
    flush, flushes = 1, 1
    if choice.model_stage.stage is not Stage.GENERATE:
        total = -(-rows // size)
        if layout.pp > 1:
            score = choice.model_stage.stage is Stage.SCORE
            flush = min(4 * layout.pp if score else choice.microbatches, total)
        flushes = -(-total // flush)

    def one(value: int) -> np.ndarray:
        return np.array([value], np.int64)

    return Candidates(
        dp=one(layout.dp),
        pp=one(layout.pp),
        tp=one(layout.tp),
        microbatch_size=one(size),
        microbatches=one(flush),
        accumulation=one(flushes),
        remat=np.array([choice.remat]),
        zero1=np.array([choice.zero1 and layout.dp > 1]),
    )
