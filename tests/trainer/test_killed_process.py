"""One of two processes is killed in each phase of a step and of a transition: the job goes on."""

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.runtime.checkpoint_files import finished_steps

# Every model-stage spans both processes, so that the one that is left waits for the dead one. An
# algorithm without a critic has all phases with few programs to compile.
CONFIG = """
import tiny


def get_config(what=""):
    changing = what == "changing"
    config = tiny.get_config()
    config.num_steps = 6 if what else 3
    if what == "controlled":
        config.control.policy = "every_k=2"
    config.emulated_devices = 4
    config.checkpoint.every = 1
    config.reward.function = "tests.trainer.killing_rewards.digit_match"
    config.algorithm.name = "grpo"
    config.rollout.batch_size = 8
    config.rollout.samples_per_prompt = 2
    del config.plan["critic-TRAIN"], config.plan["critic-SCORE"]
    config.plan["actor-TRAIN"] = "dp=2,pp=2,tp=2"
    config.plan["actor-GENERATE"] = "dp=2,pp=1,tp=2,devices=2-5"
    config.plan["reference-SCORE"] = "dp=2,pp=1,tp=2,devices=2-5"
    if changing:
        config.plan_changes["4"] = {
            "actor-TRAIN": "dp=2,pp=1,tp=2,devices=2-5",
            "actor-GENERATE": "dp=4,pp=1,tp=2",
            "reference-SCORE": "dp=4,pp=1,tp=1,devices=2-5",
        }
    return config
"""
# The step of the changing job in which a process is killed, by phase.
PHASES = {"generate": 1, "score": 2, "train": 3, "transition": 4, "checkpoint": 5}
LOSS_BOUND, LOGPROB_BOUND = 1e-5, 1e-4
WORLD_S = 200
"""That a world takes at most. Each compiles anew: jax's cache serves the first process alone."""


class ElasticJob:
    """Two slots of `nereus train --elastic` with four devices each."""

    def __init__(self, nereus: Any, workdir: Path, num_steps: int, *arguments: str) -> None:
        self.nereus, self.workdir, self.num_steps = nereus, workdir, num_steps
        self.num_worlds = 2
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._job = ("--elastic=20", f"--coordinator={address}", *arguments)
        self.slots = [self.start(slot) for slot in range(2)]

    def start(self, slot: int) -> Any:
        who = ("--num-processes=2", f"--process-id={slot}")
        return self.nereus.start(self.workdir, *self._job, *who)

    def check_ended(self, *slots: int) -> None:
        """The slots end with 0; every step and every sample is there once."""
        for slot in slots:
            child = self.slots[slot]
            assert child.process.wait(WORLD_S * self.num_worlds) == 0, child.stderr
        steps = list(range(self.num_steps))
        assert [r["step"] for r in self.rows()] == steps
        assert finished_steps(self.workdir / "checkpoints")[-1] == self.num_steps
        samples = [s["step"] for s in self.nereus.rows(self.workdir, "samples")]
        assert samples == [step for step in steps for _ in range(2)]

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of steps, without those of changes of plan."""
        return [r for r in self.nereus.same_rows(self.workdir) if "policy_loss" in r]

    def final_state(self) -> Any:
        """Counters and checksums of every array after the last step; alike on every layout."""
        directory = self.workdir / "checkpoints" / "steps" / str(self.num_steps)
        meta = json.loads((directory / "meta" / "metadata").read_text())["meta"]
        sums = json.loads((directory / "checksums" / "metadata").read_text())
        assert len(sums) > 10
        return meta["counters"], sums


def spanning_job(
    nereus: Any, workdir: Path, *, changing: bool = False, controlled: bool = False
) -> ElasticJob:
    """A job whose plan changes, one with a controller, or one without either."""
    config = nereus.directory / "killed.py"
    config.write_text(CONFIG)
    if changing or controlled:
        what = "changing" if changing else "controlled"
        return ElasticJob(nereus, workdir, 6, f"--config={config}:{what}")
    return ElasticJob(nereus, workdir, 3, f"--config={config}")


def check_same(job: ElasticJob, undisturbed: ElasticJob) -> None:
    """Every step and the final state are those of a run without a kill, bit for bit."""
    assert job.rows() == undisturbed.rows()
    assert job.final_state() == undisturbed.final_state()


@pytest.fixture(scope="module")
def undisturbed(nereus: Any, tmp_path_factory: pytest.TempPathFactory) -> ElasticJob:
    job = spanning_job(nereus, tmp_path_factory.mktemp("undisturbed"))
    job.check_ended(0, 1)
    return job


@pytest.fixture(scope="module")
def changing(nereus: Any, tmp_path_factory: pytest.TempPathFactory) -> ElasticJob:
    job = spanning_job(nereus, tmp_path_factory.mktemp("changing"), changing=True)
    job.check_ended(0, 1)
    assert "the plan has changed" in job.slots[0].stderr
    return job


@pytest.fixture
def kills(nereus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Names the phases in which a process is killed, and sees that it was."""
    marks = tmp_path / "marks"
    marks.mkdir()
    names: list[str] = []

    def name(victim: int, what: str, **steps: int) -> None:
        names.extend(f"{phase}-{step}-{victim}" for phase, step in steps.items())
        wanted = [f"{phase} {step} {victim} {what} {marks}" for phase, step in steps.items()]
        monkeypatch.setitem(nereus.env, "NEREUS_KILL", ";".join(wanted))

    yield name
    assert sorted(p.name for p in marks.iterdir()) == sorted(names)


