"""Events and decisions: what is written is what is read; a summary keeps what it must."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.events import (
    BINS,
    Decision,
    DevicesJoined,
    DevicesLost,
    Event,
    Halt,
    Keep,
    LengthSummary,
    OutOfMemory,
    Revocation,
    StepFinished,
    StepRecord,
    Transition,
    TransitionEnded,
    decision_from_json,
    decision_to_json,
    event_from_json,
    event_to_json,
)
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN

PLAN = ExecutionPlan(
    plan=Plan(
        placements={ACTOR_TRAIN: Placement(layout=ParallelLayout(), devices=(DeviceId(0, 3),))}
    ),
    choices={ACTOR_TRAIN: StageChoice(microbatch_size=2, remat=True)},
)
RECORD = StepRecord(
    step=7,
    time_s=91.5,
    step_s=3.25,
    stage_s={ACTOR_TRAIN: 1.5, ACTOR_GENERATE: 1.25},
    responses=LengthSummary.of([3, 9, 12]),
    prompts=LengthSummary.of([5]),
    peak_memory_bytes=1 << 33,
    room_tokens=64,
    tokens=29,
    first_after_compile=frozenset({ACTOR_TRAIN}),
)
EVENTS: tuple[Event, ...] = (
    StepFinished(record=RECORD),
    DevicesLost(time_s=1.0, devices=(DeviceId(0, 1), DeviceId(2, 0))),
    DevicesJoined(time_s=2.0, devices=(DeviceId(0, 1),)),
    Revocation(time_s=3.0, devices=(DeviceId(1, 1),), deadline_s=120.0),
    OutOfMemory(time_s=3.5, room_tokens=640),
    TransitionEnded(time_s=4.0, plan=PLAN, seconds=2.5, compile_s=0.25, error="broke off"),
)
DECISIONS: tuple[Decision, ...] = (
    Keep(),
    Keep(record={"step": 1, "verdict": "reject"}),
    Transition(target=PLAN, urgent=True, by_checkpoint=True, deadline_s=9.0, record={"step": 2}),
    Halt(reason="no device is left", checkpoint=False),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_events_survive_json(event):
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda d: type(d).__name__)
def test_decisions_survive_json(decision):
    assert decision_from_json(json.loads(json.dumps(decision_to_json(decision)))) == decision


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match="'Earthquake' is not known; known are StepFinished"):
        event_from_json({"kind": "Earthquake"})
    with pytest.raises(ValueError, match="'Shrug' is not known"):
        decision_from_json({"kind": "Shrug", "record": None})


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=400))
def test_a_summary_keeps_the_mean_the_longest_and_the_shape(samples):
    summary = LengthSummary.of(samples)
    assert summary.mean == pytest.approx(sum(samples) / len(samples))
    assert summary.longest == max(samples) == summary.lengths[-1]
    assert sum(n >= summary.p95 for n in samples) >= 0.05 * len(samples)
    assert sum(n <= summary.p95 for n in samples) >= 0.95 * len(samples)
    assert len(summary.lengths) <= BINS + 1 and list(summary.lengths) == sorted(summary.lengths)
    assert sum(summary.weights) == pytest.approx(1)
    # Each part is told by its rounded mean.
    kept = sum(n * w for n, w in zip(summary.lengths, summary.weights, strict=True))
    assert kept == pytest.approx(summary.mean, abs=0.51)


def test_a_summary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        LengthSummary.of([])
    with pytest.raises(ValueError, match="must be positive"):
        LengthSummary(mean=0.0, p95=1.0, longest=1, lengths=(1,), weights=(1.0,))
