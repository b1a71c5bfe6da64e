"""A run's configuration as what planning takes; without devices, files of weights, or jax."""

from collections.abc import Mapping

from nereus_jax.config import RunConfig
from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.roles import Role
from nereus_jax.core.workflow import Workflow, policy_gradient
from nereus_jax.planning.calibration import Efficiencies
from nereus_jax.planning.hardware import CPU_EMULATED
from nereus_jax.planning.memory import MemoryModel
from nereus_jax.planning.memory_coefficients import COEFFICIENTS
from nereus_jax.planning.memory_terms import EngineOptions
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload


def old_logprobs_mode(config: RunConfig) -> str:
    """Where the old log-probabilities come from, `auto` resolved by the compute dtype."""
    mode = config.algorithm.old_logprobs
    if mode != "auto":
        return mode
    return "rollout" if config.model.compute_dtype == "float32" else "recompute"


def make_workflow(config: RunConfig) -> Workflow:
    """The workflow of the configured algorithm."""
    return policy_gradient(
        config.algorithm.name,
        reward_model=bool(config.reward.model_path),
        reference=config.algorithm.kl.place != "none",
        recompute_old_logprobs=old_logprobs_mode(config) != "rollout",
    )


def random_model(config: RunConfig, vocab_size: int) -> DecoderConfig:
    """The sizes of a model that the configuration spells out.

    Args:
      config: without a path and without a preset.
      vocab_size: where the configuration has none: of the tokenizer.
    """
    sizes = config.model
    return DecoderConfig(
        num_layers=sizes.num_layers,
        embed_dim=sizes.embed_dim,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        mlp_dim=sizes.mlp_dim,
        vocab_size=sizes.vocab_size or vocab_size,
        rope_theta=sizes.rope_theta,
        norm_eps=sizes.norm_eps,
        tie_embeddings=sizes.tie_embeddings,
        max_positions=sizes.max_positions,
    )


def check_fits(config: RunConfig, vocab_size: int, model: DecoderConfig, subject: str) -> None:
    """Whether a model has the tokens and the positions that a run needs.

    Args:
      config: of the run.
      vocab_size: of its tokenizer.
      model: the sizes.
      subject: the model, in words.

    Raises:
      ConfigError: it has not.
    """
    if vocab_size > model.vocab_size:
        remedy = f"use the tokenizer that belongs to {subject}"
        if config.model.vocab_size:  # only a random model has a size to change
            remedy += ", or set model.vocab_size = 0"
        raise ConfigError(
            f"the tokenizer has {vocab_size} tokens, but the vocabulary of {subject} "
            f"only {model.vocab_size}; {remedy}"
        )
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if longest > model.max_positions:
        raise ConfigError(
            f"prompt and response take up to {longest} tokens, but {subject} has "
            f"{model.max_positions} positions; lower data.max_prompt_length or "
            f"rollout.max_response_length"
        )


def most_prefill_rows(config: RunConfig) -> int:
    """Prompts of a replica that are in the layers at a time, at most."""
    return config.score.microbatch_size or config.train.microbatch_size


def run_workload(
    config: RunConfig, prompts: LengthHistogram, responses: LengthHistogram
) -> Workload:
    """A step of a run.

    Args:
      config: of the run.
      prompts: lengths of prompts, in tokens.
      responses: of responses.
    """
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


def run_problem(
    config: RunConfig,
    models: Mapping[Role, DecoderConfig],
    workload: Workload,
    hardware: Hardware,
    num_devices: int,
    efficiencies: Efficiencies,
    prefill_rows: int,
) -> PlanProblem:
    """What there is to plan for a run.

    Args:
      config: of the run.
      models: their sizes; the reward model's where there is one.
      workload: of a step.
      hardware: of its devices.
      num_devices: how many.
      efficiencies: what is reached of the hardware's peaks.
      prefill_rows: prompts of a replica that are in the layers at a time.
    """
    backend = "cpu" if hardware.name == CPU_EMULATED else "gpu"
    options = EngineOptions(
        token_chunk=config.score.token_chunk,
        prefill_rows=prefill_rows,
        kv_cache_tokens=config.rollout.kv_cache_tokens,
        kv_page_tokens=config.rollout.kv_page_tokens,
        unrolled_generate=config.rollout.unroll_layers,
        unrolled_train=config.train.unroll_layers == 0,
    )
    return PlanProblem(
        workflow=make_workflow(config),
        models=models,
        workload=workload,
        hardware=hardware,
        num_devices=num_devices,
        efficiencies=efficiencies,
        memory=MemoryModel(coefficients=COEFFICIENTS[backend], options=options),
        param_dtype=config.model.param_dtype,
        compute_dtype=config.model.compute_dtype,
        park=config.control.park,
    )