@pytest.mark.slow
def test_a_worker_killed_in_an_update_starts_again(
    nereus: Any, finished_run: Path, kills: Any, tmp_path: Path
) -> None:
    kills(1, "worker", train=1)
    job = ElasticJob(
        nereus,
        tmp_path / "run",
        3,
        "num_steps=3",
        "emulated_devices=4",
        "checkpoint.every=1",
        "reward.function=tests.trainer.killing_rewards.digit_match",
        "rollout.source=recorded",  # nothing to compile for GENERATE
        f"rollout.recorded_dir={finished_run / 'rollouts'}",
    )
    job.check_ended(0, 1)
    wanted = [r for r in nereus.same_rows(finished_run) if "policy_loss" in r]
    check_near(job.rows(), wanted[:3])
    for child in job.slots:
        assert "the worker of slot 1 ended by SIGKILL" in child.stderr
        assert "world 2: slots 0, 1" in child.stderr


@pytest.mark.slow
@pytest.mark.timeout(WORLD_S * 8)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_in_every_phase(
    nereus: Any, changing: ElasticJob, kills: Any, tmp_path: Path, victim: int
) -> None:
    kills(victim, "worker", **PHASES)
    job = spanning_job(nereus, tmp_path / "run", changing=True)
    job.num_worlds = 1 + len(PHASES)
    job.check_ended(0, 1)
    check_same(job, changing)
    assert f"world {1 + len(PHASES)}: slots 0, 1" in job.slots[0].stderr


@pytest.mark.slow
@pytest.mark.timeout(WORLD_S * 5)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_controller_goes_on_from_what_it_knew(
    nereus: Any, kills: Any, tmp_path: Path, victim: int
) -> None:
    """It looks for a plan every second step, and has looked once before the kill."""
    kills(victim, "worker", train=3)
    job = spanning_job(nereus, tmp_path / "run", controlled=True)
    job.check_ended(0, 1)
    decisions = nereus.rows(job.workdir, "decisions")
    steps = [row["step"] for row in decisions]
    assert steps[0] == 2 and len(steps) >= 2 and steps == sorted(set(steps))
    meta = job.workdir / "checkpoints" / "steps" / "6" / "meta" / "metadata"
    controller = json.loads(meta.read_text())["meta"]["controller"]
    assert controller["replans"] == len(steps)
    assert controller["step"] + len(controller["waiting"]) == 6
    assert len(controller["lengths"]["mean"]) + len(controller["waiting"]) == 6, "every step once"


