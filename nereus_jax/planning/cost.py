# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""The cost model: seconds of a model-stage for many candidates at once, and of a whole step.

Shapes and layouts give FLOPs and bytes, the hardware gives peaks, and one efficiency for each
operation class says what is reached of them (`calibration`). All seconds here are modelled.
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.calibration import Efficiencies, OperationClass
from nereus_jax.planning.candidates import Candidates
from nereus_jax.planning.cost_decode import Decoding
from nereus_jax.planning.cost_passes import LayerPasses, Passes
from nereus_jax.planning.cost_terms import (
    Execution,
    Floats,
    ModelSizes,
    Prices,
    Spent,
    Value,
    scaled,
    total_s,
)
from nereus_jax.planning.workload import Workload

OUR_ENGINES = Execution()
"""How this project's engines run."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StageCost:
    """Modelled seconds of one step of a model-stage, for candidates [C].

    Attributes:
      seconds: [C] by operation class; what is hidden behind other work is not in it, so that the
        classes add up to the whole.
      bubble_s: [C] of these seconds, what pipeline ranks wait for each other.
    """

    seconds: Mapping[OperationClass, Floats]
    bubble_s: Floats

    @functools.cached_property
    def total_s(self) -> Floats:
        """[C] seconds of the stage."""
        return np.asarray(total_s(self.seconds), np.float64)

    def at(self, index: int) -> dict[OperationClass, float]:
        """Seconds of one candidate by class, the largest first."""
        values = {c: float(s[index]) for c, s in self.seconds.items() if s[index] > 0}
        return dict(sorted(values.items(), key=lambda item: -item[1]))

    def dominant(self, index: int) -> str:
        """What takes the most of one candidate's seconds: an operation class, or the bubble."""
        bubble_s, whole_s = float(self.bubble_s[index]), float(self.total_s[index])
        left = 1.0 - bubble_s / whole_s
        operation, seconds = next(iter(self.at(index).items()))
        return "pipeline bubble" if bubble_s > seconds * left else operation.value


def stage_seconds(
    model: DecoderConfig | ModelSizes,
    head: Head,
    model_stage: ModelStage,
    workload: Workload,
    hardware: Hardware,
    efficiencies: Efficiencies,
    candidates: Candidates,
    *,
    dtype: str = "bfloat16",
    execution: Execution = OUR_ENGINES,
    layers: LayerPasses | None = None,
) -> StageCost:
    """Modelled seconds of a model-stage in one step, all updates of TRAIN included.

    Args:
      model: a decoder, or the sizes of another model.
      head: what it ends in; ignored for `ModelSizes`.
      model_stage: what it does.
      workload: of a step.
      hardware: of the devices.
      efficiencies: what is reached of the peaks.
      candidates: layouts and microbatches.
      dtype: of activations and of weights in products.
      execution: how the engine runs.
      layers: of SCORE or TRAIN, where it has been priced for the same model with another head.

    Raises:
      ConfigError: the hardware has no peak for the dtype.
    """
    sizes = model if isinstance(model, ModelSizes) else ModelSizes.of(model, head)
    prices = Prices(hardware=hardware, efficiencies=efficiencies, dtype=dtype)
    if model_stage.stage is Stage.GENERATE:
        decoding = Decoding(
            sizes=sizes,
            workload=workload,
            candidates=candidates,
            prices=prices,
            execution=execution,
        )
        return _cost(decoding.generate(), 0.0, len(candidates))
    train = model_stage.stage is Stage.TRAIN
    if layers is None:
        layers = LayerPasses(
            sizes=sizes,
            workload=workload,
            candidates=candidates,
            prices=prices,
            execution=execution,
            train=train,
        )
    passes = Passes(sizes=sizes, layers=layers)
    if not train:
        spent, bubble_s = passes.batch()
        return _cost(spent, bubble_s, len(candidates))
    spent, bubble_s = passes.update()
    updates = float(workload.updates)
    return _cost(scaled(spent, updates), bubble_s * updates, len(candidates))


def _cost(spent: Spent, bubble_s: Value, count: int) -> StageCost:
    return StageCost(
        seconds={operation: _by_candidate(seconds, count) for operation, seconds in spent.items()},
        bubble_s=_by_candidate(bubble_s, count),
    )


def _by_candidate(value: Value, count: int) -> Floats:
    """[C] of a value that may be the same for all."""
    array = np.asarray(value, np.float64)
    return array if array.shape == (count,) else np.full(count, array)
