"""PPO of an 8B Llama 3 on up to 32 A100s whose nodes come and go while responses grow: simulated.

    nereus simulate --config=configs/sim_drift.py --policy=all --seeds=5 --json=drift.json

With made-up traces, drawn by seed; with real ones:

    --config.supply=TRACE.json --config.lengths=CURVE.csv --config.tail=HISTOGRAM.csv
"""

from typing import Any

from nereus_jax.config.simulation import default_simulation


def get_config() -> Any:
    """50 steps; a step is 300 s of the supply."""
    config = default_simulation()
    config.model = "llama3-8b"
    config.hardware = "a100-80gb"
    config.nodes = 4
    config.steps = 50
    config.prompts = 512
    config.minibatch_size = 128
    config.max_response_tokens = 8192
    config.supply = "synthetic"
    config.lengths = "synthetic"
    config.synthetic_start_tokens = 500.0
    config.synthetic_end_tokens = 3000.0
    config.tail = "lognormal=1.0"
    return config
