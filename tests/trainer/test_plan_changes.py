"""A job changes its plan at a step boundary and nothing of its logical state with it."""

import copy
import dataclasses
import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs.ppo_tiny import get_config
from nereus_jax.core.errors import NereusError
from nereus_jax.core.roles import CRITIC_TRAIN
from nereus_jax.core.transition import OperationKind, TransitionGraph, Way
from nereus_jax.report.timeline import read_timeline, to_perfetto
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime.checkpoint_files import finished_steps
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.transitions import Batch, Executed, batches, execute
from nereus_jax.trainer import plan_change
from nereus_jax.trainer.compilation import digest_recipes
from nereus_jax.trainer.job import Job, make_job
from nereus_jax.trainer.rollouts import take_prompts
from nereus_jax.trainer.rows import step_row
from nereus_jax.trainer.session import Session
from nereus_jax.trainer.state import JobState, refresh_edges
from nereus_jax.trainer.step import run_step
from nereus_jax.trainer.verification import Fingerprints, fingerprints
from tests.trainer.plan_change_cases import (
    SMALL,
    SMALL_MEMORY_GIB,
    Run,
    Trainer,
    boundary,
    logical,
    opened,
    swapping_config,
    tiny_config,
)

LOSS_BOUND, LOGPROB_BOUND = 1e-5, 1e-4
# Entry by entry what becomes of the plan of `tiny_config`.
CHANGES: Mapping[str, Mapping[str, str]] = {
    "doubled": {
        "actor-TRAIN": "dp=4,pp=1,tp=2",
        "critic-TRAIN": "dp=4,pp=1,tp=1,devices=4-7",
        "reference-SCORE": "dp=2,pp=1,tp=2",
    },
    "halved": {
        "actor-TRAIN": "dp=1,pp=1,tp=2,devices=2-3",
        "critic-TRAIN": "dp=1,pp=1,tp=1,devices=5",
        "reference-SCORE": "dp=1,pp=1,tp=1,devices=1",
    },
    "other tp and pp": {
        "actor-TRAIN": "dp=1,pp=2,tp=4",
        "critic-TRAIN": "dp=1,pp=2,tp=2,devices=0-3",
        "reference-SCORE": "dp=1,pp=2,tp=1,devices=6-7",
    },
    "no power of two": {
        "actor-TRAIN": "dp=3,pp=1,tp=2,devices=1-6",
        "critic-TRAIN": "dp=3,pp=2,tp=1,devices=0-2,5-7",
        "reference-SCORE": "dp=5,pp=1,tp=1,devices=2-6",
    },
}


@pytest.fixture(scope="module")
def programs() -> ProgramCache:
    return ProgramCache()


def check_changed(session: Session, state: JobState, wanted: dict[str, Any]) -> None:
    """The job and its state are under the first plan of `plan_changes`, the values the same."""
    planned = session.schedule.jobs[1]
    assert session.job.plan == planned.plan
    for stage, held in state.trained.items():
        for name, array in held.params.items():
            mesh = array.sharding.mesh
            assert mesh == planned.sites[stage].mesh, name
    got = logical(session.job, state)
    assert got.keys() == wanted.keys()
    assert [name for name, value in got.items() if value != wanted[name]] == []


