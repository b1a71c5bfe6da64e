"""Seconds of GENERATE: the schedule of slots against a simulation, steps by hand."""

import dataclasses
import heapq
from typing import Any

import numpy as np
import pytest

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.core.roles import ACTOR_GENERATE
from nereus_jax.planning.calibration import CLASSES, Efficiencies, OperationClass
from nereus_jax.planning.candidates import Candidates
from nereus_jax.planning.cost import StageCost, stage_seconds
from nereus_jax.planning.cost_decode import POINTS, schedule
from nereus_jax.planning.cost_terms import Execution, RowFill
from nereus_jax.planning.workload import LengthHistogram, Workload

MODEL = DecoderConfig(
    num_layers=4,
    embed_dim=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    mlp_dim=512,
    vocab_size=1024,
    tie_embeddings=False,
)
GAMMA = np.random.default_rng(0).gamma(3.0, 40.0, 4000).astype(int) + 1


def decoded(lengths: np.ndarray, slots: int) -> tuple[float, float, float]:
    """Steps until the first slot stays empty, until the last row ends, and mean busy after that."""
    free = [0.0] * slots
    heapq.heapify(free)
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + float(length))
    first, last = min(free), max(free)
    busy = sum(end - first for end in free) / slots / max(last - first, 1.0)
    return first, last, busy


@pytest.mark.parametrize(("rows", "slots"), [(64, 64), (96, 64), (256, 64), (1024, 64), (300, 8)])
def test_slots_fill_and_run_empty_as_simulated(rows: int, slots: int) -> None:
    histogram = LengthHistogram.from_samples(GAMMA)
    rng = np.random.default_rng(1)
    runs = np.array([decoded(rng.choice(GAMMA, rows), slots) for _ in range(200)])
    plan = schedule(histogram, np.array([rows]), np.array([slots]), 1.0)
    total = plan.full_steps + plan.drain_steps
    assert total[0] == pytest.approx(runs[:, 1].mean(), rel=0.06)
    # Every token is decoded once: the busy slots add up to the rows' lengths.
    tokens = slots * (plan.full_steps + plan.drain_steps * plan.busy.mean(axis=0))
    assert tokens[0] == pytest.approx(rows * histogram.mean, rel=0.03)


def test_with_a_slot_for_each_row_the_survivors_are_those_of_the_histogram() -> None:
    histogram = LengthHistogram(lengths=(10, 100), weights=(0.75, 0.25))
    plan = schedule(histogram, np.array([400]), np.array([400]), 1.0)
    assert plan.full_steps[0] == pytest.approx(0.0, abs=2.0)
    assert plan.drain_steps[0] == pytest.approx(100.0, rel=0.02)
    points = (np.arange(POINTS) + 0.5) / POINTS * plan.drain_steps[0]
    np.testing.assert_allclose(plan.busy[:, 0], np.where(points < 10, 1.0, 0.25), atol=0.05)


def test_the_slowest_of_many_replicas_counts() -> None:
    histogram = LengthHistogram.from_samples(GAMMA)
    one = np.array([16])
    few, many = (schedule(histogram, one, one, dp).drain_steps[0] for dp in (1.0, 64.0))
    rng = np.random.default_rng(2)
    longest = [rng.choice(GAMMA, 16 * 64).max() for _ in range(300)]
    assert many == pytest.approx(np.mean(longest), rel=0.05)
    assert few < 0.8 * many


def machine(**changes: Any) -> Hardware:
    free = Link(bytes_per_s=1e30, latency_s=0.0)
    fields: dict[str, Any] = {
        "name": "toy",
        "devices_per_node": 8,
        "peak_flops_per_s": {"bfloat16": 1e30},
        "memory_bytes": 1 << 34,
        "memory_bytes_per_s": 1e30,
        "intra_node": free,
        "inter_node": free,
        "host": free,
    }
    return Hardware(**(fields | changes))


def work(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "prompts": 32,
        "prompt_lengths": LengthHistogram.constant(20),
        "response_lengths": LengthHistogram.constant(50),
        "max_response_tokens": 50,
        "minibatch_size": 32,
    }
    return Workload(**(fields | changes))


