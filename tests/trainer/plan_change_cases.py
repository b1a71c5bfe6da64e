"""A run in this process whose steps, changes of plan and devices a test can get at."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from nereus_jax.config import RunConfig, parse_config
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import LeafSpec
from nereus_jax.core.errors import DevicesLostError
from nereus_jax.core.roles import ModelStage
from nereus_jax.runtime.emu import load
from nereus_jax.runtime.faults import check_devices
from nereus_jax.runtime.optimizers import is_leaf_spec
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.train_state import read_counters, unflatten
from nereus_jax.runtime.transitions import Batch
from nereus_jax.runtime.world import form_world
from nereus_jax.testing import tiny_run_config
from nereus_jax.trainer import loop, outputs, plan_change, plan_schedule, recovery
from nereus_jax.trainer.job import Job, make_job, read_inputs
from nereus_jax.trainer.session import Session, open_session, start_state
from nereus_jax.trainer.state import JobState
from nereus_jax.trainer.verification import (
    Fingerprints,
    fingerprints,
    state_arrays,
    state_stages,
    unit_spec,
)
from tests.runtime.transfer_cases import noise

Hook = Callable[[Session, JobState], None]


def tiny_config(**changes: Any) -> Any:
    """PPO with a reference model on 8 devices, all of it small; `a__b` stands for `a.b`."""
    config = tiny_run_config()
    config.emulated_devices = 8
    config.num_steps = 4
    config.model.embed_dim = 16
    config.model.head_dim = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_dim = 24
    config.model.matmul_precision = "highest"
    config.data.max_prompt_length = 6
    config.actor_optimizer.learning_rate = 1e-2
    config.critic_optimizer.learning_rate = 1e-2
    config.report.tensorboard = False
    config.report.samples_per_step = 16
    config.rollout.record = True
    config.transition.hardware = "h100"  # nothing is measured
    config.plan["actor-TRAIN"] = "dp=2,pp=1,tp=2"
    config.plan["critic-TRAIN"] = "dp=2,pp=1,tp=1,devices=4-5"
    config.plan["actor-GENERATE"] = "dp=2,pp=1,tp=2"
    config.plan["reference-SCORE"] = "dp=1,pp=1,tp=2"
    config.plan["critic-SCORE"] = "dp=2,pp=1,tp=1,devices=4-5"
    for name, value in changes.items():
        *parents, last = name.split("__")
        section = config
        for parent in parents:
            section = section[parent]
        section[last] = value
    return config


SMALL = {  # fewer programs
    "model__num_kv_heads": 4,
    "algorithm__kl__place": "none",
    "transition__verify": "off",
}
SMALL_MEMORY_GIB = 47_000 / 2**30
"""Holds one trained model of `swapping_config` on a device, and not two."""


def swapping_config(**settings: Any) -> Any:
    """Two model-stages that change places, on devices that hold only one of them at a time."""
    config = tiny_config(**SMALL | settings)
    config.plan["actor-TRAIN"] = "dp=1,pp=1,tp=2,devices=0-1"
    config.plan["critic-TRAIN"] = "dp=1,pp=1,tp=2,devices=2-3"
    config.plan["actor-GENERATE"] = "dp=1,pp=1,tp=2,devices=4-5"
    config.plan["critic-SCORE"] = "dp=1,pp=1,tp=1,devices=7"
    config.plan_changes["1"] = {
        "actor-TRAIN": "dp=1,pp=2,tp=1,devices=2-3",
        "critic-TRAIN": "dp=1,pp=1,tp=2,devices=0-1",
    }
    return config


@dataclasses.dataclass(kw_only=True)
class Run:
    """What a run did.

    Attributes:
      workdir: its files.
      states: by step, the digests of the state at the boundary before it.
      jobs: by step, under which plan it was taken.
      messages: what was printed.
      error: that ended it.
    """

    workdir: Path
    states: dict[int, Fingerprints] = dataclasses.field(default_factory=dict)
    jobs: dict[int, Job] = dataclasses.field(default_factory=dict)
    messages: list[str] = dataclasses.field(default_factory=list)
    error: Exception | None = None

    def rows(self, name: str = "metrics") -> list[dict[str, Any]]:
        text = (self.workdir / f"{name}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def steps(self) -> list[dict[str, Any]]:
        """The rows of steps."""
        return [row for row in self.rows() if "reward_mean" in row]

    def transitions(self) -> list[dict[str, Any]]:
        """The rows of changes of plan."""
        return [row for row in self.rows() if "transition_s" in row]

    def said(self, text: str) -> bool:
        """Whether a message had this in it."""
        return any(text in message for message in self.messages)


class Trainer:
    """Starts runs that share their compiled programs."""

    def __init__(self) -> None:
        self.programs = ProgramCache()

    def run(
        self,
        config: Any,
        workdir: Path,
        *,
        before_step: Hook | None = None,
        before_change: Hook | None = None,
        observe: Callable[[Batch], None] | None = None,
    ) -> Run:
        """Trains to the end, or to an error.

        Args:
          config: a ConfigDict.
          workdir: for its files.
          before_step: called at every step boundary, after changes of plan.
          before_change: called at every step boundary, before changes of plan.
          observe: called before each batch of operations of a transition.
        """
        checked: RunConfig = parse_config(copy.deepcopy(config))
        run = Run(workdir=workdir)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "make_job", lambda *a: make_job(*a, programs=self.programs))
            real_change, real_step, real_run = (
                loop.change_as_scheduled,
                loop._one_step,
                loop._run_steps,
            )

            def steps(session: Session, state: JobState, interrupted: Any) -> str:
                session.observe = observe
                return real_run(session, state, interrupted)

            def change(session: Session, state: JobState) -> None:
                if before_change is not None:
                    before_change(session, state)
                real_change(session, state)

            def step(session: Session, state: JobState) -> None:
                run.states[state.counters.step] = fingerprints(session.job, state, "digest")
                run.jobs[state.counters.step] = session.job
                if before_step is not None:
                    before_step(session, state)
                real_step(session, state)

            def message(self: outputs.Outputs, text: str) -> None:
                run.messages.append(text)
                real_message(self, text)

            real_message = outputs.Outputs.message
            patch.setattr(outputs.Outputs, "message", message)
            patch.setattr(loop, "_run_steps", steps)
            patch.setattr(loop, "change_as_scheduled", change)
            patch.setattr(loop, "_one_step", step)
            world = form_world(emulated_devices=8)
            try:
                loop.train(checked, read_inputs(checked), world, workdir)
            except Exception as error:
                run.error = error
        return run


class Devices:
    """Devices that a test may take away: the buffers of arrays made since then go with one."""

    def __init__(self) -> None:
        self._old = jax.live_arrays()  # not the run's; also keeps their ids taken

    def lose(self, *devices: DeviceId) -> int:
        """Deletes what is on devices; how many blocks that were."""
        handles = {jax.devices()[device.index] for device in devices}
        known = {id(x) for x in self._old}
        blocks = [
            shard.data
            for array in jax.live_arrays()
            if id(array) not in known and not array.is_deleted()
            for shard in array.addressable_shards
            if shard.device in handles
        ]
        count = 0
        for block in blocks:
            if not block.is_deleted():
                block.delete()
                count += 1
        return count


@contextmanager
def opened(
    config: Any, workdir: Path, programs: ProgramCache, patch: pytest.MonkeyPatch
) -> Iterator[tuple[Session, JobState]]:
    """A session at its start, whose state is any bits. Nothing that steps need is compiled."""
    patch.setattr(plan_change, "step_recipes", lambda job: [])
    patch.setattr(plan_schedule, "compile_ahead", lambda *jobs: None)
    checked = parse_config(copy.deepcopy(config))
    inputs, world = read_inputs(checked), form_world(emulated_devices=8)
    job = make_job(checked, inputs, world, programs=programs)
    schedule = plan_schedule.make_schedule(job, plan_schedule.scheduled_jobs(job))
    with open_session(job, schedule, workdir) as (session, _):
        session.outputs.start(0)
        state = some_state(start_state(session), session)
        schedule.prepare_next(job, 0)
        yield session, state


def boundary(session: Session, state: JobState, step: int) -> list[str]:
    """What the loop does at this step boundary, if the steps before it had been taken.

    Returns:
      What was printed.
    """
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs.Outputs, "message", lambda self, text: said.append(text))
        state.counters = dataclasses.replace(state.counters, step=step)
        while True:
            try:
                recovery.change_as_scheduled(session, state)
                check_devices(session.job.world, state.arrays(), state.views)  # as a step does
                return said
            except DevicesLostError as error:
                recovery.go_on_without(session, state, error)


def some_state(state: JobState, session: Session) -> JobState:
    """The state with noise in the place of all that is trained; checkpoints hold the old values."""
    job = session.job
    for number, stage in enumerate(state.trained):
        spec = unit_spec(job, stage)
        values = {
            leaf.name: noise(leaf.shape, leaf.dtype, 100 * number + i)
            for i, leaf in enumerate(spec)
        }
        arrays = load(spec, job.sites[stage], lambda name, i, v=values: v[name][i])
        numbers = tuple(np.array(7 + i, np.int32) for i in range(number_of_counters(job, stage)))
        state.trained[stage] = unflatten(job.trains[stage], arrays, numbers)
    state.views.look(job.world, state.arrays())
    return state


def number_of_counters(job: Job, stage: ModelStage) -> int:
    leaves = jax.tree.leaves(job.trains[stage].opt_state_spec, is_leaf=is_leaf_spec)
    return sum(not isinstance(leaf, LeafSpec) for leaf in leaves)


def logical(job: Job, state: JobState) -> dict[str, Any]:
    """All of the logical state, read from every copy of it: to compare with ==."""
    found: dict[str, Any] = {"counters": state.counters}
    for stage in state_stages(job):
        spec, arrays = unit_spec(job, stage), state_arrays(job, state, stage)
        for leaf in spec:
            value = np.asarray(arrays[leaf.name])
            for shard in arrays[leaf.name].addressable_shards:
                assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes()
            inside = value[tuple(slice(n) for n in leaf.shape)]
            assert np.count_nonzero(value) == np.count_nonzero(inside)  # padding is zero
            found[f"{stage} {leaf.name}"] = inside.tobytes()
        if stage in job.trains:
            numbers = read_counters(job.trains[stage], state.trained[stage], job.world, state.views)
            found[f"{stage} counters"] = [x.item() for x in numbers]
    return found
