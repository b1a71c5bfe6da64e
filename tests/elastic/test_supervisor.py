"""Supervisors in processes of their own, with workers that only pretend to train."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("supervisor_child.py")
TIMEOUT_S = 60


class Job:
    """A job of several slots."""

    def __init__(self, directory: Path, num_slots: int, silence_s: float = 20) -> None:
        self.directory, self.num_slots, self.silence_s = directory, num_slots, silence_s
        (directory / "checkpoints" / "steps").mkdir(parents=True)
        self.set_steps(10**6)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.slots: dict[int, subprocess.Popen[str]] = {}
        self.all: list[subprocess.Popen[str]] = []
        self.said: list[str] = []
        self.log_at_start: dict[int, int] = {}
        for slot in range(num_slots):
            self.start(slot)

    def set_steps(self, number: int) -> None:
        (self.directory / "num_steps").write_text(str(number))

    def start(self, slot: int) -> None:
        self.log_at_start[slot] = len(self.log())
        arguments = (slot, self.num_slots, self.port, self.directory, self.silence_s)
        self.slots[slot] = subprocess.Popen(
            [sys.executable, str(CHILD), "supervisor", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.all.append(self.slots[slot])

    def has_joined(self, slot: int) -> bool:
        """Whether its supervisor has had a worker."""
        return any(x.startswith(f"{slot} ") for x in self.log()[self.log_at_start[slot] :])

    @property
    def step(self) -> int:
        steps = (self.directory / "checkpoints" / "steps").iterdir()
        return max((int(p.name) for p in steps), default=0)

    def log(self) -> list[str]:
        """A line for each worker that was started: slot, rank/number, step, whether again."""
        path = self.directory / "log"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, what: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not what():
            assert time.monotonic() < deadline_s, self.stuck()
            time.sleep(0.02)

    def stuck(self) -> str:
        """What is known of a job that does not go on."""
        for process in self.all:
            process.kill()
        said = [process.communicate()[1] for process in self.all]
        return "\n-- ".join((f"at step {self.step}", *self.log()[-6:], *said))

    def wait_for_steps(self, number: int) -> None:
        wanted = self.step + number
        self.wait_for(lambda: self.step >= wanted)

    def wait_for_world(self, size: int, after: int) -> None:
        """A world of this size that steps, among the workers started after so many."""
        new = f"/{size} from"
        self.wait_for(lambda: sum(new in x for x in self.log()[after:]) >= size)
        self.wait_for_steps(2)

    def worker(self, slot: int) -> int:
        return int((self.directory / f"pid-{slot}").read_text())

    def kill_worker(self, slot: int) -> None:
        """Kills the worker of a slot, if it has one."""
        pid = self.worker(slot)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if CHILD.name in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)

    def finish(self) -> None:
        """All slots that live reach the last step, and end with 0."""
        self.set_steps(self.step + 3)
        for slot, process in self.slots.items():
            _, stderr = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0 and "Traceback" not in stderr, (slot, stderr)
            self.said.append(stderr)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(num_slots: int, **settings: float) -> Job:
        jobs.append(Job(tmp_path, num_slots, **settings))
        return jobs[0]

    yield start
    for process in jobs[0].all:
        process.kill()
        process.wait()


def is_running(pid: int) -> bool:
    """Whether the process runs: not ended, not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_killed_worker_starts_again_in_its_slot(job: Callable[..., Job]) -> None:
    running = job(2)
    running.wait_for_world(2, after=0)
    for slot in (1, 0):
        before = len(running.log())
        running.kill_worker(slot)
        running.wait_for_world(2, after=before)
    running.finish()
    log = running.log()
    assert [sorted(x[:5] for x in log[i : i + 2]) for i in (0, 2, 4)] == [["0 0/2", "1 1/2"]] * 3
    assert [x.endswith("True") for x in log] == [False] * 2 + [True] * 4


def test_a_killed_slot_is_done_without_and_joins_again(job: Callable[..., Job]) -> None:
    running = job(3)
    running.wait_for_world(3, after=0)
    for slot, ranks in ((2, ["0 0/2", "1 1/2"]), (0, ["1 0/2", "2 1/2"])):
        lost_worker, before = running.worker(slot), len(running.log())
        running.slots.pop(slot).kill()
        running.wait_for_world(2, after=before)
        assert sorted(x[:5] for x in running.log()[before:]) == ranks
        assert not is_running(lost_worker)  # it died with its supervisor
        before = len(running.log())
        running.start(slot)
        running.wait_for_world(3, after=before)
    # Slot 1 has led since slot 0 was lost.
    assert sorted(x[:5] for x in running.log()[-3:]) == ["0 1/3", "1 0/3", "2 2/3"]
    running.finish()


