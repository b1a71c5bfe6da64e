"""The page of a run: what it shows equals what was worked out by hand; nothing gets through as
markup; damaged files leave gaps, not errors."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from nereus_jax.cli import main
from nereus_jax.report.page.command import make_page
from tests.report.html_runs import (
    FIRST,
    SECOND,
    Page,
    admitted,
    decision,
    live_run,
    simulated_runs,
    stage,
    step_row,
    write_jsonl,
)


def svgs(text: str) -> list[ET.Element]:
    """The charts, each parsed as XML; drawings may lie in drawings."""
    found: list[ET.Element] = []
    depth = start = 0
    for mark in re.finditer("<svg|</svg>", text):
        if mark[0] == "<svg":
            start = start if depth else mark.start()
            depth += 1
            continue
        depth -= 1
        if not depth and text.startswith('<svg class="plot"', start):
            found.append(ET.fromstring(text[start : mark.end()]))
    assert len(found) == text.count('class="plot"')
    return found


def test_figures_of_a_live_run(tmp_path: Path) -> None:
    text = make_page(live_run(tmp_path / "run"))
    page = Page(text)
    assert "Measured on 8 emulated CPU devices" in page.text
    assert page.tiles["Steps"] == "6"
    assert page.tiles["Seconds a step"] == "4.17"  # (10 + 2 + 4 + 5 + 3 + 1) / 6
    assert page.tiles["Without compilation"] == "2.50"  # steps 1, 2, 4 and 5
    assert page.tiles["Changes of plan"] == "1"
    assert "1.50 s in all, 5.7% of the time" in page.text  # 1.5 of 26.5 s
    assert page.tiles["Devices lost"] == "1"
    assert page.tiles["Samples"] == "192"  # 16 x 2 x 6
    assert page.tiles["Tokens a second"] == "240"  # 6,000 in 25 s
    assert page.tiles["Success"] == "62.5%"
    assert "simulated" not in text


def test_steps_that_had_no_memory_and_a_run_that_ended_for_it(tmp_path: Path) -> None:
    directory = live_run(tmp_path / "run")
    assert "Out of memory" not in Page(make_page(directory)).tiles
    moved = admitted(3) | {"trigger": "out_of_memory", "verdict": "urgent"}
    write_jsonl(directory / "decisions.jsonl", [decision(1, "reject"), moved, moved])
    page = Page(make_page(directory))
    assert page.tiles["Out of memory"] == "2" and "and the last" not in page.text
    said = {"step": 6, "error_kind": "OutOfMemoryError", "error": "responses outgrow <9> tokens"}
    (directory / "failure.json").write_text(json.dumps(said))
    page = Page(make_page(directory))
    assert page.tiles["Out of memory"] == "3" and "and the last" in page.text
    assert page.tiles["Steps"] == "6"
    assert "The run ended early: responses outgrow <9> tokens" in page.text


def test_decisions_with_what_came_of_them(tmp_path: Path) -> None:
    page = Page(make_page(live_run(tmp_path / "run")))
    refused, taken = page.rows("Decisions")
    assert (refused["step"], refused["verdict"]) == ("1", "reject")
    assert (refused["L_step now, s"], refused["target, s"]) == ("3.00", "2.50")
    assert refused["measured, s"] == "3.00 (2 steps)"  # steps 1 and 2: 2 and 4 s
    assert refused["error"] == "+0.0%"
    assert refused["L_tran, s"] == "6.00move 0.250setup 5.75compile 0"
    assert (refused["pays back in, steps"], refused["gamma x H, steps"]) == ("12", "4")
    assert refused["measured L_tran, s"] == "–"
    assert taken["measured, s"] == "2.00 (2 steps)"  # steps 4 and 5; step 3 compiles
    assert taken["error"] == "+25.0%"  # 2.5 predicted
    assert taken["L_tran, s"].startswith("1.25move 0.250")
    assert taken["measured L_tran, s"] == "1.50"
    # mean of 0 and 25 %
    assert "Predicted at 2 decisions; off by 12.5% on average, by 25.0% at most." in page.text


def test_all_terms_of_a_decision_are_there(tmp_path: Path) -> None:
    page = Page(make_page(live_run(tmp_path / "run")))
    changed = page.tables["Plans"][1]
    assert changed[1][0] == "actor-GENERATE"
    assert changed[1][1].startswith("dp=4, pp=1, tp=2 on 0:0-7")
    assert changed[1][2].startswith("dp=7, pp=1, tp=1 on 0:0-6; microbatches of 4, ZeRO-1")
    (first,) = page.rows("Candidates")
    assert first["bytes moved"] == "4.0 MiB" and first["memory"] == "50.0%"
    terms = page.rows("Seconds by operation class")
    assert terms[0] == {
        "model-stage": "actor-GENERATE",
        "seconds": "1.50",
        "gemm": "0.750",
        "decode memory": "0.750",
        "weight edge": "0.00100",
        "park": "0",
    }
    assert page.rows("Bytes of a device by kind")[0]["parameters"] == "1.0 GiB"
    assert page.rows("Bytes by device")[0] == {
        "devices": "0:0-3",
        "peak": "2.0 GiB",
        "limit": "4.0 GiB",
    }


def test_charts_are_drawn_and_described(tmp_path: Path) -> None:
    text = make_page(live_run(tmp_path / "run"))
    charts = svgs(text)
    assert len(charts) == 8  # plan, lengths, seconds, stages, pool, memory, success, reward
    ids = Page(text).ids
    assert len(set(ids)) == len(ids)
    for svg in charts:
        title, desc = svg[0], svg[1]
        assert (title.tag, desc.tag) == ("title", "desc") and title.text and desc.text
        assert svg.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    described = [svg[1].text or "" for svg in charts]
    assert "mean from 100 to 150, at most 150" in described[1]
    assert "longest from 300 to 350" in described[1]
    assert described[3].startswith("actor-GENERATE 57.1%; actor-TRAIN 28.6%; weight edges 14.3%")
    assert described[4] == "7 to 8 devices; 8 at first, 7 at last."
    assert "50.0% of the 4.0 GiB that the planner allows itself" in described[5]


def test_a_line_goes_where_the_values_are(tmp_path: Path) -> None:
    """Three steps with 8 devices, then three with 7; an axis up to 10 is 190 pixels high."""
    text = make_page(live_run(tmp_path / "run"))
    (path,) = re.findall(r'run-pool-d.*?<path class="line l0" d="(.*?)"', text, re.S)
    assert path.startswith("M0 38L166.7 38L166.7 38L333.3 38L333.3 38L500 38L500 57L666.7 57")


def test_a_step_that_compiles_does_not_press_the_others_down(tmp_path: Path) -> None:
    text = make_page(live_run(tmp_path / "run"))
    svg = next(s for s in svgs(text) if s[0].text == "Seconds of a step over the steps")
    labels = [float(t.text or "") for t in svg.iter("text") if t.get("class") == "end"]
    assert max(labels) <= 5.0  # the longest step without compilation takes 4 s, step 0 takes 10
    assert len([p for p in svg.iter("path") if p.get("class") == "over"]) == 1  # step 0


def test_rewards_below_zero(tmp_path: Path) -> None:
    run = live_run(tmp_path / "run")
    write_jsonl(run / "metrics.jsonl", [step_row(i, 1.0, reward_mean=-2.0 - i) for i in range(3)])
    svg = next(s for s in svgs(make_page(run)) if s[0].text == "Mean reward over the steps")
    labels = [t.text for t in svg.iter("text") if t.get("class") == "end"]
    assert labels[0] == "-4" and labels[-1] == "0"
    (path,) = (p.get("d") for p in svg.iter("path") if p.get("class") == "line l0")
    assert path == "M166.7 76L500 114L833.3 152"  # 2, 3 and 4 of 5 below, of 190 pixels


def test_the_cost_model_beside_the_stages(tmp_path: Path) -> None:
    run = live_run(tmp_path / "run")
    rows = [
        step_row(i, 4.0, stage_s_predicted={"actor-GENERATE": 1.5}, calibration_mape=0.25)
        for i in range(4)
    ]
    write_jsonl(run / "metrics.jsonl", rows)
    text = make_page(run)
    assert "The model was off by 25.0% on average lately." in text
    svg = next(s for s in svgs(text) if (s[0].text or "").startswith("Model-stages, predicted"))
    # half of 4 s was generation, the only one that was predicted
    assert svg[1].text == (
        "measured from 2 to 2, at most 2; predicted by the cost model from 1.5 to 1.5, at most 1.5"
    )


def test_a_run_without_controller(tmp_path: Path) -> None:
    page = Page(make_page(live_run(tmp_path / "run", policy="")))
    assert "This run had no controller (control.policy is empty)" in page.text
    assert "before steps 3." in page.text
    assert "Decisions" not in page.tables
    assert page.rows("Plans by step")[0]["layout"] == "dp=4, pp=1, tp=2"


def test_a_controller_that_decided_nothing(tmp_path: Path) -> None:
    run = live_run(tmp_path / "run")
    (run / "decisions.jsonl").write_text("")
    assert "The controller (payback) saw no reason" in Page(make_page(run)).text


def test_a_run_of_an_older_version_has_its_plans_from_decisions(tmp_path: Path) -> None:
    run = live_run(tmp_path / "run")
    (run / "plans.jsonl").unlink()
    rows = Page(make_page(run)).rows("Plans by step")
    assert [(r["from step"], r["layout"]) for r in rows if r["model-stage"] == "actor-TRAIN"] == [
        ("0", "dp=2, pp=2, tp=2"),
        ("3", "dp=1, pp=1, tp=4"),
    ]
    (run / "decisions.jsonl").unlink()
    (run / "plan.json").write_text(json.dumps(SECOND))
    page = Page(make_page(run))
    assert "plans before the last one are not known" in page.text


def test_a_decision_that_led_back_to_a_checkpoint(tmp_path: Path) -> None:
    """The loss was before step 5, the checkpoint of step 3: the plan holds from there on."""
    run = live_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_jsonl(run / "metrics.jsonl", [r for r in rows if "transition_s" not in r])
    write_jsonl(run / "decisions.jsonl", [{**admitted(5), "verdict": "urgent"}])
    (row,) = Page(make_page(run)).rows("Decisions")
    assert row["measured L_tran, s"] == "through a checkpoint"
    assert row["measured, s"] == "2.00 (2 steps)"


def test_a_move_that_was_not_made(tmp_path: Path) -> None:
    run = live_run(tmp_path / "run")
    write_jsonl(run / "plans.jsonl", [{"step": 0, "plan": FIRST}])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_jsonl(run / "metrics.jsonl", [r for r in rows if "transition_s" not in r])
    taken = Page(make_page(run)).rows("Decisions")[1]
    assert (taken["measured, s"], taken["measured L_tran, s"]) == ("–", "not made")


def test_what_the_run_wrote_of_an_outcome_counts_where_nothing_else_is_known(
    tmp_path: Path,
) -> None:
    run = live_run(tmp_path / "run")
    rows = [{**admitted(6), "transition_s_measured": 9.0, "step_s_measured": 7.0}]
    write_jsonl(run / "decisions.jsonl", rows)
    (row,) = Page(make_page(run)).rows("Decisions")
    assert row["measured, s"] == "2.00 (2 steps)" and row["measured L_tran, s"] == "1.50"
    write_jsonl(run / "plans.jsonl", [{"step": 0, "plan": FIRST}])
    (row,) = Page(make_page(run)).rows("Decisions")
    assert row["measured, s"] == "7.00" and row["measured L_tran, s"] == "9.00"


def test_a_simulation_says_so_on_every_figure(tmp_path: Path) -> None:
    text = make_page(simulated_runs(tmp_path / "sim"))
    page = Page(text)
    assert text.index("Simulated: nothing on this page was measured") < text.index("<h2>")
    badges = re.findall(r'<span class="badge">(.*?)</span>', text)
    assert len(badges) == page.tags["figure"] > 8 and set(badges) == {"simulated"}
    assert not re.search(r"\bmeasured\b(?! on a device)", page.text)
    static, payback = page.rows("Policies")
    assert (static["s a step"], static["gap to oracle"]) == ("10.0 ± 0.500", "12.5%")
    assert (payback["s a step"], payback["share of time in them"]) == ("9.00 ± 0.500", "11.1%")
    (row,) = page.rows("Decisions")
    assert row["simulated, s"] == "6.00 (2 steps)" and row["error"] == "-16.7%"
    assert row["simulated L_tran, s"] == "4.00"  # 3 s of moving, 1 s of compilation
    assert "Policy static recorded no decision" in page.text


def test_a_directory_of_one_simulated_run(tmp_path: Path) -> None:
    simulated_runs(tmp_path / "sim")
    page = Page(make_page(tmp_path / "sim" / "payback-0"))
    assert "Simulated: nothing on this page was measured" in page.text
    assert "figures.json is missing" in page.text
    assert len(page.rows("Decisions")) == 1


EVIL = "<script>alert('\"x&')</script>"


def test_nothing_of_the_files_becomes_markup(tmp_path: Path) -> None:
    plan = {EVIL: stage(1, 1, 1, EVIL), **FIRST}
    run = live_run(tmp_path / "<b onload=x>run", policy=EVIL)
    bad = price_with(EVIL)
    rows = [
        {**d, "trigger": EVIL, "reason": EVIL, "verdict": EVIL, "pool": EVIL, "plan": plan}
        for d in (decision(1, "keep"), admitted(3))
    ]
    rows[0] |= {"current": bad, "workload": {EVIL: 1.0}}
    rows[1]["candidates"][0] |= {"origin": EVIL, "reason": EVIL, "price": bad}
    write_jsonl(run / "decisions.jsonl", rows)
    write_jsonl(run / "plans.jsonl", [{"step": 0, "device_kind": EVIL, "plan": plan}])
    steps = [step_row(i, 1.0, stage_s={EVIL: 0.5}) for i in range(3)]
    write_jsonl(run / "metrics.jsonl", steps)
    check_harmless(make_page(run))
    sim = simulated_runs(tmp_path / "sim")
    figures = json.loads((sim / "figures.json").read_text())
    figures["policies"][EVIL] = figures["policies"].pop("static")
    figures["runs"][0] |= {"policy": EVIL, "failure": EVIL}
    figures["job"] |= {"model": EVIL, "algorithm": EVIL}
    (sim / "figures.json").write_text(json.dumps(figures))
    check_harmless(make_page(sim))


def price_with(name: str) -> dict[str, object]:
    own = {"seconds": 1.0, "seconds_by_class": {name: 1.0}, "bytes": {name: 1}}
    return {"step_s": 1.0, "stages": {name: own}, "device_bytes": {name: 1}}


def check_harmless(text: str) -> None:
    page = Page(text)
    assert "alert" in page.text  # it is there, as text
    assert not {"script", "b onload", "iframe", "img", "link", "object"} & page.tags.keys()
    for name, value in page.attributes:
        assert not name.startswith("on") and name not in ("src", "style")
        assert name != "href" or value.startswith("#")
    assert "http://" not in text and "@import" not in text and "url(" not in text


def test_a_torn_line_is_told(tmp_path: Path) -> None:
    page = Page(make_page(live_run(tmp_path / "run", torn='{"step": 6, "step_s": 1')))
    assert "metrics.jsonl: line 9 cannot be read (torn or damaged): skipped" in page.text
    assert page.tiles["Steps"] == "6"


def test_values_of_other_types_leave_gaps(tmp_path: Path) -> None:
    run = live_run(tmp_path / "run")
    odd = [
        {**step_row(0, 1.0), "stage_s": [1], "compile_s": None, "response_length_mean": "long"},
        {"step": 1, "step_s": 2.0, "peak_memory_bytes": True, "devices": 1e400},
        {"step": "two", "step_s": 1.0},
        {"step": 3, "step_s": 10**400},
        {"step": 4, "step_s": 0.0},
    ]
    write_jsonl(run / "metrics.jsonl", odd)
    rows = [{"step": 1}, {}, {"step": 2, "candidates": 3, "target": {"actor-TRAIN": 4}}]
    write_jsonl(run / "decisions.jsonl", rows)
    write_jsonl(run / "plans.jsonl", [{"step": 0, "plan": {"actor-TRAIN": {"dp": 0}}}])
    (run / "config.json").write_text("[]")
    page = Page(make_page(run))
    assert "config.json holds no JSON object: left out" in page.text
    assert page.tiles["Steps"] == "3"
    assert len(page.rows("Decisions")) == 3


def test_one_step_is_enough(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_jsonl(run / "metrics.jsonl", [{"step": 0, "step_s": 2.0}])
    page = Page(make_page(run))
    assert page.tiles["Seconds a step"] == "2.00" and page.tiles["Without compilation"] == "–"
    assert "Measured on devices whose kind its files do not tell" in page.text


@pytest.mark.slow
def test_a_long_run_gives_a_page_of_bounded_size(tmp_path: Path) -> None:
    run = live_run(tmp_path / "run")
    write_jsonl(run / "metrics.jsonl", [step_row(i, 1.0 + i % 7) for i in range(5000)])
    rows = [decision(i, "reject", candidates=[candidates] * 5) for i in range(0, 5000, 20)]
    rows[7] = admitted(140)
    write_jsonl(run / "decisions.jsonl", rows)
    plans = [{"step": i, "plan": SECOND if i % 20 else FIRST} for i in range(0, 5000, 10)]
    write_jsonl(run / "plans.jsonl", plans)
    text = make_page(run)
    assert len(text.encode()) < 5_000_000
    page = Page(text)
    assert page.tiles["Steps"] == "5,000"
    assert "A point of a line stands for 32 steps." in page.text  # at most 160 points
    assert len(page.rows("Decisions")) == 250
    told = re.search(r"All terms of (\d+) of them follow", page.text)
    assert told is not None and 10 < int(told[1]) < 250
    assert "run-decision-7" in page.ids, "a decision that moved the job is told before others"


candidates = admitted(0)["candidates"][0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: None, "is no directory; give the --workdir of a run"),
        (lambda d: d.mkdir(), "holds no run: neither metrics.jsonl"),
        (lambda d: write_jsonl(d / "metrics.jsonl", []), "holds no finished step"),
        (lambda d: write_jsonl(d / "metrics.jsonl", [], '{"step'), "holds no finished step"),
    ],
)
def test_a_directory_with_nothing_to_tell(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: "object",
    message: str,
) -> None:
    make(tmp_path / "run")  # type: ignore[operator]
    assert main(["report", str(tmp_path / "run")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_the_command_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = live_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert main(["report", str(run), f"--out={tmp_path / 'page.html'}"]) == 0
    assert (tmp_path / "page.html").read_text() == (run / "report.html").read_text()
    assert main(["report", str(run), f"--out={tmp_path / 'no' / 'page.html'}"]) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert main(["report", str(run), "--colour=red"]) == 2
    assert not list(tmp_path.rglob("*.tmp"))
