"""A run under a plan file: every model-stage runs exactly as the file says."""

import json
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.config import RunConfig, parse_config
from nereus_jax.core.errors import NereusError
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    CRITIC_SCORE,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
)
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import form_world
from nereus_jax.trainer.job import Job, make_job, read_inputs
from nereus_jax.trainer.plan_schedule import make_schedule, scheduled_jobs
from tests.trainer.plan_change_cases import Trainer, boundary, logical, opened, tiny_config

ON_ONE = {"pp": 1, "tp": 1, "microbatch_size": 4}
PLAN: dict[str, dict[str, Any]] = {
    "actor-TRAIN": {
        "dp": 2,
        "pp": 2,
        "tp": 1,
        "devices": ["0:0", "0:1", "0:2", "0:3"],
        "microbatch_size": 1,
        "microbatches": 2,
        "remat": True,
        "zero1": True,
    },
    "critic-TRAIN": ON_ONE | {"dp": 1, "devices": ["0:4"], "microbatch_size": 8},
    "actor-GENERATE": ON_ONE | {"dp": 2, "devices": ["0:5", "0:6"], "microbatch_size": 6},
    "reference-SCORE": ON_ONE | {"dp": 1, "devices": ["0:0"], "microbatch_size": 16},
    "critic-SCORE": ON_ONE | {"dp": 1, "devices": ["0:4"], "microbatch_size": 2},
}


def config_of(tmp_path: Path, content: Any = PLAN, **settings: Any) -> Any:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    config = tiny_config(**settings)
    for name in list(config.plan):
        del config.plan[name]
    config.plan_file = str(path)
    return config


def job_of(config: Any) -> Job:
    checked: RunConfig = parse_config(config)
    return make_job(checked, read_inputs(checked), form_world(emulated_devices=8))


def test_every_engine_is_as_the_file_says(tmp_path: Path) -> None:
    job = job_of(config_of(tmp_path))
    actor, critic = job.trains[ACTOR_TRAIN], job.trains[CRITIC_TRAIN]
    assert (actor.microbatch_size, actor.flush_microbatches) == (1, 2)
    assert actor.remat and actor.zero1
    assert critic.microbatch_size == 8 and not critic.remat and not critic.zero1
    assert job.scores[REFERENCE_SCORE].microbatch_size == 16
    assert job.scores[CRITIC_SCORE].microbatch_size == 2
    assert job.generate.max_num_seqs == 6 and job.generate.slots(16) == 6
    assert [str(d) for d in job.plan[ACTOR_GENERATE].devices] == ["0:5", "0:6"]
    ((shape,), *_) = actor.forms(8, 10)
    assert (shape.rows, shape.microbatches, shape.flushes) == (1, 2, 2)


def test_without_a_file_choices_are_those_of_the_configuration() -> None:
    job = job_of(tiny_config(rollout__max_num_seqs=5))
    choices = job.execution.choices
    assert choices[ACTOR_TRAIN].microbatch_size == 4 and choices[REFERENCE_SCORE].microbatches == 0
    assert choices[ACTOR_GENERATE].microbatch_size == 8  # two prefill microbatches of 4
    assert job.generate.slots(16) == 8
    assert job_of(tiny_config()).execution.choices[ACTOR_GENERATE].microbatch_size == 0


