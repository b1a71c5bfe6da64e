"""Devices are lost in every phase of a step under a controller: one replan, and the run goes on."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from nereus_jax.core.devices import DeviceId
from nereus_jax.runtime import faults
from nereus_jax.runtime.checkpoints import CheckpointStore
from nereus_jax.runtime.dispatch import run_wave
from nereus_jax.runtime.transitions import Batch
from nereus_jax.trainer import loop
from nereus_jax.trainer import step as step_module
from nereus_jax.trainer.adaptation import Adaptation
from nereus_jax.trainer.session import Session
from nereus_jax.trainer.state import JobState
from tests.trainer import plan_change_cases as cases
from tests.trainer.plan_change_cases import Devices, Run, Trainer, tiny_config

pytestmark = pytest.mark.slow

STEP = 1
GONE = DeviceId(0, 0)
STAGES = {"generate": "actor-GENERATE", "score": "reference-SCORE", "train": "actor-TRAIN"}
PHASES = (*STAGES, "weight edge", "transition")


def config() -> Any:
    made = tiny_config(
        **cases.SMALL
        | {
            "transition__verify": "digest",
            "checkpoint__every": 1,
            "algorithm__name": "grpo",
            "algorithm__kl__place": "loss",
            "algorithm__kl__estimator": "k3",
            "num_steps": 3,
            "control__policy": "dp_only",
        }
    )
    made.rollout.samples_per_prompt = 2
    made.rollout.batch_size = 8
    for entry in list(made.plan):
        del made.plan[entry]
    for stage in ("actor-TRAIN", "actor-GENERATE", "reference-SCORE"):
        made.plan[stage] = "dp=2,pp=1,tp=1,devices=0-1"
    return made


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture(scope="module")
def undisturbed(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = trainer.run(config(), tmp_path_factory.mktemp("undisturbed"))
    assert run.error is None
    assert (run.workdir / "decisions.jsonl").read_text() == ""
    return run


class Loss:
    """Takes a device away in a phase of a step, once."""

    def __init__(self, phase: str, patch: pytest.MonkeyPatch) -> None:
        self.phase, self.devices, self.done = phase, Devices(), False
        self.restored = 0
        real = CheckpointStore.restore

        def restore(store: CheckpointStore, step: int, abstract: Any) -> Any:
            self.restored += 1
            return real(store, step, abstract)

        patch.setattr(CheckpointStore, "restore", restore)
        if phase in STAGES:
            patch.setattr(step_module, "run_wave", self.run_wave)
        if phase == "train":  # what is trained has been taken over by the update
            patch.setattr(faults, "probe", lambda world: frozenset([GONE] if self.done else []))
        if phase == "weight edge":
            patch.setattr(loop, "refresh_edges", self.during(loop.refresh_edges))
        if phase == "transition":
            patch.setattr(Adaptation, "_cannot_wait", lambda self, state: state.pending is not None)

    def lose(self) -> None:
        self.done = True
        assert self.devices.lose(GONE)
        raise jax.errors.JaxRuntimeError("INTERNAL: no answer from the device")

    def run_wave(self, works: Any, step: int, meanwhile: Any) -> Any:
        here = step == STEP and STAGES[self.phase] in [work.name for work in works]
        if self.done or not here:
            return run_wave(works, step, meanwhile)
        if self.phase == "train":
            works[0].launches[0]()  # one update of two
        else:
            run_wave(works, step, meanwhile)
        self.lose()

    def during(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(job: Any, state: JobState) -> Any:
            found = real(job, state)
            if state.counters.step == STEP and not self.done:
                self.lose()
            return found

        return run

    def before_change(self, session: Session, state: JobState) -> None:
        """Another device is announced to go, so that there is a transition to lose one in."""
        if self.phase == "transition" and state.counters.step == STEP - 1:
            assert session.adaptation is not None
            session.adaptation.sources.inbox.submit(
                {"change": "revoke", "devices": ["0:1"], "deadline_s": 1e5}
            )

    def observe(self, batch: Batch) -> None:
        if self.phase == "transition" and not self.done:
            self.done = True
            self.devices.lose(GONE)


@pytest.mark.parametrize("phase", PHASES)
def test_a_device_goes_in_any_phase(
    phase: str,
    trainer: Trainer,
    undisturbed: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss = Loss(phase, monkeypatch)
    run = trainer.run(config(), tmp_path, before_change=loss.before_change, observe=loss.observe)
    assert run.error is None and loss.done
    # An update that had begun has consumed the state before it.
    assert loss.restored == (1 if phase == "train" else 0)
    assert run.states[STEP] == undisturbed.states[STEP]
    assert {d for p in run.jobs[2].plan.placements.values() for d in p.devices}.isdisjoint({GONE})
    assert [row["step"] for row in run.steps()] == [0, 1, 2]
    samples = [row["sample"] for row in run.rows("samples")]
    assert samples == [row["sample"] for row in undisturbed.rows("samples")] == list(range(48))
    for got, wanted in zip(run.steps()[: STEP + 1], undisturbed.steps(), strict=False):
        assert got["policy_version"] == wanted["policy_version"]
        assert got["policy_loss"] == pytest.approx(wanted["policy_loss"], abs=1e-5)
    decisions = run.rows("decisions")
    assert 1 <= len(decisions) <= (2 if phase == "transition" else 1)
    for row in decisions:
        assert (row["trigger"], row["verdict"]) == ("pool", "urgent")
    assert decisions[-1]["transition_s_measured"] > 0
    assert ("transition_error" in decisions[-1]) == (phase == "train")


def announce(session: Session, *devices: str, deadline_s: float) -> None:
    assert session.adaptation is not None
    session.adaptation.sources.inbox.submit(
        {"change": "revoke", "devices": list(devices), "deadline_s": deadline_s}
    )


@pytest.mark.parametrize("deadline_s", [1e5, 0.0], ids=["in time", "too late"])
def test_devices_are_left_before_they_go(
    deadline_s: float,
    trainer: Trainer,
    undisturbed: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By moving if there is time, else through a checkpoint of the state as it is."""
    late = deadline_s == 0
    loss = Loss("none", monkeypatch)
    monkeypatch.setattr(Adaptation, "_cannot_wait", lambda self, state: state.pending is not None)
    plans: dict[int, Any] = {}

    def before_change(session: Session, state: JobState) -> None:
        adaptation, step = session.adaptation, state.counters.step
        assert adaptation is not None and adaptation.state is not None
        plans[step] = session.job.plan
        if step == STEP - 1:
            announce(session, "0:0", deadline_s=deadline_s)
        if step == STEP and not late and adaptation.state.leaving:  # its time is over
            adaptation.state = dataclasses.replace(adaptation.state, leaving={GONE: 0.0})

    run = trainer.run(config(), tmp_path, before_change=before_change)
    assert run.error is None
    assert loss.restored == int(late)
    assert run.states[STEP] == undisturbed.states[STEP]
    for step in (STEP, 2):
        used = {d for p in run.jobs[step].plan.placements.values() for d in p.devices}
        assert GONE not in used
    assert run.said("lost devices: 0:0; going on with 7 of 8 devices")
    assert not run.said("going back") or late
    (decision,) = run.rows("decisions")
    assert decision["verdict"] == "urgent" and "transition_error" not in decision
    assert ("by checkpoint and restart" in decision["reason"]) == late
    (row,) = run.transitions()
    assert decision["transition_s_measured"] == row["transition_s"] > 0
    assert [row["step"] for row in run.steps()] == [0, 1, 2]
    assert [row["sample"] for row in run.rows("samples")] == list(range(48))