@pytest.mark.parametrize(
    "verify",
    ["off", pytest.param("digest", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("zero1", [False, True], ids=["", "zero1"])
@pytest.mark.parametrize("name", CHANGES)
def test_the_state_is_the_same_to_the_bit(
    name: str,
    zero1: bool,
    verify: str,
    programs: ProgramCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config(train__zero1=zero1, transition__verify=verify)
    config.plan_changes["1"] = CHANGES[name]
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        before = logical(session.job, state)
        boundary(session, state, 1)
        check_changed(session, state, before | {"counters": state.counters})


def test_a_change_waits_for_its_programs_while_steps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(transition__switch="when_ready")
    config.plan_changes["1"] = CHANGES["halved"]
    config.plan_changes["2"] = CHANGES["doubled"]
    with opened(config, tmp_path, ProgramCache(), monkeypatch) as (session, state):
        first, schedule, gate = session.job, session.schedule, threading.Event()
        schedule.queue.submit(gate.wait)
        change = schedule.prepared
        assert change is not None
        for recipe in (*digest_recipes(change.old), *digest_recipes(change.new)):
            session.job.programs.prefetch(*recipe, schedule.queue)
        for step in (1, 2, 3):
            boundary(session, state, step)
            assert session.job is first, "its programs are not there"
        gate.set()
        schedule.queue.submit(lambda: None).result()
        before = logical(session.job, state)
        boundary(session, state, 4)
        check_changed(session, state, before | {"counters": state.counters})
        assert schedule.prepared_step == 2, "the change that has come meanwhile is next"
        boundary(session, state, 5)
        assert session.job.plan == schedule.jobs[1].plan, "and waits in its turn"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["composed", "direct"])
def test_one_replica_to_one_replica_under_zero1(
    way: str, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units on the way are several, but none of them holds a part of the optimizer only."""
    config = tiny_config(train__zero1=True, transition__way=way)
    config.plan["actor-TRAIN"] = "dp=1,pp=2,tp=2"
    config.plan_changes["1"] = {"actor-TRAIN": "dp=1,pp=1,tp=4"}
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        before = logical(session.job, state)
        boundary(session, state, 1)
        check_changed(session, state, before | {"counters": state.counters})


class Plug:
    """Pulled before one batch of operations, so many times.

    Args:
      number: of the batch, counted over all that are begun.
      times: that it is pulled.
    """

    def __init__(self, number: int, times: int = 1) -> None:
        self.number, self.times, self.begun = number, times, 0

    def __call__(self, batch: Batch) -> None:
        self.begun += 1
        if self.number < self.begun <= self.number + self.times:
            raise RuntimeError("no power")


def number_of_batches(session: Session) -> int:
    prepared = session.schedule.prepared
    assert prepared is not None
    return len(batches(prepared.graph))


MOVES = {"actor-TRAIN": "dp=2,pp=2,tp=1,devices=1-4", "critic-TRAIN": "dp=1,pp=1,tp=2,devices=2-3"}


def test_an_exception_at_any_operation_leaves_the_old_plan(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**SMALL)
    config.plan_changes["1"] = config.plan_changes["2"] = MOVES
    config.plan_changes["3"] = {"actor-TRAIN": "dp=1,pp=1,tp=2"}
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        job, before = session.job, logical(session.job, state)
        for number in range(number_of_batches(session)):
            session.observe = Plug(number)
            said = boundary(session, state, 1)
            assert "the old plan goes on: the transition stopped at operation" in said[-1]
            assert session.job is job
            assert logical(job, state) == before | {"counters": state.counters}
            session.schedule.prepare_next(job, 1)
        session.observe = None
        boundary(session, state, 1)
        check_changed(session, state, before | {"counters": state.counters})
        assert session.schedule.due(3) is not None  # the second is the plan that holds now


@pytest.mark.parametrize("times", [1, 2])
def test_without_room_for_the_old_state_it_goes_on_from_whole_units(
    times: int, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the same operation is tried again. Twice: the rest is planned anew."""
    monkeypatch.setattr(TransitionGraph, "old_state_fits", property(lambda graph: False))
    config = tiny_config(**SMALL)
    config.plan_changes["1"] = MOVES
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        job, before, first = session.job, logical(session.job, state), copy.copy(state)
        for number in range(number_of_batches(session)):
            session.observe = Plug(number, times)
            said = boundary(session, state, 1)
            anew = [text for text in said if "going on from the units that are intact" in text]
            assert len(anew) == times - 1
            check_changed(session, state, before | {"counters": state.counters})
            session.job, state = job, copy.copy(first)
            session.schedule.prepare_next(job, 1)


def test_what_never_goes_through_is_given_up(
    programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransitionGraph, "old_state_fits", property(lambda graph: False))
    config = tiny_config(**SMALL)
    config.plan_changes["1"] = MOVES
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        before = logical(session.job, state)
        session.observe = Plug(1, 100)
        said = boundary(session, state, 1)
        assert "is given up; the job goes on where its state is now" in said[-1]
        assert session.job.plan != session.schedule.jobs[1].plan
        assert logical(session.job, state) == before | {"counters": state.counters}


@pytest.mark.parametrize("times", [0, 1, 2])
def test_state_that_waits_in_host_memory_is_whole_at_every_operation(
    times: int, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = swapping_config(device_memory_gib=SMALL_MEMORY_GIB)
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        job, before, first = session.job, logical(session.job, state), copy.copy(state)
        prepared = session.schedule.prepared
        assert prepared is not None and not prepared.graph.old_state_fits
        assert Way.PARKED in {choice.way for choice in prepared.graph.choices.values()}
        for number in range(number_of_batches(session) if times else 1):
            session.observe = Plug(number, times)
            boundary(session, state, 1)
            check_changed(session, state, before | {"counters": state.counters})
            session.job, state = job, copy.copy(first)
            session.schedule.prepare_next(job, 1)


def flip_a_bit(executed: Executed) -> Executed:
    """One bit of one block of the critic is wrong."""
    unit = next(iter(executed.units[CRITIC_TRAIN].values()))
    blocks = dict(unit.blocks["parameters.layers.up"])
    device, block = next(iter(blocks.items()))
    wrong = np.array(block)
    wrong.reshape(-1).view(np.uint32)[3] ^= 1 << 20
    blocks[device] = jax.device_put(wrong, block.device)
    leaves = dict(unit.blocks) | {"parameters.layers.up": blocks}
    broken = dataclasses.replace(unit, blocks=leaves)
    held = dict(executed.units[CRITIC_TRAIN]) | {unit.unit: broken}
    return dataclasses.replace(executed, units=executed.units | {CRITIC_TRAIN: held})


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ("digest", True),
        ("off", True),
        ("full", True),
        pytest.param("digest", False, marks=pytest.mark.slow),
        pytest.param("full", False, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_bit_is_found(
    how: str, kept: bool, programs: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransitionGraph, "old_state_fits", property(lambda graph: kept))
    monkeypatch.setattr(plan_change, "execute", lambda *a, **k: flip_a_bit(execute(*a, **k)))
    config = tiny_config(**SMALL | {"transition__verify": how, "checkpoint__every": 1})
    config.plan_changes["1"] = MOVES
    with opened(config, tmp_path, programs, monkeypatch) as (session, state):
        job, before = session.job, logical(session.job, state)
        said = boundary(session, state, 1)
        if how == "off":
            got = logical(session.job, state)
            wrong = [name for name, value in got.items() if value != before[name]]
            assert wrong == ["counters", "critic-TRAIN parameters.layers.up"]
            return
        assert session.job is job
        assert any("critic-TRAIN: 'parameters.layers.up' has" in text for text in said)
        if kept:
            assert "the old plan goes on" in said[-1]
            assert logical(job, state) == before | {"counters": state.counters}
        else:
            assert said[-1] == "resumed from the checkpoint of step 0"
            assert state.counters.step == 0 and logical(job, state) != before


@pytest.mark.parametrize(
    ("changes", "settings", "says"),
    [
        pytest.param(
            {"actor-TRAIN": "dp=1,pp=1,tp=2,devices=7-8"},
            {},
            ["plan_changes.1.actor-TRAIN: ", "names device 8, got a pool of 8 devices"],
            id="a device that is not there",
        ),
        pytest.param(
            {"critic-TRAIN": "dp=3,pp=2,tp=2"},
            {},
            ["plan_changes.1.critic-TRAIN: ", "asks for 12 devices, got a pool of 8"],
            id="too many devices",
        ),
        pytest.param(
            {"actor-TRAIN": "dp=2,pp=1,tp=1,devices=2-3"},
            {"device_memory_gib": SMALL_MEMORY_GIB},
            ["plan_changes.1: device 0:2 needs", "device_memory_gib allows"],
            id="a plan that does not fit",
        ),
        pytest.param(
            None,
            {"device_memory_gib": SMALL_MEMORY_GIB, "transition__way": "composed"},
            [
                "plan_changes.1: ",
                "-TRAIN cannot reach its target: the operation",
                "bytes on device",
            ],
            id="no way to a plan that fits",
        ),
        pytest.param(
            None,
            {"transition__hardware": "h1000"},
            ["h1000"],
            id="unknown hardware",
        ),
    ],
)
def test_a_change_that_cannot_be_is_one_line_before_anything_starts(
    changes: dict[str, str] | None, settings: dict[str, Any], says: list[str], tmp_path: Path
) -> None:
    config = swapping_config(**settings)
    if changes is not None:
        config.plan_changes["1"] = changes
    trainer = Trainer()
    error = trainer.run(config, tmp_path).error
    assert isinstance(error, NereusError) and error.exit_code == 2
    assert "\n" not in str(error)
    for part in says:
        assert part in str(error)
    assert not trainer.programs.items()
    assert not list(tmp_path.rglob("*.jsonl"))


# --- in a run ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """A run that changed its plan, and what it had before each change.

    Attributes:
      run: what it did.
      trainer: with its programs.
      before: by step, the job, the digests and a copy of the state before the change.
    """

    run: Run
    trainer: Trainer
    before: Mapping[int, tuple[Job, Fingerprints, JobState]]


def copied(state: JobState) -> JobState:
    """The same values in arrays of their own."""

    def copy_of(x: jax.Array) -> jax.Array:
        return jax.device_put(np.array(x), x.sharding)

    trained, frozen = jax.tree.map(copy_of, (state.trained, dict(state.frozen)))
    return JobState(counters=state.counters, trained=trained, frozen=frozen)


def watch(config: Any, workdir: Path) -> Watched:
    trainer = Trainer()
    before: dict[int, tuple[Job, Fingerprints, JobState]] = {}

    def look(session: Session, state: JobState) -> None:
        step, job = state.counters.step, session.job
        if step in config_steps:
            before[step] = job, fingerprints(job, state, "digest"), copied(state)

    config_steps = {int(step) for step in config.plan_changes}
    run = trainer.run(config, workdir, before_change=look)
    if run.error is not None:
        raise run.error
    return Watched(run=run, trainer=trainer, before=before)


def changing_config() -> Any:
    config = tiny_config(**SMALL, num_steps=5, checkpoint__every=1, checkpoint__keep=100)
    config.transition.verify = "digest"
    config.plan_changes["2"] = {"actor-TRAIN": "dp=1,pp=2,tp=1,devices=3-4"}
    config.plan_changes["4"] = {
        "actor-TRAIN": "dp=1,pp=2,tp=1,devices=3-4",
        "critic-TRAIN": "dp=3,pp=1,tp=1,devices=0,2,4",
    }
    return config


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return watch(changing_config(), tmp_path_factory.mktemp("changing"))


def check_steps_after_changes(watched: Watched) -> None:
    """The step after each change is the one that the old plan takes from there."""
    run = watched.run
    for step, (old, digests, state) in watched.before.items():
        assert run.states[step] == digests
        assert run.jobs[step].plan != old.plan
        row = step_of(watched, old, state)
        got = run.steps()[step]
        for name in ("policy_loss", "value_loss"):
            assert abs(got[name] - row[name]) <= LOSS_BOUND, (step, name)
        assert abs(got["kl"] - row["kl"]) <= LOGPROB_BOUND
        assert row["rollout_train_logp_diff"] <= LOGPROB_BOUND
        for name in ("entropy", "approx_kl", "actor_grad_norm", "critic_grad_norm"):
            assert got[name] == pytest.approx(row[name], rel=1e-4, abs=1e-4), (step, name)
        for name in ("reward_mean", "tokens", "policy_version", "response_length_mean"):
            assert got[name] == row[name], (step, name)


def step_of(watched: Watched, old: Job, state: JobState) -> Mapping[str, Any]:
    """The row of a step that the old plan takes with the recorded rollout."""
    rollout = dataclasses.replace(
        old.config.rollout,
        source="recorded",
        record=False,
        recorded_dir=str(watched.run.workdir / "rollouts"),
    )
    config = dataclasses.replace(old.config, rollout=rollout)
    job = make_job(config, old.inputs, old.world, old.execution, watched.trainer.programs)
    counters = state.counters
    prompts = take_prompts(job, counters.data_position, counters.samples)
    refresh_edges(job, state)
    result = run_step(job, state, prompts)
    return step_row(job, result, step=counters.step, step_s=1.0, edge_spans=())


@pytest.mark.slow
def test_the_step_after_a_change_is_that_of_the_old_plan(watched: Watched) -> None:
    check_steps_after_changes(watched)


def check_samples(run: Run, num_steps: int, rows: int) -> None:
    """Every sample of the stream was used once, in order, with draws of its own."""
    rollouts = [Rollout.load(p) for p in sorted((run.workdir / "rollouts").iterdir())]
    indices = np.concatenate([r.sample_indices_B for r in rollouts])
    np.testing.assert_array_equal(indices, np.arange(rows * num_steps))
    inputs = run.jobs[0].inputs
    stream = inputs.train_prompts.take(rollout_start(run), rows * num_steps)
    wanted = [list(s.tokens) for s in stream.samples]
    used = [
        tokens[:n].tolist()
        for r in rollouts
        for tokens, n in zip(r.tokens_BS, r.prompt_lengths_B, strict=True)
    ]
    assert used == wanted
    assert [row["step"] for row in run.steps()] == list(range(num_steps))


def rollout_start(run: Run) -> int:
    """Samples of the stream that the warm-up took."""
    warmup = run.jobs[0].config.warmup
    return warmup.num_steps * warmup.batch_size if warmup.num_steps else 0


@pytest.mark.slow
def test_samples_are_used_once(watched: Watched) -> None:
    check_samples(watched.run, num_steps=5, rows=16)


@pytest.mark.slow
def test_what_a_change_did_is_recorded(watched: Watched) -> None:
    rows, spans = watched.run.transitions(), read_timeline(watched.run.workdir / "timeline.jsonl")
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        assert set(row["transition_ways"]) == {str(s) for s in watched.run.jobs[0].plan.placements}
        changes = [s for s in spans if s.kind == "transition" and s.step == row["step"]]
        whole, operations = changes[0], changes[1:]
        assert whole.name == "transition" and operations
        moved = row["transition_wire_bytes"]
        assert sum(s.bytes or 0 for s in operations) == whole.bytes == moved > 0
        for span in operations:
            kind, stage = span.name.split()
            assert kind in set(OperationKind) and stage in ("actor-TRAIN", "critic-TRAIN")
            assert whole.start_s <= span.start_s <= span.end_s <= whole.end_s
            assert set(span.devices) <= set(whole.devices)
        assert row["transition_s"] == pytest.approx(whole.duration_s)
    # From the change on every step has the new devices.
    for step, devices in ((1, ("0:0", "0:1", "0:2", "0:3")), (2, ("0:3", "0:4"))):
        (span,) = [s for s in spans if (s.step, s.name) == (step, "actor-TRAIN")]
        assert span.devices == devices
    events = to_perfetto(spans)["traceEvents"]
    assert {e["tid"] for e in events if e["name"] == "reshard actor-TRAIN"}
    json.dumps(events, allow_nan=False)


@pytest.mark.slow
def test_a_resume_goes_on_with_the_plan_that_holds_then(watched: Watched, tmp_path: Path) -> None:
    """Also at a step before which the plan changes: the change is made then."""
    for step in (3, 4):
        workdir = tmp_path / str(step)
        shutil.copytree(watched.run.workdir, workdir)
        for later in finished_steps(workdir / "checkpoints"):
            if later > step:
                shutil.rmtree(workdir / "checkpoints" / "steps" / str(later))
        again = watched.trainer.run(changing_config(), workdir)
        assert again.error is None
        assert list(again.states) == list(range(step, 5))
        assert [again.jobs[s].plan for s in again.jobs] == [
            watched.run.jobs[s].plan for s in again.jobs
        ]
        assert all(again.states[s] == watched.run.states[s] for s in again.states)
        assert [row["step"] for row in again.transitions()] == [2, 4]
        assert [row["step"] for row in again.steps()] == list(range(5))
        assert again.rows("samples") == watched.run.rows("samples")


def four_changes() -> Any:
    """`configs/ppo_tiny.py`, 20 steps of it with fewer rows, under five plans."""
    config = get_config()
    config.num_steps = 20
    config.warmup.num_steps = 4
    config.warmup.batch_size = 32
    config.rollout.batch_size = 32
    config.algorithm.minibatch_size = 16
    config.train.microbatch_size = 4
    config.rollout.record = True
    config.report.tensorboard = False
    config.transition.hardware = "h100"
    config.eval.every = 0
    config.plan_changes["4"] = {  # half of the devices
        "actor-TRAIN": "dp=1,pp=2,tp=2,devices=4-7",
        "critic-TRAIN": "dp=2,pp=1,tp=2,devices=0-3",
        "actor-GENERATE": "dp=2,pp=1,tp=2,devices=0-3",
        "reference-SCORE": "dp=2,pp=1,tp=1,devices=1-2",
        "critic-SCORE": "dp=1,pp=1,tp=2,devices=6-7",
    }
    config.plan_changes["8"] = {  # and twice as many again
        "actor-TRAIN": "dp=2,pp=2,tp=2",
        "critic-TRAIN": "dp=4,pp=1,tp=2",
        "actor-GENERATE": "dp=4,pp=1,tp=2",
        "reference-SCORE": "dp=4,pp=1,tp=1,devices=0-3",
        "critic-SCORE": "dp=2,pp=1,tp=2,devices=4-7",
    }
    config.plan_changes["12"] = {  # tp and pp of every model-stage
        "actor-TRAIN": "dp=2,pp=1,tp=4",
        "critic-TRAIN": "dp=1,pp=2,tp=4",
        "actor-GENERATE": "dp=2,pp=2,tp=2",
        "reference-SCORE": "dp=1,pp=2,tp=2,devices=0-3",
        "critic-SCORE": "dp=1,pp=1,tp=4,devices=4-7",
    }
    config.plan_changes["16"] = {  # no powers of two
        "actor-TRAIN": "dp=1,pp=3,tp=2,devices=1-6",
        "critic-TRAIN": "dp=3,pp=1,tp=2,devices=2-7",
        "actor-GENERATE": "dp=3,pp=1,tp=2,devices=0-5",
        "reference-SCORE": "dp=3,pp=1,tp=1,devices=0-2",
        "critic-SCORE": "dp=5,pp=1,tp=1,devices=3-7",
    }
    return config


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_changes_in_twenty_steps(tmp_path: Path) -> None:
    watched = watch(four_changes(), tmp_path)
    assert list(watched.before) == [4, 8, 12, 16]
    check_steps_after_changes(watched)
    check_samples(watched.run, num_steps=20, rows=32)
    for row in watched.run.transitions():
        print(row["step"], row["transition_ways"], row["transition_operations"])
