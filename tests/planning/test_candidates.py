"""The candidates of a model-stage: complete where they should be, and only ones that can run."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_SCORE, ACTOR_TRAIN
from nereus_jax.planning.candidates import (
    MAX_FLUSH_PER_RANK,
    enumerate_candidates,
    shortest_splits,
)
from nereus_jax.planning.workload import LengthHistogram, Workload

LINK = Link(bytes_per_s=1e11, latency_s=1e-6)
NODE_OF_8 = Hardware(
    name="test",
    devices_per_node=8,
    peak_flops_per_s={"bfloat16": 1e14},
    memory_bytes=80 * 2**30,
    memory_bytes_per_s=1e12,
    intra_node=LINK,
    inter_node=LINK,
    host=LINK,
)


def model(num_layers: int = 6, num_heads: int = 12) -> DecoderConfig:
    return DecoderConfig(
        num_layers=num_layers,
        embed_dim=64,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=8,
        mlp_dim=128,
        vocab_size=256,
    )


def workload(rows: int = 24, minibatch: int = 12) -> Workload:
    return Workload(
        prompts=rows,
        prompt_lengths=LengthHistogram.constant(16),
        response_lengths=LengthHistogram.constant(16),
        max_response_tokens=16,
        minibatch_size=minibatch,
    )


def found(stage, devices, rows=24, minibatch=12, **sizes):
    return enumerate_candidates(
        model(**sizes), stage, workload(rows, minibatch), NODE_OF_8, devices
    )


def test_train_keeps_the_global_batch_and_tries_all_four_memory_choices():
    some = found(ACTOR_TRAIN, 8)
    assert (some.dp * some.rows_per_replica == 12).all()
    by_layout = {}
    for i in range(len(some)):
        key = (some.layout(i), some.microbatch_size[i], some.microbatches[i])
        by_layout.setdefault(key, []).append((bool(some.remat[i]), bool(some.zero1[i])))
    for (layout, _, _), choices in by_layout.items():
        zero1 = (False, True) if layout.dp > 1 else (False,)
        assert sorted(choices) == sorted(itertools.product((False, True), zero1))


def test_every_layout_that_can_be_is_there():
    """By brute force over all degrees: 6 layers, 12 heads, minibatches of 12 rows, 7 devices."""
    some = found(ACTOR_TRAIN, 7)
    layouts = {some.layout(i) for i in range(len(some))}
    distinct_pp = {1, 2, 3, 6}  # 4 and 5 leave 2 layers to a rank, as 3 does
    expected = {
        ParallelLayout(dp, pp, tp)
        for dp, pp, tp in itertools.product(range(1, 8), repeat=3)
        if dp * pp * tp <= 7 and 12 % tp == 0 and pp in distinct_pp and 12 % dp == 0
    }
    assert layouts == expected
    assert ParallelLayout(2, 3, 1) in layouts and ParallelLayout(1, 1, 6) in layouts


def test_without_a_pipeline_a_flush_is_one_microbatch():
    some = found(ACTOR_TRAIN, 8)
    alone = some.pp == 1
    assert (some.microbatches[alone] == 1).all()
    cuts = {(int(m), int(a)) for m, a in zip(some.microbatch_size, some.accumulation, strict=True)}
    assert {(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)} <= cuts


def test_flushes_fill_the_pipeline_where_they_can():
    some = found(ACTOR_TRAIN, 8, rows=96, minibatch=96)
    total = some.microbatches * some.accumulation
    enough = (some.pp > 1) & (total >= some.pp) & (total % some.pp == 0)
    assert enough.any()
    assert (some.microbatches[enough] >= some.pp[enough]).all()
    assert (some.microbatches <= MAX_FLUSH_PER_RANK * some.pp).all()


def test_tp_stays_inside_a_node_unless_asked():
    """12 heads on nodes of 8: 3, 6 and 12 ranks would straddle nodes, on one node they do not."""
    assert set(found(ACTOR_SCORE, 16).tp) == {1, 2, 4}
    assert set(found(ACTOR_SCORE, 8).tp) == {1, 2, 3, 4, 6}
    sizes = model(num_heads=16)
    wide = enumerate_candidates(sizes, ACTOR_SCORE, workload(), NODE_OF_8, 16, tp_across_nodes=True)
    assert set(wide.tp) == {1, 2, 4, 8, 16}


def test_score_takes_any_dp_that_makes_replicas_smaller():
    some = found(ACTOR_SCORE, 7)
    alone = (some.pp == 1) & (some.tp == 1)
    assert set(some.dp[alone]) == {1, 2, 3, 4, 5, 6}  # 24 rows: 7 replicas have 4 rows, as 6
    assert (some.dp * some.rows_per_replica >= 24).all()
    assert not some.remat.any() and not some.zero1.any()


def test_generate_decodes_all_rows_at_a_time_or_halves_of_them_in_whole_groups():
    some = found(ACTOR_GENERATE, 1)
    assert sorted(some.microbatch_size) == [2, 3, 8, 12, 24]  # 6 are prefilled as two times 4
    assert (some.accumulation == 1).all() and (some.microbatches == 1).all()


@given(total=st.integers(1, 300), limit=st.integers(1, 300))
def test_shortest_splits_are_the_smallest_with_their_largest_part(total: int, limit: int):
    splits = shortest_splits(total, limit)
    largest = {-(-total // n) for n in range(1, limit + 1)}
    assert [-(-total // n) for n in splits] == sorted(largest, reverse=True)
    for n in splits:
        assert n == 1 or -(-total // (n - 1)) > -(-total // n)


@pytest.mark.parametrize("devices", [1, 3, 7, 60])
@pytest.mark.parametrize("stage", [ACTOR_GENERATE, ACTOR_SCORE, ACTOR_TRAIN], ids=str)
def test_all_candidates_can_run(stage, devices: int):
    some = found(stage, devices)
    assert len(some)
    assert some.devices.max() <= devices
    for layout in {some.layout(i) for i in range(len(some))}:
        model().check_layout(layout)
        assert layout.pp <= model().num_layers
    rows = np.stack([getattr(some, n) for n in vars(some) if n != "devices"])
    assert len(np.unique(rows, axis=1).T) == len(some), "a candidate is there twice"
