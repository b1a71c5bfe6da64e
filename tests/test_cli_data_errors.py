"""What bad data gets from the command: one line on stderr, exit code 2, before any allocation.

Cases of JSONL are in test_cli_errors.py; the readers' own tests are in tests/data.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from nereus_jax.cli import main

ROOT = Path(__file__).parents[1]
CONFIG = """
from nereus_jax.testing import tiny_run_config

def get_config():
    return tiny_run_config()
"""
CHAT = {"prompt": [{"role": "user", "content": "1"}], "answer": "1"}

CASES = [
    (
        ["data.train=table.parquet"],
        "no column 'prompt' (did you mean 'Prompt'?); its columns: Prompt, answer; "
        "set data.prompt_field",
    ),
    (
        ["data.train=table.parquet", "data.prompt_field=Prompt"],
        "table.parquet: row 1 (the first is 0): field 'Prompt' is null",
    ),
    (["data.train=numbers.parquet"], "row 0 (the first is 0): field 'prompt' must be text"),
    (["data.train=*s.parquet"], "numbers.parquet: row 0"),
    (["data.train=no_row.parquet"], "no_row.parquet is empty"),
    (["data.train=torn.parquet"], "torn.parquet cannot be read as Parquet"),
    (["data.train=torn.jsonl.gz"], "torn.jsonl.gz cannot be unpacked"),
    (["data.train=chats.jsonl"], "set data.chat_template = True"),
    (["data.eval=*.nothing"], "data.eval: expected a .jsonl, .jsonl.gz or .parquet file"),
    (["data.eval=/dev/null"], "exists but is not such a thing"),
    (["data.train=."], "files of several kinds (1 .gz, 1 .jsonl, 4 .parquet)"),
    (["data.prompt_field="], "data.prompt_field='' names no field"),
    (
        ["data.train=chats.jsonl", "data.answer_field=", "warmup.num_steps=1"],
        "warmup.num_steps > 0 trains on the answers, but data.answer_field is ''",
    ),
    (
        ["data.distinct=True", "data.task_options.digits=1"],
        "task:reverse_digits has about 9 distinct train problems, fewer than data.train_size",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the cases name."""
    folder = tmp_path_factory.mktemp("data")
    table = pa.table({"Prompt": ["1", None], "answer": ["1", "2"]})
    parquet.write_table(table, folder / "table.parquet")
    no_row = table.slice(0, 0).rename_columns(["prompt", "answer"])
    parquet.write_table(no_row, folder / "no_row.parquet")
    parquet.write_table(pa.table({"prompt": [1], "answer": [1]}), folder / "numbers.parquet")
    (folder / "torn.parquet").write_text("PAR1")
    (folder / "torn.jsonl.gz").write_text("{}")
    (folder / "chats.jsonl").write_text(json.dumps(CHAT))
    (folder / "run.py").write_text(CONFIG)
    return folder


def arguments(changes: list[str]) -> list[str]:
    keys = [f"--config.{change}" for change in changes]
    return ["train", "--config=run.py", "--workdir=out", *keys]


def check(code: int, out: str, err: str, says: str) -> None:
    assert code == 2, err
    assert out == ""
    assert err.startswith("nereus: error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert says in err
    assert not list(Path().glob("out/*"))


@pytest.mark.parametrize(("changes", "says"), CASES, ids=lambda x: x[0] if type(x) is list else "")
def test_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    code = main(arguments(changes))
    captured = capsys.readouterr()
    check(code, captured.out, captured.err, says)


def test_without_pyarrow_the_command_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    (tmp_path / "pyarrow.py").write_text("raise ModuleNotFoundError('No module', name='pyarrow')")
    done = subprocess.run(
        [sys.executable, "-m", "nereus_jax.cli", *arguments(["data.train=table.parquet"])],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    says = "table.parquet needs the package pyarrow; install it with: pip install 'nereus_jax[parqu"
    check(done.returncode, done.stdout, done.stderr, says)
