"""`nereus simulate`, from its configuration to its files."""

import json
from pathlib import Path

import pytest

from nereus_jax.cli import main
from nereus_jax.config.simulation import SimulationConfig, default_simulation, parse_simulation
from nereus_jax.core.errors import ConfigError
from nereus_jax.simulator.command import trace_of

CONFIG = """
from nereus_jax.config.simulation import default_simulation


def get_config():
    config = default_simulation()
    config.model = "qwen2.5-0.5b"
    config.nodes = 2
    config.steps = 5
    config.prompts = 32
    config.minibatch_size = 16
    config.prompt_tokens = 64
    config.supply = "synthetic"
    config.max_response_tokens = 2048
    config.synthetic_start_tokens = 100.0
    config.synthetic_end_tokens = 400.0
    return config
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "sim.py"
    path.write_text(CONFIG)
    return f"--config={path}"


def test_policies_are_compared(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, runs = tmp_path / "out.json", tmp_path / "runs"
    code = main(
        [
            "simulate",
            config,
            "--policy=payback,oracle",
            "--seeds=2",
            f"--json={figures}",
            f"--workdir={runs}",
            "--config.steps=3",
        ]
    )
    assert code == 0
    captured = capsys.readouterr()
    assert "policy (simulated)" in captured.out and "payback" in captured.out
    assert captured.err.count("(simulated)") == 4
    data = json.loads(figures.read_text())
    assert data["simulated"] is True
    assert set(data["policies"]) == {"payback", "oracle"}
    assert data == json.loads((runs / "figures.json").read_text())
    steps = (runs / "payback-1" / "steps.jsonl").read_text().splitlines()
    rows = [json.loads(s) for s in steps]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "actor-TRAIN" in rows[0]["plan"] and rows[0]["simulated"] is True
    for row in rows:
        longest = row["response_tokens_longest"]
        assert 0 < row["response_tokens_mean"] <= row["response_tokens_p95"] <= longest
    assert data["job"] | {"model": "qwen2.5-0.5b", "devices": 16, "steps": 3} == data["job"]
    for line in (runs / "payback-0" / "decisions.jsonl").read_text().splitlines():
        assert {"step", "trigger", "verdict", "reason"} <= set(json.loads(line))
    assert main(["report", str(runs)]) == 0
    page = (runs / "report.html").read_text()
    assert "PPO of qwen2.5-0.5b on up to 16" in page and "payback, seed 0" in page
    assert page.count('<span class="badge">simulated</span>') == page.count("<figure") > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds=0"], "--seeds must be at least 1, got 0"),
        (["--policy=best"], "policy 'best' is not known; use one of static"),
        (["--config.steps=0"], "steps must be an int >= 1, got 0"),
        (["--config.nodes=0"], "nodes must be an int >= 1"),
        (["--config.step=3"], "did you mean 'steps'?"),
        (["--config.supply=none.json"], "none.json cannot be read"),
        (["--config.model=llama3-8bb"], "llama3-8b"),
        (["--config.minibatch_size=7"], "minibatch_size must divide the 32 rows"),
        (["--config.algorithm=grpo"], "samples must be at least 2 for grpo"),
        (["--config.hardware=v100-32gb"], "has no peak for bfloat16"),
        (["--config.tail=lognormal=x"], "lognormal needs a number, got 'x'"),
        (["--config.model=llama3-70b", "--config.nodes=1"], "GiB short of a device"),
        (["--speed=3"], "unknown argument '--speed=3'"),
    ],
)
def test_mistakes_are_one_line(
    config: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", config, *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.startswith("nereus: error: ") and "\n" not in error


def test_the_configuration() -> None:
    assert parse_simulation({}) == SimulationConfig()
    assert parse_simulation(default_simulation().to_dict()) == SimulationConfig()
    with pytest.raises(ConfigError, match="supply_stop_s must be above supply_start_s 50 or 0"):
        parse_simulation({"supply_start_s": 50.0, "supply_stop_s": 20.0})


def test_real_traces_are_cut_and_scaled(tmp_path: Path) -> None:
    """A window of a supply of 16 nodes for a cluster of 4; the curve over all steps."""
    supply, curve = tmp_path / "supply.json", tmp_path / "curve.csv"
    supply.write_text('{"metadata": {"gap_seconds": 300}, "data": [16, 16, 8, 0, 4, 12, 16]}')
    curve.write_text("step,mean_response_length\n0,100\n100,300\n")
    trace = trace_of(
        parse_simulation(
            {
                "supply": str(supply),
                "supply_start_s": 600.0,
                "lengths": str(curve),
                "steps": 3,
                "nodes": 3,
                "seconds_per_step": 300.0,
            }
        ),
        seed=0,
    )
    # 8, 0, 4 of the window's 8 become 3, 0 and 2 of 3 nodes; one stays in any case.
    assert trace.nodes == 3
    assert [(c.at, c.nodes) for c in trace.changes] == [(1.5, 1), (2.5, 2)]
    assert trace.mean_tokens.tolist() == [100.0, 200.0, 300.0]
