"""A run that was killed or interrupted goes on as if nothing had happened."""

import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_jax.data.prompts import PromptStream, TaskProblems
from nereus_jax.data.tokenizers import CharacterTokenizer
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime.checkpoint_files import finished_steps

RUN = ("num_steps=8", "eval.every=3", "eval.num_prompts=16")
OTHER_PLAN = (
    "emulated_devices=4",
    "plan.actor-TRAIN=dp=1,pp=1,tp=4",
    "plan.critic-TRAIN=dp=2,pp=2,tp=1",
    "plan.actor-GENERATE=dp=2,pp=2,tp=1",
    "plan.reference-SCORE=dp=1,pp=2,tp=2",
    "plan.critic-SCORE=dp=1,pp=1,tp=2,devices=2-3",
)
LOSS_BOUND, LOGPROB_BOUND = 1e-5, 1e-4


def copy_up_to(finished: Path, workdir: Path, step: int) -> None:
    """A run as it was when its newest checkpoint was of `step`, but with all its rows."""
    shutil.copytree(finished, workdir)
    for later in finished_steps(workdir / "checkpoints"):
        if later > step:
            shutil.rmtree(workdir / "checkpoints" / "steps" / str(later))


@pytest.mark.slow
def test_three_kills_change_nothing(nereus: Any, finished_run: Path, tmp_path: Path) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")  # shown if the test fails
    moments = random.Random(seed)
    overrides = (*RUN, "checkpoint.every=2", "rollout.record=True")
    for least in (1, 3, 5):
        child = nereus.start(tmp_path, *overrides)
        child.wait_for(lambda least=least: len(nereus.rows(tmp_path)) > least)
        time.sleep(moments.uniform(0, 0.05))
        child.kill()
    child = nereus.run(tmp_path, *overrides)
    assert child.process.returncode == 0, child.stderr
    assert nereus.same_rows(tmp_path) == nereus.same_rows(finished_run)
    assert nereus.rows(tmp_path, "samples") == nereus.rows(finished_run, "samples")
    spans = [(s["step"], s["name"]) for s in nereus.rows(tmp_path, "timeline")]
    assert spans == [(s["step"], s["name"]) for s in nereus.rows(finished_run, "timeline")]
    assert not list((tmp_path / "checkpoints" / "steps").glob("*tmp*"))
    check_samples(tmp_path, 8)


def check_samples(workdir: Path, num_steps: int) -> None:
    """Every sample of the stream was used once, in order, with draws of its own."""
    rollouts = [Rollout.load(p) for p in sorted((workdir / "rollouts").iterdir())]
    indices = np.concatenate([r.sample_indices_B for r in rollouts])
    np.testing.assert_array_equal(indices, np.arange(16 * num_steps))
    problems = TaskProblems("reverse_digits", split="train", size=1000, seed=0, options={})
    stream = PromptStream(
        problems, CharacterTokenizer("0123456789="), seed=0, max_prompt_length=6, overlong="drop"
    )
    wanted = [list(s.tokens) for s in stream.take(0, 16 * num_steps).samples]
    rows = [zip(r.tokens_BS, r.prompt_lengths_B, strict=True) for r in rollouts]
    assert [tokens[:n].tolist() for row in rows for tokens, n in row] == wanted


