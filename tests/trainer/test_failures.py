"""What goes wrong while a run is running ends it with one line that says how to go on."""

import json
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.runtime.checkpoint_files import finished_steps

# One device and no reference model: the fewest programs to compile.
SMALL = (
    "emulated_devices=1",
    "algorithm.kl.place=none",
    "plan.actor-TRAIN=dp=1,pp=1,tp=1",
    "plan.critic-TRAIN=dp=1,pp=1,tp=1",
    "plan.actor-GENERATE=dp=1,pp=1,tp=1",
    "plan.reference-SCORE=dp=1,pp=1,tp=1",
    "plan.critic-SCORE=dp=1,pp=1,tp=1",
)
REWARDS = """
import math

calls = 0


def good():
    global calls
    calls += 1
    return calls <= 2


def raises(prompts, completions, answers, metadata):
    if not good():
        raise KeyError("no such\\nunit")
    return [1.0] * len(prompts)


def nan(prompts, completions, answers, metadata):
    return [0.5, 1.0 if good() else math.nan] * (len(prompts) // 2)


def shape(prompts, completions, answers, metadata):
    return [1.0] * (len(prompts) if good() else 3)
"""


@pytest.fixture(scope="module")
def rewards_module(nereus: Any) -> str:
    (nereus.directory / "failing_rewards.py").write_text(REWARDS)
    return "failing_rewards"


