# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Seconds of a whole step: the critical path of a workflow over the devices of its model-stages.

The calls of a wave do not depend on each other. Those on disjoint devices run at the same time,
those that share a device in turn, in the order in which they are dispatched; the next wave starts
when all have ended, because the host needs their results. Weight edges come before the first wave.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.roles import ModelStage
from nereus_jax.core.timeline import Span
from nereus_jax.core.workflow import StageCall, WeightEdge, Workflow
from nereus_jax.planning.calibration import OperationClass
from nereus_jax.planning.cost_terms import Prices, Spent, Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """Modelled seconds of a step.

    Attributes:
      step_s: from the first weight edge to the last stage's end.
      waves_s: of each wave of the workflow.
      edges_s: of the weight edges, which run one after the other.
      spans: when each call runs, from 0 on; their devices are not named.
    """

    step_s: float
    waves_s: tuple[float, ...]
    edges_s: float
    spans: tuple[Span, ...]


def step_seconds(
    workflow: Workflow,
    stage_s: Mapping[ModelStage, float],
    devices: Mapping[ModelStage, Iterable[int]],
    edges_s: Mapping[WeightEdge, float] | None = None,
    *,
    step: int = 0,
) -> StepCost:
    """The critical path of a step.

    Args:
      workflow: what depends on what.
      stage_s: seconds of each model-stage.
      devices: indices of the devices of each.
      edges_s: seconds of each weight edge; one that is missing takes none.
      step: for the spans.
    """
    moved = [(edges_s or {}).get(edge, 0.0) for edge in workflow.weight_edges]
    clock = sum(moved)
    spans: list[Span] = []
    waves_s: list[float] = []
    for wave in workflow.waves():
        free_at: dict[int, float] = {}
        end = clock
        for call in wave:
            if not isinstance(call, StageCall):
                continue
            used = list(devices[call.model_stage])
            start = max((free_at.get(d, clock) for d in used), default=clock)
            stop = start + stage_s[call.model_stage]
            free_at.update(dict.fromkeys(used, stop))
            spans.append(_span(call.name, start, stop, step))
            end = max(end, stop)
        waves_s.append(end - clock)
        clock = end
    return StepCost(step_s=clock, waves_s=tuple(waves_s), edges_s=sum(moved), spans=tuple(spans))


def _span(name: str, start_s: float, end_s: float, step: int) -> Span:
    return Span(name=name, kind="model_stage", start_s=start_s, end_s=end_s, devices=(), step=step)


def edge_seconds(
    num_bytes: Value,
    prices: Prices,
    parts: Value,
    *,
    same_node: NDArray[np.bool_] | bool,
    resident: Value = 0.0,
) -> Spent:
    """A weight edge: every target device receives what it lacks of its part.

    Args:
      num_bytes: of the model, in the dtype that is sent.
      prices: of the hardware.
      parts: [C] devices that a replica of the target is split over.
      same_node: [C] whether sender and receiver are in one node.
      resident: [C] share of its part that a target device has already, 0 to 1.
    """
    each = num_bytes / parts * (1.0 - resident)
    hardware, efficiencies = prices.hardware, prices.efficiencies
    intra, inter = hardware.intra_node, hardware.inter_node
    intra_s = (intra.latency_s + each / intra.bytes_per_s) / efficiencies[OperationClass.P2P_INTRA]
    inter_s = (inter.latency_s + each / inter.bytes_per_s) / efficiencies[OperationClass.P2P_INTER]
    moves, near = np.asarray(each > 0), np.asarray(same_node)
    return {
        OperationClass.P2P_INTRA: np.where(moves & near, intra_s, 0.0),
        OperationClass.P2P_INTER: np.where(moves & ~near, inter_s, 0.0),
    }
