"""Random pairs of plans on 8 devices, units with known values, and an account of live memory."""

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ACTOR_TRAIN, CRITIC_TRAIN, REFERENCE_SCORE, ModelStage
from nereus_jax.core.transition import TransitionGraph, Unit
from nereus_jax.planning.transition_graph import plan_transition
from nereus_jax.planning.transition_inputs import MOVING_WAYS, StageState, TransitionBudget
from nereus_jax.runtime.emu import ElasticModelUnit, group_site, load, make_site, units_of
from nereus_jax.runtime.parking import HOST_MEMORY
from nereus_jax.runtime.transfers import Transfer
from nereus_jax.runtime.transitions import Batch, batches
from nereus_jax.runtime.world import World
from nereus_jax.trainer.edges import make_transfer
from tests.runtime.transfer_cases import check_same, noise

# 3 layers, 37 entries and 10 columns are padded by most layouts; 2 heads are shared by tp=4.
MODEL = DecoderConfig(
    num_layers=3,
    embed_dim=4,
    num_heads=12,
    num_kv_heads=2,
    head_dim=2,
    mlp_dim=10,
    vocab_size=37,
)
NAMES = ("embed", "layers.q", "layers.k", "final_norm")
PARAMETERS = EmuSpec(leaves=tuple(MODEL.spec(Head.LM)[name] for name in NAMES))
MOMENTS = EmuSpec(
    leaves=tuple(dataclasses.replace(leaf, name=f"mu.{leaf.name}") for leaf in PARAMETERS)
)
TRAINED = StageState(parameters=PARAMETERS, optimizer=MOMENTS, num_kv_heads=2)
STATES = {
    ACTOR_TRAIN: TRAINED,
    CRITIC_TRAIN: TRAINED,
    REFERENCE_SCORE: StageState(parameters=PARAMETERS, num_kv_heads=2),
}
HARDWARE = Hardware(
    name="test",
    devices_per_node=8,
    peak_flops_per_s={},
    memory_bytes=10**9,
    memory_bytes_per_s=1e9,
    intra_node=Link(bytes_per_s=1e8, latency_s=1e-6),
    inter_node=Link(bytes_per_s=1e7, latency_s=1e-5),
    host=Link(bytes_per_s=1e7, latency_s=1e-5),
)
Units = dict[ModelStage, list[ElasticModelUnit]]


def leaves(state: StageState) -> EmuSpec:
    """All leaves of a unit."""
    optimizer = state.optimizer.leaves if state.optimizer is not None else ()
    return EmuSpec(leaves=(*state.parameters.leaves, *optimizer))


def placement(dp: int, pp: int, tp: int, devices: Sequence[DeviceId]) -> Placement:
    """The layout on the first of the devices."""
    return Placement(layout=ParallelLayout(dp, pp, tp), devices=tuple(devices[: dp * pp * tp]))


