"""Seconds of stages on the simulated cluster, against sums by hand with round peaks."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.packed_cuts import GAIN
from nereus_jax.planning.cost_terms import DataSync, Execution, ModelSizes, RowFill
from nereus_jax.simulator.curves import KernelCurve, LinkCurve, Truth, load_truth
from nereus_jax.simulator.decoding import generate_s
from nereus_jax.simulator.operations import Device, product_s
from nereus_jax.simulator.passes import score_s, train_s
from nereus_jax.simulator.stage_run import EngineOverheads, StageRun, StepRows, cut

FLOPS = 1e12
IDEAL = KernelCurve(
    peak=1.0,
    half_width=0.0,
    half_depth=0.0,
    corner=8.0,
    bandwidth=1e15,
    elementwise_bandwidth=1e15,
    kernel_s=0.0,
    attention_peak=1.0,
    attention_half_tokens=0.0,
)
WIRE = LinkCurve(share=1.0, half_bytes=0.0, ramp=1.0, hop_s=0.0)
TRUTH = dataclasses.replace(
    load_truth(),
    kernels={"other": IDEAL},
    links={"intra_node": WIRE, "inter_node": WIRE, "host": WIRE},
)
NO_LINK = Link(bytes_per_s=1e30, latency_s=0.0)
TOY = Hardware(
    name="toy",
    devices_per_node=4,
    peak_flops_per_s={"bfloat16": FLOPS},
    memory_bytes=10**9,
    memory_bytes_per_s=1e12,
    intra_node=NO_LINK,
    inter_node=NO_LINK,
    host=NO_LINK,
)
SIZES = ModelSizes(
    num_layers=2,
    embed_dim=64,
    query_dim=64,
    kv_dim=64,
    num_heads=4,
    num_kv_heads=4,
    mlp_dim=128,
    vocab_size=0,
    params=1e6,
)
LAYER = 64 * (64 + 2 * 64) + 64 * 64 + 64 * 2 * 128 + 128 * 64
"""Matrix elements of a layer."""
PADDED = Execution(rows=RowFill.PADDED, score_bytes=0.0, vocab_over_pp=False)


def device(hardware: Hardware = TOY, truth: Truth = TRUTH) -> Device:
    return Device(hardware=hardware, truth=truth, devices_per_node=hardware.devices_per_node)


def stage(dp: int = 1, pp: int = 1, tp: int = 1, **changes: object) -> StageRun:
    run = StageRun(
        sizes=SIZES,
        train=False,
        layout=ParallelLayout(dp, pp, tp),
        microbatch_size=1,
        flush=2,
        remat=False,
        zero1=False,
        execution=PADDED,
        minibatch_size=4,
        room_tokens=64,
        prompt_tokens=64,
    )
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def rows(*responses: int, prompt: int = 64) -> StepRows:
    return StepRows(
        prompts=np.full(len(responses), prompt), responses=np.array(responses, np.int64)
    )


def even(run: StageRun) -> np.ndarray:
    return np.ones((run.layout.dp, run.layout.pp))


def layer_s(tokens: float = 128.0, length: float = 128.0) -> float:
    """One layer's forward pass of a padded row."""
    return (2.0 * tokens * LAYER + 4.0 * tokens * length * 64) / FLOPS


def test_products_by_hand() -> None:
    """Tiles of 128 rows and 64 columns are computed whole; traffic hides behind compute."""
    seconds = product_s(IDEAL, FLOPS, 1e12, 130.0, 64.0, 70.0, 2.0)
    assert seconds == pytest.approx(2.0 * 256 * 64 * 128 / FLOPS)
    half = dataclasses.replace(IDEAL, peak=0.8, half_width=64.0, kernel_s=1e-3)
    seconds = product_s(half, FLOPS, 1e12, 128.0, 64.0, 64.0, 2.0)
    assert seconds == pytest.approx(1e-3 + 2.0 * 128 * 64 * 64 / (FLOPS * 0.8 * 0.5))
    # Nothing to compute with: 2 bytes for every element of all three matrices.
    memory = dataclasses.replace(IDEAL, bandwidth=0.5)
    seconds = product_s(memory, 1e30, 1e12, 1.0, 64.0, 64.0, 2.0)
    assert seconds == pytest.approx(2.0 * (64 + 64 * 64 + 64) / 0.5e12)


