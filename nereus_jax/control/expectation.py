"""The work of the steps to come, as far as past steps tell."""

import dataclasses
import math
from collections.abc import Sequence

from nereus_jax.control.forecast import Forecast, make_forecast
from nereus_jax.control.settings import ControllerSettings
from nereus_jax.control.state import ControllerState
from nereus_jax.core.events import LengthSummary, StepRecord
from nereus_jax.planning.workload import LengthHistogram, Workload


def forecast_of(settings: ControllerSettings, state: ControllerState) -> Forecast | None:
    """Lengths as they are expected; None before the first step."""
    if not state.lengths.mean:
        return None
    return make_forecast(
        state.lengths.mean,
        state.lengths.longest,
        settings.workload.max_response_tokens,
        settings.forecast,
    )


def expected_workload(
    settings: ControllerSettings, state: ControllerState, forecast: Forecast | None
) -> Workload:
    """The work that a new plan is made for: lengths as in the newest steps, moved to the mean that
    is expected, and memory for the longest response of the steps until the next plan."""
    template = settings.workload
    if forecast is None:
        return template
    cut = template.max_response_tokens
    pooled = pooled_lengths(state.lengths.responses, 1.0, cut)
    expected = forecast.mean_tokens(settings.look_ahead_steps)
    responses = pooled_lengths(state.lengths.responses, expected / pooled.mean, cut)
    bound = math.ceil(forecast.tail_bound(settings.plan_ahead_steps))
    return dataclasses.replace(
        template,
        response_lengths=responses,
        prompt_lengths=pooled_lengths(state.lengths.prompts, 1.0),
        max_response_tokens=min(max(bound, responses.max), cut),
    )


def with_length(workload: Workload, tokens: int) -> Workload:
    """The work of steps whose responses all have one length, with room for no more."""
    lengths = LengthHistogram.constant(tokens)
    return dataclasses.replace(workload, response_lengths=lengths, max_response_tokens=tokens)


def seen_workload(settings: ControllerSettings, record: StepRecord) -> Workload:
    """The work of a step that has ended."""
    cut = settings.workload.max_response_tokens
    return dataclasses.replace(
        settings.workload,
        response_lengths=pooled_lengths((record.responses,), 1.0, cut),
        prompt_lengths=pooled_lengths((record.prompts,), 1.0),
    )


def pooled_lengths(
    summaries: Sequence[LengthSummary], scale: float, cut_tokens: float = math.inf
) -> LengthHistogram:
    """Several summaries as one histogram.

    Args:
      summaries: at least one.
      scale: that lengths are multiplied with.
      cut_tokens: longer ones are cut.
    """
    shares: dict[int, float] = {}
    for summary in summaries:
        for length, weight in zip(summary.lengths, summary.weights, strict=True):
            tokens = int(min(max(round(length * scale), 1), cut_tokens))
            shares[tokens] = shares.get(tokens, 0.0) + weight
    total = sum(shares.values())
    lengths = sorted(shares)
    return LengthHistogram(
        lengths=tuple(lengths), weights=tuple(shares[n] / total for n in lengths)
    )
