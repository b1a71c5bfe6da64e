"""The rows that the planner thinks SCORE and TRAIN run, against those that the engines choose."""

import numpy as np

from nereus_jax.core.layout import ParallelLayout
from nereus_jax.planning.candidates import Candidates
from nereus_jax.planning.cost_passes import PACKED_FILL, packed_cut
from nereus_jax.rl.packed_forms import fit_form, packed_forms


def foreseen_and_run(rng: np.random.Generator) -> tuple[float, float]:
    """Tokens that a replica runs, of a random batch and layout: as planned, and as packed."""
    length = int(rng.choice([64, 300, 640, 2048, 8192]))
    dp, pp = int(rng.choice([1, 2, 3, 8, 16])), int(rng.choice([1, 1, 2, 4]))
    each = int(rng.integers(1, 65))
    size = min(int(rng.choice([1, 2, 4, 8])), each)
    drawn = rng.lognormal(0.0, rng.uniform(0.1, 1.2), dp * each) * length * rng.uniform(0.05, 0.5)
    lengths_B = np.clip(np.ceil(drawn), 1, length).astype(np.int64)
    fit = fit_form(
        packed_forms(len(lengths_B), length, ParallelLayout(dp, pp, 1), size, 4), lengths_B
    )
    microbatches = -(-each // size)
    flush = 1 if pp == 1 else min(4, microbatches)
    degrees = {"dp": dp, "pp": pp, "tp": 1, "microbatch_size": size, "microbatches": flush}
    degrees["accumulation"] = -(-microbatches // flush)
    candidate = Candidates(
        **{name: np.array([n], np.int64) for name, n in degrees.items()},
        remat=np.array([False]),
        zero1=np.array([False]),
    )
    held = each * lengths_B.mean()
    rows, run = packed_cut(np.array([held / (PACKED_FILL * length)]), candidate, length)
    return float(rows[0] * run[0] * length), fit.run_tokens / dp


def test_the_planner_foresees_the_rows_that_the_engines_run():
    rng = np.random.default_rng(0)
    errors = np.array([a / b - 1 for a, b in (foreseen_and_run(rng) for _ in range(400))])
    print(f"error {np.abs(errors).mean():.3f}, bias {errors.mean():.3f}")
    assert np.abs(errors).mean() < 0.08
    assert abs(errors.mean()) < 0.06
    assert np.abs(errors).max() <= 0.5
