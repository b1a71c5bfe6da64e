"""A run as what planning takes: its model-stages, models, lengths and devices."""

import numpy as np

from nereus_jax.config import RunConfig
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.roles import Role
from nereus_jax.planning.calibration import Efficiencies
from nereus_jax.planning.run_problem import run_problem, run_workload
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.trainer.job import Job


def plan_problem(
    job: Job, hardware: Hardware, efficiencies: Efficiencies, workload: Workload | None = None
) -> PlanProblem:
    """What there is to plan for a run.

    Args:
      job: the run, under any plan.
      hardware: of its devices.
      efficiencies: what is reached of the hardware's peaks.
      workload: of a step; None: all prompts and responses as long as they can be.
    """
    config = job.config
    models = {Role.ACTOR: job.inputs.model, Role.CRITIC: job.inputs.model}
    models[Role.REFERENCE] = job.inputs.model
    if job.inputs.reward_model is not None:
        models[Role.REWARD] = job.inputs.reward_model
    return run_problem(
        config,
        models,
        longest_workload(config) if workload is None else workload,
        hardware,
        len(job.world.pool),
        efficiencies,
        job.generate.prefill_rows,
    )


def longest_workload(config: RunConfig) -> Workload:
    """A step whose prompts and responses are all as long as they can be."""
    return run_workload(
        config,
        LengthHistogram.constant(config.data.max_prompt_length),
        LengthHistogram.constant(config.rollout.max_response_length),
    )


def measured_workload(
    config: RunConfig, prompt_lengths_B: np.ndarray, response_lengths_B: np.ndarray
) -> Workload:
    """A step with these lengths.

    Args:
      config: of the run.
      prompt_lengths_B: tokens of each prompt.
      response_lengths_B: tokens of each response.
    """
    return run_workload(
        config,
        LengthHistogram.from_samples(prompt_lengths_B.tolist()),
        LengthHistogram.from_samples(response_lengths_B.tolist()),
    )