@pytest.mark.slow
def test_rows_after_the_checkpoint_are_cut(nereus: Any, finished_run: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    copy_up_to(finished_run, workdir, 5)
    for name in ("metrics", "samples", "timeline"):
        with (workdir / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 7, "torn')
    child = nereus.start(workdir, *RUN)
    child.wait_for(lambda: "resumed from the checkpoint of step 5" in child.stderr)
    assert child.wait() == 0, child.stderr
    for name in ("metrics", "samples", "timeline"):
        steps = [r["step"] for r in nereus.rows(workdir, name)]
        assert steps == [r["step"] for r in nereus.rows(finished_run, name)]
    assert nereus.same_rows(workdir) == nereus.same_rows(finished_run)


@pytest.mark.slow
def test_ctrl_c_ends_at_a_step_and_the_same_command_goes_on(
    nereus: Any, finished_run: Path, tmp_path: Path
) -> None:
    child = nereus.start(tmp_path, *RUN)
    child.wait_for(lambda: len(nereus.rows(tmp_path)) > 2)
    child.interrupt()
    assert child.wait() == 0, child.stderr
    (step,) = finished_steps(tmp_path / "checkpoints")
    assert 2 <= step < 8
    assert f"interrupted: step {step} of 8 is saved" in child.stderr
    assert max(r["step"] for r in nereus.rows(tmp_path, "samples")) == step - 1
    child = nereus.run(tmp_path, *RUN)
    assert child.process.returncode == 0, child.stderr
    assert nereus.same_rows(tmp_path) == nereus.same_rows(finished_run)
    assert nereus.rows(tmp_path, "samples") == nereus.rows(finished_run, "samples")


@pytest.mark.slow
def test_a_finished_run_started_again_stays_as_it_is(
    nereus: Any, finished_run: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(finished_run, workdir)
    child = nereus.run(workdir, *RUN, "checkpoint.keep=100")
    assert child.process.returncode == 0, child.stderr
    assert nereus.same_rows(workdir) == nereus.same_rows(finished_run)
    for name in ("samples", "timeline"):
        assert nereus.rows(workdir, name) == nereus.rows(finished_run, name)
    assert finished_steps(workdir / "checkpoints") == finished_steps(finished_run / "checkpoints")


@pytest.mark.slow
def test_another_plan_and_device_count_take_the_same_step(
    nereus: Any, finished_run: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    copy_up_to(finished_run, workdir, 5)
    recorded = f"rollout.recorded_dir={finished_run / 'rollouts'}"
    child = nereus.run(workdir, "num_steps=6", "rollout.source=recorded", recorded, *OTHER_PLAN)
    assert child.process.returncode == 0, child.stderr
    (got,) = (r for r in nereus.rows(workdir) if r["step"] == 5)
    (wanted,) = (r for r in nereus.rows(finished_run) if r["step"] == 5)
    for name in ("policy_loss", "value_loss"):
        assert abs(got[name] - wanted[name]) <= LOSS_BOUND, name
    # TRAIN's log-probs against those of the plan that generated, and the reference's by the KL.
    assert got["rollout_train_logp_diff"] <= LOGPROB_BOUND
    assert abs(got["kl"] - wanted["kl"]) <= LOGPROB_BOUND
    for name in ("entropy", "approx_kl", "actor_grad_norm", "critic_grad_norm"):
        assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-4), name
    for name in ("reward_mean", "tokens", "policy_version", "response_length_mean", "kl_coef"):
        assert got[name] == wanted[name], name


@pytest.mark.slow
def test_another_plan_generates_the_same_step(
    nereus: Any, finished_run: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    copy_up_to(finished_run, workdir, 5)
    child = nereus.run(workdir, "num_steps=6", "rollout.record=True", *OTHER_PLAN)
    assert child.process.returncode == 0, child.stderr
    name = "rollouts/step_00000005.npz"
    got, wanted = Rollout.load(workdir / name), Rollout.load(finished_run / name)
    np.testing.assert_array_equal(got.tokens_BS, wanted.tokens_BS)
    np.testing.assert_array_equal(got.sample_indices_B, wanted.sample_indices_B)
    np.testing.assert_allclose(got.logprobs_BT, wanted.logprobs_BT, rtol=0, atol=LOGPROB_BOUND)


@pytest.mark.slow
def test_a_kill_in_the_warm_up_starts_it_again(nereus: Any, tmp_path: Path) -> None:
    overrides = ("num_steps=2", "warmup.num_steps=100", "checkpoint.every=1")
    whole = nereus.run(tmp_path / "whole", *overrides)
    assert whole.process.returncode == 0, whole.stderr
    child = nereus.start(tmp_path / "killed", *overrides)
    child.wait_for(lambda: "warm-up 41/100" in child.stderr)
    child.kill()
    assert finished_steps(tmp_path / "killed" / "checkpoints") == []
    child = nereus.run(tmp_path / "killed", *overrides)
    assert "warm-up 1/100" in child.stderr
    assert nereus.same_rows(tmp_path / "killed") == nereus.same_rows(tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_in_the_warm_up_saves_what_it_has_learned(nereus: Any, tmp_path: Path) -> None:
    overrides = ("num_steps=2", "warmup.num_steps=100")
    child = nereus.start(tmp_path, *overrides)
    child.wait_for(lambda: "warm-up 1/100" in child.stderr)
    child.interrupt()
    assert child.wait() == 0, child.stderr
    assert finished_steps(tmp_path / "checkpoints") == [0]
    child = nereus.run(tmp_path, *overrides)
    assert child.process.returncode == 0, child.stderr
    assert "warm-up" not in child.stderr
    assert [r["step"] for r in nereus.rows(tmp_path)] == [0, 1]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(nereus: Any, tmp_path: Path) -> None:
    child = nereus.start(tmp_path, "num_steps=100000", "checkpoint.every=2")
    child.wait_for(lambda: len(nereus.rows(tmp_path)) > 4)
    child.interrupt()
    child.interrupt()
    assert child.wait() in (0, 130), child.stderr  # 0: the step ended between the two
    assert not child.errors
    assert finished_steps(tmp_path / "checkpoints")


def test_never_resume_refuses_a_used_directory(
    nereus: Any, finished_run: Path, tmp_path: Path
) -> None:
    before = nereus.rows(finished_run)
    child = nereus.run(finished_run, *RUN, "checkpoint.resume=never")
    assert child.process.returncode == 2
    (line,) = child.errors
    assert "checkpoint of step 8" in line and "resume='never'" in line
    assert nereus.rows(finished_run) == before


def test_another_models_checkpoint_is_refused(nereus: Any, finished_run: Path) -> None:
    before = nereus.rows(finished_run)
    child = nereus.run(finished_run, *RUN, "model.mlp_dim=32")
    assert child.process.returncode == 2
    (line,) = child.errors
    assert "another model" in line
    assert nereus.rows(finished_run) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("seed=1", "seed=0, got 1"),
        ("data.train=task:sort_digits", "data.train='task:reverse_digits', got 'task:sort_digits'"),
        ("data.train_size=999", "problems in data.train=1000, got 999"),
    ],
)
def test_another_seed_or_other_data_is_refused(
    nereus: Any, finished_run: Path, change: str, says: str
) -> None:
    before = nereus.rows(finished_run)
    child = nereus.run(finished_run, *RUN, change)
    assert child.process.returncode == 2
    (line,) = child.errors
    assert "would name other samples" in line and says in line
    assert nereus.rows(finished_run) == before
