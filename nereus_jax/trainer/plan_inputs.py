"""The job that `nereus plan` plans for: of its own arguments, or of a run's configuration."""

import argparse
import dataclasses
import difflib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nereus_jax.config import RunConfig
from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.layout import divisors
from nereus_jax.core.presets import PRESETS
from nereus_jax.core.roles import Role
from nereus_jax.core.workflow import ALGORITHMS, policy_gradient
from nereus_jax.planning.calibration import Efficiencies
from nereus_jax.planning.calibration_record import load_efficiencies, software_versions
from nereus_jax.planning.hardware import CPU_EMULATED, load_hardware
from nereus_jax.planning.memory import MemoryModel
from nereus_jax.planning.memory_coefficients import COEFFICIENTS
from nereus_jax.planning.run_problem import (
    check_fits,
    most_prefill_rows,
    random_model,
    run_problem,
    run_workload,
)
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload

MINIBATCH = 256
"""Rows of an update at most, where the command does not say."""
HARDWARE = "h100"
"""Where neither the command nor the configuration says."""

STATED: Mapping[str, tuple[Any, str]] = {
    "model": (None, "model.preset or model.path"),
    "algorithm": ("ppo", "algorithm.name"),
    "reward_model": (None, "reward.model_path"),
    "max_response": (None, "rollout.max_response_length"),
    "prompts": (512, "rollout.batch_size"),
    "samples": (1, "rollout.samples_per_prompt"),
    "minibatch": (None, "algorithm.minibatch_size"),
    "epochs": (1, "algorithm.epochs"),
    "param_dtype": ("float32", "model.param_dtype"),
    "compute_dtype": (None, "model.compute_dtype"),
    "no_park": (False, "control.park"),
}
"""Arguments that a configuration has keys for: their defaults without one, and those keys."""

ReadModel = Callable[[str], DecoderConfig]


def make_problem(
    arguments: argparse.Namespace, config: RunConfig | None, model: ReadModel
) -> PlanProblem:
    """The problem that the arguments describe.

    Args:
      arguments: of the command.
      config: of the run that is planned for, where the arguments name one.
      model: the sizes of a model by the name of a preset, or by its path.

    Raises:
      ConfigError, DataError: an argument is not possible.
    """
    if config is not None:
        return _configured(arguments, config, model)
    if not arguments.model:
        raise ConfigError(
            "--model is missing; name a preset or a path, or a run's configuration with --config"
        )
    stated = argparse.Namespace(**vars(arguments))
    for name, (default, _) in STATED.items():
        if getattr(stated, name) is None:
            setattr(stated, name, default)
    return _stated(stated, model)


def _configured(arguments: argparse.Namespace, config: RunConfig, model: ReadModel) -> PlanProblem:
    for name, (_, key) in STATED.items():
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag}: the configuration of --config says that; leave it out, or set "
                f"--config.{key}"
            )
    devices = _devices(arguments, config.emulated_devices)
    name = arguments.hardware or config.transition.hardware
    hardware = _hardware(name or (CPU_EMULATED if config.emulated_devices else HARDWARE), devices)
    if limit := config.device_memory_bytes:
        if hardware.name != CPU_EMULATED:  # there it says what GPUs would have
            limit = min(limit, hardware.memory_bytes)
        hardware = dataclasses.replace(hardware, memory_bytes=limit)
    vocab_size = _vocab_size(config)
    models = dict.fromkeys(Role, _sizes(config, model, vocab_size))
    check_fits(config, vocab_size, models[Role.ACTOR], "the model")
    if config.reward.model_path:
        models[Role.REWARD] = model(_path(config.reward.model_path))
        check_fits(config, vocab_size, models[Role.REWARD], "the reward model")
    prompts = _lengths("--prompt-lengths", arguments.prompt_lengths, config.data.max_prompt_length)
    responses = _lengths("--lengths", arguments.lengths, config.rollout.max_response_length)
    _check_longest("--prompt-lengths", prompts, "data.max_prompt_length", config)
    _check_longest("--lengths", responses, "rollout.max_response_length", config)
    learned = config.calibration.file if config.calibration.mode != "off" else ""
    return run_problem(
        config,
        models,
        run_workload(config, prompts, responses),
        hardware,
        devices,
        _efficiencies(arguments.calibration or learned, hardware),
        most_prefill_rows(config),
    )


def _vocab_size(config: RunConfig) -> int:
    """Of the tokenizer; 0 where its files, or the packages that read them, are neither there nor
    needed: a recipe is planned for before they are."""
    tokenizers = importlib.import_module("nereus_jax.data.tokenizers")
    sizes = config.model
    if config.tokenizer.kind == "huggingface" and (sizes.path or sizes.preset or sizes.vocab_size):
        where = Path(config.tokenizer.path or sizes.path).expanduser()
        if not (where / "tokenizer.json").is_file() or not tokenizers.is_installed():
            return 0
    return tokenizers.make_tokenizer(config).vocab_size