def message_of(child: Any, exit_code: int = 1) -> str:
    """The one line of a run that failed as it should."""
    assert child.process.returncode == exit_code, child.stderr
    (line,) = child.errors
    assert child.stderr.rstrip().endswith(line)  # nothing follows it
    return line


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        pytest.param(
            "raises",
            "raised KeyError: 'no such\\nunit' at ",
            id="raises",
            marks=pytest.mark.slow,
        ),
        pytest.param("nan", "returned nan, not a finite", id="nan", marks=pytest.mark.slow),
        pytest.param(
            "shape",
            "returned a list of shape (3,) for 16 samples",
            id="shape",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_reward_function_that_fails(
    nereus: Any, rewards_module: str, tmp_path: Path, function: str, reason: str
) -> None:
    name = f"{rewards_module}.{function}"
    child = nereus.run(tmp_path, "num_steps=5", f"reward.function={name}", *SMALL)
    message = message_of(child)
    assert f"reward function {name} {reason}" in message
    assert f"the checkpoint of step 2 in {tmp_path / 'checkpoints'} is whole" in message
    assert [r["step"] for r in nereus.rows(tmp_path)] == [0, 1]


@pytest.mark.slow
def test_a_mended_reward_function_goes_on(nereus: Any, rewards_module: str, tmp_path: Path) -> None:
    reward = f"reward.function={rewards_module}.raises"
    message_of(nereus.run(tmp_path, "num_steps=3", reward, *SMALL))
    child = nereus.run(tmp_path, "num_steps=3", reward, *SMALL)  # two calls of a process are good
    assert child.process.returncode == 0, child.stderr
    assert [r["step"] for r in nereus.rows(tmp_path)] == [0, 1, 2]


@pytest.mark.slow
def test_a_reward_function_that_fails_in_an_evaluation(
    nereus: Any, rewards_module: str, tmp_path: Path
) -> None:
    child = nereus.run(
        tmp_path,
        "num_steps=5",
        f"reward.function={rewards_module}.raises",
        "eval.every=1",
        "eval.num_prompts=16",
        *SMALL,
    )
    message = message_of(child)
    assert "the checkpoint of step 1 in" in message


# With one update a step the next rollout is what fails, with more the second update.
@pytest.mark.slow
@pytest.mark.parametrize("minibatch", [8, 16])
def test_a_diverging_run_names_the_last_good_checkpoint(
    nereus: Any, tmp_path: Path, minibatch: int
) -> None:
    rate = ("actor_optimizer.learning_rate=1e30", f"algorithm.minibatch_size={minibatch}")
    child = nereus.run(tmp_path, "num_steps=5", *rate, "checkpoint.every=1", *SMALL)
    message = message_of(child)
    assert "not finite" in message and "learning rate" in message
    steps = finished_steps(tmp_path / "checkpoints")
    assert f"the checkpoint of step {steps[-1]} in {tmp_path / 'checkpoints'} is whole" in message
    rows = nereus.rows(tmp_path)
    assert [r["step"] for r in rows] == list(range(steps[-1]))


@pytest.mark.slow
def test_diverging_without_checkpoints(nereus: Any, tmp_path: Path) -> None:
    child = nereus.run(tmp_path, "num_steps=5", "critic_optimizer.learning_rate=1e30", *SMALL)
    assert "no checkpoint has been written yet" in message_of(child)


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 3 MB, or None where it cannot be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    yield disk if mounted else None
    if mounted:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def check_resume(nereus: Any, workdir: Path, step: int) -> None:
    """The named checkpoint is whole: a run goes on from it."""
    child = nereus.run(workdir, f"num_steps={step + 1}", *SMALL)
    assert child.process.returncode == 0, child.stderr
    assert f"resumed from the checkpoint of step {step}" in child.stderr
    assert [r["step"] for r in nereus.rows(workdir)] == list(range(step + 1))


@pytest.mark.slow
@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk(nereus: Any, small_disk: Path | None, tensorboard: bool) -> None:
    if small_disk is None:
        pytest.skip("no right to mount a small file system")
    workdir = small_disk / "run"
    arguments = ("checkpoint.every=1", "checkpoint.keep=1000", "rollout.record=True")
    child = nereus.run(
        workdir, "num_steps=1000", *arguments, f"report.tensorboard={tensorboard}", *SMALL
    )
    message = message_of(child)
    assert "No space left on device" in message
    step = finished_steps(workdir / "checkpoints")[-1]
    assert f"step {step}" in message
    for old in range(step):  # make room
        subprocess.run(["rm", "-r", str(workdir / "checkpoints" / "steps" / str(old))], check=True)
    check_resume(nereus, workdir, step)


@pytest.mark.slow
def test_a_log_that_cannot_be_written(nereus: Any, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    child = nereus.run(tmp_path, "num_steps=3", "checkpoint.every=1", *SMALL)
    message = message_of(child)
    assert f"cannot write {tmp_path / 'samples.jsonl'}: No space left on device" in message
    assert f"the checkpoint of step 0 in {tmp_path / 'checkpoints'} is whole" in message
    (tmp_path / "samples.jsonl").unlink()
    check_resume(nereus, tmp_path, 0)


@pytest.mark.slow
def test_files_that_cannot_grow(nereus: Any, tmp_path: Path) -> None:
    limit = 150_000  # bytes: less than some arrays take

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    arguments = ("checkpoint.every=5", "report.samples_per_step=16", "compilation_cache_dir=")
    child = nereus.run(tmp_path, "num_steps=1000", *arguments, *SMALL, preexec_fn=limit_files)
    message = message_of(child)
    assert "File too large" in message
    step = finished_steps(tmp_path / "checkpoints")[-1]
    assert f"step {step}" in message
    check_resume(nereus, tmp_path, step)


@pytest.mark.slow
@pytest.mark.parametrize("overlong", ["drop", "cut"])
def test_overlong_prompts_are_counted(nereus: Any, tmp_path: Path, overlong: str) -> None:
    data = tmp_path / "prompts.jsonl"
    texts = ["12345678" if i % 4 == 0 else "123" for i in range(64)]
    data.write_text("".join(json.dumps({"prompt": t, "answer": "1"}) + "\n" for t in texts))
    workdir = tmp_path / "run"
    child = nereus.run(
        workdir,
        "num_steps=2",
        f"data.train={data}",
        f"data.eval={data}",
        f"data.overlong={overlong}",
        "report.samples_per_step=16",
        *SMALL,
    )
    assert child.process.returncode == 0, child.stderr
    rows = nereus.rows(workdir)
    dropped = sum(r["prompts_dropped"] for r in rows)
    cut = sum(r["prompts_cut"] for r in rows)
    prompts = [r["prompt"] for r in nereus.rows(workdir, "samples")]
    assert len(prompts) == 32
    if overlong == "drop":
        assert dropped > 0 and cut == 0
        assert "12345678" not in prompts
    else:
        assert cut == prompts.count("12345678") > 0 and dropped == 0
