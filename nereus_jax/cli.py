"""The `nereus` command.

Exit codes: 0 done, 1 an error while running, 2 a mistake in the command, the configuration, the
data or the plan, 130 interrupted for the second time.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nereus_jax.config import RunConfig, load_config_file, parse_config
from nereus_jax.core.errors import ConfigError, NereusError

# Emulated devices are threads: on a busy machine they reach a collective late, and XLA would abort.
EMULATION_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nereus", description="RL post-training on JAX with adaptive layouts.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    train = commands.add_parser(
        "train",
        help="train from a configuration file",
        description="Trains. Every key of the configuration can be set: --config.seed=1",
    )
    train.add_argument("--config", required=True, metavar="FILE", help="a file with get_config()")
    train.add_argument("--workdir", type=Path, metavar="DIR", help="where results go")
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    try:
        arguments, rest = _parser().parse_known_args(argv)
        return _train(arguments, rest)
    except NereusError as error:
        print(f"nereus: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("nereus: stopped at once; the last checkpoint is whole", file=sys.stderr)
        return 130


def _train(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    overrides = [r for r in rest if r.startswith(("--config.", "--noconfig."))]
    unknown = [r for r in rest if r not in overrides]
    if unknown:
        raise ConfigError(
            f"unknown argument {unknown[0]!r}; a key of the configuration is set as "
            f"--config.key=value, see `nereus train --help` for the rest"
        )
    if arguments.workdir is None and not arguments.dry_run:
        raise ConfigError("--workdir is missing; name a directory for results: --workdir=runs/one")
    # A console script does not search the directory it is started in; reward functions live there.
    sys.path.insert(0, os.getcwd())
    config = parse_config(load_config_file(arguments.config, overrides))
    _prepare_backend(config)
    # jax is imported only from here on: its flags are read once.
    run = importlib.import_module("nereus_jax.trainer.command")
    run.run_train(
        config,
        workdir=arguments.workdir,
        dry_run=arguments.dry_run,
        distributed=run.DistributedConfig(
            enabled=arguments.distributed
            or any(
                v is not None
                for v in (arguments.coordinator, arguments.num_processes, arguments.process_id)
            ),
            coordinator=arguments.coordinator,
            num_processes=arguments.num_processes,
            process_id=arguments.process_id,
        ),
    )
    return 0


def _prepare_backend(config: RunConfig) -> None:
    if config.emulated_devices:
        flags = os.environ.get("XLA_FLAGS", "").split()
        given = {f.split("=")[0] for f in flags}
        flags += [f for f in EMULATION_FLAGS if f.split("=")[0] not in given]
        os.environ["XLA_FLAGS"] = " ".join(flags)
        os.environ["JAX_PLATFORMS"] = "cpu"


if __name__ == "__main__":
    sys.exit(main())