@pytest.mark.slow
@pytest.mark.timeout(WORLD_S * 5)
def test_an_operation_that_fails_in_one_process_alone(
    nereus: Any, changing: ElasticJob, kills: Any, tmp_path: Path
) -> None:
    """The others wait for it in a collective: nobody can go on from intact units."""
    kills(1, "error", transition=4)
    job = spanning_job(nereus, tmp_path / "run", changing=True)
    job.check_ended(0, 1)
    check_same(job, changing)
    assert "world 2: slots 0, 1" in job.slots[0].stderr


@pytest.mark.slow
@pytest.mark.timeout(WORLD_S * 5)
def test_a_device_that_is_full_in_one_process_alone(
    nereus: Any, kills: Any, tmp_path: Path
) -> None:
    """The world that follows tells its controller, which moves before the step is made again."""
    kills(1, "error", score=3)
    job = spanning_job(nereus, tmp_path / "run", controlled=True)
    job.check_ended(0, 1)
    said = job.slots[0].stderr
    assert "world 2: slots 0, 1" in said and "one process had no memory for a step" in said
    told = [d for d in nereus.rows(job.workdir, "decisions") if "out_of_memory" in d["trigger"]]
    assert len(told) == 1 and told[0]["step"] == 3
    assert told[0]["verdict"] == "urgent" and told[0]["target"] != told[0]["plan"]
    # The step that had no memory is made again under the other plan, not under the old one.
    rows = nereus.rows(job.workdir, "metrics")
    order = [("move" if "transition_s" in row else "step", row["step"]) for row in rows]
    assert order.index(("move", 3)) < order.index(("step", 3))
    notes = [json.loads(x) for x in (job.workdir / "device_full.jsonl").read_text().splitlines()]
    assert [note["step"] for note in notes] == [3] and notes[0]["plan"] == told[0]["plan"]


@pytest.mark.slow
@pytest.mark.timeout(WORLD_S * 5)
@pytest.mark.parametrize(
    ("phase", "victim"), [*((phase, 1) for phase in PHASES), ("train", 0), ("transition", 0)]
)
def test_a_killed_machine_is_done_without(
    nereus: Any, changing: ElasticJob, kills: Any, tmp_path: Path, phase: str, victim: int
) -> None:
    """Worker and supervisor of a slot die; the other one goes on with its four devices."""
    kills(victim, "slot", **{phase: PHASES[phase]})
    job = spanning_job(nereus, tmp_path / "run", changing=True)
    left = 1 - victim
    job.check_ended(left)
    said = job.slots[left].stderr
    assert f"world 2: slots {left}" in said
    assert "needs more than the 4 devices" in said
    check_near(job.rows(), changing.rows())


def check_near(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Steps on other layouts from the same state: within the parity bounds."""
    for row, reference in zip(got, wanted, strict=True):
        assert abs(row["policy_loss"] - reference["policy_loss"]) <= LOSS_BOUND, row["step"]
        assert abs(row["kl"] - reference["kl"]) <= LOGPROB_BOUND, row["step"]
        assert row["rollout_train_logp_diff"] <= LOGPROB_BOUND
        for name in ("reward_mean", "tokens", "policy_version"):
            assert row[name] == reference[name], (row["step"], name)


@pytest.mark.slow
@pytest.mark.timeout(WORLD_S * 5)
def test_a_killed_machine_comes_back(
    nereus: Any, undisturbed: ElasticJob, kills: Any, tmp_path: Path
) -> None:
    kills(1, "slot", score=1)
    job = spanning_job(nereus, tmp_path / "run")
    job.slots[0].wait_for(lambda: "world 2: slots 0" in job.slots[0].stderr)
    assert job.slots[1].wait() == -signal.SIGKILL
    job.slots[1] = job.start(1)
    job.check_ended(0, 1)
    check_near(job.rows(), undisturbed.rows())
    assert "world 3: slots 0, 1" in job.slots[0].stderr