def random_placement(rng: random.Random, devices: Sequence[DeviceId]) -> Placement:
    """Any layout on any devices: often in order, sometimes shuffled."""
    tp = rng.choice([1, 2, 3, 4, 6])
    pp = rng.choice([n for n in (1, 2, 3) if n * tp <= len(devices)])
    dp = rng.randint(1, len(devices) // (tp * pp))
    start = rng.randint(0, len(devices) - dp * pp * tp)
    chosen = list(devices[start : start + dp * pp * tp])
    if rng.random() < 0.3:
        rng.shuffle(chosen)
    return placement(dp, pp, tp, chosen)


def random_plans(seed: int, devices: Sequence[DeviceId]) -> tuple[Plan, Plan]:
    """Two plans of the same model-stages, which overlap as it comes."""
    rng = random.Random(seed)
    first, second = (
        Plan(placements={stage: random_placement(rng, devices) for stage in STATES})
        for _ in range(2)
    )
    return first, second


def held_bytes(plan: Plan, states: Mapping[ModelStage, StageState]) -> dict[DeviceId, int]:
    """What the units of a plan take on each device."""
    total: dict[DeviceId, int] = {}
    for stage, where in plan.placements.items():
        layout = where.layout
        mesh = ParallelLayout(1, layout.pp, layout.tp).mesh_shape(2)
        for device in where.devices:
            total[device] = total.get(device, 0) + leaves(states[stage]).local_bytes(mesh)
    return total


def plan_it(
    source: Plan,
    target: Plan,
    *,
    slack: float | None = None,
    ways: frozenset = MOVING_WAYS,
    states: Mapping[ModelStage, StageState] = STATES,
    lost: Iterable[DeviceId] = (),
) -> TransitionGraph:
    """A graph; `slack` is the part of the smaller plan for which there is room beside the larger.

    None: there is room for everything.
    """
    capacity: dict[DeviceId, int] = {}
    if slack is not None:
        both = held_bytes(source, states), held_bytes(target, states)
        for device in {*both[0], *both[1]}:
            old, new = (held.get(device, 0) for held in both)
            capacity[device] = int(max(old, new) + slack * min(old, new))
    budget = TransitionBudget(capacity_bytes=capacity, headroom=0.0, buffer_bytes=0, ways=ways)
    return plan_transition(states, source, target, hardware=HARDWARE, budget=budget, lost=lost)


def values_of(stage: ModelStage, states: Mapping[ModelStage, StageState] = STATES) -> dict:
    """The logical state of a model-stage: any bits."""
    first = 100 * sorted(STATES).index(stage)
    return {
        leaf.name: noise(leaf.shape, leaf.dtype, first + i)
        for i, leaf in enumerate(leaves(states[stage]))
    }


def placed(world: World, plan: Plan, states: Mapping[ModelStage, StageState] = STATES) -> Units:
    """The units of a plan, with those values."""
    units: Units = {}
    for stage, where in plan.placements.items():
        site, values = make_site(world, stage, where, 2), values_of(stage, states)
        arrays = load(leaves(states[stage]), site, lambda name, i, v=values: v[name][i])
        units[stage] = list(units_of(world, site, arrays, version=3))
    return units


def make_transfers(
    world: World,
    graph: TransitionGraph,
    states: Mapping[ModelStage, StageState] = STATES,
    lost: Iterable[DeviceId] = (),
) -> dict[int, Transfer]:
    """What carries out the batches that move."""
    transfers: dict[int, Transfer] = {}
    for batch in batches(graph):
        if batch.moves:
            spec = leaves(states[batch.model_stage])
            source = group_site(world, batch.sources, 2)
            target = group_site(world, batch.targets, 2)
            parked = any(unit.parked for unit in batch.sources)
            transfers[batch.operations[0]] = make_transfer(
                world, spec, source, spec, target, lost=lost, parked=parked
            )
    return transfers


def check_unit(
    unit: ElasticModelUnit, states: Mapping[ModelStage, StageState] = STATES, version: int = 3
) -> None:
    """Every block of a unit is that part of the values, and the padding is zero."""
    name, stage = unit.unit, unit.unit.model_stage
    mesh = ParallelLayout(1, name.pp, name.tp).mesh_shape(2)
    spec, values = leaves(states[stage]), values_of(stage, states)
    assert unit.version == version and unit.is_intact
    assert list(unit.blocks) == [leaf.name for leaf in spec]
    for leaf in spec:
        whole = np.zeros(leaf.padded_shape(spec.rules, mesh), leaf.dtype)
        whole[tuple(slice(n) for n in leaf.shape)] = values[leaf.name]
        assert list(unit.blocks[leaf.name]) == list(name.devices)
        places = np.ndindex(*mesh)
        for device, place in zip(name.devices, places, strict=True):
            box = leaf.box(spec.rules, mesh, place)
            block = unit.blocks[leaf.name][device]
            check_same(block, whole[tuple(slice(a, b) for a, b in box)])
            assert (block.sharding.memory_kind == HOST_MEMORY) == name.parked


def units_in(plan: Plan) -> set[Unit]:
    """The units of a plan, as values."""
    return {
        Unit(model_stage=s, tp=p.layout.tp, pp=p.layout.pp, devices=p.replica_devices(i))
        for s, p in plan.placements.items()
        for i in range(p.layout.dp)
    }


def live_bytes(world: World) -> dict[DeviceId, int]:
    """Bytes of all buffers in the memory of each device, each once."""
    names = {handle: device for device, handle in world.handles.items()}
    seen: dict[tuple[DeviceId, int], int] = {}
    for array in jax.live_arrays():
        if array.is_deleted() or array.sharding.memory_kind == HOST_MEMORY:
            continue
        for shard in array.addressable_shards:
            if not shard.data.is_deleted():
                key = names[shard.device], shard.data.unsafe_buffer_pointer()
                seen[key] = shard.data.nbytes
    total = dict.fromkeys(world.pool.devices, 0)
    for (device, _), num_bytes in seen.items():
        total[device] += num_bytes
    return total


class Ledger:
    """What the units of a graph take by device, batch after batch, by the graph's own numbers."""

    def __init__(self, graph: TransitionGraph) -> None:
        self.graph = graph
        self.units = dict(zip(graph.initial_units, graph.initial_bytes, strict=True))

    def carry_out(self, batch: Batch) -> None:
        """What exists after a batch."""
        for i in batch.operations:
            operation = self.graph.operations[i]
            for unit in operation.consumes:
                self.units.pop(unit)
            for unit in operation.produces:
                self.units[unit] = 0 if unit.parked else operation.produced_bytes

    def bytes_by_device(self) -> dict[DeviceId, int]:
        """Bytes of all that exists."""
        total = dict.fromkeys(self.graph.devices, 0)
        for unit, num_bytes in self.units.items():
            for device in unit.devices:
                total[device] += num_bytes
        return total