def _sizes(config: RunConfig, model: ReadModel, vocab_size: int) -> DecoderConfig:
    if config.model.path:
        return model(_path(config.model.path))
    if config.model.preset:
        return model(config.model.preset)
    return random_model(config, vocab_size)


def _path(text: str) -> str:
    """A path that no preset is called like."""
    return str(Path(text).expanduser().resolve())


def _check_longest(flag: str, lengths: LengthHistogram, key: str, config: RunConfig) -> None:
    section, _, name = key.partition(".")
    most = getattr(getattr(config, section), name)
    if lengths.max > most:
        raise ConfigError(
            f"{flag}: up to {lengths.max} tokens, but {key} of the configuration is {most}; raise "
            f"it with --config.{key}={lengths.max}"
        )


def _stated(arguments: argparse.Namespace, model: ReadModel) -> PlanProblem:
    devices = _devices(arguments, 0)
    hardware = _hardware(arguments.hardware or HARDWARE, devices)
    emulated = hardware.name == CPU_EMULATED
    models = dict.fromkeys(Role, _named(arguments.model, model))
    if arguments.reward_model:
        models[Role.REWARD] = _named(arguments.reward_model, model)
    traits = ALGORITHMS[arguments.algorithm]
    compute_dtype = arguments.compute_dtype or ("float32" if emulated else "bfloat16")
    workflow = policy_gradient(
        arguments.algorithm,
        reward_model=bool(arguments.reward_model),
        reference=True,
        recompute_old_logprobs=compute_dtype != "float32",
    )
    if traits.grouped and arguments.samples < 2:
        raise ConfigError(
            f"--samples must be at least 2 for {arguments.algorithm}, whose baseline is the other "
            f"responses to a prompt; got {arguments.samples}"
        )
    return PlanProblem(
        workflow=workflow,
        models=models,
        workload=_workload(arguments),
        hardware=hardware,
        num_devices=devices,
        efficiencies=_efficiencies(arguments.calibration, hardware),
        memory=MemoryModel(coefficients=COEFFICIENTS["cpu" if emulated else "gpu"]),
        param_dtype=arguments.param_dtype,
        compute_dtype=compute_dtype,
        park=not arguments.no_park,
    )


def _devices(arguments: argparse.Namespace, emulated: int) -> int:
    found: int = emulated if arguments.devices is None else arguments.devices
    if not found and arguments.devices is None:
        raise ConfigError("--devices is missing; say how many devices the job may have")
    return found


def _hardware(name: str, devices: int) -> Hardware:
    return load_hardware(name, emulated_devices=max(devices, 1))


def _named(name: str, model: ReadModel) -> DecoderConfig:
    near = difflib.get_close_matches(name.lower(), PRESETS, 3, 0.5)
    if name not in PRESETS and not Path(name).expanduser().exists() and near:
        raise ConfigError(
            f"--model: {name!r} is not known; nearest: {', '.join(near)}; or give a directory or "
            f"config.json of Hugging Face"
        )
    return model(name)


def _workload(arguments: argparse.Namespace) -> Workload:
    responses = _lengths("--lengths", arguments.lengths, 1024)
    rows = arguments.prompts * arguments.samples
    minibatch = arguments.minibatch
    if minibatch is None:
        minibatch = max((d for d in divisors(max(rows, 1)) if d <= MINIBATCH), default=1)
    if rows >= 1 and minibatch >= 1 and rows % minibatch:
        raise ConfigError(
            f"--minibatch must divide the {rows} rows of a step, got {minibatch}; nearest: "
            f"{max(d for d in divisors(rows) if d <= max(minibatch, 1))}"
        )
    return Workload(
        prompts=arguments.prompts,
        samples_per_prompt=arguments.samples,
        prompt_lengths=_lengths("--prompt-lengths", arguments.prompt_lengths, 512),
        response_lengths=responses,
        max_response_tokens=arguments.max_response or responses.max,
        minibatch_size=minibatch,
        epochs=arguments.epochs,
    )


def _lengths(flag: str, text: str | None, default: int) -> LengthHistogram:
    if text is None:
        return LengthHistogram.constant(default)
    if text.isdecimal():
        if not int(text):
            raise ConfigError(f"{flag} must be at least 1 token, got {text}")
        return LengthHistogram.constant(int(text))
    return LengthHistogram.from_file(Path(text).expanduser())


def _efficiencies(path: str | Path | None, hardware: Hardware) -> Efficiencies:
    if not path:
        return Efficiencies.prior()
    return load_efficiencies(Path(path).expanduser(), hardware.name, software_versions())
