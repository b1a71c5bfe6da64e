"""`nereus explain`: every format says the same as the graph, and mistakes are one line."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from nereus_jax.cli import main
from nereus_jax.core.architectures import Head
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN, REFERENCE_SCORE
from nereus_jax.core.transition import LinkBytes, OperationKind, TransitionGraph, Way
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.transition_graph import plan_transition
from nereus_jax.planning.transition_inputs import decoder_states
from nereus_jax.report.transition_report import LINKS, to_dot, to_json, to_svg, to_text

ROOT = Path(__file__).resolve().parents[2]
POOL = DevicePool.uniform(2, 4).devices
MODEL = "qwen2.5-0.5b"


def place(dp: int, pp: int, tp: int, start: int) -> Placement:
    layout = ParallelLayout(dp, pp, tp)
    return Placement(layout=layout, devices=POOL[start : start + layout.num_devices])


SOURCE = Plan(
    placements={
        ACTOR_GENERATE: place(4, 1, 1, 0),
        REFERENCE_SCORE: place(2, 1, 2, 0),
        ACTOR_TRAIN: place(1, 2, 2, 0),
    }
)
TARGET = Plan(
    placements={
        ACTOR_GENERATE: place(8, 1, 1, 0),
        REFERENCE_SCORE: place(2, 1, 2, 0),
        ACTOR_TRAIN: place(2, 2, 2, 0),
    }
)


@pytest.fixture(scope="module")
def graph() -> TransitionGraph:
    states = decoder_states(preset(MODEL), SOURCE.placements)
    return plan_transition(states, SOURCE, TARGET, hardware=load_hardware("h100"))


def test_the_graph_of_the_example(graph: TransitionGraph) -> None:
    ways = {stage: choice.way for stage, choice in graph.choices.items()}
    assert ways == {
        ACTOR_GENERATE: Way.REFRESHED,
        REFERENCE_SCORE: Way.KEPT,
        ACTOR_TRAIN: Way.COMPOSED,
    }
    # Four units of GENERATE are made on the second node; the one unit of TRAIN is copied there.
    kinds = [o.kind for o in graph.operations]
    assert sorted(kinds) == [OperationKind.EXTEND] + 4 * [OperationKind.REFRESH]
    state_bytes = 3 * 4 * preset(MODEL).num_params(Head.LM)
    assert graph.link_bytes == LinkBytes(
        inter_node=state_bytes, intra_node=graph.link_bytes.intra_node
    )


def test_text_names_operations_choices_and_peaks(graph: TransitionGraph) -> None:
    text = to_text(graph, "a title")
    assert text.startswith("a title\nmodelled: L_tran ")
    assert re.search(r"\* +actor-TRAIN +extend .*pp2 tp2 on 0:0-3 -> pp2 tp2 on 1:0-3", text)
    assert "reference-SCORE: kept" in text and "actor-GENERATE: refreshed" in text
    assert re.search(r"composed .*\n +direct ", text)
    assert re.search(r"GB of 7.*GB +0:0-3", text)
    operations = text.split("operations in dispatch order")[1]
    assert "storage" not in operations  # nothing comes from there


def test_json_holds_the_whole_graph(graph: TransitionGraph) -> None:
    content = json.loads(to_json(graph, "t"))
    assert content["transition_s"] == graph.transition_s and content["modelled"] is True
    assert len(content["operations"]) == len(graph.operations)
    for i, (row, operation) in enumerate(zip(content["operations"], graph.operations, strict=True)):
        assert row["kind"] == operation.kind and row["start_s"] == graph.start_s[i]
        assert row["data_edges"] == list(graph.data_edges[i])
        devices = [d for u in row["produces"] for d in u["devices"]]
        assert devices == [str(d) for u in operation.produces for d in u.devices]
    for name in LINKS:
        total = sum(row["link_bytes"][name] for row in content["operations"])
        assert content["link_bytes"][name] == total
    assert content["devices"]["0:0"]["peak_bytes"] == graph.peak_bytes[0]


def test_dot_has_every_node_and_edge(graph: TransitionGraph) -> None:
    dot = to_dot(graph, 'a "title"')
    assert dot.count("[label=") == len(graph.operations)
    edges = sum(map(len, graph.data_edges)) + sum(map(len, graph.resource_edges))
    assert dot.count(" -> ") == edges
    assert dot.count("penwidth") == len(graph.critical_path)


def test_svg_draws_every_operation_that_takes_time(graph: TransitionGraph) -> None:
    root = ET.fromstring(to_svg(graph, "a < b"))
    names = [x.text or "" for x in root.iter("{http://www.w3.org/2000/svg}title")]
    timed = [i for i, o in enumerate(graph.operations) if o.seconds]
    assert {int(n.split()[0]) for n in names} == set(timed)
    framed = [x for x in root.iter() if x.get("stroke") == "#d62728"]
    assert framed


def write(path: Path, plan: Plan) -> str:
    path.write_text(json.dumps(plan.to_json()))
    return str(path)


def test_the_command_prints_what_the_report_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], graph: TransitionGraph
) -> None:
    ends = write(tmp_path / "a.json", SOURCE), write(tmp_path / "b.json", TARGET)
    arguments = ["explain", f"--from={ends[0]}", f"--to={ends[1]}", f"--model={MODEL}"]
    assert main([*arguments, "--format=json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["transition_s"] == graph.transition_s
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"{ends[0]} -> {ends[1]}: {MODEL} on h100\n")


def test_the_command_takes_files_of_hugging_face(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ROOT / "tests" / "golden" / "qwen2_tiny"
    one = Plan(placements={ACTOR_TRAIN: place(1, 1, 1, 0)})
    ends = write(tmp_path / "a.json", one), write(tmp_path / "b.json", one)
    for name in (model, model / "config.json"):
        assert main(["explain", f"--from={ends[0]}", f"--to={ends[1]}", f"--model={name}"]) == 0
        assert "actor-TRAIN: kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--from": "nowhere.json"}, "nowhere.json cannot be read as a plan"),
        ({"--from": "list.json"}, "holds no plan"),
        ({"--to": "wrong.json"}, "is not a placement"),
        ({"--to": "wide.json"}, "tp=3 does not divide"),
        ({"--model": "nothing"}, "no model is called 'nothing'"),
        ({"--hardware": "h1000"}, "hardware: 'h1000' is not known"),
        ({"--format": "pdf"}, "invalid choice: 'pdf'"),
        ({"--to": "large.json", "--model": "llama3-70b"}, "largest is actor-TRAIN"),
        ({"--workdir": "x"}, "unknown argument '--workdir=x'"),
    ],
)
def test_a_mistake_is_one_line(
    change: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a.json"), SOURCE)
    write(Path("large.json"), Plan(placements={ACTOR_TRAIN: place(8, 1, 1, 0)}))
    write(Path("wide.json"), Plan(placements={ACTOR_TRAIN: place(1, 1, 3, 0)}))
    Path("list.json").write_text("[]")
    Path("wrong.json").write_text('{"actor-TRAIN": {"dp": 1}}')
    given = {"--from": "a.json", "--to": "a.json", "--model": MODEL} | change
    assert main(["explain", *(f"{k}={v}" for k, v in given.items())]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_explain_loads_no_jax(tmp_path: Path) -> None:
    end = write(tmp_path / "a.json", SOURCE)
    program = (
        "import sys; from nereus_jax.cli import main; "
        f"code = main(['explain', '--from={end}', '--to={end}', '--model={MODEL}']); "
        "assert code == 0 and 'jax' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True, timeout=60
    )


def test_devices_in_ranges(graph: TransitionGraph) -> None:
    assert DeviceId(0, 0) in graph.devices
    text = to_text(graph, "t")
    assert "0:0-3" in text and "1:0-3" in text
