"""The `nereus` command.

Exit codes: 0 done, 1 an error while running, 2 a mistake in the command, the configuration, the
data or the plan, 130 ended at once by Ctrl-C: while it started, or by the second one in training.
"""

import argparse
import difflib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from nereus_jax.config import RunConfig, load_config_file, parse_config
from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.errors import (
    ConfigError,
    DeviceFullError,
    DevicesLostError,
    NereusError,
    WorldError,
)
from nereus_jax.core.plan import Plan
from nereus_jax.core.presets import PRESETS, preset
from nereus_jax.core.roles import ACTOR_TRAIN, CRITIC_TRAIN
from nereus_jax.core.workflow import ALGORITHMS, Traits
from nereus_jax.elastic.exit_codes import FAILED, INTERRUPTED
from nereus_jax.runtime.checkpoint_files import CHECKPOINTS
from nereus_jax.runtime.membership import DistributedConfig

# Emulated devices are threads: on a busy machine they reach a collective late, and XLA would abort.
EMULATION_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)

SILENCE_S = 15.0
"""A slot of an elastic job that is silent for so long ends its worker, and soon counts as lost."""
FLAGS = (
    "--config",
    "--workdir",
    "--dry-run",
    "--distributed",
    "--coordinator",
    "--num-processes",
    "--process-id",
    "--elastic",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nereus",
        description="RL post-training on JAX with adaptive layouts.",
        epilog="`nereus train --help` tells what it takes.",
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    train = commands.add_parser(
        "train",
        help="train from a configuration file",
        description=(
            "Trains; the same command again goes on from the last checkpoint in --workdir. Ctrl-C "
            "saves one at the end of the step, a second Ctrl-C ends at once."
        ),
        epilog=(
            "Every key of the configuration can be set here: --config.seed=1 "
            "--config.model.num_layers=4 --config.plan.actor-TRAIN=dp=2,pp=2,tp=2. All keys, with "
            "their defaults and units: nereus_jax/config/schema.py"
        ),
        allow_abbrev=False,
    )
    train.add_argument(
        "--config", metavar="FILE[:ARG]", help="a file with get_config(), required; ARG is passed"
    )
    train.add_argument("--workdir", metavar="DIR", help="where results go; required to train")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="print plan, shapes and bytes per device, compile everything, run nothing",
    )
    train.add_argument(
        "--distributed",
        action="store_true",
        help="join a job of several processes, found through SLURM, Kubernetes, MPI, ...",
    )
    train.add_argument("--coordinator", metavar="HOST:PORT", help="process 0 of the job")
    train.add_argument("--num-processes", type=int, metavar="N", help="processes of the job")
    train.add_argument("--process-id", type=int, metavar="I", help="rank of this process")
    train.add_argument(
        "--elastic",
        metavar="SECONDS",
        nargs="?",
        type=float,
        const=SILENCE_S,
        help=(
            "go on when processes die: this one supervises another one that trains, and all form "
            "a new world from those that are left or come back; a machine that is silent for so "
            f"long (default {SILENCE_S:.0f}) is lost. Uses the port after --coordinator's, too"
        ),
    )
    train.add_argument("--worker-of", type=int, help=argparse.SUPPRESS)  # pid of the supervisor
    _add_explain(commands)
    plan = commands.add_parser(
        "plan",
        help="find the best plans of a job, with or without its devices",
        description=(
            "Prints the fastest plans that fit: layout and microbatches of every model-stage, "
            "modelled seconds and memory, what dominates, why the next plan is slower; or, when "
            "nothing fits, the smallest number of devices that does. Nothing is run."
        ),
        allow_abbrev=False,
    )
    importlib.import_module("nereus_jax.trainer.plan_command").add_plan_arguments(plan)
    simulate = commands.add_parser(
        "simulate",
        help="try policies on a simulated cluster, with the controller of live runs",
        description=(
            "Runs policies through a trace of lengths and devices on a simulated cluster, and "
            "prints what each would take. All figures are simulated."
        ),
        epilog=(
            "Every key of the configuration can be set here: --config.steps=20. All keys, with "
            "their defaults and units: nereus_jax/config/simulation.py"
        ),
        allow_abbrev=False,
    )
    importlib.import_module("nereus_jax.simulator.command").add_simulate_arguments(simulate)
    importlib.import_module("nereus_jax.report.page.command").add_report_parser(commands)
    return parser


