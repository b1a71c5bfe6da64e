"""State and arguments are exact: against EmuSpec, and against what XLA counts."""

import itertools

import numpy as np
import pytest

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.presets import preset
from nereus_jax.planning.candidates import Candidates
from nereus_jax.planning.memory_state import (
    COUNTER_BYTES,
    Shards,
    mesh_degrees,
    state_bytes,
)

ODD = DecoderConfig(
    num_layers=5,
    embed_dim=32,
    num_heads=12,
    num_kv_heads=6,
    head_dim=8,
    mlp_dim=50,
    vocab_size=51,
    tie_embeddings=False,
    qkv_bias=True,
    qk_norm=True,
)
LAYOUTS = [
    ParallelLayout(dp, pp, tp)
    for dp, pp, tp in itertools.product((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4, 6, 12))
]


def candidates(layouts: list[ParallelLayout], zero1: bool = False) -> Candidates:
    dp, pp, tp = np.array([(x.dp, x.pp, x.tp) for x in layouts], np.int64).T
    ones = np.ones_like(dp)
    return Candidates(
        dp=dp,
        pp=pp,
        tp=tp,
        microbatch_size=ones,
        microbatches=ones,
        accumulation=ones,
        remat=np.zeros(len(dp), np.bool_),
        zero1=np.full(len(dp), zero1) & (dp > 1),
    )


@pytest.mark.parametrize("head", list(Head))
@pytest.mark.parametrize("zero1", [False, True])
def test_all_layouts_at_once_are_what_emu_spec_says_of_each(head: Head, zero1: bool):
    spec = ODD.spec(head, "float32")
    cut = candidates(LAYOUTS, zero1)
    shards = Shards(mesh_degrees(cut, ODD.num_kv_heads))
    other = next(h for h in Head if h is not head)  # what it has in common is not cut again
    state_bytes(ODD.spec(other, "float32"), "float32", cut, shards, train=True)
    state = state_bytes(spec, "float32", cut, shards, train=True)
    for i, layout in enumerate(LAYOUTS):
        mesh = layout.mesh_shape(ODD.num_kv_heads)
        moments = spec.with_zero(mesh) if zero1 else spec
        assert state.parameters[i] == spec.local_bytes(mesh), layout
        assert state.optimizer[i] == 2 * moments.local_bytes(mesh) + COUNTER_BYTES, layout


def test_8b_on_one_device_by_hand():
    """8,030,261,248 parameters; float32 with two moments take 12 bytes each."""
    model = preset("llama3-8b")
    one = candidates([ParallelLayout(1, 1, 1)])
    spec = model.spec(Head.LM, "float32")
    shards = Shards(mesh_degrees(one, model.num_kv_heads))
    trained = state_bytes(spec, "float32", one, shards, train=True)
    assert trained.parameters[0] == 4 * 8_030_261_248
    assert trained.optimizer[0] == 8 * 8_030_261_248 + 8
    used = state_bytes(model.spec(Head.LM, "bfloat16"), "bfloat16", one, shards, train=False)
    assert used.parameters[0] == 2 * 8_030_261_248
    assert used.optimizer[0] == 0
