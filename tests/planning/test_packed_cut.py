"""The rows that the planner thinks SCORE and TRAIN run, against those that the engines choose."""

import numpy as np
import pytest

from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.packed_cuts import SCORE_FLUSH_PER_RANK
from nereus_jax.planning.candidates import Candidates
from nereus_jax.planning.cost_passes import PACKED_FILL, packed_cut
from nereus_jax.rl.packed_forms import fit_form, packed_forms


def foreseen_and_run(rng: np.random.Generator, train: bool) -> tuple[float, float]:
    """Tokens that pass through a replica's pipeline, its bubbles included, of a random batch and
    layout: as planned, and as packed."""
    length = int(rng.choice([64, 300, 640, 2048, 8192]))
    dp, pp = int(rng.choice([1, 2, 3, 8, 16])), int(rng.choice([1, 1, 2, 4]))
    each = int(rng.integers(1, 65))
    size = min(int(rng.choice([1, 2, 4, 8])), each)
    microbatches = -(-each // size)
    limit = int(rng.choice([0, 2, 4])) if train else SCORE_FLUSH_PER_RANK * pp
    drawn = rng.lognormal(0.0, rng.uniform(0.1, 1.2), dp * each) * length * rng.uniform(0.05, 0.5)
    lengths_B = np.clip(np.ceil(drawn), 1, length).astype(np.int64)
    fit = fit_form(
        packed_forms(len(lengths_B), length, ParallelLayout(dp, pp, 1), size, limit), lengths_B
    )
    run = 0
    for shape, count in zip(fit.form, fit.microbatches, strict=True):
        flushes = -(-count // shape.microbatches)
        run += (count + flushes * (pp - 1)) * shape.rows * shape.width
    flush = 1 if pp == 1 else min(limit or microbatches, microbatches)
    degrees = {"dp": dp, "pp": pp, "tp": 1, "microbatch_size": size, "microbatches": flush}
    degrees["accumulation"] = -(-microbatches // flush)
    candidate = Candidates(
        **{name: np.array([n], np.int64) for name, n in degrees.items()},
        remat=np.array([False]),
        zero1=np.array([False]),
    )
    held = np.array([each * lengths_B.mean()])
    cut = packed_cut(held / PACKED_FILL, candidate, length, train)
    ticks = cut.microbatches + cut.flushes * (pp - 1)
    return float((cut.tokens / cut.microbatches * ticks)[0]), float(run)


@pytest.mark.parametrize("train", [False, True], ids=["SCORE", "TRAIN"])
def test_the_planner_foresees_the_rows_that_the_engines_run(train: bool):
    rng = np.random.default_rng(0)
    errors = np.array([a / b - 1 for a, b in (foreseen_and_run(rng, train) for _ in range(400))])
    print(f"error {np.abs(errors).mean():.3f}, bias {errors.mean():.3f}")
    assert np.abs(errors).mean() < 0.08
    assert abs(errors.mean()) < 0.06
    assert np.quantile(np.abs(errors), 0.9) <= 0.25


def test_short_microbatches_count_as_microbatches():
    """1.7 long rows: one, and three quarters."""
    one = np.array([1], np.int64)
    candidate = Candidates(
        dp=one,
        pp=one,
        tp=one,
        microbatch_size=one,
        microbatches=one,
        accumulation=2 * one,
        remat=np.array([False]),
        zero1=np.array([False]),
    )
    cut = packed_cut(np.array([1.7 * 512]), candidate, 512, True)
    assert cut.microbatches == cut.flushes == 4
    assert cut.tokens == 512 + 3 * 128
    assert cut.pairs == 512**2 + 3 * 128**2
