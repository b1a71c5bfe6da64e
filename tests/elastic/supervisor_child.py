"""A supervisor with short times, and the worker it has, which knows no jax.

    supervisor SLOT NUM_SLOTS PORT DIRECTORY SILENCE_S
    worker DIRECTORY SLOT ARGUMENTS

Workers "train": they meet in files of their world, and end after the step in DIRECTORY/num_steps.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from nereus_jax.core.errors import NereusError
from nereus_jax.elastic.register import Timing
from nereus_jax.elastic.settings import Settings
from nereus_jax.elastic.supervisor import supervise
from nereus_jax.elastic.worker import end_with_parent


def supervisor(slot: str, num_slots: str, port: str, directory: str, silence_s: str) -> int:
    """One slot, whose worker is below."""
    command = (sys.executable, __file__, "worker", directory, slot)
    settings = Settings(
        slot=int(slot),
        num_slots=int(num_slots),
        host="127.0.0.1",
        port=int(port),
        workdir=Path(directory),
        command=command,
        again=("--again",),
        checkpoints=Path(directory) / "checkpoints",
        timing=Timing(beat_s=0.1, silence_s=float(silence_s), join_s=20, finish_s=1),
    )
    try:
        return supervise(settings)
    except NereusError as error:
        print(f"nereus: error: {error}", file=sys.stderr)
        return error.exit_code


def worker(directory: str, slot: str, *arguments: str) -> int:
    """Steps with the others of its world, from the newest checkpoint on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker-of", type=int)
    parser.add_argument("--coordinator", default="alone")
    parser.add_argument("--num-processes", type=int, default=1)
    parser.add_argument("--process-id", type=int, default=0)
    parser.add_argument("--again", action="store_true")
    told = parser.parse_args(arguments)
    end_with_parent(told.worker_of)
    root, stopping = Path(directory), []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    signal.signal(signal.SIGINT, lambda *_: stopping.append(True))
    world = root / f"world-{told.coordinator.rpartition(':')[2]}"
    world.mkdir(exist_ok=True)
    (root / f"pid-{slot}").write_text(str(os.getpid()))
    checkpoints = root / "checkpoints" / "steps"
    step = max((int(p.name) for p in checkpoints.iterdir()), default=0)
    with (root / "log").open("a") as log:
        log.write(f"{slot} {told.process_id}/{told.num_processes} from {step} {told.again}\n")
    while step < int((root / "num_steps").read_text()):
        code = root / f"end-{slot}-{step}"  # a slot that is to end in this step, and how
        if code.exists():
            return int(code.read_text())
        (world / f"{step}-{told.process_id}-{bool(stopping)}").touch()
        while len(met := list(world.glob(f"{step}-*"))) < told.num_processes:
            time.sleep(0.01)
        time.sleep(0.02)
        step += 1
        if told.process_id == 0:
            try:
                (checkpoints / str(step)).mkdir()
            except FileExistsError:  # it was silent, and the others went on: its supervisor ends it
                signal.pause()
        else:
            while not (checkpoints / str(step)).exists():
                time.sleep(0.01)
        if any(p.name.endswith("True") for p in met):
            break
    return 0


if __name__ == "__main__":
    sys.exit({"supervisor": supervisor, "worker": worker}[sys.argv[1]](*sys.argv[2:]))
