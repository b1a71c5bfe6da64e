"""What `nereus report` does; it loads no jax."""

import argparse
import os
from pathlib import Path
from typing import Any

from nereus_jax.core.errors import ConfigError, StorageError
from nereus_jax.report.page.document import live_page, simulated_page
from nereus_jax.report.page.live import read_live
from nereus_jax.report.page.simulated import read_simulated

FILE = "report.html"


def add_report_parser(commands: Any) -> None:
    """Adds `report` to a command's parsers: what `add_subparsers` of argparse returned."""
    parser = commands.add_parser(
        "report",
        help="make one HTML file of a run: curves, plans, decisions and their terms",
        description=(
            "Writes a page that needs no network: lengths, pool, plans, seconds, memory, learning, "
            "and every decision of the controller with what came of it. DIR is that of a run, also "
            "of one that still runs, or of simulated ones; the page says which."
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="--workdir of `nereus train` or `simulate`")
    add("--out", type=Path, metavar="FILE", help=f"where the page goes; default DIR/{FILE}")


def run_report(arguments: argparse.Namespace) -> int:
    """Writes the page of a run, or of simulated ones.

    Raises:
      ConfigError: the directory holds nothing to tell of.
      StorageError: the page cannot be written.
    """
    directory: Path = arguments.directory.expanduser()
    out: Path = (arguments.out or directory / FILE).expanduser()
    page = make_page(directory)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(
            f"{out} cannot be written: {error.strerror or error}; name another place with --out"
        ) from error
    print(f"{out}: {out.stat().st_size / 1000:,.0f} kB")
    return 0


def make_page(directory: Path) -> str:
    """The page of a directory.

    Raises:
      ConfigError: it is not there, or holds nothing to tell of.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory; give the --workdir of a run")
    run = read_live(directory)
    if run is not None:
        return live_page(run)
    found = read_simulated(directory)
    if found is not None:
        return simulated_page(directory.resolve().name, found)
    if (directory / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{directory} holds no finished step: metrics.jsonl has none yet; ask again after the "
            f"run's first step"
        )
    raise ConfigError(
        f"{directory} holds no run: neither metrics.jsonl (of `nereus train --workdir`) nor "
        f"POLICY-SEED/steps.jsonl (of `nereus simulate --workdir`) is there; give such a directory"
    )
