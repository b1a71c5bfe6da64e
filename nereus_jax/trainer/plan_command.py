"""What `nereus plan` does. It loads no jax but for `--verify=compile`."""

import argparse
import difflib
import importlib
import json
from collections.abc import Callable
from pathlib import Path

from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.errors import ConfigError, StorageError
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
from nereus_jax.planning.search_plans import find_plans
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.report.plan_report import (
    plans_json,
    plans_text,
    raise_infeasible,
    verification_text,
)

APART = 1e-3
"""Plans that are shown differ by this share of their seconds at least."""
MINIBATCH = 256
"""Rows of an update at most, where the command does not say."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `nereus plan`."""
    add = parser.add_argument
    add("--model", required=True, help="a preset, or a directory or config.json of Hugging Face")
    add("--hardware", default="h100", help="a name such as h100, or a .json file; default h100")
    add("--devices", type=int, required=True, metavar="N", help="devices of the pool")
    add("--algorithm", default="ppo", choices=tuple(ALGORITHMS), help="default ppo")
    add("--reward-model", metavar="MODEL", help="rewards from a model; default: from a function")
    add(
        "--lengths",
        default="1024",
        metavar="FILE|TOKENS",
        help="response lengths: a histogram (CSV or JSON) or one number; default 1024",
    )
    add("--prompt-lengths", default="512", metavar="FILE|TOKENS", help="the same; default 512")
    add("--max-response", type=int, metavar="TOKENS", help="default: the longest of --lengths")
    add("--prompts", type=int, default=512, metavar="N", help="prompts of a step; default 512")
    add("--samples", type=int, default=1, metavar="N", help="responses to each; default 1")
    add("--minibatch", type=int, metavar="ROWS", help="rows of an update; default up to 256")
    add("--epochs", type=int, default=1, metavar="N", help="passes of training; default 1")
    add("--param-dtype", default="float32", choices=("float32", "bfloat16"))
    add("--compute-dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on GPUs")
    add("--calibration", type=Path, metavar="FILE", help="efficiencies that were learned")
    add("--no-park", action="store_true", help="no model-stage waits in the host's memory")
    add("--top", type=int, default=5, metavar="K", help="plans that are shown; default 5")
    add("--json", action="store_true", help="print JSON")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the best plan, for `nereus train --config.plan_file=FILE`",
    )
    add(
        "--devices-per-process",
        type=int,
        metavar="N",
        help="of the run that takes the plan file, which names devices by them; default: a node's",
    )
    add(
        "--verify",
        choices=("compile",),
        help="compile the best plan's programs and compare their memory (extra gpu-compile)",
    )


def run_plan(arguments: argparse.Namespace, model: Callable[[str], DecoderConfig]) -> int:
    """Prints the best plans.

    Args:
      arguments: as `add_plan_arguments` has them.
      model: the sizes of a model by name.

    Raises:
      ConfigError, DataError: an argument is not possible.
      InfeasiblePlanError: nothing fits.
    """
    if arguments.top < 1:
        raise ConfigError(f"--top must be at least 1, got {arguments.top}")
    each: int | None = arguments.devices_per_process
    if each is not None and each < 1:
        raise ConfigError(f"--devices-per-process must be at least 1, got {each}")
    problem = make_problem(arguments, model)
    found = find_plans(problem, arguments.top, APART)
    if arguments.json:
        print(json.dumps(plans_json(problem, found, each), indent=1))
    if found.shortage is not None:
        raise_infeasible(found.shortage)
    if not arguments.json:
        print(plans_text(problem, found), end="")
    if arguments.out:
        _write(arguments.out, json.dumps(found.plans[0].plan(each).to_json(), indent=1) + "\n")
    if arguments.verify:
        verify = importlib.import_module("nereus_jax.trainer.verify_plan")
        print("\n" + verification_text(verify.verify_step(problem, found.plans[0])), end="")
    return 0


def make_problem(
    arguments: argparse.Namespace, model: Callable[[str], DecoderConfig]
) -> PlanProblem:
    """The problem that the arguments describe."""
    hardware = load_hardware(arguments.hardware, emulated_devices=max(arguments.devices, 1))
    emulated = hardware.name == CPU_EMULATED
    models = dict.fromkeys(Role, _model(arguments.model, model))
    if arguments.reward_model:
        models[Role.REWARD] = _model(arguments.reward_model, model)
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
        num_devices=arguments.devices,
        efficiencies=_efficiencies(arguments.calibration, hardware),
        memory=MemoryModel(coefficients=COEFFICIENTS["cpu" if emulated else "gpu"]),
        param_dtype=arguments.param_dtype,
        compute_dtype=compute_dtype,
        park=not arguments.no_park,
    )


def _model(name: str, model: Callable[[str], DecoderConfig]) -> DecoderConfig:
    near = difflib.get_close_matches(name.lower(), PRESETS, 3, 0.5)
    if name not in PRESETS and not Path(name).expanduser().exists() and near:
        raise ConfigError(
            f"--model: {name!r} is not known; nearest: {', '.join(near)}; or give a directory or "
            f"config.json of Hugging Face"
        )
    return model(name)


def _workload(arguments: argparse.Namespace) -> Workload:
    responses = _lengths("--lengths", arguments.lengths)
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
        prompt_lengths=_lengths("--prompt-lengths", arguments.prompt_lengths),
        response_lengths=responses,
        max_response_tokens=arguments.max_response or responses.max,
        minibatch_size=minibatch,
        epochs=arguments.epochs,
    )


def _lengths(flag: str, text: str) -> LengthHistogram:
    if text.isdecimal():
        if not int(text):
            raise ConfigError(f"{flag} must be at least 1 token, got {text}")
        return LengthHistogram.constant(int(text))
    return LengthHistogram.from_file(Path(text).expanduser())


def _efficiencies(path: Path | None, hardware: Hardware) -> Efficiencies:
    if path is None:
        return Efficiencies.prior()
    return load_efficiencies(path.expanduser(), hardware.name, software_versions())


def _write(path: Path, text: str) -> None:
    try:
        path.expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"--out: {path} cannot be written: {error.strerror or error}; name another file"
        ) from error
