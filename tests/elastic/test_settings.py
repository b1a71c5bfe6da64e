"""What `nereus train --elastic` refuses, and the command that it gives a worker."""

import os
from pathlib import Path

import pytest

from nereus_jax.cli import main
from nereus_jax.elastic.messages import Action, Order
from nereus_jax.elastic.settings import Settings

ROOT = Path(__file__).parents[2]
CONFIG = f"--config={ROOT / 'configs' / 'ppo_tiny.py'}"
SLOT = ("--num-processes=2", "--process-id=0")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--elastic", "--dry-run"], "--elastic and --dry-run"),
        (["--elastic=0"], "at least 1 s, got 0"),
        (["--elastic=soon"], "invalid float value: 'soon'"),
        (["--elastic", "--distributed"], "needs --coordinator, --num-processes, --process-id too"),
        (["--elastic", "--coordinator=localhost:65535", *SLOT], "use a smaller one"),
        (["--elastic", "--coordinator=localhost", *SLOT], "HOST:PORT"),
        (["--elastic", "--config.num_steps=0"], "num_steps"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_mistake_is_told_before_anything_starts(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", CONFIG, f"--workdir={tmp_path / 'out'}", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nereus: error:") and says in line
    assert not (tmp_path / "out").exists()


def test_the_command_of_a_worker(tmp_path: Path) -> None:
    settings = Settings(
        slot=2,
        num_slots=3,
        host="h",
        port=5,
        workdir=tmp_path,
        command=("train",),
        again=("--again",),
        checkpoints=tmp_path / "checkpoints",
    )
    assert settings.progress() == -1
    (tmp_path / "checkpoints" / "steps" / "12").mkdir(parents=True)
    assert settings.progress() == 12
    own = f"--worker-of={os.getpid()}"
    everybody = {0: "a:1", 1: "b:1", 2: "c:1"}
    order = Order(epoch=1, action=Action.RUN, members=everybody, leader=0, coordinator="h:9")
    assert settings.worker_command(order) == (
        "train",
        own,
        "--coordinator=h:9",
        "--num-processes=3",
        "--process-id=2",
    )
    alone = Order(epoch=2, action=Action.RUN, members={2: "c:1"}, leader=2)
    assert settings.worker_command(alone) == ("train", own, "--again")
