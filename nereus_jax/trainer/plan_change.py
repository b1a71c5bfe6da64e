"""A running job changes its plan at a step boundary: no rollout is in flight, no gradient is kept.

What moves is the state that no weight edge brings anew in every step: parameters and optimizer of
what is trained, and frozen models. Here planning and runtime meet: the graph and its transfers are
made and compiled ahead, in the background, and carried out when the step has come.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.errors import DigestError
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.roles import ModelStage
from nereus_jax.core.timeline import Span
from nereus_jax.core.transition import TransitionGraph, Way, placed_units
from nereus_jax.planning.hardware import (
    CPU_EMULATED,
    hardware_of_kind,
    load_hardware,
    parse_hardware,
)
from nereus_jax.planning.transition_graph import plan_transition
from nereus_jax.planning.transition_inputs import MOVING_WAYS, TransitionBudget
from nereus_jax.runtime import host
from nereus_jax.runtime.compile_queue import CompileQueue
from nereus_jax.runtime.emu import (
    ElasticModelUnit,
    Site,
    group_arrays,
    group_site,
    units_of,
)
from nereus_jax.runtime.faults import watch
from nereus_jax.runtime.programs import Recipe
from nereus_jax.runtime.train_state import (
    OptimizerCounters,
    optimizer_leaves,
    parameter_leaves,
    read_counters,
    unflatten,
)
from nereus_jax.runtime.transfers import Transfer
from nereus_jax.runtime.transitions import (
    Batch,
    Executed,
    TransitionStopped,
    batches,
    execute,
    unit_in_memory,
)
from nereus_jax.trainer.compilation import digest_recipes, step_recipes
from nereus_jax.trainer.edges import make_transfer
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.stage_states import coming, stage_states, waiting
from nereus_jax.trainer.state import JobState
from nereus_jax.trainer.verification import (
    fingerprints,
    state_arrays,
    state_stages,
    surviving_fingerprints,
    unit_spec,
    verify,
)

WAYS: Mapping[str, frozenset[Way]] = {
    "auto": MOVING_WAYS,
    "composed": frozenset({Way.COMPOSED}),
    "direct": frozenset({Way.DIRECT, Way.LEAN, Way.PARKED}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanChange:
    """A transition that is ready to be carried out, or will be when its programs are compiled.

    Attributes:
      old: the job as it is.
      new: the job under the new plan; it shares the old one's programs.
      graph: what is to be done.
      transfers: for each batch of operations that moves, by its first operation.
      planned_s: seconds of planning.
      waiting: model-stages that take no part: they are in host memory before and after.
    """

    old: Job
    new: Job
    graph: TransitionGraph
    transfers: Mapping[int, Transfer]
    planned_s: float
    waiting: frozenset[ModelStage] = frozenset()

    def compile_in(self, queue: CompileQueue) -> None:
        """Compiles in the background what moves."""
        for transfer in self.transfers.values():
            transfer.compile_in(queue)

    def is_ready(self) -> bool:
        """Whether all programs are there: of the change, of its checks and of the new plan."""
        new = self.new
        moving = (*self.transfers.values(), *new.edges.values())
        return all(transfer.is_compiled for transfer in moving) and all(
            new.programs.has(key) for key, _ in self._recipes()
        )

    def wait(self) -> float:
        """Waits until it is ready, and connections are made; seconds that it took."""
        start_s = time.perf_counter()
        for transfer in self.transfers.values():
            transfer.set_up()
        for recipe in self._recipes():
            self.new.programs.get(*recipe)
        return time.perf_counter() - start_s

    def _recipes(self) -> list[Recipe]:
        return [*digest_recipes(self.old), *digest_recipes(self.new), *step_recipes(self.new)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed:
    """What a transition made.

    Attributes:
      state: the logical state, under the new plan.
      spans: of its operations and checks.
      row: its record.
    """

    state: JobState
    spans: tuple[Span, ...]
    row: Mapping[str, Any]


def live_hardware(job: Job) -> Hardware:
    """What the job's devices can do, the same on every process.

    Raises:
      ConfigError: `transition.hardware` names nothing, or nothing fits the devices.
    """
    name = job.config.transition.hardware
    if not name:
        kind = job.world.pool.kind
        emulated = job.config.emulated_devices or "cpu" in kind.lower()
        name = CPU_EMULATED if emulated else hardware_of_kind(kind)
    if name != CPU_EMULATED:
        return load_hardware(name)
    measured = ""
    if job.world.is_main:  # one machine's measurement for all: they must plan alike
        found = load_hardware(CPU_EMULATED, emulated_devices=len(job.world.pool))
        measured = json.dumps(dataclasses.asdict(found))
    return parse_hardware(json.loads(host.broadcast_text(measured)), CPU_EMULATED)


def plan_change(
    old: Job, new: Job, hardware: Hardware, *, lost: Iterable[DeviceId] = ()
) -> PlanChange:
    """Plans a transition; nothing is compiled and nothing moves.

    Args:
      old: the job as it is.
      new: the job under the new plan.
      hardware: what its devices can do.
      lost: devices that are gone.

    Raises:
      InfeasiblePlanError: the new plan cannot be reached; the message says why.
      LostStateError: a part of the state was on lost devices only.
    """
    start_s = time.perf_counter()
    gone = frozenset(lost)
    config = old.config
    capacity: dict[DeviceId, int] = {}
    if limit := config.device_memory_bytes:
        capacity = dict.fromkeys(old.world.pool.devices, limit)
    budget = TransitionBudget(
        capacity_bytes=capacity, ways=WAYS[config.transition.way], buffer_bytes=0
    )
    graph = plan_transition(
        stage_states(old, new, lost=gone),
        old.plan,
        new.plan,
        hardware=hardware,
        budget=budget,
        lost=gone,
    )
    stateful = state_stages(old)
    transfers = {
        batch.operations[0]: _batch_transfer(old, new, batch, gone)
        for batch in batches(graph)
        if batch.moves and batch.model_stage in stateful
    }
    planned_s = time.perf_counter() - start_s
    return PlanChange(
        old=old,
        new=new,
        graph=graph,
        transfers=transfers,
        planned_s=planned_s,
        waiting=waiting(old, new),
    )


def _batch_transfer(old: Job, new: Job, batch: Batch, lost: frozenset[DeviceId]) -> Transfer:
    stage = batch.model_stage
    kv_heads = old.decoder(stage).num_kv_heads
    source = group_site(old.world, batch.sources, kv_heads)
    target = group_site(old.world, batch.targets, kv_heads)
    # Under ZeRO-1 a leaf is also cut over dp, so that the two ends differ in their leaves. But what
    # is one replica in both plans goes through units that are whole.
    apart = all(stage in job.plan and job.plan[stage].layout.dp == 1 for job in (old, new))
    ends = [
        unit_spec(job, stage) if apart else _group_spec(job, stage, site)
        for job, site in ((old, source), (new, target))
    ]
    parked = any(unit.parked for unit in batch.sources)
    return make_transfer(old.world, ends[0], source, ends[1], target, lost=lost, parked=parked)


def _group_spec(job: Job, stage: ModelStage, site: Site) -> EmuSpec:
    """The leaves of a DP group."""
    engine = job.trains.get(stage)
    if engine is None or not engine.zero1:
        return unit_spec(job, stage)
    optimizer = optimizer_leaves(engine, engine.spec.with_zero(site.mesh_shape))
    parameters = parameter_leaves(engine)
    return dataclasses.replace(optimizer, leaves=(*parameters.leaves, *optimizer.leaves))


def carry_out(
    change: PlanChange,
    state: JobState,
    *,
    restore: Callable[[Batch], Sequence[ElasticModelUnit]] | None = None,
    observe: Callable[[Batch], None] | None = None,
) -> Changed:
    """Carries out a transition and verifies it.

    What waits in host memory under both plans stays there; what else is parked comes to devices,
    and is put away again by the caller (`put_all_away`). The old state stays as it is where memory
    allows, until the new one is verified: an error leaves the job running as before. Else
    operations free what they destroy.

    Args:
      change: what to do.
      state: the state; without room for both it is emptied.
      restore: reads units from a checkpoint.
      observe: called before each batch of operations.

    Raises:
      TransitionStopped: an operation failed (twice where the old state is not kept); the error
        holds what is intact.
      DigestError: the state is not what it was.
      DevicesLostError: devices are gone since the last operation.
    """
    old, new, graph = change.old, change.new, change.graph
    step, how = state.counters.step, old.config.transition.verify
    begin_s = time.time()
    waited_s = change.wait()
    state.edges.clear()  # the next step's weight edges bring these anew
    counters = {
        s: read_counters(old.trains[s], x, old.world, state.views) for s, x in state.trained.items()
    }
    with watch(old.world):
        before = {} if graph.lost else fingerprints(old, state, how)
        units = _units(change, state)
        if graph.lost and how != "off":
            how, before = "digest", surviving_fingerprints(old, units, graph.lost)
    keep_old = graph.old_state_fits and not graph.lost
    if not keep_old:
        state.trained = {s: x for s, x in state.trained.items() if s in change.waiting}
        state.frozen = {s: x for s, x in state.frozen.items() if s in change.waiting}
    run = functools.partial(
        execute, old.world, graph, transfers=change.transfers, restore=restore, observe=observe
    )
    executed, first = None, 0
    try:
        executed = run(units=units, step=step)
    except TransitionStopped as error:
        if keep_old or error.lost:
            raise
        units, first = error.to_lists(), error.operations
    if executed is None:  # what exists is in neither plan, but is whole: the rest may go through
        executed = run(units=units, step=step, first=first)
    moved = _assembled(change, executed, counters, state)
    try:
        with watch(new.world):
            verify(new, moved, before, how)
    except DigestError as error:
        raise DigestError(f"{error}; the old plan goes on" if keep_old else str(error)) from error
    end_s = time.time()
    moved_bytes = sum(t.schedule.wire_bytes for t in change.transfers.values())
    row = {
        "step": step,
        "transition_s": end_s - begin_s,
        "transition_modelled_s": graph.transition_s,
        "transition_planning_s": change.planned_s,
        "transition_compile_s": waited_s,
        "transition_wire_bytes": moved_bytes,
        "transition_operations": len(graph.operations),
        "transition_ways": {str(s): str(c.way) for s, c in graph.choices.items()},
        "transition_kept_old_state": keep_old,
    }
    whole = Span(
        name="transition",
        kind="transition",
        start_s=begin_s,
        end_s=end_s,
        devices=tuple(str(d) for d in graph.devices),
        step=step,
        bytes=moved_bytes,
    )
    return Changed(state=moved, spans=(whole, *executed.spans), row=row)


def _units(change: PlanChange, state: JobState) -> dict[ModelStage, list[ElasticModelUnit]]:
    """The units of the model-stages that hold state, but for those that wait.

    They are in host memory where the graph takes them from there, else on devices.
    """
    job, arriving = change.old, coming(change.old, change.graph.lost)
    units: dict[ModelStage, list[ElasticModelUnit]] = {}
    for stage in (*state.trained, *state.frozen):
        if stage in change.waiting:
            continue
        version = state.counters.version_of(stage) if stage in state.trained else 0
        arrays = state_arrays(job, state, stage)
        held = units_of(job.world, job.sites[stage], arrays, version, state.views)
        units[stage] = [unit_in_memory(unit, parked=stage in arriving) for unit in held]
    return units


def _assembled(
    change: PlanChange,
    executed: Executed,
    optimizer_counters: Mapping[ModelStage, OptimizerCounters],
    old: JobState,
) -> JobState:
    """The state of the new plan, made of the units' buffers, and what has been waiting."""
    new, waits = change.new, change.waiting
    trained = {s: x for s, x in old.trained.items() if s in waits}
    frozen = {s: x for s, x in old.frozen.items() if s in waits}
    for stage, held in executed.units.items():
        site, spec = new.sites[stage], unit_spec(new, stage)
        wanted = placed_units(stage, site.placement)
        arrays = group_arrays(new.world, site, spec, [held[unit] for unit in wanted])
        if stage in new.trains:
            trained[stage] = unflatten(new.trains[stage], arrays, optimizer_counters[stage])
        else:
            frozen[stage] = arrays
    order = [s for s in new.trains if s in trained]
    return JobState(counters=old.counters, trained={s: trained[s] for s in order}, frozen=frozen)
