"""A run as what planning takes: its model-stages, models, lengths and devices."""

import numpy as np

from nereus_jax.config import RunConfig
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.roles import Role
from nereus_jax.planning.calibration import Efficiencies
from nereus_jax.planning.hardware import CPU_EMULATED
from nereus_jax.planning.memory import MemoryModel
from nereus_jax.planning.memory_coefficients import COEFFICIENTS
from nereus_jax.planning.memory_terms import EngineOptions
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
    config, backend = job.config, "cpu" if hardware.name == CPU_EMULATED else "gpu"
    options = EngineOptions(
        token_chunk=config.score.token_chunk,
        prefill_rows=job.generate.prefill_rows,
        kv_cache_tokens=config.rollout.kv_cache_tokens,
        kv_page_tokens=config.rollout.kv_page_tokens,
        unrolled_generate=config.rollout.unroll_layers,
        unrolled_train=config.train.unroll_layers == 0,
    )
    models = {Role.ACTOR: job.inputs.model, Role.CRITIC: job.inputs.model}
    models[Role.REFERENCE] = job.inputs.model
    if job.inputs.reward_model is not None:
        models[Role.REWARD] = job.inputs.reward_model
    return PlanProblem(
        workflow=job.workflow,
        models=models,
        workload=longest_workload(config) if workload is None else workload,
        hardware=hardware,
        num_devices=len(job.world.pool),
        efficiencies=efficiencies,
        memory=MemoryModel(coefficients=COEFFICIENTS[backend], options=options),
        param_dtype=config.model.param_dtype,
        compute_dtype=config.model.compute_dtype,
        park=False,
    )


def longest_workload(config: RunConfig) -> Workload:
    """A step whose prompts and responses are all as long as they can be."""
    return _workload(
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
    return _workload(
        config,
        LengthHistogram.from_samples(prompt_lengths_B.tolist()),
        LengthHistogram.from_samples(response_lengths_B.tolist()),
    )


def _workload(config: RunConfig, prompts: LengthHistogram, responses: LengthHistogram) -> Workload:
    return Workload(
        prompts=config.rollout.batch_size,
        samples_per_prompt=config.rollout.samples_per_prompt,
        prompt_lengths=prompts,
        response_lengths=responses,
        max_response_tokens=config.rollout.max_response_length,
        minibatch_size=config.algorithm.minibatch_size,
        epochs=config.algorithm.epochs,
        max_prompt_tokens=config.data.max_prompt_length,
    )
