"""What bad input gets: one line on stderr, exit code 2, within 10 seconds, before any allocation.

Every case runs through `main` in this process; of each class of mistake one also runs as the real
command, where the libraries' own noise would show.
"""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from nereus_jax.cli import main

ROOT = Path(__file__).parents[1]
GOLDEN_MODEL = ROOT / "tests" / "golden" / "llama_tiny"
LIMIT_S = 10.0

CONFIG = """
from nereus_jax.testing import tiny_run_config

def get_config():
    return tiny_run_config()
"""
CONFIG_AFTER_JAX = """
import jax
from nereus_jax.testing import tiny_run_config

def get_config():
    jax.devices()
    return tiny_run_config()
"""
FILES = {
    "run.py": CONFIG,
    "after_jax.py": CONFIG_AFTER_JAX,
    "syntax.py": "def get_config(:\n",
    "raises.py": "def get_config():\n    raise RuntimeError('two\\nlines')\n",
    "exits.py": "raise SystemExit(0)\n",
    "none.py": "def get_config():\n    pass\n",
    "nothing.py": "x = 1\n",
    "typed.py": CONFIG.replace("return", "c =") + "    c.seed = 'x'\n    return c\n",
    "locked.py": CONFIG.replace("return", "c =") + "    c.sed = 1\n    return c\n",
    "a_file": "",
    "not_json.jsonl": '{"prompt": "1", "answer": "1"}\n{"prompt":\n',
    "no_field.jsonl": '{"question": "1", "answer": "1"}\n',
    "letters.jsonl": '{"prompt": "abc", "answer": "1"}\n',
    "letter_answers.jsonl": '{"prompt": "12", "answer": "zz"}\n',
    "long.jsonl": '{"prompt": "123456789", "answer": "1"}\n',
    "empty.jsonl": "\n",
    "rewards_that_exit.py": "raise SystemExit(0)\n",
    "other_run/checkpoints/steps/3/x": "",
    "other_run/checkpoints/model.json": json.dumps({"fingerprint": "0123"}),
    "never/checkpoints/steps/3/x": "",
}
TRAIN = "train --config={tmp}/run.py --workdir={tmp}/out "
DRY_RUN = "train --config={tmp}/run.py --dry-run "
ONE_OF_TWO = "--coordinator={coordinator} --num-processes=2 --process-id=0 "
HUGE = "--config.model.embed_dim=65536 --config.model.num_layers=96 --config.model.mlp_dim=65536"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments (separated by spaces), and what the one line must say.

    Attributes:
      command: the arguments.
      says: fragments of the message.
      process: also run as the real command.
      environment: of the real command, beside the usual one.
    """

    command: str
    says: tuple[str, ...]
    process: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def case(command: str, *says: str, process: bool = False, **environment: str) -> Case:
    return Case(command=command, says=says, process=process, environment=tuple(environment.items()))


COMMAND_LINE = [
    case("", "required: command", "nereus --help"),
    case("trian", "'trian'", "train"),
    case("train --workdir=x", "--config is missing", "get_config()"),
    case("train --config={tmp}/run.py", "--workdir is missing", process=True),
    case("train --config={tmp}/run.py --workdir=", "--workdir is missing"),
    case("train --confg=x", "'--confg=x'", "did you mean '--config'?"),
    case(TRAIN + "--dryrun", "'--dryrun'", "'--dry-run'", "nereus train --help", process=True),
    case(TRAIN + "--dry", "unknown argument '--dry'"),
    case(TRAIN + "extra", "unknown argument 'extra'", "--config.KEY=VALUE"),
    case(TRAIN + "--num-processes=two", "--num-processes", "'two'"),
]
CONFIG_FILE = [
    case("train --workdir=x --config={tmp}/no.py", "/no.py'", "does not exist", process=True),
    case("train --workdir=x --config={tmp}", "is not a file", "run.py"),
    case("train --workdir=x --config=", "configuration file ''"),
    case("train --workdir=x --config=" + "x" * 300, "cannot be read: File name too long"),
    case("train --workdir=x --config={tmp}/syntax.py", "syntax.py:1", "SyntaxError", process=True),
    case("train --workdir=x --config={tmp}/raises.py", "raises.py:2", "RuntimeError: two lines"),
    case("train --workdir=x --config={tmp}/exits.py", "exits.py:1", "SystemExit"),
    case("train --workdir=x --config={tmp}/none.py", "got None", "return config"),
    case("train --workdir=x --config={tmp}/nothing.py", "has no function get_config()"),
    case("train --workdir=x --config={tmp}/typed.py", "typed.py:6", "seed"),
    case("train --workdir=x --config={tmp}/locked.py", "'sed'", "did you mean 'seed'?"),
    case("train --workdir=x --config={tmp}/run.py:ARG", "does not take the arguments"),
]
KEYS = [
    case(
        TRAIN + "--config.model.num_layer=2",
        "unknown key 'model.num_layer'",
        "did you mean 'model.num_layers'?",
        process=True,
    ),
    case(TRAIN + "--config.nope=2", "unknown key 'nope'", "num_steps, seed"),
    case(TRAIN + "--config.num_steps=many", "expected an int >= 1", "'many'", process=True),
    case(TRAIN + "--config.num_steps=1.5", "expected an int >= 1", "'1.5'"),
    case(TRAIN + "--config.num_steps=0", "num_steps must be an int >= 1, got 0"),
    case(TRAIN + "--config.num_steps 0", "num_steps must be an int >= 1, got 0"),
    case(TRAIN + "--config.num_steps", "has no value", "--config.num_steps=VALUE"),
    case(TRAIN + "--config.seed=4294967296", "seed must be", "<= 4294967295", "4294967296"),
    case(TRAIN + "--config.emulated_devices=-1", "emulated_devices must be an int >= 0"),
    case(TRAIN + "--config.model=3", "'model' is a section", "num_layers"),
    case(TRAIN + "--config.algorithm.name=ppa", "one of 'ppo'", "'ppa'"),
]
PLAN = [
    case(
        TRAIN + "--config.plan.actor-TRAIN=dp=2,tp=3",
        "plan.actor-TRAIN: tp=3 does not divide the 4 query heads",
        "allowed tp: 1, 2, 4",
        process=True,
    ),
    case(TRAIN + "--config.plan.actor-TRAIN=pp=3", "pp=3", "2 layers", "allowed pp: 1 to 2"),
    case(
        TRAIN + "--config.algorithm.minibatch_size=6",
        "algorithm.minibatch_size=6 does not divide rollout.batch_size=16",
        "4 or 8",
    ),
    case(
        TRAIN + "--config.algorithm.minibatch_size=2 --config.plan.critic-TRAIN=dp=4",
        "plan.critic-TRAIN: dp=4 replicas, but a minibatch has algorithm.minibatch_size=2 rows",
        "at most dp=2",
        process=True,
    ),
    case(
        TRAIN + "--config.plan.actor-TRAIN=dp=2,pp=2,tp=4",
        "asks for 16 devices, got a pool of 8",
        "such as 'dp=1,pp=2,tp=4'",
        "emulated_devices",
    ),
    case(TRAIN + "--config.plan.actor-TRAIN=dp=2,devices=0,0", "device 0 more than once"),
    case(TRAIN + "--config.plan.actor-TRAIN=tp=4,devices=0-2,1", "device 1 more than once"),
    case(TRAIN + "--config.plan.actor-TRAIN=dp=2,devices=1,0", "ascending", "devices=0-1"),
    case(TRAIN + "--config.plan.actor-TRAIN=dp=2,devices=0", "dp*pp*tp = 2 devices, got 1"),
    case(TRAIN + "--config.plan.actor-TRAIN=dp=2,devices=7-8", "names device 8", "0 to 7"),
    case(TRAIN + "--config.plan.actor-TRAIN=two", "'two' is not one of dp=N, pp=N, tp=N"),
    case(TRAIN + "--config.plan.actr-TRAIN=dp=1", "'actr-TRAIN'", "did you mean 'actor-TRAIN'?"),
]
INPUTS = [
    case(TRAIN + "--config.data.train=task:reverse", "no task 'reverse'", "reverse_digits"),
    case(TRAIN + "--config.data.task_options.digts=3", "no option 'digts'", "'digits'"),
    case(TRAIN + "--config.data.train_size=0", "data.train_size must be at least 1"),
    case(TRAIN + "--config.data.train_size=100000000000", "data.train_size", "<= 100000000"),
    case(TRAIN + "--config.data.train={tmp}/no.jsonl", "data.train", "does not exist"),
    case(TRAIN + "--config.data.train=" + "x" * 300, "cannot be read: File name too long"),
    case(TRAIN + "--config.data.train={tmp}/empty", "data.train", "has no .jsonl, .jsonl.gz"),
    case(TRAIN + "--config.data.train={tmp}/not_json.jsonl", "line 2: not JSON", process=True),
    case(TRAIN + "--config.data.train={tmp}/no_field.jsonl", "line 1", "'prompt'", "question"),
    case(TRAIN + "--config.data.train={tmp}/letters.jsonl", "'a' of 'abc'", "characters"),
    case(TRAIN + "--config.data.train={tmp}/empty.jsonl", "is empty"),
    case(TRAIN + "--config.data.train={tmp}/long.jsonl", "all 1 prompts are longer", "'cut'"),
    case(
        TRAIN + "--config.warmup.num_steps=1 --config.data.train={tmp}/letter_answers.jsonl",
        "'z' of 'zz'",
    ),
    case(TRAIN + "--config.data.chat_template", "no chat template", "chat_template = False"),
    case(
        TRAIN + "--config.tokenizer.kind=huggingface --config.tokenizer.path={tmp}/tokenizer "
        "--config.data.chat_template",
        "the chat template failed",
        "no users, please",
        "data.chat_template = False",
    ),
    case(TRAIN + "--config.tokenizer.kind=huggingface", "needs a directory"),
    case(
        TRAIN + "--config.tokenizer.kind=huggingface --config.tokenizer.path={tmp}/empty",
        "tokenizer.json does not exist",
    ),
    case(TRAIN + "--config.model.vocab_size=5", "has 14 tokens", "only 5", "vocab_size = 0"),
    case(TRAIN + "--config.rollout.stop=('12',)", "'12' is 2 tokens"),
    case(TRAIN + "--config.model.path={tmp}/no", "model.path", "does not exist"),
    case(TRAIN + "--config.model.path={tmp}/empty", "config.json does not exist"),
    case(TRAIN + "--config.model.path={tmp}/truncated", "is truncated", "copy it again"),
    case(TRAIN + "--config.model.max_positions=9", "= 10 tokens", "max_positions=9"),
    case(TRAIN + "--config.reward.function=match", "must be a dotted name"),
    case(TRAIN + "--config.reward.function=no_such.module.f", "no module 'no_such'"),
    case(
        TRAIN + "--config.reward.function=nereus_jax.rl.rewards.digit_mach",
        "did you mean 'digit_match'?",
        process=True,
    ),
    case(TRAIN + "--config.reward.function=rewards_that_exit.f", "failed with", "SystemExit"),
    case(
        TRAIN + "--config.rollout.source=recorded --config.rollout.recorded_dir={tmp}/no",
        "rollout.recorded_dir",
        "does not exist",
    ),
]
PLACES = [
    case(
        "train --config={tmp}/run.py --workdir={tmp}/other_run",
        "other_run/checkpoints holds checkpoints of another model: 0123",
        "another workdir",
        process=True,
    ),
    case(
        "train --config={tmp}/run.py --workdir={tmp}/never",
        "model.json cannot be read",
        "another workdir",
    ),
    case("train --config={tmp}/run.py --workdir={tmp}/a_file", "cannot be written", "File exists"),
    case(
        "train --config={tmp}/run.py --workdir={tmp}/a_file/below",
        "--workdir",
        "cannot be written: Not a directory",
        process=True,
    ),
    case("train --config={tmp}/run.py --workdir=/proc/nereus", "cannot be written"),
    case(
        TRAIN + "--config.compilation_cache_dir={tmp}/a_file",
        "compilation_cache_dir",
        "cannot be written",
    ),
    case(
        TRAIN + "--config.rollout.source=recorded --config.rollout.recorded_dir={tmp}/empty",
        "step_00000000.npz does not exist",
        "rollout.record",
    ),
]
PROCESSES = [
    case(
        TRAIN + "--coordinator=localhost:1234 --num-processes=2 --process-id=2",
        "--process-id must be 0 to 1",
        "got 2",
        process=True,
    ),
    case(
        TRAIN + "--coordinator=localhost:1234 --num-processes=2 --process-id=-1",
        "--process-id must be 0 to 1",
    ),
    case(TRAIN + "--coordinator=localhost:1234 --num-processes=0", "--num-processes", "got 0"),
    case(TRAIN + ONE_OF_TWO.format(coordinator="localhost"), "HOST:PORT", "'localhost'"),
    case(TRAIN + ONE_OF_TWO.format(coordinator="localhost:99999"), "1 to 65535"),
    case(TRAIN + ONE_OF_TWO.format(coordinator="localhost:http"), "HOST:PORT"),
    case(TRAIN + ONE_OF_TWO.format(coordinator="no-host.invalid:1234"), "'no-host.invalid'"),
    case(
        TRAIN + "--coordinator=localhost:{used_port} --num-processes=2 --process-id=0",
        "cannot listen on port {used_port}",
        "Address already in use",
    ),
]
MEMORY = [
    case(DRY_RUN + HUGE + " --config.emulated_devices=8", "this host has", "zero1", process=True),
    case(TRAIN + HUGE + " --config.emulated_devices=8", "together", "this host has"),
]
BACKEND = [
    case(
        "train --config={tmp}/after_jax.py --workdir={tmp}/out --config.emulated_devices=3",
        "emulated_devices=3, but jax runs already with 8 cpu devices",
        "fresh process",
    ),
    case(
        "train --config={tmp}/after_jax.py --workdir={tmp}/out --config.emulated_devices=2",
        "emulated_devices=2, but jax runs already with",
        process=True,
    ),
]
# jax has a backend in this process.
ONLY_AS_A_PROCESS = [
    case(
        TRAIN + "--config.emulated_devices=2 --config.plan.actor-TRAIN=dp=2,pp=2",
        "plan.actor-TRAIN: 'dp=2,pp=2,tp=1' asks for 4 devices, got a pool of 2",
        process=True,
    ),
    case(TRAIN + "--distributed", "--process-id not given", "no scheduler", process=True),
    case(TRAIN + "--process-id=0", "--coordinator, --num-processes not given", process=True),
    case(TRAIN, "jax finds no devices", "'nonsense'", process=True, JAX_PLATFORMS="nonsense"),
]
IN_PROCESS = [
    *COMMAND_LINE,
    *CONFIG_FILE,
    *KEYS,
    *PLAN,
    *INPUTS,
    *PLACES,
    *PROCESSES,
    *MEMORY,
    *BACKEND,
]
AS_A_PROCESS = [c for c in [*IN_PROCESS, *ONLY_AS_A_PROCESS] if c.process]


def short(tried: Case) -> str:
    return tried.command.replace(TRAIN, "").replace("{tmp}/", "")[:80] or "nothing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the cases name."""
    folder = tmp_path_factory.mktemp("cli")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "empty").mkdir()
    shutil.copytree(GOLDEN_MODEL, folder / "truncated")
    weights = folder / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (folder / "tokenizer").mkdir()
    vocabulary = {"<unk>": 0, "</s>": 1}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": "{{ raise_exception('no users, please') }}"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def used_port() -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The command changes where modules are found, and the variables that jax reads."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(folder)
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def check(tried: Case, values: dict[str, object], code: int, out: str, err: str) -> None:
    assert code == 2, err
    assert out == ""
    assert err.startswith("nereus: error: ")
    assert err.count("\n") == 1 and err.endswith("\n"), err
    for fragment in tried.says:
        assert fragment.format(**values) in err


@pytest.mark.parametrize("tried", IN_PROCESS, ids=short)
def test_in_this_process(
    tried: Case, folder: Path, used_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    values: dict[str, object] = {"tmp": folder, "used_port": used_port}
    start_s = time.monotonic()
    code = main(tried.command.format(**values).split())
    assert time.monotonic() - start_s < LIMIT_S
    captured = capsys.readouterr()
    check(tried, values, code, captured.out, captured.err)
    nothing_ran(folder)


@pytest.mark.parametrize("tried", AS_A_PROCESS, ids=short)
def test_as_the_real_command(tried: Case, folder: Path, used_port: int) -> None:
    values: dict[str, object] = {"tmp": folder, "used_port": used_port}
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "nereus_jax.cli", *tried.command.format(**values).split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **dict(tried.environment)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert time.monotonic() - start_s < LIMIT_S
    check(tried, values, done.returncode, done.stdout, done.stderr)
    nothing_ran(folder)


def nothing_ran(folder: Path) -> None:
    """A refused run leaves at most an empty work directory, and no metrics anywhere."""
    assert not list(folder.rglob("metrics.jsonl"))
    out = folder / "out"
    if out.exists():
        assert not list(out.iterdir())
        out.rmdir()
