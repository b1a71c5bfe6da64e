"""Two processes hear of their pool through the first one: a file, then HTTP, up to the end."""

import http.client
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.runtime.checkpoint_files import finished_steps

# A replica of everything on each process.
CONFIG = """
import tiny


def get_config():
    config = tiny.get_config()
    config.num_steps = 1000
    config.emulated_devices = 4
    config.checkpoint.every = 0
    config.algorithm.name = "grpo"
    config.rollout.batch_size = 8
    config.rollout.samples_per_prompt = 2
    config.control.policy = "dp_only"
    del config.plan["critic-TRAIN"], config.plan["critic-SCORE"]
    for stage in ("actor-TRAIN", "actor-GENERATE", "reference-SCORE"):
        config.plan[stage] = "dp=2,pp=1,tp=2,devices=2-5"
    return config
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_loss_and_the_end_of_the_pool(nereus: Any, tmp_path: Path) -> None:
    config, file, workdir = nereus.directory / "pool.py", tmp_path / "pool.jsonl", tmp_path / "run"
    config.write_text(CONFIG)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = nereus.start_two(
        workdir,
        f"--config={config}",
        f"control.pool_file={file}",
        f"control.pool_hook=127.0.0.1:{port}",
    )

    def ask(method: str, message: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        body = None if message is None else json.dumps(message)
        connection.request(method, "/pool", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def decisions() -> list[Any]:
        return nereus.rows(workdir, "decisions")

    children[0].wait_for(lambda: len(nereus.rows(workdir)) > 1)
    assert f"pool hook: http://127.0.0.1:{port}/pool" in children[0].stderr
    file.write_text(json.dumps({"change": "lost", "devices": ["1:1"]}) + "\n")
    children[0].wait_for(lambda: any("transition_s_measured" in row for row in decisions()))
    code, shown = ask("GET")
    assert code == 200 and "1:1" not in shown["pool"] and len(shown["pool"]) == 7
    code, answer = ask("POST", {"change": "lost", "devices": ["1:1"]})
    assert code == 400 and "1:1 is not there" in answer["error"]
    all_left = {"change": "revoke", "devices": shown["pool"], "deadline_s": 600}
    assert ask("POST", all_left)[0] == 202
    assert [child.wait() for child in children] == [0, 0], [c.stderr for c in children]
    said = children[0].stderr
    assert "lost devices: 1:1; going on with 7 of 8 devices" in said
    assert "start the run again in the same directory" in said
    assert "resumed from" not in said, "a replica was whole"
    (row, *_) = decisions()
    assert (row["trigger"], row["verdict"]) == ("pool", "urgent")
    assert "transition_error" not in row
    assert all("1:1" not in entry["devices"].split(",") for entry in row["target"].values())
    steps = [row["step"] for row in nereus.rows(workdir) if "policy_loss" in row]
    assert steps == list(range(len(steps))) and len(steps) < 1000
    assert finished_steps(workdir / "checkpoints") == [len(steps)]
    sampled = [row["sample"] for row in nereus.rows(workdir, "samples")]
    assert len(set(sampled)) == len(sampled)