def cost(hardware: Hardware, workload: Workload, **layout: int) -> StageCost:
    degrees = {"dp": 1, "pp": 1, "tp": 1, "microbatch_size": 32} | layout
    one = np.ones(1, np.int64)
    arrays = {k: v * one for k, v in degrees.items()}
    ones = dict.fromkeys(CLASSES, 1.0) | {OperationClass.LAUNCH: 1e30}
    return stage_seconds(
        MODEL,
        Head.LM,
        ACTOR_GENERATE,
        workload,
        hardware,
        Efficiencies.prior().replace(ones),
        Candidates(
            **arrays,
            microbatches=one,
            accumulation=one,
            remat=np.zeros(1, np.bool_),
            zero1=np.zeros(1, np.bool_),
        ),
        execution=Execution(rows=RowFill.EXACT, static_slots=False, score_bytes=0.0),
    )


def test_a_step_reads_weights_and_cache_by_hand() -> None:
    """All rows are 50 tokens long: 50 steps, with 20 to 70 tokens in the cache of 32 rows."""
    found = cost(machine(memory_bytes_per_s=1e9), work())
    weights = 2 * (4 * MODEL.layer_params() + 1024 * 256)
    norms = 2 * 4 * 2 * 256
    cache = 32 * 45 * MODEL.kv_bytes_per_token("bfloat16")
    steps_s = 50 * (weights - norms + cache) / 1e9
    prefill_s = 2 * (4 * MODEL.layer_params() - 4 * 2 * 256) / 1e9
    seconds = found.seconds[OperationClass.DECODE_MEMORY][0]
    assert seconds == pytest.approx(steps_s + prefill_s, rel=0.02)


def test_a_step_multiplies_by_hand() -> None:
    found = cost(machine(peak_flops_per_s={"bfloat16": 1e12}), work())
    layers = 4 * (MODEL.layer_params() - 2 * 256)
    decode = 2 * 32 * 50 * (layers + 1024 * 256)
    assert found.seconds[OperationClass.GEMM][0] == pytest.approx(
        (decode + 2 * 32 * 20 * layers) / 1e12, rel=0.02
    )


def test_a_batch_that_shrinks_multiplies_less_unless_its_slots_are_static() -> None:
    ragged = work(response_lengths=LengthHistogram(lengths=(5, 50), weights=(0.9, 0.1)))
    hardware = machine(peak_flops_per_s={"bfloat16": 1e12})
    all_long, some = (
        float(cost(hardware, w).seconds[OperationClass.GEMM][0]) for w in (work(), ragged)
    )
    assert some < 0.5 * all_long


def test_rows_that_wait_take_free_slots() -> None:
    """Half the slots: twice the steps, each with half of the rows."""
    hardware = machine(memory_bytes_per_s=1e9)
    workload = work(prompts=320)
    many, few = (
        cost(hardware, workload, microbatch_size=n).seconds[OperationClass.DECODE_MEMORY][0]
        for n in (64, 32)
    )
    weights_s = 2 * (4 * MODEL.layer_params() + 1024 * 256) * 250 / 1e9
    assert few - many == pytest.approx(weights_s, rel=0.1)


def test_pipeline_groups_follow_each_other() -> None:
    """A rank reads its half of the weights for both groups, and its half of each group's cache."""
    found = cost(machine(memory_bytes_per_s=1e9), work(), pp=2)
    layers = 2 * (4 * MODEL.layer_params() - 4 * 2 * 256)
    cache = 32 * 45 * MODEL.kv_bytes_per_token("bfloat16")
    steps_s = 50 * (layers + 2 * 1024 * 256 + cache / 2) / 1e9
    prefill_s = (2 + 1) * layers / 2 / 1e9  # two groups through two ranks
    seconds = found.seconds[OperationClass.DECODE_MEMORY][0]
    assert seconds == pytest.approx(steps_s + prefill_s, rel=0.02)


def test_static_slots_read_their_cache_to_the_end() -> None:
    ragged = work(response_lengths=LengthHistogram(lengths=(5, 50), weights=(0.9, 0.1)))
    hardware = machine(memory_bytes_per_s=1e9)
    base = Execution(rows=RowFill.EXACT, score_bytes=0.0)
    seconds = []
    for static in (False, True):
        one = np.ones(1, np.int64)
        off = np.zeros(1, np.bool_)
        found = stage_seconds(
            MODEL,
            Head.LM,
            ACTOR_GENERATE,
            ragged,
            hardware,
            Efficiencies.prior(),
            Candidates(
                dp=one,
                pp=one,
                tp=one,
                microbatch_size=32 * one,
                microbatches=one,
                accumulation=one,
                remat=off,
                zero1=off,
            ),
            execution=dataclasses.replace(base, static_slots=static),
        )
        seconds.append(found.seconds[OperationClass.DECODE_MEMORY][0])
    assert seconds[0] < seconds[1]
