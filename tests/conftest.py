"""The one conftest: 8 emulated CPU devices, strict ranks, Hypothesis profiles.

`-m gpu` puts the GPUs first, so that `jax.devices()` are GPUs; the 8 CPU devices stay beside them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

NUM_CPU_DEVICES = 8
# A loaded machine may start the 8 threads of a collective late: XLA aborts after 40 s by default.
XLA_FLAGS = (
    # Compiling is most of the time of most tests; without LLVM's optimizations it takes half of it.
    "--xla_backend_optimization_level=0",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)

os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS)).strip()

import jax  # noqa: E402  (XLA reads its flags once)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Set jax up before a test module can touch a device."""
    # A shell may start pytest in the background with Ctrl-C ignored, which every child inherits.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    platforms = "cuda,cpu" if config.option.markexpr == "gpu" else "cpu"
    jax.config.update("jax_platforms", platforms)
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def eight_cpu_devices() -> None:
    """A test never skips for want of devices: the count is asserted once."""
    assert len(jax.devices("cpu")) == NUM_CPU_DEVICES


@pytest.fixture(scope="session", autouse=True)
def compilation_cache() -> Iterator[None]:
    """A program that several tests build is compiled once a session (0.3 s against 0.04 s)."""
    with tempfile.TemporaryDirectory(prefix="nereus-test-cache-") as path:
        jax.config.update("jax_compilation_cache_dir", path)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        yield


ROOT = Path(__file__).parent.parent
# One plan for most runs of the command: GENERATE spans all devices, the actor is on the first half
# (the first of two processes), the critic on the second.
CONFIG = """
from nereus_jax.testing import tiny_run_config


def get_config():
    config = tiny_run_config()
    config.emulated_devices = 8
    config.compilation_cache_dir = {cache!r}
    config.model.matmul_precision = "highest"
    config.actor_optimizer.learning_rate = 1e-2
    config.critic_optimizer.learning_rate = 1e-2
    config.report.tensorboard = False
    config.plan["actor-TRAIN"] = "dp=2,pp=2,tp=1,devices=0-3"
    config.plan["critic-TRAIN"] = "dp=2,pp=1,tp=2,devices=4-7"
    config.plan["actor-GENERATE"] = "dp=4,pp=1,tp=2"
    config.plan["reference-SCORE"] = "dp=4,pp=1,tp=1,devices=0-3"
    config.plan["critic-SCORE"] = "dp=2,pp=1,tp=2,devices=4-7"
    return config
"""
# What a process compiles runs for a moment: unoptimized programs are there in half the time.
CHILD_XLA_FLAGS = (
    *XLA_FLAGS,
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
CHILD_TIMEOUT_S = 300
Row = dict[str, Any]


class Child:
    """A running `nereus train`, its output in files."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str], cwd: Path, **how: Any):
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd, **how
            )

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def errors(self) -> list[str]:
        """The error messages; a traceback or a message of several lines fails the test."""
        assert "Traceback" not in self.stderr, self.stderr
        return [x for x in self.stderr.splitlines() if x.startswith("nereus: error:")]

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(CHILD_TIMEOUT_S)

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Waits until something is so, while the process runs."""
        deadline_s = time.monotonic() + CHILD_TIMEOUT_S
        while not what():
            assert self.process.poll() is None, f"ended too early:\n{self.stdout}{self.stderr}"
            assert time.monotonic() < deadline_s, "nothing happens"
            time.sleep(0.005)

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Ends it at once, as a power cut would; it must still be running."""
        assert self.process.poll() is None, "it ended before it was to be killed"
        self.process.kill()
        self.process.wait()


class Nereus:
    """Runs the command with a tiny configuration, each time in a process of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / "tiny.py"
        self.config.write_text(CONFIG.format(cache=str(directory / "compiled")))
        self.env = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"), str(directory))),
            "XLA_FLAGS": " ".join(CHILD_XLA_FLAGS),
        }
        self.children: list[Child] = []

    def start(self, workdir: Path, *arguments: str, **how: Any) -> Child:
        """Starts one process; an argument `key=value` sets a key of the configuration."""
        command = [sys.executable, "-m", "nereus_jax.cli", "train", f"--config={self.config}"]
        command += [f"--workdir={workdir}"]
        command += [a if a.startswith("--") else f"--config.{a}" for a in arguments]
        log = self.directory / f"child-{len(self.children)}"
        child = Child(command, log, self.env, self.directory, **how)
        self.children.append(child)
        return child

    def run(self, workdir: Path, *arguments: str, **how: Any) -> Child:
        """Runs one process to its end."""
        child = self.start(workdir, *arguments, **how)
        child.wait()
        return child

    def start_two(self, workdir: Path, *arguments: str) -> tuple[Child, Child]:
        """Starts a job of two processes with four devices each."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        job = (f"--coordinator={address}", "--num-processes=2", "emulated_devices=4", *arguments)
        first, second = (self.start(workdir, f"--process-id={i}", *job) for i in range(2))
        return first, second

    @staticmethod
    def rows(workdir: Path, name: str = "metrics") -> list[Row]:
        """The rows of a log that are whole."""
        path = workdir / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def same_rows(self, workdir: Path) -> list[Row]:
        """The metrics without what no two runs share: times, rates and memory."""
        own = {"step_s", "tokens_per_s", "stage_s", "weight_edge_s", "compile_s", "eval_s"}
        own |= {"peak_memory_bytes", "tflops_per_device", "controller_cpu_s"}
        return [{k: v for k, v in r.items() if k not in own} for r in self.rows(workdir)]


@pytest.fixture(scope="session")
def nereus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nereus]:
    """Runs `nereus train` in processes; programs are compiled once a session."""
    command = Nereus(tmp_path_factory.mktemp("nereus"))
    yield command
    for child in command.children:
        if child.process.poll() is None:
            child.process.kill()


@pytest.fixture(scope="session")
def finished_run(nereus: Nereus) -> Path:
    """The work directory of a run of 8 steps: a checkpoint and a recorded rollout of each.

    Not to be changed.
    """
    workdir = nereus.directory / "finished"
    child = nereus.run(
        workdir,
        "num_steps=8",
        "checkpoint.every=1",
        "checkpoint.keep=100",
        "rollout.record=True",
        "eval.every=3",
        "eval.num_prompts=16",
    )
    assert child.process.returncode == 0, child.stderr
    return workdir