def test_all_reduces_by_hand() -> None:
    links = {
        "intra_node": Link(bytes_per_s=1e9, latency_s=0),
        "inter_node": Link(bytes_per_s=1e8, latency_s=0),
    }
    machine = device(dataclasses.replace(TOY, **links))
    assert machine.all_reduce(1e9, 1) == 0.0
    assert machine.all_reduce(1e9, 4) == pytest.approx(2.0 * 3 / 4)
    # 8 ranks: each of 4 in a node takes a quarter of the buffer to the other node: the slower way.
    assert machine.all_reduce(1e9, 8) == pytest.approx(2.0 * 1 / 2 * 2.5e8 / 1e8)
    # Ranks that are a node apart have every one its own link, and the whole buffer.
    assert machine.all_reduce(1e9, 2, stride=4) == pytest.approx(2.0 * 1 / 2 * 1e9 / 1e8)
    assert machine.all_reduce(1e9, 2, stride=4, passes=1.0) == pytest.approx(5.0)
    busy = dataclasses.replace(machine, network=0.5)
    assert busy.all_reduce(1e9, 2, stride=4) == pytest.approx(20.0)
    assert busy.all_reduce(1e9, 4) == pytest.approx(1.5)


def test_score_by_hand() -> None:
    """4 rows, 2 replicas: 2 microbatches of a padded row through 2 layers each."""
    run = stage(dp=2)
    one = layer_s()
    assert score_s(run, device(), rows(64, 9, 9, 9), even(run)) == pytest.approx(4 * one)
    # The slowest replica counts.
    slow = np.array([[1.0], [1.5]])
    assert score_s(run, device(), rows(64, 9, 9, 9), slow) == pytest.approx(6 * one)


def test_a_pipeline_by_hand() -> None:
    """A layer a rank, 4 microbatches in flushes of 2: each waits for the first to come through."""
    run = stage(pp=2)
    one = layer_s()
    assert score_s(run, device(), rows(9, 9, 9, 9), even(run)) == pytest.approx((4 + 2) * one)
    whole = dataclasses.replace(run, flush=4)
    assert score_s(whole, device(), rows(9, 9, 9, 9), even(run)) == pytest.approx((4 + 1) * one)
    slow = np.array([[1.0, 3.0]])
    assert score_s(whole, device(), rows(9, 9, 9, 9), slow) == pytest.approx((4 * 3 + 1) * one)


def test_exact_rows_by_hand() -> None:
    """Only tokens count; the two replicas get 100 + 4 and 50 + 10 responses, longest first."""
    execution = dataclasses.replace(PADDED, rows=RowFill.EXACT)
    run = stage(dp=2, execution=execution, microbatch_size=2)
    micro = cut(run, rows(4, 100, 10, 50, prompt=1))
    assert micro.tokens.tolist() == [[[106.0], [62.0]]]
    assert micro.pairs.tolist() == [[[101.0**2 + 5**2], [51.0**2 + 11**2]]]
    assert micro.head_tokens.tolist() == [[[104.0], [60.0]]]


def test_packed_rows_by_hand() -> None:
    """124, 66, 60 and 60 tokens in rows of 128: best fit decreasing needs three."""
    run = stage(execution=dataclasses.replace(PADDED, rows=RowFill.PACKED))
    batch = rows(120, 62, 56, 56, prompt=4)
    micro = cut(run, batch)
    assert micro.tokens.tolist() == [[[128.0] * 3]]
    assert micro.head_tokens.sum() == pytest.approx(120 + 62 + 56 + 56)
    # Two replicas run as many rows as the fuller one.
    two = dataclasses.replace(run, layout=ParallelLayout(dp=2))
    assert cut(two, batch).tokens.shape == (1, 2, 2)


def test_train_by_hand() -> None:
    """Two updates of two rows; backward twice the forward, 2.5 times in fused attention."""
    run = stage(train=True, minibatch_size=2)
    products, scores = 2.0 * 128 * LAYER / FLOPS, 4.0 * 128 * 128 * 64 / FLOPS
    seconds = train_s(run, device(), rows(9, 9, 9, 9), even(run))
    assert seconds == pytest.approx(4 * 2 * (3.0 * products + 3.5 * scores))
    again = dataclasses.replace(run, remat=True)
    assert train_s(again, device(), rows(9, 9, 9, 9), even(run)) == pytest.approx(
        4 * 2 * (4.0 * products + 4.5 * scores)
    )
    twice = dataclasses.replace(run, epochs=2)
    assert train_s(twice, device(), rows(9, 9, 9, 9), even(run)) == pytest.approx(2 * seconds)


