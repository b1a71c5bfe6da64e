"""Spans: their arithmetic and their invariants."""

import dataclasses

import pytest

from nereus_jax.core.timeline import Span

SPAN = Span(
    name="actor-GENERATE", kind="stage", start_s=10.0, end_s=12.5, devices=("cpu:0",), step=3
)


def test_duration() -> None:
    assert SPAN.duration_s == 2.5


def test_an_instant_is_a_span() -> None:
    assert dataclasses.replace(SPAN, end_s=10.0).duration_s == 0.0


@pytest.mark.parametrize("change", [{"end_s": 9.0}, {"end_s": float("nan")}, {"bytes": -1}])
def test_impossible_spans_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match="actor-GENERATE"):
        dataclasses.replace(SPAN, **change)