def _add_explain(commands: "argparse._SubParsersAction[_Parser]") -> None:
    explain = commands.add_parser(
        "explain",
        help="tell how a job would change from one plan to another",
        description=(
            "Prints the operations that lead from one plan to another, in order: bytes by link, "
            "modelled seconds, peak bytes by device, the critical path. Nothing is run. TRAIN "
            "holds float32 parameters and two moments, the others bfloat16 weights, which a weight "
            "edge fills where the model is trained."
        ),
        allow_abbrev=False,
    )
    plan = {"metavar": "PLAN.json", "required": True}
    explain.add_argument("--from", dest="source", help="plan.json of the plan that holds", **plan)
    explain.add_argument("--to", dest="target", help="plan.json of the plan wanted", **plan)
    explain.add_argument(
        "--model",
        metavar="MODEL",
        default="llama3-8b",
        help="a preset, or a directory or config.json of Hugging Face; default llama3-8b",
    )
    explain.add_argument(
        "--hardware", metavar="NAME", default="h100", help="a name or a .json file; default h100"
    )
    explain.add_argument("--format", choices=("text", "json", "dot", "svg"), default="text")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    try:
        arguments, rest = _parser().parse_known_args(argv)
        commands = {
            "train": _train,
            "explain": _explain,
            "plan": _plan,
            "simulate": _simulate,
            "report": _report,
        }
        run = commands[arguments.command]
        code = run(arguments, rest)
        sys.stdout.flush()
        return code
    except NereusError as error:
        print(f"nereus: error: {_one_line(error)}", file=sys.stderr)
        if isinstance(error, WorldError | DevicesLostError | DeviceFullError):
            _end_alone(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        print("nereus: stopped at once; checkpoints saved before are whole", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # nobody raised it on purpose: a defect, or the backend's trouble
        traceback.print_exc()
        said = " ".join(str(error).split())
        print(
            f"nereus: error: {type(error).__name__} was not expected (the traceback is above): "
            f"{said or 'it says no more'}; checkpoints saved before are whole, and the same "
            f"command goes on from them",
            file=sys.stderr,
        )
        _end_alone(1)
        return 1


def _one_line(error: NereusError) -> str:
    """The message; what it cites of a library may hold line ends."""
    return " ".join(str(error).splitlines())


def _train(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    overrides = _overrides(rest)
    if arguments.config is None:
        raise ConfigError(
            "--config is missing; name a file with a get_config(): --config=configs/ppo_tiny.py"
        )
    if not arguments.workdir and not arguments.dry_run:
        raise ConfigError("--workdir is missing; name a directory for results: --workdir=runs/one")
    config = _read_config(arguments.config, overrides)
    distributed = DistributedConfig(
        enabled=arguments.distributed
        or any(
            v is not None
            for v in (arguments.coordinator, arguments.num_processes, arguments.process_id)
        ),
        coordinator=arguments.coordinator,
        num_processes=arguments.num_processes,
        process_id=arguments.process_id,
    )
    if arguments.elastic is not None:
        return _supervise(arguments, overrides, distributed)
    _prepare_backend(config)
    if arguments.worker_of is not None:
        importlib.import_module("nereus_jax.elastic.worker").end_with_parent(arguments.worker_of)
    # jax is imported only from here on: its flags are read once.
    run = importlib.import_module("nereus_jax.trainer.command")
    try:
        run.run_train(
            config,
            workdir=Path(arguments.workdir).expanduser() if arguments.workdir else None,
            dry_run=arguments.dry_run,
            distributed=distributed,
            fit_plan=arguments.worker_of is not None,
        )
    except (WorldError, DevicesLostError):
        raise
    except NereusError as error:
        if arguments.worker_of is None or error.exit_code != 1:
            raise
        print(f"nereus: error: {_one_line(error)}", file=sys.stderr)
        return FAILED
    return 0


def _read_config(name: str, overrides: Sequence[str], *, plans: bool = True) -> RunConfig:
    """A run's configuration, checked.

    Args:
      name: FILE or FILE:ARG.
      overrides: its keys, as texts.
      plans: with its plans; they may be what is looked for.
    """
    # A console script does not search the directory it is started in; reward functions live there.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        config: Any = load_config_file(name, overrides)
        if not plans:
            config.plan_file, config.plan_changes = "", {}
            # The least that a run needs: the others fall back to those that train.
            traits = ALGORITHMS.get(config.algorithm.name, Traits())
            trained = (ACTOR_TRAIN, CRITIC_TRAIN) if traits.critic else (ACTOR_TRAIN,)
            config.plan = {str(stage): "dp=1,pp=1,tp=1" for stage in trained}
        return parse_config(config)
    except OSError as error:  # to ask whether a file exists may be refused, too
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror or error}; mend it, or name another"
        ) from error


def _supervise(
    arguments: argparse.Namespace, overrides: Sequence[str], distributed: DistributedConfig
) -> int:
    """Trains in processes that are started again when one of the job dies."""
    if arguments.dry_run:
        raise ConfigError("--elastic and --dry-run do not go together; leave one of them out")
    if not arguments.elastic >= 1:
        raise ConfigError(f"--elastic must be at least 1 s, got {arguments.elastic}")
    settings = importlib.import_module("nereus_jax.elastic.settings")
    supervisor = importlib.import_module("nereus_jax.elastic.supervisor")
    slot, num_slots, host, port = settings.find_slot(distributed)
    workdir = Path(arguments.workdir).expanduser()
    command = (sys.executable, "-m", "nereus_jax.cli", "train")
    command += (f"--config={arguments.config}", f"--workdir={workdir}")
    return supervisor.supervise(
        settings.Settings(
            slot=slot,
            num_slots=num_slots,
            host=host,
            port=port,
            workdir=workdir,
            command=command + tuple(overrides),
            again=("--config.checkpoint.resume=auto",),
            checkpoints=workdir / CHECKPOINTS,
            timing=settings.Timing(
                beat_s=min(1.0, arguments.elastic / 5), silence_s=arguments.elastic
            ),
        )
    )


def _explain(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see `nereus explain --help`")
    planning = "nereus_jax.planning."
    inputs = importlib.import_module(f"{planning}transition_inputs")
    graph = importlib.import_module(f"{planning}transition_graph")
    hardware = importlib.import_module(f"{planning}hardware").load_hardware(arguments.hardware)
    report = importlib.import_module("nereus_jax.report.transition_report")
    model = _model(arguments.model)
    plans = [_read_plan(path) for path in (arguments.source, arguments.target)]
    stages = sorted({stage for plan in plans for stage in plan.placements})
    for plan in plans:
        for placement in plan.placements.values():
            model.check_layout(placement.layout)
    states = inputs.decoder_states(model, stages)
    found = graph.plan_transition(states, *plans, hardware=hardware)
    title = f"{arguments.source} -> {arguments.target}: {arguments.model} on {hardware.name}"
    print(report.FORMATS[arguments.format](found, title), end="")
    return 0


def _plan(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest and (not arguments.config or not rest[0].startswith(("--config.", "--noconfig."))):
        raise ConfigError(f"unknown argument {rest[0]!r}; see `nereus plan --help`")
    config = None
    if arguments.config:
        config = _read_config(arguments.config, _overrides(rest), plans=False)
    run: int = importlib.import_module("nereus_jax.trainer.plan_command").run_plan(
        arguments, config, _model
    )
    return run


def _simulate(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    overrides = _overrides(rest)
    run: int = importlib.import_module("nereus_jax.simulator.command").run_simulate(
        arguments, overrides, _model
    )
    return run


def _report(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see `nereus report --help`")
    return importlib.import_module("nereus_jax.report.page.command").run_report(arguments)


def _read_plan(path: str) -> Plan:
    """A plan.json, as a run writes it."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as a plan: {error}; give the plan.json of a run, or write "
            f"model-stage -> {{dp, pp, tp, devices}}"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no plan: give model-stage -> {{dp, pp, tp, devices}}")
    return Plan.from_json(content)


def _model(name: str) -> DecoderConfig:
    """The sizes of a preset or of files in the Hugging Face format."""
    path = Path(name).expanduser()
    if name in PRESETS or not path.exists():
        return preset(name)
    files = importlib.import_module("nereus_jax.models.huggingface_config")
    config: DecoderConfig = files.read_checkpoint_config(
        path / "config.json" if path.is_dir() else path
    )[0]
    return config


def _overrides(rest: Sequence[str]) -> list[str]:
    """The arguments that set keys of the configuration; refuses all others.

    A value may follow its key as an argument of its own.
    """
    overrides: list[str] = []
    for argument in rest:
        is_key = argument.startswith(("--config.", "--noconfig."))
        is_value = not argument.startswith("--") and overrides and "=" not in overrides[-1]
        if not is_key and not (is_value and overrides[-1].startswith("--config.")):
            name = argument.partition("=")[0]
            close = difflib.get_close_matches(name, FLAGS, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(
                f"unknown argument {argument!r}{hint}; a key of the configuration is set as "
                f"--config.KEY=VALUE, see `nereus train --help` for the rest"
            )
        overrides.append(argument)
    return overrides


def _prepare_backend(config: RunConfig) -> None:
    if config.emulated_devices:
        flags = os.environ.get("XLA_FLAGS", "").split()
        given = {f.split("=")[0] for f in flags}
        flags += [f for f in EMULATION_FLAGS if f.split("=")[0] not in given]
        os.environ["XLA_FLAGS"] = " ".join(flags)
        os.environ["JAX_PLATFORMS"] = "cpu"


def _end_alone(code: int) -> None:
    """Ends the process at once if it is one of several: in a tidy exit it would wait for the
    others, and they may wait for it in a collective."""
    if _num_processes() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _num_processes() -> int:
    """Of the job, as far as they have found each other; jax itself would start its backend."""
    jax = sys.modules.get("jax")
    distributed = getattr(jax, "distributed", None)  # none where it was stopped while it loaded
    if jax is None or distributed is None or not distributed.is_initialized():
        return 1
    return jax.process_count()


def script() -> NoReturn:
    """Runs the command that the process was started with, and ends the process."""
    code = main()
    if code == INTERRUPTED:  # XLA, stopped in the middle of a compilation, crashes in a tidy exit
        os._exit(code)
    if code in (1, FAILED) and "jax" in sys.modules and _num_processes() == 1:
        # All is closed. In a tidy exit the libraries would tell of a full disk once more.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    script()
