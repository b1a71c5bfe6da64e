"""Seconds of SCORE and TRAIN: by hand, against a simulated pipeline, and as properties."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_SCORE,
    ACTOR_TRAIN,
    CRITIC_SCORE,
    CRITIC_TRAIN,
    ModelStage,
)
from nereus_jax.planning.calibration import CLASSES, Efficiencies, OperationClass
from nereus_jax.planning.candidates import Candidates
from nereus_jax.planning.cost import StageCost, stage_seconds
from nereus_jax.planning.cost_terms import (
    COMPILE_S,
    KERNEL_S,
    ROOFLINE_NORM,
    DataSync,
    Execution,
    ModelSizes,
    Prices,
    RowFill,
    aligned_widths,
)
from nereus_jax.planning.workload import LengthHistogram, Workload

MODEL = DecoderConfig(
    num_layers=6,
    embed_dim=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    mlp_dim=512,
    vocab_size=1024,
    tie_embeddings=False,
)
FREE = Link(bytes_per_s=1e30, latency_s=0.0)
EXACT = Execution(rows=RowFill.EXACT, score_bytes=0.0, score_share=0.5)
WORK = Workload(
    prompts=64,
    prompt_lengths=LengthHistogram.constant(96),
    response_lengths=LengthHistogram(lengths=(16, 48), weights=(0.5, 0.5)),
    max_response_tokens=64,
    minibatch_size=32,
)


def hardware(**changes: Any) -> Hardware:
    """Only products take time, unless a test says otherwise."""
    fields: dict[str, Any] = {
        "name": "toy",
        "devices_per_node": 8,
        "peak_flops_per_s": {"bfloat16": 1e12, "float32": 1e11},
        "memory_bytes": 1 << 34,
        "memory_bytes_per_s": 1e30,
        "intra_node": FREE,
        "inter_node": FREE,
        "host": FREE,
    }
    return Hardware(**(fields | changes))


REAL = hardware(
    memory_bytes_per_s=1e11,
    intra_node=Link(bytes_per_s=1e10, latency_s=1e-6),
    inter_node=Link(bytes_per_s=1e9, latency_s=1e-5),
)


def perfect(**values: float) -> Efficiencies:
    """Everything at its peak, and launches that take no time."""
    ones = dict.fromkeys(CLASSES, 1.0) | {OperationClass.LAUNCH: 1e30}
    named = {OperationClass[name.upper()]: value for name, value in values.items()}
    return Efficiencies.prior().replace(ones | named)


def candidates(*rows: dict[str, Any]) -> Candidates:
    default = {"dp": 1, "pp": 1, "tp": 1, "microbatch_size": 4, "microbatches": 1}
    default |= {"accumulation": 1, "remat": False, "zero1": False}
    full = [default | row for row in rows]
    return Candidates(**{k: np.array([r[k] for r in full]) for k in default})


def cost(
    *rows: dict[str, Any],
    stage: ModelStage = ACTOR_TRAIN,
    head: Head = Head.LM,
    work: Workload = WORK,
    machine: Hardware | None = None,
    efficiencies: Efficiencies | None = None,
    **execution: Any,
) -> StageCost:
    return stage_seconds(
        MODEL,
        head,
        stage,
        work,
        machine or hardware(),
        efficiencies or perfect(),
        candidates(*rows),
        execution=dataclasses.replace(EXACT, **execution),
    )


def test_score_is_the_models_own_flops() -> None:
    """core/architectures counts the same work: tokens, mean context, response tokens."""
    tokens = 64 * WORK.mean_row_tokens
    context = WORK.mean_square_row_tokens / 2 / WORK.mean_row_tokens
    found = cost({"microbatch_size": 4, "accumulation": 16}, stage=ACTOR_SCORE)
    flops = MODEL.forward_flops(int(tokens), context, int(64 * WORK.response_lengths.mean))
    assert found.total_s[0] == pytest.approx(flops / 1e12, rel=1e-9)


def test_train_is_three_passes_and_recomputation_one_more() -> None:
    one = cost({"accumulation": 16}, stage=CRITIC_SCORE, head=Head.SCALAR)
    score = {c: s[0] for c, s in one.seconds.items()}
    rows = [{"accumulation": 8, "remat": r} for r in (False, True)]
    trained = cost(*rows, stage=CRITIC_TRAIN, head=Head.SCALAR)
    gemm, attention = OperationClass.GEMM, OperationClass.ATTENTION
    # Two updates of 32 rows are 64 rows, as in SCORE.
    np.testing.assert_allclose(trained.seconds[gemm], [3 * score[gemm], 4 * score[gemm]])
    fused = [3.5 * score[attention], 4.5 * score[attention]]  # the backward makes scores again
    np.testing.assert_allclose(trained.seconds[attention], fused)


def test_efficiencies_divide() -> None:
    at_peak, half = (
        cost({"accumulation": 8}),
        cost({"accumulation": 8}, efficiencies=perfect(gemm=0.5, attention=0.25)),
    )
    for operation, factor in ((OperationClass.GEMM, 2), (OperationClass.ATTENTION, 4)):
        assert half.seconds[operation][0] == pytest.approx(factor * at_peak.seconds[operation][0])


def test_padded_rows_take_all_columns_and_packed_ones_their_tokens() -> None:
    row = {"microbatch_size": 4, "accumulation": 16}
    kinds = {r: cost(row, stage=ACTOR_SCORE, rows=r) for r in RowFill}
    gemm = {r: float(c.seconds[OperationClass.GEMM][0]) for r, c in kinds.items()}
    layers = MODEL.forward_flops(64 * 160, 1e-12, 0) / 1e12
    head = 2.0 * 64 * 64 * 1024 * 256 / 1e12
    assert gemm[RowFill.PADDED] == pytest.approx(layers + head)
    # 64 rows of 128 tokens in microbatches of 4 x 160, filled to 95 %: 14 of the 16.
    run = math.ceil(64 * 128 / (0.95 * 4 * 160))
    assert run == 14
    assert gemm[RowFill.PACKED] == pytest.approx(layers * run / 16 + head * 32 / 64)
    assert gemm[RowFill.EXACT] < gemm[RowFill.PACKED] < gemm[RowFill.PADDED]


def simulated_pipeline(stage_s: list[float], microbatches: int) -> float:
    """When the last microbatch leaves the last rank, each rank taking one at a time."""
    free = [0.0] * len(stage_s)
    end = 0.0
    for _ in range(microbatches):
        end = 0.0
        for rank, seconds in enumerate(stage_s):
            end = max(end, free[rank]) + seconds
            free[rank] = end
    return end


@given(st.integers(1, 6), st.integers(1, 12))
def test_a_flush_is_the_pipeline_simulated_with_padded_layers(pp: int, micro: int) -> None:
    row = {"pp": pp, "microbatches": micro}
    found = cost(row, stage=CRITIC_SCORE, head=Head.SCALAR)
    one = cost({}, stage=CRITIC_SCORE, head=Head.SCALAR).total_s[0] / 6
    layers = -(-6 // pp)
    expected = simulated_pipeline([layers * one] * pp, micro)
    assert found.total_s[0] == pytest.approx(expected)
    assert found.bubble_s[0] == pytest.approx(expected - micro * 6 * one / pp, abs=1e-12)


@given(st.integers(1, 6), st.integers(1, 12))
def test_a_flush_with_the_head_on_the_last_rank(pp: int, micro: int) -> None:
    """Ranks have whole layers as even as can be, the larger ones first."""
    row = {"pp": pp, "microbatches": micro}
    uneven: dict[str, Any] = {"vocab_over_pp": False, "padded_layers": False}
    found = cost(row, stage=ACTOR_SCORE, **uneven)
    layer = cost({}, stage=CRITIC_SCORE, head=Head.SCALAR).total_s[0] / 6
    head = cost({}, stage=ACTOR_SCORE, **uneven).total_s[0] - 6 * layer
    layers = [6 // pp + (rank < 6 % pp) for rank in range(pp)]
    stages = [n * layer for n in layers]
    stages[-1] += head
    assert found.total_s[0] == pytest.approx(simulated_pipeline(stages, micro))


def test_interleaving_divides_the_bubble() -> None:
    plain, parts = (
        cost({"pp": 3, "microbatches": 6}, stage=CRITIC_SCORE, head=Head.SCALAR, interleave=v)
        for v in (1, 2)
    )
    assert parts.bubble_s[0] == pytest.approx(plain.bubble_s[0] / 2)


def prices(machine: Hardware = REAL, efficiencies: Efficiencies | None = None) -> Prices:
    return Prices(hardware=machine, efficiencies=efficiencies or perfect(), dtype="bfloat16")


@pytest.mark.parametrize(
    ("ranks", "stride", "intra_s", "inter_s"),
    [
        (1, 1, 0.0, 0.0),
        (8, 1, 2 * 7 / 8 * 1e9 / 1e10 + 2 * 3 * 1e-6, 0.0),
        (4, 2, 2 * 3 / 4 * 1e9 / 1e10 + 2 * 2 * 1e-6, 0.0),
        # 16 ranks in 2 nodes: each node's 8 ranks share what crosses.
        (16, 1, 2 * 7 / 8 * 1e9 / 1e10 + 2 * 3 * 1e-6, 2 / 2 * 1e9 / 8 / 1e9 + 2 * 1e-5),
        # One rank a node.
        (4, 8, 0.0, 2 * 3 / 4 * 1e9 / 1e9 + 2 * 2 * 1e-5),
        (4, 64, 0.0, 2 * 3 / 4 * 1e9 / 1e9 + 2 * 2 * 1e-5),
    ],
)
def test_an_all_reduce_by_hand(ranks: int, stride: int, intra_s: float, inter_s: float) -> None:
    found = prices().all_reduce(1e9, np.array([ranks]), np.array([stride]))
    assert found[OperationClass.ALL_REDUCE_INTRA] == pytest.approx(intra_s)
    assert found[OperationClass.ALL_REDUCE_INTER] == pytest.approx(inter_s)


def test_a_product_by_the_roofline() -> None:
    """1e12 FLOPs and 2e11 bytes: 1 s and 2 s."""
    found = prices().product(1e12, 2e11, np.array([True]))
    whole = (1 + 2**ROOFLINE_NORM) ** (1 / ROOFLINE_NORM)
    assert sum(float(s[0]) for s in map(np.atleast_1d, found.values())) == pytest.approx(whole)
    share = 1 / (1 + 2**ROOFLINE_NORM)
    assert found[OperationClass.GEMM] == pytest.approx(whole * share)


def test_gradients_are_summed_once_an_update_and_scattered_under_zero1() -> None:
    rows = [{"dp": 8, "accumulation": 1, "zero1": z} for z in (False, True)]
    slow = hardware(intra_node=Link(bytes_per_s=1e6, latency_s=0.0))
    found = cost(*rows, machine=slow).seconds[OperationClass.ALL_REDUCE_INTRA]
    params = MODEL.num_params(Head.LM)
    each = 2 * 2 * 7 / 8 * params * 4 / 1e6  # two updates; two ways; float32
    np.testing.assert_allclose(found, [each, each])  # scatter and gather are an all-reduce
    half = cost(*rows, machine=slow, gather_bytes=2.0).seconds[OperationClass.ALL_REDUCE_INTRA]
    assert half[1] == pytest.approx(0.75 * each)


def test_overlapped_gradients_hide_behind_the_backward_pass() -> None:
    rows = {"dp": 8, "accumulation": 1}
    for bytes_per_s, hidden in ((1e12, True), (1e6, False)):
        machine = hardware(intra_node=Link(bytes_per_s=bytes_per_s, latency_s=0.0))
        at_end = cost(rows, machine=machine).seconds[OperationClass.ALL_REDUCE_INTRA][0]
        beside = cost(rows, machine=machine, sync=DataSync.OVERLAPPED)
        waited = beside.seconds[OperationClass.ALL_REDUCE_INTRA][0]
        if hidden:
            assert waited == pytest.approx(
                at_end / 6
            )  # the first layer's has nothing to hide behind
        else:
            compute = cost(rows).total_s[0]
            assert waited == pytest.approx(at_end - compute * 2 / 3, rel=1e-6)


def test_fsdp_gathers_for_every_microbatch() -> None:
    slow = hardware(intra_node=Link(bytes_per_s=1e6, latency_s=0.0))
    params = MODEL.num_params(Head.LM)
    row = {"dp": 8, "accumulation": 1, "microbatch_size": 4}
    kinds = {"sync": DataSync.SHARDED, "grad_bytes": 2.0}
    found = cost(row, machine=slow, **kinds).seconds[OperationClass.ALL_REDUCE_INTRA][0]
    moved = 2 * 3 * 7 / 8 * params * 2 / 1e6  # two updates; two gathers and a scatter, 2 bytes
    assert found == pytest.approx(moved - cost(row).total_s[0], rel=1e-4)


def test_key_value_heads_above_tp_are_shared() -> None:
    """4 key/value heads on 8 ranks: each holds one, so its matrices shrink by 4 and not by 8."""
    rows = [{"tp": 1}, {"tp": 8}]
    layers = cost(*rows, stage=CRITIC_SCORE, head=Head.SCALAR).seconds
    spent = layers[OperationClass.GEMM] + layers.get(OperationClass.UNALIGNED_GEMM, 0.0)
    d, q, kv, f = 256, 256, 128, 512
    whole, split = 2 * d * q + 3 * d * f, 2 * d * kv
    assert spent[1] / spent[0] == pytest.approx((whole / 8 + split / 4) / (whole + split))


def test_widths_that_do_not_fit_a_matrix_unit() -> None:
    sizes = ModelSizes.of(dataclasses.replace(MODEL, mlp_dim=528), Head.LM)
    assert aligned_widths(sizes, np.array([1, 2, 4])).tolist() == [False, False, False]
    sizes = ModelSizes.of(MODEL, Head.LM)
    assert aligned_widths(sizes, np.array([1, 8, 16])).tolist() == [True, True, False]


def test_launches_count() -> None:
    ready = perfect(launch=1.0)
    found = cost({"accumulation": 16}, stage=CRITIC_SCORE, head=Head.SCALAR, efficiencies=ready)
    assert found.seconds[OperationClass.LAUNCH][0] == pytest.approx(16 * 6 * 10 * KERNEL_S)


def test_copies_to_the_host_and_compiling() -> None:
    machine = hardware(host=Link(bytes_per_s=1e9, latency_s=0.5))
    half = prices(machine, perfect(host_copy=0.5, compile=0.25))
    assert half.host_copy(2e9) == {OperationClass.HOST_COPY: 5.0}
    assert half.compile(3) == {OperationClass.COMPILE: 3 * COMPILE_S / 0.25}


def test_a_dtype_without_a_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"toy has no peak for float16; use one of bfloat16"):
        stage_seconds(
            MODEL,
            Head.LM,
            ACTOR_TRAIN,
            WORK,
            hardware(),
            perfect(),
            candidates({}),
            dtype="float16",
        )


ROW = st.fixed_dictionaries(
    {
        "dp": st.sampled_from([1, 2, 3, 4, 8, 16]),
        "pp": st.sampled_from([1, 2, 3, 6]),
        "tp": st.sampled_from([1, 2, 4, 8, 16]),
        "microbatch_size": st.integers(1, 8),
        "microbatches": st.integers(1, 6),
        "accumulation": st.integers(1, 3),
        "remat": st.booleans(),
        "zero1": st.booleans(),
    }
)
STAGES = st.sampled_from([ACTOR_TRAIN, ACTOR_SCORE, ACTOR_GENERATE, CRITIC_TRAIN])
SYNCS = st.sampled_from(list(DataSync))


@given(st.lists(ROW, min_size=2, max_size=5), STAGES, st.sampled_from(list(RowFill)), SYNCS)
def test_many_candidates_cost_what_each_does_alone(
    rows: list[dict[str, Any]], stage: ModelStage, fill: RowFill, sync: DataSync
) -> None:
    how = {"stage": stage, "machine": REAL, "rows": fill, "sync": sync}
    together = cost(*rows, **how, efficiencies=Efficiencies.prior())
    for index, row in enumerate(rows):
        alone = cost(row, **how, efficiencies=Efficiencies.prior())
        assert together.total_s[index] == pytest.approx(alone.total_s[0], rel=1e-3)
        assert sum(together.at(index).values()) == pytest.approx(together.total_s[index])
        assert 0 <= together.bubble_s[index] <= together.total_s[index]
    assert all((s >= 0).all() for s in together.seconds.values())


@given(ROW, st.sampled_from([ACTOR_TRAIN, ACTOR_SCORE, ACTOR_GENERATE]))
def test_a_class_share_is_what_its_efficiency_brings(
    row: dict[str, Any], stage: ModelStage
) -> None:
    """d log(seconds) / d log(efficiency) = -share: what the calibration relies on."""
    prior, step = Efficiencies.prior(), 1e-4
    base = cost(row, stage=stage, machine=REAL, efficiencies=prior)
    for operation, seconds in base.at(0).items():
        better = prior.replace({operation: prior[operation] * math.exp(step)})
        changed = cost(row, stage=stage, machine=REAL, efficiencies=better)
        slope = math.log(changed.total_s[0] / base.total_s[0]) / step
        assert slope == pytest.approx(-seconds / base.total_s[0], abs=2e-3)


@given(ROW, STAGES)
def test_longer_rows_never_take_less(row: dict[str, Any], stage: ModelStage) -> None:
    longer = dataclasses.replace(
        WORK, response_lengths=LengthHistogram(lengths=(32, 64), weights=(0.5, 0.5))
    )
    how = {"stage": stage, "machine": REAL, "efficiencies": Efficiencies.prior()}
    assert cost(row, **how, work=longer).total_s[0] >= cost(row, **how).total_s[0] * (1 - 1e-9)


def test_what_dominates_is_said() -> None:
    assert cost({"accumulation": 8}).dominant(0) == "gemm"
    bubble = cost({"pp": 6, "microbatches": 1}, stage=CRITIC_SCORE, head=Head.SCALAR)
    assert bubble.dominant(0) == "pipeline bubble"