@pytest.mark.parametrize(
    ("stage", "changes", "says"),
    [
        ("critic-SCORE", None, ["critic-SCORE is missing"]),
        ("reward-SCORE", ON_ONE | {"dp": 1, "devices": ["0:0"]}, ["reward-SCORE is no part"]),
        ("critic-TRAIN", {"devices": ["1:4"]}, ["critic-TRAIN is placed on 1:4", "pool of 8"]),
        ("critic-TRAIN", {"microbatch_size": 3}, ["microbatch_size=3", "allowed: 1, 2, 4, 8"]),
        ("actor-TRAIN", {"microbatches": 3}, ["microbatches=3", "allowed: 0 (all), 1, 2, 4"]),
        ("critic-SCORE", {"microbatch_size": 5}, ["5 does not divide the 16 rows of a replica"]),
        ("critic-SCORE", {"remat": True}, ["critic-SCORE: remat and zero1 are for TRAIN"]),
        (
            "critic-TRAIN",
            {"tp": 3, "devices": ["0:1", "0:2", "0:3"]},
            ["critic-TRAIN: tp=3 does not divide the 4 query heads"],
        ),
        (
            "actor-GENERATE",
            {"dp": 1, "pp": 2, "microbatch_size": 3},
            ["actor-GENERATE: microbatch_size=3", "a multiple of 2"],
        ),
        (
            "critic-SCORE",
            {"pp": 2, "devices": ["0:1", "0:2"], "microbatches": 4},
            ["microbatches=4, but a flush of SCORE has 8 here"],
        ),
    ],
    ids=lambda x: "" if isinstance(x, list) else str(x),
)
def test_what_cannot_run_exactly_is_one_line(
    stage: str, changes: dict[str, Any] | None, says: list[str], tmp_path: Path
) -> None:
    content = {name: dict(entry) for name, entry in PLAN.items()}
    if changes is None:
        del content[stage]
    else:
        content[stage] = content.get(stage, {}) | changes
    config = config_of(tmp_path, content)
    with pytest.raises(NereusError) as caught:
        job_of(config)
    message = str(caught.value)
    assert message.startswith(f"plan_file ({config.plan_file})") and "\n" not in message
    assert caught.value.exit_code == 2
    for part in says:
        assert part in message


MOVED = {
    **PLAN,
    "actor-TRAIN": ON_ONE | {"dp": 1, "tp": 2, "devices": ["0:2", "0:3"]},
    "critic-TRAIN": ON_ONE | {"dp": 2, "devices": ["0:4", "0:5"], "zero1": True},
}
SAME_PLACES = {**PLAN, "actor-TRAIN": PLAN["actor-TRAIN"] | {"zero1": False, "microbatch_size": 2}}


@pytest.mark.slow
def test_choices_change_with_the_plan_and_no_bit_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the optimizer's state is split over the replicas in one of the plans only."""
    config = config_of(tmp_path)
    for step, content in ((1, MOVED), (2, PLAN), (3, SAME_PLACES)):
        path = tmp_path / f"{step}.json"
        path.write_text(json.dumps(content))
        config.plan_changes[str(step)] = str(path)
    programs = ProgramCache()
    with opened(config, tmp_path / "run", programs, monkeypatch) as (session, state):
        before = logical(session.job, state)
        for step in (1, 2, 3):
            wanted = session.schedule.jobs[step].execution
            boundary(session, state, step)
            assert session.job.execution == wanted
            assert logical(session.job, state) == before | {"counters": state.counters}
            written = json.loads((tmp_path / "run" / "plan.json").read_text())
            assert ExecutionPlan.from_json(written) == wanted


def test_a_change_to_a_file_that_cannot_run_names_its_step(tmp_path: Path) -> None:
    path = tmp_path / "later.json"
    wrong = PLAN["critic-TRAIN"] | {"microbatch_size": 3}
    path.write_text(json.dumps({**PLAN, "critic-TRAIN": wrong}))
    config = config_of(tmp_path)
    config.plan_changes["2"] = str(path)
    job = job_of(config)
    with pytest.raises(
        NereusError, match=r"plan_changes\.2 \(.*later\.json\): critic-TRAIN: micro"
    ):
        make_schedule(job, scheduled_jobs(job))


@pytest.mark.slow
def test_a_run_under_a_file_gives_what_one_under_entries_gives(tmp_path: Path) -> None:
    """Microbatches, recomputation and ZeRO-1 change no sample and no loss beyond rounding."""
    trainer = Trainer()
    rows: list[list[dict[str, Any]]] = []
    for name, config in (("file", config_of(tmp_path)), ("entries", tiny_config())):
        config.num_steps = 2
        run = trainer.run(config, tmp_path / name)
        assert run.error is None
        rows.append(run.steps())
    for mine, its in zip(*rows, strict=True):
        assert mine["tokens"] == its["tokens"]
    assert rows[0][0]["policy_loss"] == pytest.approx(rows[1][0]["policy_loss"], abs=1e-5)
    assert rows[0][0]["value_loss"] == pytest.approx(rows[1][0]["value_loss"], abs=1e-5)
