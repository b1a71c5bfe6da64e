"""A recorded run under other policies: a directory made by hand, and mistakes with it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.cli import main
from nereus_jax.config import config_to_json, parse_config
from nereus_jax.control.decisions import device_ranges, parse_plan, parse_ranges, plan_json
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.run_problem import make_workflow
from nereus_jax.simulator.compare import compare
from nereus_jax.simulator.recording import FILES, lengths_of, read_recording
from nereus_jax.simulator.replay import Replay, make_replay
from nereus_jax.simulator.stage_run import StepRows
from nereus_jax.testing import tiny_run_config

DEVICES = tuple(DeviceId(0, i) for i in range(4))
STEPS, LOST, BACK = 8, 3, 6
MEANS = [100.0 + 20.0 * i for i in range(STEPS)]
FACTORS = {Stage.GENERATE: 3.0, Stage.SCORE: 0.5, Stage.TRAIN: 2.0}
BETWEEN_S = 0.7


def live_config() -> Any:
    config = tiny_run_config()
    config.model.preset = "qwen2.5-0.5b"
    config.num_steps, config.checkpoint.every, config.checkpoint.keep = STEPS, 1, 2
    config.data.max_prompt_length, config.rollout.max_response_length = 64, 1024
    config.rollout.batch_size, config.algorithm.minibatch_size = 32, 16
    config.transition.hardware = "a100-40gb"
    config.control.policy = "dp_only"
    return config


def plan_of(dp: int) -> ExecutionPlan:
    """Everything on `dp` devices, one after the other."""
    stages = make_workflow(parse_config(live_config())).model_stages
    placement = Placement(layout=ParallelLayout(dp, 1, 1), devices=DEVICES[:dp])
    return ExecutionPlan(
        plan=Plan(placements=dict.fromkeys(stages, placement)),
        choices=dict.fromkeys(stages, StageChoice(microbatch_size=2)),
    )


def row(step: int, stage_s: Mapping[str, float], step_s: float) -> dict[str, Any]:
    return {
        "step": step,
        "step_s": step_s,
        "stage_s": dict(stage_s),
        "response_length_mean": MEANS[step],
        "response_length_p95": 2.0 * MEANS[step],
        "response_length_max": round(3.0 * MEANS[step]),
        "tokens": 32 * (MEANS[step] + 48.0),
        # A new program is waited for at the start and after the loss.
        "compile_s": {"exposed": 5.0 + 4.0 * (step >= LOST)},
    }


def write(directory: Path, rows: list[dict[str, Any]]) -> Path:
    """A run on four devices, of which one is gone for three steps."""
    directory.mkdir(exist_ok=True)
    many, few = plan_of(4), plan_of(2)
    base = {"trigger": "pool", "verdict": "urgent"}
    decisions = [
        base | {"step": LOST, "plan": plan_json(many), "pool": "0:0-2"},
        base | {"step": BACK, "plan": plan_json(few), "pool": "0:0-3"},
    ]
    moved = {"step": LOST, "transition_s": 1.5}
    files: dict[str, list[dict[str, Any]]] = {
        "metrics.jsonl": [*rows[:LOST], moved, *rows[LOST:]],
        "decisions.jsonl": decisions,
        "plans.jsonl": [
            {"step": step, "device_kind": "cpu", "plan": plan_json(plan)}
            for step, plan in ((0, few), (0, many), (LOST, few))  # the first was replaced at once
        ],
    }
    for name, lines in files.items():
        (directory / name).write_text("".join(json.dumps(x) + "\n" for x in lines))
    config = config_to_json(parse_config(live_config()))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """Of a run whose seconds are the ground truth's times factors, but for first calls."""
    directory = tmp_path_factory.mktemp("run")
    names = [str(s) for s in plan_of(4).choices]
    write(directory, [row(i, dict.fromkeys(names, 1.0), 1.0) for i in range(STEPS)])
    blank = make_replay(read_recording(directory), preset)
    made = blank.scenario(0)
    factors = {ModelStage.parse(n): FACTORS[ModelStage.parse(n).stage] for n in names}
    cluster = type(made.cluster)(
        problem=blank.problem, nodes=1, seed=0, stage_factors=factors, between_s=BETWEEN_S
    )
    rows: list[dict[str, Any]] = []
    for i, step in enumerate(blank.recording.steps):
        prompts = np.full(32, blank.problem.workload.prompt_lengths.max, np.int64)
        step_rows = StepRows(prompts=prompts, responses=step.responses)
        stage_s, step_s = cluster.usual_s(step.plan, step_rows)
        slow = 1.0 if step.settled else 9.0
        rows.append(row(i, {str(s): slow * x for s, x in stage_s.items()}, slow * step_s))
    return make_replay(read_recording(write(directory, rows)), preset)


def test_what_happened_is_read(replay: Replay) -> None:
    recording = replay.recording
    layouts = [s.plan.plan.placements for s in recording.steps]
    assert [{p.layout.dp for p in x.values()} for x in layouts] == [{4}] * LOST + [{2}] * 5
    assert [s.settled for s in recording.steps] == [False, True, True, False, *[True] * 4]
    assert recording.pool.first == DEVICES
    changes = [(c.at, c.going, c.coming) for c in recording.pool.changes]
    assert changes == [(3.0, DEVICES[3:], ()), (6.0, (), DEVICES[3:])]
    assert (recording.policy, recording.moves, recording.moved_s) == ("dp_only", 1, 1.5)
    for step, mean in zip(recording.steps, MEANS, strict=True):
        assert step.responses.mean() == pytest.approx(mean, abs=0.5)
        assert step.prompt_tokens == pytest.approx(48.0)