def test_gradients_by_hand() -> None:
    """Between nodes, 4 bytes for each of a million parameters: an all-reduce an update; under
    ZeRO-1 half of it, and parameters are gathered."""
    slow = dataclasses.replace(
        TOY, inter_node=Link(bytes_per_s=1e6, latency_s=0), devices_per_node=1
    )
    run = stage(dp=2, train=True)
    base = train_s(run, device(), rows(9, 9, 9, 9), even(run))
    plain = train_s(run, device(slow), rows(9, 9, 9, 9), even(run))
    assert plain - base == pytest.approx(2.0 * 1 / 2 * 4.0)
    zero = dataclasses.replace(run, zero1=True)
    assert train_s(zero, device(slow), rows(9, 9, 9, 9), even(run)) - base == pytest.approx(
        2.0 + 2.0
    )
    # Sharded parameters: two gathers and a scatter a microbatch; the first layer's half is seen.
    fsdp = dataclasses.replace(
        run, execution=dataclasses.replace(PADDED, sync=DataSync.SHARDED, grad_bytes=2.0)
    )
    behind = dataclasses.replace(slow, peak_flops_per_s={"bfloat16": 1e6})
    free = train_s(
        fsdp, device(dataclasses.replace(behind, inter_node=NO_LINK)), rows(9, 9, 9, 9), even(run)
    )
    seen = train_s(fsdp, device(behind), rows(9, 9, 9, 9), even(run)) - free
    assert seen == pytest.approx(2 * 3.0 / 2, rel=1e-3)


def decode(slots: int, *responses: int, dp: int = 1, row_s: float = 0.0) -> float:
    run = stage(
        dp=dp,
        microbatch_size=slots,
        execution=dataclasses.replace(PADDED, rows=RowFill.EXACT, static_slots=False),
        overheads=EngineOverheads(decode_step_s=1.0 - bool(row_s), decode_row_s=row_s, factor=0.0),
    )
    return generate_s(run, device(), rows(*responses), even(run))


def test_decoding_by_hand() -> None:
    """Steps until the last row has ended, with 2 slots: 3 and 5, the third row from 3 to 7."""
    assert decode(4, 3, 5, 4) == pytest.approx(5.0)
    assert decode(2, 3, 5, 4) == pytest.approx(7.0)
    assert decode(1, 3, 5, 4) == pytest.approx(12.0)
    # Two replicas in turn: (3, 4) and (5, 9).
    assert decode(1, 3, 5, 4, 9, dp=2) == pytest.approx(14.0)
    # A second for every row that is busy in a step: all tokens, however they wait.
    for slots in (1, 2, 64):
        assert decode(slots, 30, 50, 40, 10, row_s=1.0) == pytest.approx(130.0, rel=0.06)


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=24),
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from((RowFill.PADDED, RowFill.PACKED, RowFill.EXACT)),
    st.booleans(),
)
def test_more_work_takes_longer(
    responses: list[int], size: int, dp: int, fill: RowFill, train: bool
) -> None:
    """With one row more, or on slower devices, nothing is faster; all tokens are in some row."""
    run = stage(
        dp=dp,
        train=train,
        microbatch_size=size,
        minibatch_size=8,
        room_tokens=200,
        execution=dataclasses.replace(PADDED, rows=fill),
    )
    batch, longer = rows(*responses), rows(*responses, 200)
    own = dataclasses.replace(run, minibatch_size=len(responses))
    more = dataclasses.replace(run, minibatch_size=len(responses) + 1)
    call = train_s if train else score_s
    real = device(truth=load_truth())
    # Packed rows may run a tenth more tokens than the best form would: one row more may end that.
    above = GAIN if fill is RowFill.PACKED else 1 + 1e-9
    assert call(own, real, batch, even(run)) <= call(more, real, longer, even(run)) * above
    slow = 1.0 + np.arange(dp, dtype=np.float64)[:, None]
    assert call(own, real, batch, slow) >= call(own, real, batch, even(run)) * (1 - 1e-9)
    assert cut(own, batch).tokens.sum() >= (batch.prompts + batch.responses).sum()


@given(st.lists(st.integers(1, 300), min_size=2, max_size=24), st.integers(1, 8), st.integers(1, 3))
def test_decoding_keeps_its_bounds(responses: list[int], slots: int, dp: int) -> None:
    """No slot idles while rows wait: at least the mean load and the longest row, at most twice."""
    seconds = decode(slots, *responses, dp=dp)
    groups = [responses[i::dp] for i in range(dp)]
    least = max(max(sum(g) / slots, max(g, default=0)) for g in groups)
    assert least * (1 - 1e-9) <= seconds <= 2 * least * (1 + 1e-9)


def test_the_fitted_parameters() -> None:
    """What is committed is what a fit may give: shares of peaks, and a source for everything."""
    truth = load_truth()
    assert truth == Truth.from_json(truth.to_json())
    for curve in truth.kernels.values():
        for share in (curve.peak, curve.bandwidth, curve.elementwise_bandwidth):
            assert 0.3 < share <= 1.0
    assert truth.kernel("a100-80gb") == truth.kernels["a100"]
    assert truth.kernel("h100-pcie") == truth.kernels["h100"]
    assert truth.kernel("mi300x") == truth.kernels["other"]
    assert set(truth.links) == {"intra_node", "inter_node", "host"}
    assert len(truth.sources) >= 8
