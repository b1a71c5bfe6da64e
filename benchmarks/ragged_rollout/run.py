"""Generation of long-tailed responses: continuous batching against a static padded batch.

All runs use the same engine, the same prompts, the same weights and the same response lengths
(each row has a limit of its own; there are no stop tokens). The static one decodes a batch until
its longest response ends, then takes the next batch; the continuous one fills a place as soon as it
is free. Batches have as many rows as there are places, so both have the same KV cache. The paged
one is the continuous one with a part of that cache, handed out in pages.
"""

import argparse
import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

SHORTEST, LONGEST = 8, 512
SHORTEST_PROMPT, LONGEST_PROMPT = 4, 128
MICROBATCH = 2
"""Longest rows of a microbatch and replica in SCORE and TRAIN."""
REPLICAS = (1, 2, 4, 8, 16, 32, 64)


def lengths_of(
    histogram: Path | None, count: int, seed: int, shortest: int, longest: int
) -> np.ndarray:
    """Lengths: drawn from a histogram (from, to, share), or log-normal, then scaled.

    The 99.5th percentile becomes the longest length, and all are cut to [shortest, longest].
    """
    rng = np.random.default_rng(seed)
    if histogram is None:
        drawn = rng.lognormal(0.0, 1.2, 20 * count)
    else:
        with histogram.open() as file:
            bins = [tuple(map(float, r)) for r in csv.reader(file) if r and r[0].isdecimal()]
        low, high, share = np.array(bins).T
        chosen = rng.choice(len(bins), 20 * count, p=share / share.sum())
        drawn = rng.uniform(low[chosen], high[chosen])
    scaled = drawn * longest / np.quantile(drawn, 0.995)
    return np.clip(np.ceil(rng.permutation(scaled)[:count]), shortest, longest).astype(int)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--histogram", type=Path, help="CSV of response lengths: from, to, share")
    parser.add_argument("--prompts", type=Path, help="CSV of prompt lengths: from, to, share")
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--places", type=int, default=24, help="rows decoded at a time")
    parser.add_argument("--kv-share", type=float, default=0.25, help="of the contiguous KV cache")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small: seconds, for a test")
    arguments = parser.parse_args()
    if not 0 < arguments.kv_share < 1:
        parser.error(f"--kv-share is above 0 and below 1, got {arguments.kv_share}")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    result = measure(arguments)
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from nereus_jax.core.architectures import DecoderConfig, Head
    from nereus_jax.core.layout import ParallelLayout
    from nereus_jax.core.plan import Placement
    from nereus_jax.core.roles import ACTOR_GENERATE
    from nereus_jax.models.sampling import SamplingConfig
    from nereus_jax.runtime import emu
    from nereus_jax.runtime.engines.generate import GenerateEngine
    from nereus_jax.runtime.programs import ProgramCache
    from nereus_jax.runtime.world import form_world

    rows, places = arguments.rows, arguments.places
    sizes: dict[str, Any] = {"num_layers": 4, "embed_dim": 256, "num_heads": 8, "num_kv_heads": 4}
    sizes |= {"head_dim": 32, "mlp_dim": 768, "vocab_size": 2048}
    if arguments.quick:
        rows, places = 32, 8
        sizes |= {"num_layers": 2, "embed_dim": 64, "mlp_dim": 128, "vocab_size": 256}
    model = DecoderConfig(**sizes, max_positions=1024)
    world = form_world()
    placement = Placement(layout=ParallelLayout(1, 1, 1), devices=world.pool.devices[:1])
    site = emu.make_site(world, ACTOR_GENERATE, placement, model.num_kv_heads)
    params = emu.initialize(model, Head.LM, site, "float32", seed=0)
    rng = np.random.default_rng(0)
    tokens_BP = rng.integers(0, model.vocab_size, (rows, LONGEST_PROMPT))
    lengths_B = lengths_of(arguments.prompts, rows, 2, SHORTEST_PROMPT, LONGEST_PROMPT)
    limits_B = lengths_of(arguments.histogram, rows, 1, SHORTEST, LONGEST)
    sampling = SamplingConfig(max_tokens=LONGEST)

    def engine(max_num_seqs: int, kv_cache_tokens: int = 0) -> GenerateEngine:
        return GenerateEngine(
            config=model,
            site=site,
            dtype="float32",
            prefill_rows=8,
            precision="default",
            max_num_seqs=max_num_seqs,
            kv_cache_tokens=kv_cache_tokens,
            programs=ProgramCache(),
        )

    def generate(of: GenerateEngine, part: slice) -> dict[str, np.ndarray]:
        indices_B = np.arange(rows)[part]
        arrays = of.dispatch(
            params, tokens_BP[part], lengths_B[part], indices_B, 0, sampling, limits_B[part]
        )
        return {name: np.asarray(x) for name, x in arrays.items()}

    contiguous_tokens = places * (LONGEST_PROMPT + LONGEST)
    continuous, static = engine(places), engine(0)
    paged = engine(places, int(arguments.kv_share * contiguous_tokens))
    parts = [slice(first, first + places) for first in range(0, rows, places)]
    ways: dict[str, Callable[[], list[dict[str, np.ndarray]]]] = {
        "continuous": lambda: [generate(continuous, slice(0, rows))],
        "static": lambda: [generate(static, p) for p in parts],
        "paged": lambda: [generate(paged, slice(0, rows))],
    }
    outputs = {name: way() for name, way in ways.items()}  # compiles
    tokens = {name: np.concatenate([o["tokens"] for o in out]) for name, out in outputs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.repeats):
        for name, way in ways.items():
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            way()
            seconds[name].append(time.perf_counter() - start_s)
            cpu_seconds[name].append(time.process_time() - start_cpu_s)
    medians = {name: float(np.median(s)) for name, s in seconds.items()}
    cpu_s = {name: float(np.median(s)) for name, s in cpu_seconds.items()}
    generated = int(limits_B.sum())
    pool = paged.page_pool(places, LONGEST_PROMPT + LONGEST)
    assert pool is not None
    temp_bytes = {
        name: of.program(rows, LONGEST_PROMPT, sampling).temp_bytes
        for name, of in (("continuous", continuous), ("paged", paged))
    }
    packed = {dp: packed_padding_share(lengths_B, limits_B, dp) for dp in REPLICAS}
    return {
        "padding_share": packed[1],
        "tokens_per_s_over_static": medians["static"] / medians["continuous"],
        "paged_tokens_per_s_over_contiguous": medians["continuous"] / medians["paged"],
        "kv_bytes_over_contiguous": pool.num_pages * pool.page_tokens / contiguous_tokens,
        "detail": {
            "same_tokens": {
                name: bool(np.array_equal(x, tokens["static"])) for name, x in tokens.items()
            },
            "tokens_per_s": {name: generated / s for name, s in medians.items()},
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "static_cpu_s_over_continuous": cpu_s["static"] / cpu_s["continuous"],
            "paged_cpu_s_over_contiguous": cpu_s["paged"] / cpu_s["continuous"],
            "temp_bytes": temp_bytes,
            "padded_rows_padding_share": 1
            - float((lengths_B + limits_B).mean()) / (LONGEST_PROMPT + LONGEST),
            "packed_padding_share_by_dp": packed,
            "prefill_padding_share": {
                name: padding_share(out, "prompt_tokens", "prefill_tokens")
                for name, out in outputs.items()
            },
            "decode_padding_share": {
                name: padding_share(out, "row_tokens", "decode_tokens")
                for name, out in outputs.items()
            },
            "restarts": sum(int(o["restarts"].sum()) for o in outputs["paged"]),
            "redone_share": sum(int(o["row_tokens"].sum()) for o in outputs["paged"])
            / (generated - rows)
            - 1,
            "rows": rows,
            "places": places,
            "mean_length": float(limits_B.mean()),
            "p95_length": float(np.quantile(limits_B, 0.95)),
            "mean_prompt": float(lengths_B.mean()),
            "model": sizes,
        },
    }


def packed_padding_share(lengths_B: np.ndarray, limits_B: np.ndarray, dp: int) -> float:
    """Share of the tokens computed for these rows which belong to none of them: in SCORE, and in
    TRAIN where all rows are one minibatch.

    A microbatch is MICROBATCH longest rows.
    """
    from nereus_jax.core.layout import ParallelLayout
    from nereus_jax.rl.packed_forms import packed_forms
    from nereus_jax.runtime.engines.packed import pack_batch

    layout = ParallelLayout(dp, 1, 1)
    forms = packed_forms(len(lengths_B), LONGEST_PROMPT + LONGEST, layout, MICROBATCH)
    return pack_batch(forms, lengths_B + limits_B, lengths_B - 1, limits_B).padding_share


def padding_share(outputs: list[dict[str, np.ndarray]], used: str, computed: str) -> float:
    """Share of the computed positions that held no token."""
    sums = [sum(int(o[name].sum()) for o in outputs) for name in (used, computed)]
    return 1 - sums[0] / sums[1]


if __name__ == "__main__":
    main()
