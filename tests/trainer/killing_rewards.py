"""A reward function whose module kills its process in a phase of a step that the test has named.

NEREUS_KILL is 'PHASE STEP PROCESS WHAT MARKS', several of them with ';' between: the process kills
itself (WHAT = worker) or its supervisor too (slot), or a device of it is full (error), once
it has begun PHASE of STEP, and leaves a file in the directory MARKS, so that it does so once.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from nereus_jax.rl.rewards import digit_match as digit_match
from nereus_jax.runtime.checkpoints import CheckpointStore
from nereus_jax.runtime.engines.generate import GenerateEngine
from nereus_jax.runtime.engines.score import ScoreEngine
from nereus_jax.runtime.engines.train import TrainEngine
from nereus_jax.trainer import loop, recovery


class Killer:
    """Knows the step, and who is to die in it."""

    def __init__(self, wanted: str) -> None:
        self.step = -1
        self._wanted = [tuple(x.split()) for x in wanted.split(";") if x.strip()]

    def reach(self, phase: str, step: int | None = None) -> None:
        step = self.step if step is None else step
        for wanted in self._wanted:
            if wanted[:3] == (phase, str(step), str(jax.process_index())):
                what, marks = wanted[3:]
                self._kill(what, Path(marks) / f"{phase}-{step}-{jax.process_index()}")

    @staticmethod
    def _kill(what: str, mark: Path) -> None:
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return
        if what == "error":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory on one host")
        if what == "slot":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def after(owner: Any, name: str, then: Callable[..., None]) -> None:
    """Calls `then` with the same arguments when a method has returned."""
    method = getattr(owner, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        result = method(*arguments, **keywords)
        then(*arguments, **keywords)
        return result

    setattr(owner, name, wrapped)


def install(killer: Killer) -> None:
    run_step, carry_out = loop.run_step, recovery.carry_out

    def numbered(job: Any, state: Any, prompts: Any) -> Any:
        killer.step = state.counters.step
        return run_step(job, state, prompts)

    def observed(change: Any, state: Any, **keywords: Any) -> Any:
        batches: list[Any] = []

        def observe(batch: Any) -> None:
            batches.append(batch)
            if len(batches) == 3:  # in the middle: some operations are done, others are not
                killer.reach("transition", state.counters.step)

        return carry_out(change, state, **{**keywords, "observe": observe})

    loop.run_step, recovery.carry_out = numbered, observed
    # What is dispatched runs on when its call has returned, and a save is not whole by then.
    for engine, phase in (
        (GenerateEngine, "generate"),
        (ScoreEngine, "score"),
        (TrainEngine, "train"),
    ):
        after(engine, "dispatch", lambda *_, phase=phase, **__: killer.reach(phase))
    after(CheckpointStore, "save", lambda _, step, *__: killer.reach("checkpoint", step))


install(Killer(os.environ.get("NEREUS_KILL", "")))
