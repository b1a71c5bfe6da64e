"""Two processes with four devices each do what one process with eight does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime.checkpoint_files import finished_steps

LOSS_BOUND, LOGPROB_BOUND = 1e-5, 1e-4
# TRAIN over both processes with a pipeline between them, edges that change sides, parked state.
SPANNING_PLAN = (
    "plan.actor-TRAIN=dp=2,pp=2,tp=2,parked",
    "plan.critic-TRAIN=dp=1,pp=2,tp=2,devices=4-7",
    "plan.actor-GENERATE=dp=2,pp=1,tp=2,parked,devices=2-5",
    "plan.reference-SCORE=dp=2,pp=1,tp=2,parked,devices=0-3",
    "plan.critic-SCORE=dp=2,pp=1,tp=1,devices=1-2",
)


def check_rows(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Metrics of two runs from the same rollouts, within the parity bounds."""
    assert [r["step"] for r in got] == [r["step"] for r in wanted]
    for row, reference in zip(got, wanted, strict=True):
        for name in ("policy_loss", "value_loss"):
            assert abs(row[name] - reference[name]) <= LOSS_BOUND, (row["step"], name)
        assert row["rollout_train_logp_diff"] <= LOGPROB_BOUND
        assert abs(row["kl"] - reference["kl"]) <= LOGPROB_BOUND
        for name in ("entropy", "approx_kl", "actor_grad_norm", "critic_grad_norm"):
            assert row[name] == pytest.approx(reference[name], rel=1e-4, abs=1e-4), name
        for name in ("reward_mean", "tokens", "policy_version"):
            assert row[name] == reference[name], name


def training_rows(nereus: Any, workdir: Path, num_steps: int) -> list[dict[str, Any]]:
    rows = [r for r in nereus.rows(workdir) if "policy_loss" in r]
    return rows[:num_steps]


@pytest.mark.slow
def test_recorded_rollouts_give_the_same_steps(
    nereus: Any, finished_run: Path, tmp_path: Path
) -> None:
    recorded = f"rollout.recorded_dir={finished_run / 'rollouts'}"
    children = nereus.start_two(tmp_path, "num_steps=3", "rollout.source=recorded", recorded)
    assert [c.wait() for c in children] == [0, 0], [c.stderr for c in children]
    got, wanted = (training_rows(nereus, w, 3) for w in (tmp_path, finished_run))
    check_rows(got, wanted)
    # A model-stage that is only on the second process is timed by it.
    assert all(row["stage_s"]["critic-TRAIN"] > 1e-3 for row in got)
    assert "step 1/3" in children[0].stderr and "step 1/3" not in children[1].stderr
    assert finished_steps(tmp_path / "checkpoints") == [3]


@pytest.mark.slow
def test_stages_and_edges_across_the_processes(
    nereus: Any, finished_run: Path, tmp_path: Path
) -> None:
    arguments = ("num_steps=3", "rollout.record=True", "eval.every=3", "eval.num_prompts=16")
    children = nereus.start_two(tmp_path, *arguments, *SPANNING_PLAN)
    assert [c.wait() for c in children] == [0, 0], [c.stderr for c in children]
    got, wanted = (training_rows(nereus, w, 3) for w in (tmp_path, finished_run))
    check_rows(got, wanted)
    for step in range(3):  # generated anew: the same tokens under another plan and two processes
        name = f"rollouts/step_{step:08d}.npz"
        ours, theirs = Rollout.load(tmp_path / name), Rollout.load(finished_run / name)
        np.testing.assert_array_equal(ours.tokens_BS, theirs.tokens_BS)
        np.testing.assert_allclose(ours.logprobs_BT, theirs.logprobs_BT, rtol=0, atol=LOGPROB_BOUND)
    evaluations = [r for r in nereus.rows(tmp_path) if "eval_step" in r]
    assert [r["eval_step"] for r in evaluations] == [0, 3]
    for row, reference in zip(
        evaluations, [r for r in nereus.rows(finished_run) if "eval_step" in r], strict=False
    ):
        assert row["eval_reward_mean"] == pytest.approx(reference["eval_reward_mean"])


@pytest.mark.slow
def test_ctrl_c_to_one_process_ends_both_and_one_process_goes_on(
    nereus: Any, finished_run: Path, tmp_path: Path
) -> None:
    first, second = nereus.start_two(tmp_path, "num_steps=1000")
    first.wait_for(lambda: len(nereus.rows(tmp_path)) > 1)
    second.interrupt()
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    (step,) = finished_steps(tmp_path / "checkpoints")
    rows = nereus.rows(tmp_path)
    assert [r["step"] for r in rows] == list(range(step))
    assert f"interrupted: step {step} of 1000 is saved" in first.stderr

    last = max(step + 1, 8)
    child = nereus.run(tmp_path, f"num_steps={last}")
    assert child.process.returncode == 0, child.stderr
    assert [r["step"] for r in nereus.rows(tmp_path)] == list(range(last))
    rows = training_rows(nereus, finished_run, 3)
    check_rows(training_rows(nereus, tmp_path, 3), rows)  # before the rounding can show in a token


@pytest.mark.slow
def test_an_error_of_one_process_ends_both(nereus: Any, tmp_path: Path) -> None:
    (nereus.directory / "two_process_rewards.py").write_text(
        "def fail(prompts, completions, answers, metadata):\n    raise KeyError('no such unit')\n"
    )
    children = nereus.start_two(tmp_path, "num_steps=3", "reward.function=two_process_rewards.fail")
    assert [c.wait() for c in children] == [1, 1], [c.stderr for c in children]
    messages = {line for c in children for line in c.errors}
    assert len(messages) == 1, messages
    (message,) = messages
    assert "two_process_rewards.fail raised KeyError" in message
    assert "the checkpoint of step 0" in message
    assert [len(c.errors) for c in children] == [1, 1]


@pytest.mark.slow
def test_a_disk_that_only_process_0_writes_ends_both(nereus: Any, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    children = nereus.start_two(tmp_path, "num_steps=3")
    assert [c.wait() for c in children] == [1, 1], [c.stderr for c in children]
    for child in children:
        (line,) = child.errors
        assert "samples.jsonl" in line
