"""Continuous batching under layouts: whatever waits for a slot, the tokens are the same."""

import jax
import numpy as np
import pytest

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_GENERATE
from nereus_jax.models.sampling import SamplingConfig
from nereus_jax.runtime import emu, host
from nereus_jax.runtime.engines.generate import GenerateEngine
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import take_stock

CONFIG = DecoderConfig(
    num_layers=3,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=32,
    vocab_size=13,
)
ROWS, WIDTH, LONGEST = 22, 5, 9
SAMPLING = SamplingConfig(max_tokens=LONGEST, stop_ids=(4,), pad_id=1)


def generate(
    layout: ParallelLayout, max_num_seqs: int, unroll: bool = False
) -> dict[str, np.ndarray]:
    world = take_stock()
    placement = Placement(layout=layout, devices=world.pool.devices[: layout.num_devices])
    site = emu.make_site(world, ACTOR_GENERATE, placement, CONFIG.num_kv_heads)
    params = emu.initialize(CONFIG, Head.LM, site, "float32", seed=3)
    engine = GenerateEngine(
        config=CONFIG,
        site=site,
        dtype="float32",
        prefill_rows=2,
        precision="highest",
        max_num_seqs=max_num_seqs,
        unroll=unroll,
        programs=ProgramCache(),
    )
    rng = np.random.default_rng(1)
    tokens_BP = rng.integers(0, CONFIG.vocab_size, (ROWS, WIDTH))
    lengths_B = rng.integers(1, WIDTH + 1, ROWS)
    limits_B = rng.integers(1, LONGEST + 1, ROWS)
    samples_B = np.arange(ROWS)
    arrays = engine.dispatch(params, tokens_BP, lengths_B, samples_B, 5, SAMPLING, limits_B)
    jax.block_until_ready(arrays)
    assert arrays["tokens"].shape[0] == engine.padded_rows(ROWS)
    return {name: x[:ROWS] for name, x in host.fetch(arrays).items()}


@pytest.fixture(scope="module")
def at_once() -> dict[str, np.ndarray]:
    return generate(ParallelLayout(1, 1, 1), 0)


@pytest.mark.parametrize(
    ("layout", "max_num_seqs"),
    [
        (ParallelLayout(2, 2, 1), 4),  # replicas of a pipeline wait for each other
        (ParallelLayout(3, 1, 1), 3),  # 8 rows a replica, of which 2 only fill up
        pytest.param(ParallelLayout(1, 1, 2), 4, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(1, 3, 2), 6, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(2, 1, 4), 5, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(2, 3, 1), 3, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(1, 1, 1), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_tokens_are_those_of_one_device_and_one_batch(
    layout: ParallelLayout, max_num_seqs: int, at_once: dict[str, np.ndarray]
) -> None:
    # Layers without a loop are the same arithmetic: half of the cases have them.
    got = generate(layout, max_num_seqs, unroll=max_num_seqs == 4)
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(got[name], at_once[name], err_msg=name)
    np.testing.assert_allclose(got["logprobs"], at_once["logprobs"], atol=1e-5)
    assert len(set(at_once["lengths"].tolist())) > 3
