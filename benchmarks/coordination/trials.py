"""Random transitions on shared devices, and their execution under a ledger of device memory."""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_SCORE,
    ACTOR_TRAIN,
    CRITIC_SCORE,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
    REWARD_SCORE,
    ModelStage,
)
from nereus_jax.core.transition import TransitionGraph, Unit, placed_units
from nereus_jax.planning.transition_graph import plan_transition
from nereus_jax.planning.transition_inputs import StageState, TransitionBudget, decoder_states
from nereus_jax.planning.transition_replay import uncoordinated_order
from nereus_jax.runtime.emu import ElasticModelUnit, group_site, load, make_site, units_of
from nereus_jax.runtime.transfers import Transfer
from nereus_jax.runtime.transitions import Batch, TransitionStopped, batches, execute
from nereus_jax.runtime.world import World
from nereus_jax.trainer.edges import make_transfer

NUM_DEVICES = 32
NODE = 8
MODEL = DecoderConfig(
    num_layers=4,
    embed_dim=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=2,
    mlp_dim=16,
    vocab_size=64,
)
KINDS: Mapping[str, tuple[ModelStage, ...]] = {
    "one_model_across_stages": (ACTOR_GENERATE, ACTOR_SCORE, ACTOR_TRAIN),
    "models_in_one_stage": (ACTOR_SCORE, CRITIC_SCORE, REFERENCE_SCORE, REWARD_SCORE),
    "both": (
        ACTOR_GENERATE,
        ACTOR_SCORE,
        CRITIC_SCORE,
        REFERENCE_SCORE,
        REWARD_SCORE,
        ACTOR_TRAIN,
        CRITIC_TRAIN,
    ),
}
"""Which model-stages share devices; all of them have state that must move."""

Units = dict[ModelStage, list[ElasticModelUnit]]


class OutOfMemory(Exception):
    """An operation needs more memory than its device has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One transition to carry out.

    Attributes:
      seed: of the draws.
      source, target: the plans.
      states: what the units hold.
      capacity: bytes of each device.
    """

    seed: int
    source: Plan
    target: Plan
    states: Mapping[ModelStage, StageState]
    capacity: Mapping[DeviceId, int]


def make_trial(kind: str, seed: int, devices: Sequence[DeviceId], slack: float) -> Trial:
    """Draws a trial.

    Args:
      kind: of overlap.
      seed: of the draws.
      devices: all of them.
      slack: memory of a device is what the larger of the two plans needs there, and this part of
        what the smaller one needs; with 1 there is room for both.
    """
    rng = random.Random(f"{kind}/{seed}")
    states = decoder_states(MODEL, KINDS[kind], weight_edges=False)
    source, target = (
        Plan(placements={stage: _place(rng, devices) for stage in states}) for _ in range(2)
    )
    both = [_held(plan, states) for plan in (source, target)]
    capacity: dict[DeviceId, int] = {}
    for device in {*both[0], *both[1]}:
        needs = [held.get(device, 0) for held in both]
        capacity[device] = int(max(needs) + slack * min(needs))
    return Trial(seed=seed, source=source, target=target, states=states, capacity=capacity)


def _place(rng: random.Random, devices: Sequence[DeviceId]) -> Placement:
    """A layout on neighbouring devices."""
    layouts = [
        (dp, pp, tp)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4)
        for dp in (1, 2, 4, 8, 16)
        if tp * pp <= 16 and dp * pp * tp <= len(devices)
    ]
    dp, pp, tp = rng.choice(layouts)
    count = dp * pp * tp
    start = rng.randrange(0, len(devices) - count + 1) // min(count, NODE) * min(count, NODE)
    return Placement(
        layout=ParallelLayout(dp, pp, tp), devices=tuple(devices[start : start + count])
    )


def unit_bytes(state: StageState, unit: Unit) -> int:
    """What a unit takes on each of its devices, from its leaves: no figure of the plan."""
    mesh = ParallelLayout(1, unit.pp, unit.tp).mesh_shape(state.num_kv_heads)
    return 0 if unit.parked else leaves(state).local_bytes(mesh)


def leaves(state: StageState) -> EmuSpec:
    """All leaves of a unit."""
    optimizer = state.optimizer.leaves if state.optimizer is not None else ()
    return EmuSpec(leaves=(*state.parameters.leaves, *optimizer))


def units_in(plan: Plan) -> Iterator[Unit]:
    """The units of a plan, as values."""
    for stage, where in plan.placements.items():
        yield from placed_units(stage, where)


def _held(plan: Plan, states: Mapping[ModelStage, StageState]) -> dict[DeviceId, int]:
    total: dict[DeviceId, int] = {}
    for unit in units_in(plan):
        for device in unit.devices:
            total[device] = total.get(device, 0) + unit_bytes(states[unit.model_stage], unit)
    return total


