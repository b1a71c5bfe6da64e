"""What a step's model-stages reach of their devices: model FLOPs over measured seconds."""

from collections.abc import Mapping

import numpy as np

from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.roles import ModelStage, Role, Stage
from nereus_jax.rl.rollout import Rollout
from nereus_jax.trainer.job import Job

PASSES = {Stage.GENERATE: 1, Stage.SCORE: 1, Stage.TRAIN: 3}
"""Forward passes that a model-stage's work is worth; recomputation is no model work."""


def model_flops(
    model: DecoderConfig, prompts_B: np.ndarray, responses_B: np.ndarray, *, scalar: bool
) -> float:
    """FLOPs of one forward pass over rows of these lengths, padding not counted.

    Args:
      model: its sizes.
      prompts_B: prompt lengths.
      responses_B: response lengths.
      scalar: there is no vocabulary to project on.
    """
    totals_B = prompts_B.astype(np.float64) + responses_B
    tokens = totals_B.sum()
    context = (totals_B * (totals_B + 1) / 2).sum() / tokens  # a token attends to itself too
    return model.forward_flops(int(tokens), context, 0 if scalar else int(responses_B.sum()))


def tflops_per_device(
    job: Job, rollout: Rollout, stage_s: Mapping[str, float]
) -> dict[ModelStage, float]:
    """Model TFLOP/s that each device of a model-stage reached in a step.

    Args:
      job: the run.
      rollout: of the step.
      stage_s: seconds by model-stage.
    """
    found: dict[ModelStage, float] = {}
    for stage, placement in job.plan.placements.items():
        seconds = stage_s.get(str(stage), 0.0)
        if seconds <= 0.0:
            continue
        forward = model_flops(
            job.decoder(stage),
            rollout.prompt_lengths_B,
            rollout.response_lengths_B,
            scalar=stage.role in (Role.CRITIC, Role.REWARD),
        )
        epochs = job.config.algorithm.epochs if stage.stage is Stage.TRAIN else 1
        work = forward * PASSES[stage.stage] * epochs
        found[stage] = work / seconds / len(placement.devices) / 1e12
    return found
