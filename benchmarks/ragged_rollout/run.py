"""Generation of long-tailed responses: continuous batching against a static padded batch.

Both runs use the same engine, the same prompts, the same weights and the same response lengths
(each row has a limit of its own; there are no stop tokens). The static one decodes a batch until
its longest response ends, then takes the next batch; the other one fills a place as soon as it is
free. Batches have as many rows as there are places, so both have the same KV cache.
"""

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

SHORTEST, LONGEST = 8, 512


def lengths_of(histogram: Path | None, count: int, seed: int) -> np.ndarray:
    """Response lengths: drawn from a histogram (from, to, share), or log-normal, then scaled.

    The 99.5th percentile becomes the longest length, and all are cut to [SHORTEST, LONGEST].
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
    scaled = drawn * LONGEST / np.quantile(drawn, 0.995)
    return np.clip(np.ceil(rng.permutation(scaled)[:count]), SHORTEST, LONGEST).astype(int)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--histogram", type=Path, help="CSV of response lengths: from, to, share")
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--places", type=int, default=24, help="rows decoded at a time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small: seconds, for a test")
    arguments = parser.parse_args()
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
    tokens_BP = rng.integers(0, model.vocab_size, (rows, 32))
    lengths_B = rng.integers(8, 33, rows)
    limits_B = lengths_of(arguments.histogram, rows, seed=1)
    sampling = SamplingConfig(max_tokens=LONGEST)

    def engine(max_num_seqs: int) -> GenerateEngine:
        return GenerateEngine(
            config=model,
            site=site,
            dtype="float32",
            prefill_rows=8,
            precision="default",
            max_num_seqs=max_num_seqs,
            programs=ProgramCache(),
        )

    def generate(of: GenerateEngine, part: slice) -> dict[str, np.ndarray]:
        indices_B = np.arange(rows)[part]
        arrays = of.dispatch(
            params, tokens_BP[part], lengths_B[part], indices_B, 0, sampling, limits_B[part]
        )
        return {name: np.asarray(x) for name, x in arrays.items()}

    continuous, static = engine(places), engine(0)
    parts = [slice(first, first + places) for first in range(0, rows, places)]
    ways = {
        "continuous": lambda: generate(continuous, slice(0, rows))["tokens"],
        "static": lambda: np.concatenate([generate(static, p)["tokens"] for p in parts]),
    }
    tokens = {name: way() for name, way in ways.items()}  # compiles
    same = bool(np.array_equal(tokens["continuous"], tokens["static"]))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.repeats):
        for name, way in ways.items():
            start_s = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start_s)
    medians = {name: float(np.median(s)) for name, s in seconds.items()}
    generated = int(limits_B.sum())
    longest = np.array([limits_B[p].max() for p in parts])
    return {
        "tokens_per_s_over_static": medians["static"] / medians["continuous"],
        "detail": {
            "same_tokens": same,
            "tokens_per_s": {name: generated / s for name, s in medians.items()},
            "seconds": seconds,
            "rows": rows,
            "places": places,
            "mean_length": float(limits_B.mean()),
            "p95_length": float(np.quantile(limits_B, 0.95)),
            "static_padding_share": float(1 - generated / (places * longest.sum())),
            "model": sizes,
        },
    }


if __name__ == "__main__":
    main()
