"""What `nereus plan` does. It loads no jax but for `--verify=compile`."""

import argparse
import importlib
import json
from pathlib import Path

from nereus_jax.config import RunConfig
from nereus_jax.core.errors import ConfigError, StorageError
from nereus_jax.core.workflow import ALGORITHMS
from nereus_jax.planning.search_plans import find_plans
from nereus_jax.report.plan_report import (
    plans_json,
    plans_text,
    raise_infeasible,
    verification_text,
)
from nereus_jax.trainer.plan_inputs import HARDWARE, MINIBATCH, ReadModel, make_problem

APART = 1e-3
"""Plans that are shown differ by this share of their seconds at least."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `nereus plan`."""
    add = parser.add_argument
    add("--model", help="a preset, or a directory or config.json of Hugging Face")
    add(
        "--config",
        metavar="FILE[:ARG]",
        help=(
            "a run's configuration, in the place of --model and all that it says of algorithm, "
            "batch and dtypes; keys can be set as in `nereus train`: --config.KEY=VALUE"
        ),
    )
    add(
        "--hardware",
        help=f"a name such as h100, or a .json file; default: the configuration's, or {HARDWARE}",
    )
    add(
        "--devices",
        type=int,
        metavar="N",
        help="devices of the pool; default: emulated_devices of the configuration",
    )
    add("--algorithm", choices=tuple(ALGORITHMS), help="default ppo")
    add("--reward-model", metavar="MODEL", help="rewards from a model; default: from a function")
    add(
        "--lengths",
        metavar="FILE|TOKENS",
        help=(
            "response lengths: a histogram (CSV or JSON) or one number; default 1024, or the "
            "longest that the configuration allows"
        ),
    )
    add("--prompt-lengths", metavar="FILE|TOKENS", help="the same; default 512, or the longest")
    add("--max-response", type=int, metavar="TOKENS", help="default: the longest of --lengths")
    add("--prompts", type=int, metavar="N", help="prompts of a step; default 512")
    add("--samples", type=int, metavar="N", help="responses to each; default 1")
    add("--minibatch", type=int, metavar="ROWS", help=f"of an update; default up to {MINIBATCH}")
    add("--epochs", type=int, metavar="N", help="passes of training; default 1")
    add("--param-dtype", choices=("float32", "bfloat16"), help="default float32")
    add("--compute-dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on GPUs")
    add("--calibration", type=Path, metavar="FILE", help="efficiencies that were learned")
    add(
        "--no-park",
        action="store_true",
        default=None,
        help="no model-stage waits in the host's memory; with --config: control.park",
    )
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


def run_plan(arguments: argparse.Namespace, config: RunConfig | None, model: ReadModel) -> int:
    """Prints the best plans.

    Args:
      arguments: as `add_plan_arguments` has them.
      config: of the run that is planned for, where the arguments name one.
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
    problem = make_problem(arguments, config, model)
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


def _write(path: Path, text: str) -> None:
    try:
        path.expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"--out: {path} cannot be written: {error.strerror or error}; name another file"
        ) from error