@pytest.mark.slow
def test_a_silent_slot_is_lost_and_comes_back(job: Callable[..., Job]) -> None:
    running = job(2, silence_s=2)
    running.wait_for_world(2, after=0)
    for slot in (1, 0):
        before = len(running.log())
        pids = (running.slots[slot].pid, running.worker(slot))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        running.wait_for_world(1, after=before)
        (alone,) = running.log()[before:]
        assert alone.startswith(f"{1 - slot} 0/1")
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        running.wait_for_world(2, after=before + 1)
        assert not is_running(pids[1])
    running.finish()


@pytest.mark.parametrize("code", [2, 3])
def test_an_error_that_would_come_again_ends_the_job(job: Callable[..., Job], code: int) -> None:
    running = job(2)
    running.wait_for_world(2, after=0)
    (running.directory / f"end-1-{running.step + 5}").write_text(str(code))
    for process in running.slots.values():
        process.communicate(timeout=TIMEOUT_S)
    assert {p.returncode for p in running.slots.values()} == {2 if code == 2 else 1}
    assert len(running.log()) == 2


def test_crashes_without_progress_end_the_job(job: Callable[..., Job]) -> None:
    running = job(2)
    running.wait_for_world(2, after=0)
    step = running.step + 5
    (running.directory / f"end-1-{step}").write_text("1")
    for process in running.slots.values():
        _, stderr = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 1
        (line,) = (x for x in stderr.splitlines() if x.startswith("nereus: error:"))
        assert "slot 1 ended with exit code 1: 3 crashes since" in line
        assert f"checkpoint of step {step}" in line
    assert sum(x.startswith("1 ") for x in running.log()) == 3


def test_terminate_takes_a_slot_out_and_ctrl_c_ends_the_job(job: Callable[..., Job]) -> None:
    running = job(2)
    running.wait_for_world(2, after=0)
    leader = running.slots.pop(0)
    leader.terminate()
    running.wait_for_world(1, after=2)
    _, stderr = leader.communicate(timeout=TIMEOUT_S)
    assert leader.returncode == 0 and "Traceback" not in stderr, stderr
    assert stderr.splitlines()[-1].startswith("nereus: slot 0 leaves: the world is formed anew")
    assert running.log()[2].startswith("1 0/1")
    running.slots[1].send_signal(signal.SIGINT)
    assert running.slots[1].wait(TIMEOUT_S) == 0
    assert len(running.log()) == 3


def test_a_slot_that_is_taken_or_of_another_job_is_refused(job: Callable[..., Job]) -> None:
    running = job(2)
    running.wait_for_world(2, after=0)
    arguments = [sys.executable, str(CHILD), "supervisor"]
    for slot, number, message in ((0, 2, "cannot listen on port"), (1, 3, "other values of")):
        numbers = map(str, (slot, number, running.port, running.directory, 20))
        done = subprocess.run(
            [*arguments, *numbers],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 2
        assert message in done.stderr
    running.finish()


def test_one_slot_alone(job: Callable[..., Job]) -> None:
    running = job(1)
    running.wait_for_world(1, after=0)
    running.kill_worker(0)
    running.wait_for_world(1, after=1)
    running.finish()


@pytest.mark.slow
def test_whatever_is_killed_no_step_is_taken_twice(job: Callable[..., Job]) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")  # shown if the test fails
    draw = random.Random(seed)
    running = job(3)
    running.wait_for_world(3, after=0)
    for _ in range(15):
        slot = draw.choice(sorted(running.slots))
        if draw.random() < 0.5:
            running.kill_worker(slot)
        elif any(running.has_joined(other) for other in running.slots if other != slot):
            running.slots.pop(slot).kill()
        time.sleep(draw.uniform(0, 0.6))
        for missing in {0, 1, 2} - running.slots.keys():
            if draw.random() < 0.5:
                running.start(missing)
        running.wait_for_steps(1)
    for missing in {0, 1, 2} - running.slots.keys():
        running.start(missing)
    running.wait_for(lambda: all(running.has_joined(slot) for slot in range(3)))
    running.finish()
    # A worker that finds its step taken by another world ends with an error, and is told of.
    for stderr in running.said:
        assert "exit code 1" not in stderr and "Error" not in stderr, stderr