def test_when_all_devices_go_the_run_ends_and_can_go_on(
    trainer: Trainer, undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command goes on, under the plan that the controller had moved to."""
    monkeypatch.setattr(Adaptation, "_cannot_wait", lambda self, state: state.pending is not None)

    def before_change(session: Session, state: JobState) -> None:
        if state.counters.step == 0:
            announce(session, "0:0", deadline_s=1e5)
        if state.counters.step == 1:
            announce(session, "0:1-7", deadline_s=60)

    ended = trainer.run(config(), tmp_path, before_change=before_change)
    assert ended.error is None and [row["step"] for row in ended.steps()] == [0, 1]
    assert ended.said("the run ends before step 3: all devices that are left will be gone; start")
    again = trainer.run(config(), tmp_path)
    assert again.error is None and again.said("resumed from the checkpoint of step 2")
    assert again.said("going on under the plan that the controller had moved to")
    assert again.jobs[2].execution == ended.jobs[1].execution != ended.jobs[0].execution
    assert [row["step"] for row in again.steps()] == [0, 1, 2]
    assert [row["sample"] for row in again.rows("samples")] == list(range(48))
    assert [row["verdict"] for row in again.rows("decisions")] == ["urgent"]
    made = config()  # another plan is asked for: that is meant
    made.plan["reference-SCORE"] = "dp=1,pp=1,tp=1,devices=1"
    made.num_steps = 3
    other = trainer.run(made, tmp_path)
    assert other.error is None and not other.said("going on under the plan")