def plan_trial(trial: Trial, hardware: Hardware) -> TransitionGraph:
    """The graph that leads from plan to plan in the memory that there is."""
    budget = TransitionBudget(capacity_bytes=trial.capacity, headroom=0.0, buffer_bytes=0)
    nodes = {d: d.index // NODE for d in trial.capacity}
    return plan_transition(
        trial.states, trial.source, trial.target, hardware=hardware, budget=budget, nodes=nodes
    )


def uncoordinated(graph: TransitionGraph, seed: int) -> TransitionGraph:
    """The same operations in an order that knows only of those of the same model-stage."""
    order = uncoordinated_order(graph, seed)
    place = {old: new for new, old in enumerate(order)}
    operations = tuple(graph.operations[i] for i in order)
    edges = tuple(
        tuple(
            sorted(
                place[j]
                for j in graph.data_edges[i]
                if graph.operations[j].model_stage == graph.operations[i].model_stage
            )
        )
        for i in order
    )
    return dataclasses.replace(
        graph, operations=operations, data_edges=edges, resource_edges=((),) * len(order)
    )


class Ledger:
    """Memory by device; an operation takes what it produces, then gives back what it consumes.

    Args:
      trial: whose units and devices.
      graph: its operations.
    """

    def __init__(self, trial: Trial, graph: TransitionGraph) -> None:
        self._trial, self._graph = trial, graph
        self._held = dict.fromkeys(trial.capacity, 0) | _held(trial.source, trial.states)

    def __call__(self, batch: Batch) -> None:
        """Called before each batch.

        Raises:
          OutOfMemory: one of its operations does not fit.
        """
        for i in batch.operations:
            operation = self._graph.operations[i]
            for unit in operation.produces:
                self._add(unit, 1)
            for unit in operation.consumes:
                self._add(unit, -1)

    def _add(self, unit: Unit, sign: int) -> None:
        num_bytes = unit_bytes(self._trial.states[unit.model_stage], unit)
        for device in unit.devices:
            self._held[device] += sign * num_bytes
            if self._held[device] > self._trial.capacity[device]:
                raise OutOfMemory(
                    f"{unit} needs {num_bytes} bytes on {device}, which has "
                    f"{self._trial.capacity[device]} and would hold {self._held[device]}"
                )


def carry_out(world: World, trial: Trial, graph: TransitionGraph) -> str:
    """Executes a graph under the ledger.

    Returns:
      What went wrong; empty: every unit of the target is there, to the bit.
    """
    values = {stage: _values(stage, state) for stage, state in trial.states.items()}
    units = _placed(world, trial, values)
    transfers = _transfers(world, trial, graph)
    try:
        executed = execute(world, graph, units, transfers, step=0, observe=Ledger(trial, graph))
    except TransitionStopped as error:
        return str(error.__cause__)
    got = {name: unit for held in executed.units.values() for name, unit in held.items()}
    if set(got) != set(units_in(trial.target)):
        return "other units are there than the target plan has"
    wrong = [str(name) for name, unit in got.items() if not _is_right(trial, unit, values)]
    return f"{wrong[0]} has other values" if wrong else ""


def _values(stage: ModelStage, state: StageState) -> dict[str, np.ndarray]:
    """Any bits for every leaf."""
    rng = np.random.default_rng(sum(str(stage).encode()))
    return {
        leaf.name: rng.integers(0, 256, leaf.num_bytes, np.uint8)
        .view(jax.numpy.dtype(leaf.dtype))
        .reshape(leaf.shape)
        for leaf in leaves(state)
    }


def _placed(
    world: World, trial: Trial, values: Mapping[ModelStage, Mapping[str, np.ndarray]]
) -> Units:
    units: Units = {}
    for stage, where in trial.source.placements.items():
        state = trial.states[stage]
        site = make_site(world, stage, where, state.num_kv_heads)
        arrays = load(leaves(state), site, lambda name, i, stage=stage: values[stage][name][i])
        units[stage] = list(units_of(world, site, arrays))
    return units


def _transfers(world: World, trial: Trial, graph: TransitionGraph) -> dict[int, Transfer]:
    transfers: dict[int, Transfer] = {}
    for batch in batches(graph):
        if not batch.moves:
            continue
        state = trial.states[batch.model_stage]
        spec = leaves(state)
        source = group_site(world, batch.sources, state.num_kv_heads)
        target = group_site(world, batch.targets, state.num_kv_heads)
        parked = any(unit.parked for unit in batch.sources)
        transfers[batch.operations[0]] = make_transfer(
            world, spec, source, spec, target, parked=parked
        )
    return transfers


def _is_right(
    trial: Trial, unit: ElasticModelUnit, values: Mapping[ModelStage, Mapping[str, np.ndarray]]
) -> bool:
    """Whether each block of a unit has the bits of its part of the leaf."""
    name = unit.unit
    state = trial.states[name.model_stage]
    spec = leaves(state)
    mesh = ParallelLayout(1, name.pp, name.tp).mesh_shape(state.num_kv_heads)
    for leaf in spec:
        value = values[name.model_stage][leaf.name]
        for device, place in zip(name.devices, np.ndindex(*mesh), strict=True):
            box = leaf.box(spec.rules, mesh, place)
            wanted = value[tuple(slice(a, b) for a, b in box)]
            if np.asarray(unit.blocks[leaf.name][device]).tobytes() != wanted.tobytes():
                return False
    return True
