"""`nereus plan`: from arguments to plans, in a second, without jax; and what it refuses."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.cli import main
from nereus_jax.core.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
BASE = ["plan", "--model=llama3-8b", "--hardware=h100"]


RECIPE = ["plan", f"--config={ROOT / 'configs' / 'ppo_llama8b_h100.py'}", "--devices=16"]


TINY = ["plan", f"--config={ROOT / 'configs' / 'ppo_tiny.py'}"]
SIZES = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("nereus: error: ") and captured.err.count("\n") == 1
    return captured.err


def test_text(capsys: pytest.CaptureFixture[str]):
    assert main([*BASE, "--devices=64"]) == 0
    text = capsys.readouterr().out
    assert "64 x h100" in text and "actor-TRAIN" in text and "the next plans" in text


def test_json_and_a_plan_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "plan.json"
    assert main([*BASE, "--devices=16", "--top=2", "--json", f"--out={path}"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["plans"]) == 2
    written = json.loads(path.read_text())
    assert written == report["plans"][0]["plan"]
    assert len(Plan.from_json(written).placements) == 6


def test_a_plan_file_is_what_explain_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    paths = [tmp_path / f"{n}.json" for n in (8, 16)]
    for path, devices in zip(paths, (8, 16), strict=True):
        assert main([*BASE, f"--devices={devices}", f"--out={path}"]) == 0
    capsys.readouterr()
    assert main(["explain", f"--from={paths[0]}", f"--to={paths[1]}"]) == 0
    assert "actor-TRAIN" in capsys.readouterr().out


def test_lengths_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    histogram = tmp_path / "lengths.csv"
    histogram.write_text("length,weight\n256,0.9\n4096,0.1\n")
    assert main([*BASE, "--devices=16", f"--lengths={histogram}", "--json", "--top=1"]) == 0
    tail = json.loads(capsys.readouterr().out)["plans"][0]["step_s"]
    assert main([*BASE, "--devices=16", "--lengths=640", "--json", "--top=1"]) == 0
    even = json.loads(capsys.readouterr().out)["plans"][0]["step_s"]
    assert tail > even, "the same mean length, but some wait for the longest"


def test_grpo_with_a_reward_model(capsys: pytest.CaptureFixture[str]):
    arguments = ["--algorithm=grpo", "--samples=4", "--prompts=64", "--reward-model=llama3.2-1b"]
    assert main([*BASE, "--devices=8", *arguments, "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["plans"][0]["stage_s"]
    assert set(stages) == {
        "actor-GENERATE",
        "actor-SCORE",
        "reference-SCORE",
        "reward-SCORE",
        "actor-TRAIN",
    }


def test_a_run_s_configuration(capsys: pytest.CaptureFixture[str]):
    assert main([*RECIPE, "--json", "--top=1"]) == 0
    (configured,) = json.loads(capsys.readouterr().out)["plans"]
    stated = ["--prompts=512", "--minibatch=128", "--no-park", "--json", "--top=1"]
    assert main([*BASE, "--devices=16", *stated]) == 0
    (same,) = json.loads(capsys.readouterr().out)["plans"]
    assert set(configured["stage_s"]) == set(same["stage_s"])
    # The configuration has its own token chunk and prefill rows: the work is the same.
    assert configured["step_s"] == pytest.approx(same["step_s"], rel=0.05)


def test_keys_of_the_configuration_can_be_set(capsys: pytest.CaptureFixture[str]):
    def step_s(*arguments: str) -> float:
        assert main([*RECIPE, "--json", "--top=1", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["plans"][0]["step_s"]

    assert step_s("--config.rollout.batch_size=1024") > 1.5 * step_s()
    assert step_s("--lengths=256") < 0.7 * step_s(), "all as long as they can be, unless it says"
    assert step_s("--hardware=h200") < step_s()


def test_a_configuration_s_memory_is_the_limit(capsys: pytest.CaptureFixture[str]):
    error = error_of(capsys, *RECIPE, "--config.device_memory_gib=16")
    assert "13.4 GiB" in error and "32 devices" in error, "16 GiB less headroom and communicators"


def test_a_device_s_memory_is_the_limit_too(capsys: pytest.CaptureFixture[str]):
    """The recipe allows 80 GiB; an L40S has 45."""
    assert main([*RECIPE, "--hardware=l40s", "--json", "--top=1"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["peak_memory_bytes"] < 45 * 2**30


def test_a_plan_file_that_is_still_to_be_found(capsys: pytest.CaptureFixture[str]):
    assert main([*RECIPE, "--config.plan_file=not_yet.json", "--top=1"]) == 0
    assert "16 x h100" in capsys.readouterr().out


def test_a_directory_that_is_called_like_a_preset(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "llama3-70b").mkdir()
    (tmp_path / "llama3-70b" / "config.json").write_text(json.dumps(SIZES))
    monkeypatch.chdir(tmp_path)
    path = ["--config.model.preset=", "--config.model.path=llama3-70b"]
    assert main([*RECIPE, *path, "--json", "--top=1"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["step_s"] < 1.0


def test_an_emulated_run_s_devices(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", f"--config={ROOT / 'configs' / 'ppo_tiny.py'}", "--top=1"]) == 0
    assert "8 x cpu-emulated" in capsys.readouterr().out


def test_a_model_from_its_config(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    sizes = dict(SIZES)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(sizes))
    assert main(["plan", f"--model={config}", "--devices=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["min_devices"] == 1
    del sizes["hidden_size"]
    config.write_text(json.dumps(sizes))
    assert "hidden_size" in error_of(capsys, "plan", f"--model={config}", "--devices=2")


def test_in_a_second_and_without_jax():
    """The whole process, Python's start included; processor seconds, as others share the
    machine."""
    code = (
        "import sys; from nereus_jax.cli import main; "
        "code = main(['plan', '--model=llama3-8b', '--hardware=h100', '--devices=64']); "
        "assert not {'jax', 'jaxlib', 'flax'} & set(sys.modules); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OPENBLAS_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{used_s:.2f} s")
    assert used_s < 1.0


def test_nothing_fits(capsys: pytest.CaptureFixture[str]):
    error = error_of(capsys, "plan", "--model=llama3-70b", "--hardware=h100", "--devices=8")
    assert "actor-TRAIN" in error and "optimizer" in error and "24 devices" in error


def test_nothing_fits_as_json(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model=llama3-70b", "--devices=8", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["plans"] == [] and report["min_devices"] == 24
    assert "actor-TRAIN" in report["infeasible_reason"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model=llama3-9b", "--devices=8"], ("llama3-8b", "nearest")),
        (["--model=llama3-8b", "--hardware=h101", "--devices=8"], ("h100", "nearest")),
        (["--model=llama3-8b", "--devices=0"], ("at least 1", "0")),
        (["--model=llama3-8b", "--devices=8", "--top=0"], ("--top", "0")),
        (["--model=llama3-8b", "--devices=8", "--lengths=0"], ("--lengths", "0")),
        (["--model=llama3-8b", "--devices=8", "--lengths=no.csv"], ("no.csv",)),
        (["--model=llama3-8b", "--devices=8", "--minibatch=100"], ("512", "100", "64")),
        (["--model=llama3-8b", "--devices=8", "--max-response=8"], ("1024", "8")),
        (["--model=llama3-8b", "--devices=8", "--algorithm=grpo"], ("--samples", "at least 2")),
        (["--model=llama3-8b", "--devices=8", "--calibration=none.json"], ("none.json",)),
        (
            [
                "--model=llama3-8b",
                "--devices=8",
                "--compute-dtype=bfloat16",
                "--hardware=v100-16gb",
            ],
            ("bfloat16", "float16"),
        ),
        (["--model=llama3-8b", "--devices=8", "--speed=1"], ("--speed",)),
        (["--model=llama3-8b"], ("--devices",)),
        (["--devices=8"], ("--model", "--config")),
        (["--config=none.py", "--devices=8"], ("none.py",)),
        ([*RECIPE[1:], "--prompts=64"], ("--prompts", "rollout.batch_size")),
        ([*RECIPE[1:], "--model=llama3-8b"], ("--model", "model.preset")),
        ([*RECIPE[1:], "--config.rollout.batch=64"], ("rollout.batch",)),
        ([*RECIPE[1:2]], ("--devices",)),
        ([*RECIPE[1:], "--config.rollout.max_response_length=200000"], ("positions", "lower")),
        ([*TINY[1:], "--config.model.vocab_size=5"], ("the tokenizer has", "only 5", "vocab_size")),
        (["--model=llama3-8b", "--devices=8", "--config.seed=1"], ("--config.seed",)),
        ([*RECIPE[1:], "--device=8"], ("--device=8", "nereus plan")),
        ([*RECIPE[1:], "--lengths=4096"], ("4096", "rollout.max_response_length", "1024")),
        ([f"--config={'x' * 300}.py", "--devices=8"], ("cannot be read",)),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else "",
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], words: tuple[str, ...]):
    error = error_of(capsys, "plan", *arguments)
    for word in words:
        assert word in error, error


def test_a_histogram_that_does_not_add_up(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    histogram = tmp_path / "lengths.json"
    histogram.write_text(json.dumps({"lengths": [10, 20], "weights": [0.5, 0.2]}))
    assert "0.7" in error_of(capsys, *BASE, "--devices=8", f"--lengths={histogram}")


def test_hardware_with_a_negative_field(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    source = json.loads((ROOT / "nereus_jax" / "hardware" / "h100.json").read_text())
    source["memory_bytes"] = -1
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(source))
    error = error_of(capsys, "plan", "--model=llama3-8b", f"--hardware={path}", "--devices=8")
    assert "memory_bytes" in error


@pytest.mark.slow
def test_a_plan_file_is_what_train_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, nereus: Any
):
    """From the sizes of a model to a run under the best plan for it."""
    sizes = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": 15,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    model, path = tmp_path / "config.json", tmp_path / "plan.json"
    model.write_text(json.dumps(sizes))
    arguments = ["--hardware=cpu-emulated", "--devices=8", "--no-park", f"--out={path}"]
    arguments += ["--prompts=16", "--minibatch=8", "--prompt-lengths=6", "--lengths=4"]
    assert main(["plan", f"--model={model}", *arguments]) == 0
    child = nereus.run(tmp_path / "run", f"plan_file={path}")
    assert child.process.returncode == 0, child.stderr
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == json.loads(path.read_text())
    assert len(nereus.rows(tmp_path / "run")) == 2
