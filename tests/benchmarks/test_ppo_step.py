"""The PPO step benchmark: its arithmetic by hand, and a small run of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.core.architectures import DecoderConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "ppo_step"
NAMES = {
    "cpu_s_over_tunix",
    "cpu_s_over_trl",
    "wall_s_over_tunix_best8",
    "peak_memory_over_tunix",
    "train_matmul_peak_share",
    "detail",
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's modules `work` and `run`, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("work", "clock", "clocked_reward", "run")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import run  # type: ignore[import-not-found]
    import work  # type: ignore[import-not-found]

    yield work, run
    for name in names:
        sys.modules.pop(name, None)


def test_flops_by_hand_and_as_the_library_counts_them(modules: Any) -> None:
    work, _ = modules
    sizes = work.Sizes(
        num_layers=1,
        embed_dim=2,
        num_heads=1,
        head_dim=2,
        mlp_dim=3,
        vocab_size=5,
        batch_size=1,
        prompt_length=1,
        response_length=2,
        epochs=1,
    )
    # 3 tokens: matrices 2 * (4*2*2 + 3*2*3) = 68, attention 4 * 2 * (1+2+3)/3 = 16.
    assert work.forward_flops(sizes, vocabulary=False) == 3 * (68 + 16)
    assert work.forward_flops(sizes, vocabulary=True) == 3 * (68 + 16) + 2 * 2 * 5 * 2
    assert work.train_flops(sizes) == 3 * (2 * 3 * (68 + 16) + 40)

    full = work.FULL
    decoder = DecoderConfig(
        num_layers=full.num_layers,
        embed_dim=full.embed_dim,
        num_heads=full.num_heads,
        num_kv_heads=full.num_heads,
        head_dim=full.head_dim,
        mlp_dim=full.mlp_dim,
        vocab_size=full.vocab_size,
    )
    counted = decoder.forward_flops(32 * 96, mean_context=48.5, head_tokens=32 * 64)
    assert work.forward_flops(full, vocabulary=True) == pytest.approx(counted, rel=1e-12)


def test_prompts_and_rewards(modules: Any) -> None:
    work, _ = modules
    rows = work.prompts(work.QUICK, steps=2)
    assert len(rows) == 2 * work.QUICK.batch_size
    assert all(len(row) == work.QUICK.prompt_length and row[0] == work.BOS for row in rows)
    assert min(min(row[1:]) for row in rows) >= work.FIRST_PROMPT_TOKEN
    assert work.reward(work.QUICK, [0, 63, 64, 127, 1, 2, 3, 4]) == 6 - 4
    responses = [[0] * work.QUICK.response_length] * work.QUICK.batch_size
    work.check_responses(work.QUICK, responses)
    with pytest.raises(ValueError, match="8 responses of 8 tokens"):
        work.check_responses(work.QUICK, [*responses[1:], [0] * 7])


def test_a_steady_step_leaves_out_those_that_compile(modules: Any) -> None:
    _, run = modules
    walls, cpus = [0.0, 50.0, 60.0, 62.0, 65.0], [0.0, 40.0, 45.0, 46.0, 49.0]
    ticks = [
        {"wall_s": wall, "cpu_s": cpu, "peak_rss_bytes": 7, "reward": 0.5}
        for wall, cpu in zip(walls, cpus, strict=True)
    ]
    found = run.steady(ticks)
    assert (found["wall_s"], found["cpu_s"]) == (2.5, 2.0)
    assert found["peak_rss_bytes"] == 7


def test_ratios(modules: Any) -> None:
    work, run = modules
    ours = {"wall_s": 4.0, "cpu_s": 6.0, "peak_rss_bytes": 100}
    found = {
        "ours single": {**ours, "actor-TRAIN s": 1.5, "critic-TRAIN s": 0.5},
        "ours dp8": {"wall_s": 5.0},
        "ours apart": {"wall_s": 3.0},
        "matmul peak": {"flops_per_s": work.train_flops(work.FULL)},
    }
    alone = run.summarize(found, work.FULL)
    assert alone.pop("train_matmul_peak_share") == pytest.approx(0.5)
    assert set(alone.values()) == {None}
    peers = {
        "tunix single": {"wall_s": 1.0, "cpu_s": 8.0, "peak_rss_bytes": 200},
        "tunix colo_fsdp": {"wall_s": 10.0},
        "tunix disagg_all": {"wall_s": 6.0},
        "trl": {"wall_s": 1.0, "cpu_s": 12.0, "peak_rss_bytes": 1},
    }
    ratios = run.summarize(found | peers, work.FULL)
    assert ratios["cpu_s_over_tunix"] == 0.75
    assert ratios["cpu_s_over_trl"] == 0.5
    assert ratios["peak_memory_over_tunix"] == 0.5
    assert ratios["wall_s_over_tunix_best8"] == 0.5


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    output = tmp_path / "ppo_step.json"
    options = ["--quick", "--steps=4", "--runs=1", f"--json={output}"]
    run = subprocess.run(
        [sys.executable, "benchmarks/ppo_step/run.py", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(output.read_text())
    assert set(report) == NAMES
    assert report["cpu_s_over_tunix"] is report["cpu_s_over_trl"] is None
    assert 0 < report["train_matmul_peak_share"] < 1
    measured = report["detail"]["medians"]
    assert set(measured) == {"matmul peak", "ours single", "ours dp8"}
    assert all(f["cpu_s"] > 0 for name, f in measured.items() if name != "matmul peak")