def test_the_cluster_is_fitted_to_the_run(replay: Replay) -> None:
    for stage, factor in replay.fit.factors.items():
        assert factor == pytest.approx(FACTORS[stage.stage])
    assert replay.fit.between_s == pytest.approx(BETWEEN_S, abs=1e-6)
    assert replay.fit.error == pytest.approx(0.0, abs=1e-9)
    assert replay.fit.steps == STEPS - 2
    stages = [s.stage for s in plan_of(4).choices]  # two programs of GENERATE and TRAIN
    assert replay.fit.compile_s == 5.0 / (len(stages) + sum(s != Stage.SCORE for s in stages))
    assert replay.scenario(0).cluster.truth.overheads.compile_s == replay.fit.compile_s


def test_other_policies_go_through_the_same(replay: Replay) -> None:
    compared = compare(replay.scenario, ["dp_only", "payback", "oracle"], [0])
    for runs in (*compared.runs.values(), compared.bounds):
        run = runs[0]
        assert not run.failure and len(run.steps) == STEPS
        assert [s.mean_tokens for s in run.steps] == [
            float(s.responses.mean()) for s in replay.recording.steps
        ]
        assert {len(s.pool) for s in run.steps[LOST:BACK]} == {3}
        assert run.steps[0].plan == plan_of(4) or runs is compared.bounds
    again = compare(replay.scenario, ["payback"], [0])
    assert again.figures()["payback"]["total_s"] == compared.figures()["payback"]["total_s"]


def test_the_command(replay: Replay, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    source = f"--from={replay.recording.directory}"
    assert main(["simulate", source, "--policy=static", f"--json={figures}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("recorded (measured): dp_only, 8 steps") and "simulated" in out
    data = json.loads(figures.read_text())
    assert data["simulated"] is True and data["recorded"]["simulated"] is False
    assert data["recorded"]["fit"]["error"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("missing", FILES)
def test_what_is_missing_is_said(
    replay: Replay, tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in FILES:
        if name != missing:
            (tmp_path / name).write_bytes((replay.recording.directory / name).read_bytes())
    assert main(["simulate", f"--from={tmp_path}"]) == 2
    error = capsys.readouterr().err.strip()
    assert f"has no {missing}; a replay needs config.json, " in error and "\n" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from=nowhere"], "nowhere is no directory"),
        (["--from=RUN", "--config.steps=3"], "--config.steps=3 sets a key of --config"),
        (["--from=RUN", "--hardware=a100-81gb"], "'a100-81gb' is not known"),
        (["--from=RUN", "--seeds=0"], "--seeds must be at least 1, got 0"),
        (["--from=RUN", "--policy="], "--policy names no policy"),
        (["--config=sim.py", "--hardware=h100"], "--hardware goes with --from"),
    ],
)
def test_mistakes_are_one_line(
    replay: Replay, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(replay.recording.directory)
    assert main(["simulate", *(a.replace("RUN", run) for a in arguments)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.startswith("nereus: error: ") and "\n" not in error


def test_a_plan_that_is_none(replay: Replay, tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes((replay.recording.directory / name).read_bytes())
    (tmp_path / "plans.jsonl").write_text('{"step": 0, "plan": {"actor-TRAIN": {"dp": 1}}}\n')
    from nereus_jax.core.errors import NereusError

    with pytest.raises(NereusError, match="are not those of a run of this version"):
        read_recording(tmp_path)
    (tmp_path / "plans.jsonl").write_text("")
    with pytest.raises(NereusError, match=r"plans\.jsonl has no plan of step 0"):
        read_recording(tmp_path)


@given(
    mean=st.floats(20.0, 400.0),
    spread=st.floats(1.2, 4.0),
    tail=st.floats(1.0, 3.0),
    count=st.integers(32, 2048),
)
def test_lengths_have_the_recorded_mean(
    mean: float, spread: float, tail: float, count: int
) -> None:
    p95 = mean * spread
    longest = round(p95 * tail)
    lengths = lengths_of(mean, p95, longest, count)
    assert len(lengths) == count and lengths.max() == longest and lengths.min() >= 1
    assert lengths.mean() == pytest.approx(mean, rel=0.02, abs=1.0)
    at_p95 = float(np.percentile(lengths, 95))
    assert at_p95 == pytest.approx(p95, abs=1.0 + 5.0 * longest / count)


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 11)), min_size=1))
def test_ranges_are_read_back(pairs: set[tuple[int, int]]) -> None:
    devices = tuple(sorted(DeviceId(*p) for p in pairs))
    assert parse_ranges(device_ranges(devices)) == devices
    backwards = tuple(reversed(devices))
    assert parse_ranges(",".join(map(str, backwards))) == backwards


def test_plans_are_read_back() -> None:
    plan = plan_of(3)
    assert parse_plan(json.loads(json.dumps(plan_json(plan)))) == plan
    with pytest.raises(ValueError, match="0:3-1"):
        parse_ranges("0:3-1")
