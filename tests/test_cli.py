"""The command line where nothing is wrong: help, overrides, the dry run, Ctrl-C, a closed pipe."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nereus_jax import cli
from nereus_jax.cli import main

ROOT = Path(__file__).parents[1]
CONFIG = """
from nereus_jax.testing import tiny_run_config

def get_config():
    return tiny_run_config()
"""
MIB = 2**20


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "run.py"
    path.write_text(CONFIG)
    return str(path)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nereus_jax.cli", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_names_the_command() -> None:
    done = run_command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "train from a configuration file" in done.stdout
    assert "nereus train --help" in done.stdout


def test_help_of_train_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for flag in cli.FLAGS:
        assert flag in shown
    for text in ("--config.seed=1", "--config.plan.actor-TRAIN=", "schema.py", "Ctrl-C"):
        assert text in shown


def test_the_flags_that_a_typing_error_is_compared_with_are_those_of_the_parser(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out.partition("options:")[2].partition("Every key")[0]
    assert set(re.findall(r"^ +(?:-h, )?(--[\w-]+)", shown, re.M)) == {*cli.FLAGS, "--help"}


@pytest.mark.parametrize(
    "spelling",
    [
        ["--config.seed=7", "--config.report.tensorboard=false"],
        ["--config.seed", "7", "--noconfig.report.tensorboard"],
        ["--noconfig.report.tensorboard", "--config.seed=3", "--config.seed=7"],
    ],
    ids=" ".join,
)
def test_a_key_is_set_in_any_spelling(
    spelling: list[str], config_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "nereus_jax.trainer.command.run_train", lambda config, **rest: seen.append((config, rest))
    )
    assert main(["train", "--workdir=~/out", *spelling, f"--config={config_file}"]) == 0
    ((config, rest),) = seen
    assert (config.seed, config.report.tensorboard) == (7, False)
    assert rest["workdir"] == Path("~/out").expanduser()
    assert (rest["dry_run"], rest["distributed"].enabled) == (False, False)


@pytest.mark.slow
def test_a_dry_run_counts_the_bytes_of_each_model_stage(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", f"--config={config_file}", "--dry-run", f"--workdir={tmp_path / 'out'}"]
    sizes = ["--config.model.vocab_size=40000", "--config.plan.critic-TRAIN=dp=1,pp=1,tp=2"]
    assert main([*command, *sizes]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    # One layer: q 32 x 32, k and v 32 x 16, o 32 x 32; gate, up and down of 32 x 64; two norms.
    matrices, norms = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64, 2 * 32
    actor = 40_000 * 32 + 2 * (matrices + norms) + 32
    # tp=2: half of the vocabulary and of every matrix; norms and the scalar head on both ranks.
    critic = 20_000 * 32 + 2 * (matrices // 2 + norms) + 32 + 32
    assert lines[0].startswith(f"model: {actor:,} parameters, 2 layers")
    table = {line.split()[0]: line for line in lines if re.match(r"\w+-[A-Z]+ ", line)}
    assert cells(table["actor-TRAIN"])[:2] == [mib(4 * actor), mib(8 * actor)]
    assert cells(table["critic-TRAIN"])[:2] == [mib(4 * critic), mib(8 * critic)]
    assert cells(table["reference-SCORE"])[:2] == [mib(4 * actor), mib(0)]
    assert "shared" in table["actor-GENERATE"] and "shared" in table["critic-SCORE"]
    assert "0:0..0:1" in table["critic-TRAIN"]
    # Device 0:0 holds the actor with its moments, the reference, and its half of the critic.
    held = 4 * (3 * actor + actor + 3 * critic)
    largest = max(float(cells(line)[-1].removesuffix(" MiB")) for line in table.values())
    (total,) = (line for line in lines if line.startswith("largest device: 0:0 with"))
    shown = float(total.split()[4])
    assert shown == pytest.approx(held / MIB + largest, abs=0.02)
    assert lines[-1].startswith("compiled 5 programs in ")
    assert not (tmp_path / "out").exists()


def cells(line: str) -> list[str]:
    return re.findall(r"[0-9.]+ [MG]iB", line)


def mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.2f} MiB"


def test_ctrl_c_while_compiling_ends_at_once(tmp_path: Path) -> None:
    workdir = tmp_path / "out"
    command = ["train", f"--config={ROOT / 'configs' / 'ppo_tiny.py'}", f"--workdir={workdir}"]
    with subprocess.Popen(
        [sys.executable, "-m", "nereus_jax.cli", *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline_s = time.monotonic() + 60
        while not (workdir / "plan.json").exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert err == "nereus: stopped at once; checkpoints saved before are whole\n"
    assert (process.returncode, out) == (130, "")


def test_what_nobody_expected_ends_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> int:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(cli, "_train", fail)
    assert main(["train"]) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("Traceback")
    assert shown[-1].startswith("nereus: error: RuntimeError was not expected")
    assert "out of luck; checkpoints saved before are whole" in shown[-1]


def test_a_reader_that_leaves_is_no_error() -> None:
    program = (
        "from nereus_jax import cli\n"
        "cli._train = lambda arguments, rest: print('line\\n' * 100_000) or 0\n"
        "cli.script()\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", program, "train"],
        env=environment(),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
