"""No array of full logits: what the compiled SCORE and TRAIN programs need, as XLA counts it.

Only compiles. With temporaries m(V, T) the mixed difference
m(V2, T2) - m(V1, T2) - m(V2, T1) + m(V1, T1) drops everything that grows with the vocabulary V
alone (gradients of the [V, D] matrices) or with the tokens B * T alone (activations): what is left
grows with tokens x vocabulary. Full logits in float32 would make it 4 * B * (T2 - T1) * (V2 - V1)
bytes at least.
"""

import functools

import pytest

from nereus_jax.config import OptimizerConfig
from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.rl.objectives import PolicyObjective
from nereus_jax.runtime import emu
from nereus_jax.runtime.engines.score import ScoreEngine, ScoreKind
from nereus_jax.runtime.engines.train import TrainEngine
from nereus_jax.runtime.optimizers import make_optimizer
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import take_stock

B, P = 8, 4
TOKENS = (16, 48)  # responses
VOCABS = (8192, 16384)
TOKEN_CHUNK = 16
EMBED = 8
ONE, SPLIT = ParallelLayout(1, 1, 1), ParallelLayout(1, 2, 2)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)


@functools.cache
def temp_bytes(stage: str, layout: ParallelLayout, chunk: int, vocab: int, width: int) -> int:
    """Temporaries per device of one compiled program."""
    config = DecoderConfig(
        num_layers=2,
        embed_dim=EMBED,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        mlp_dim=8,
        vocab_size=vocab,
    )
    world = take_stock()
    placement = Placement(layout=layout, devices=world.pool.devices[: layout.num_devices])
    site = emu.make_site(world, ACTOR_TRAIN, placement, config.num_kv_heads)
    programs = ProgramCache()
    if stage == "SCORE":
        score = ScoreEngine(
            config=config,
            kind=ScoreKind.LOGPROBS,
            site=site,
            dtype="float32",
            precision="default",
            microbatch_size=B // layout.pp,
            temperature=1.0,
            token_chunk=chunk,
            programs=programs,
        )
        return score.program(score.forms(B, P + width)[0]).temp_bytes
    train = TrainEngine(
        config=config,
        head=Head.LM,
        site=site,
        param_dtype="float32",
        compute_dtype="float32",
        precision="default",
        microbatch_size=B // layout.pp,
        flush_microbatches=0,
        remat=False,
        zero1=False,
        temperature=1.0,
        token_chunk=chunk,
        objective=PolicyObjective(clip=0.2, entropy_coef=0.01),
        optimizer=make_optimizer(OPTIMIZER, 10),
        optimizer_key=OPTIMIZER,
        programs=programs,
    )
    return train.program(train.forms(B, P + width)[0]).temp_bytes


def logits_bytes(layout: ParallelLayout) -> int:
    """What the mixed difference of one full-logits array would be on one device."""
    return 4 * B * (TOKENS[1] - TOKENS[0]) * (VOCABS[1] - VOCABS[0]) // layout.num_devices


def mixed_difference(stage: str, layout: ParallelLayout, chunk: int) -> int:
    at = functools.partial(temp_bytes, stage, layout, chunk)
    small, large = VOCABS
    few, many = TOKENS
    return at(large, many) - at(small, many) - at(large, few) + at(small, few)


both_stages = pytest.mark.parametrize(
    "stage", ["SCORE", pytest.param("TRAIN", marks=pytest.mark.slow)]
)


@both_stages
@pytest.mark.parametrize("layout", [ONE, SPLIT], ids=str)
def test_temporaries_do_not_grow_with_tokens_times_vocabulary(stage: str, layout: ParallelLayout):
    growth = mixed_difference(stage, layout, TOKEN_CHUNK)
    print(f"{stage} {layout}: {growth} of {logits_bytes(layout)} bytes")
    assert growth < 0.05 * logits_bytes(layout)


@both_stages
def test_the_slope_in_the_vocabulary_is_that_of_one_chunk_and_of_the_matrices(stage: str):
    small, large = (temp_bytes(stage, ONE, TOKEN_CHUNK, v, TOKENS[1]) for v in VOCABS)
    slope = (large - small) / (VOCABS[1] - VOCABS[0])
    # A few arrays [chunk, V] live at a time; TRAIN adds gradients and updates of [V, D] matrices.
    allowed = 4 * 4 * TOKEN_CHUNK + (4 * 8 * EMBED if stage == "TRAIN" else 4 * EMBED)
    print(f"{stage}: {slope:.0f} bytes a vocabulary entry, allowed {allowed}")
    assert slope <= allowed
    assert allowed < 4 * B * TOKENS[1] / 2, "full logits would not pass"
    assert large < 4 * B * TOKENS[1] * VOCABS[1] / 2


@both_stages
def test_a_program_with_full_logits_is_found_out(stage: str):
    """All tokens in one chunk are full logits: the bounds above must refuse that program."""
    everything = B * TOKENS[1]
    assert mixed_difference(stage, ONE, everything) > 0.9 * logits_bytes(ONE)
    assert temp_bytes(stage, ONE, everything, VOCABS[1], TOKENS[1]) > (
        0.9 * 4 * B * TOKENS[1] * VOCABS[1]
    )
