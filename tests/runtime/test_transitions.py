"""A graph carried out: the target's units to the bit, memory as planned, nothing lost half way."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import jax
import pytest

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.plan import Plan
from nereus_jax.core.roles import ACTOR_TRAIN, CRITIC_TRAIN, REFERENCE_SCORE
from nereus_jax.core.transition import OperationKind, RecoverySource, TransitionGraph, Unit, Way
from nereus_jax.runtime.emu import ElasticModelUnit
from nereus_jax.runtime.transfers import Transfer
from nereus_jax.runtime.transitions import Batch, Executed, TransitionStopped, batches, execute
from nereus_jax.runtime.world import World, take_stock
from tests.runtime.transition_cases import (
    STATES,
    Ledger,
    Units,
    check_unit,
    live_bytes,
    make_transfers,
    placed,
    placement,
    plan_it,
    random_plans,
    units_in,
)

WAYS = {
    "any": None,
    "composed": frozenset({Way.COMPOSED}),
    "direct": frozenset({Way.DIRECT}),
    "lean": frozenset({Way.LEAN}),
}


@pytest.fixture(scope="module")
def world() -> World:
    return take_stock()


def planned(seed: int, world: World, ways: str = "any", slack: float | None = None) -> Any:
    plans = random_plans(seed, world.pool.devices)
    options = {"ways": WAYS[ways]} if WAYS[ways] else {}
    return *plans, plan_it(*plans, slack=slack, **options)


def run(world: World, graph: TransitionGraph, source: Plan, **options: Any) -> Executed:
    transfers = make_transfers(world, graph)
    return execute(world, graph, placed(world, source), transfers, step=4, **options)


def check_reached(executed: Executed, target: Plan) -> None:
    got = [unit for held in executed.units.values() for unit in held]
    assert set(got) == units_in(target) and len(got) == len(set(got))
    for held in executed.units.values():
        for name, unit in held.items():
            assert unit.unit == name
            check_unit(unit)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("seed", range(6))
def test_the_target_is_reached_bit_by_bit(seed: int, ways: str, world: World) -> None:
    source, target, graph = planned(seed, world, ways)
    executed = run(world, graph, source)
    check_reached(executed, target)
    assert [s.name for s in executed.spans] == [b.name for b in batches(graph)]
    assert sum(s.bytes or 0 for s in executed.spans) == graph.link_bytes.wire
    for span, batch in zip(executed.spans, batches(graph), strict=True):
        assert span.kind == "transition" and span.step == 4
        assert set(span.devices) == {
            str(d) for i in batch.operations for d in graph.operations[i].devices
        }


@pytest.mark.parametrize("slack", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(10, 22))
def test_memory_is_what_was_planned_at_every_moment(seed: int, slack: float, world: World) -> None:
    source, target, graph = planned(seed, world, slack=slack)
    before = live_bytes(world)
    transfers, ledger = make_transfers(world, graph), Ledger(graph)
    waiting: list[Batch] = []

    def look(batch: Batch) -> None:
        for done in waiting:
            ledger.carry_out(done)
        waiting[:] = [batch]
        now, planned_bytes = live_bytes(world), ledger.bytes_by_device()
        capacity = dict(zip(graph.devices, graph.capacity_bytes, strict=True))
        for device in graph.devices:
            held = now[device] - before[device]
            assert held <= planned_bytes[device] <= capacity[device]

    executed = execute(world, graph, placed(world, source), transfers, step=0, observe=look)
    after = live_bytes(world)
    ledger.carry_out(waiting[0])
    assert {d: after[d] - before[d] for d in graph.devices} == ledger.bytes_by_device()
    check_reached(executed, target)
    del executed
    assert live_bytes(world) == before


def test_the_cases_take_every_way_and_every_kind(world: World) -> None:
    """What the tests above go through; without it they could pass on nothing."""
    graphs = [planned(seed, world, ways)[2] for seed in range(6) for ways in WAYS]
    graphs += [planned(seed, world, slack=slack)[2] for seed in range(10, 18) for slack in (0, 0.5)]
    ways = {choice.way for graph in graphs for choice in graph.choices.values()}
    assert ways >= {Way.COMPOSED, Way.DIRECT, Way.LEAN, Way.PARKED}
    kinds = {o.kind for graph in graphs for o in graph.operations}
    assert kinds == set(OperationKind) - {OperationKind.RESTORE, OperationKind.REFRESH}
    assert not all(graph.old_state_fits for graph in graphs)
    assert any(graph.resource_edges != ((),) * len(graph.operations) for graph in graphs)


@pytest.mark.parametrize("seed", range(30))
def test_batches_keep_order_and_edges(seed: int, world: World) -> None:
    rng = random.Random(seed)
    ways = rng.choice(list(WAYS))
    _, _, graph = planned(seed, world, ways, 0.3 if ways == "any" else None)
    found = batches(graph)
    assert [i for batch in found for i in batch.operations] == list(range(len(graph.operations)))
    number = {i: n for n, batch in enumerate(found) for i in batch.operations}
    for i, operation in enumerate(graph.operations):
        batch = found[number[i]]
        assert all(number[j] < number[i] for j in graph.predecessors(i))
        assert (operation.kind, operation.model_stage) == (batch.kind, batch.model_stage)
        assert set(operation.produces) <= set(batch.targets)
        assert set(operation.consumes) <= set(batch.consumed) <= set(batch.sources)
        assert set(operation.reads) <= set(batch.sources)
    for batch in found:
        for units in (batch.sources, batch.targets):
            assert len({(u.pp, u.tp, u.parked) for u in units}) <= 1
            taken = [d for u in units for d in u.devices]
            assert len(taken) == len(set(taken))


def check_left(stopped: TransitionStopped, graph: TransitionGraph, done: int) -> None:
    """What exists after so many operations is there and whole, of every model-stage."""
    assert stopped.operations == done
    assert {u for held in stopped.units.values() for u in held} == units_after(graph, done)
    assert all(stopped.units[stage] for stage in STATES)
    for held in stopped.units.values():
        for unit in held.values():
            check_unit(unit)


class Broken(Exception):
    """What a test throws."""


HARD = [(3, "composed", None), (12, "any", 0.0), (13, "any", 0.0), (15, "any", 0.5)]


@pytest.mark.parametrize(("seed", "ways", "slack"), HARD)
def test_an_exception_before_any_operation_leaves_whole_units(
    seed: int, ways: str, slack: float | None, world: World
) -> None:
    source, _, graph = planned(seed, world, ways, slack)
    for number, place in enumerate(batches(graph)):
        seen: list[Batch] = []

        def stop(batch: Batch, number: int = number, seen: list[Batch] = seen) -> None:
            if len(seen) == number:
                raise Broken("pulled\nthe plug")
            seen.append(batch)

        with pytest.raises(TransitionStopped, match=r": pulled the plug$") as caught:
            run(world, graph, source, observe=stop)
        assert isinstance(caught.value.__cause__, Broken)
        check_left(caught.value, graph, place.operations[0])


@pytest.mark.parametrize("seed", [3, 12])
def test_an_exception_in_the_middle_of_any_transfer_leaves_whole_units(
    seed: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, graph = planned(seed, world, slack=0.0)
    moving = [b for b in batches(graph) if b.moves]
    real = Transfer.run_blocks
    for number, place in enumerate(moving):
        calls: list[int] = []

        def half(
            self: Transfer, blocks: Sequence[Any], number: int = number, calls: list = calls
        ) -> Any:
            moved = real(self, blocks)  # the memory is taken, but the unit is never handed over
            calls.append(1)
            if len(calls) > number:
                del moved
                raise Broken
            return moved

        monkeypatch.setattr(Transfer, "run_blocks", half)
        with pytest.raises(TransitionStopped, match="Broken") as caught:
            run(world, graph, source)
        check_left(caught.value, graph, place.operations[0])


@pytest.mark.parametrize(("seed", "ways", "slack"), HARD[:2])
def test_a_device_that_is_lost_at_any_operation_takes_its_units_and_no_other(
    seed: int, ways: str, slack: float | None, world: World
) -> None:
    source, target, graph = planned(seed, world, ways, slack)
    lost = world.pool.devices[2]
    stops = 0
    for number in range(len(batches(graph))):
        seen: list[Batch] = []

        def lose(batch: Batch, number: int = number, seen: list[Batch] = seen) -> None:
            if len(seen) == number:
                delete_all(world, lost)
            seen.append(batch)

        try:
            left = run(world, graph, source, observe=lose).units
            expected = units_in(target)
        except TransitionStopped as stopped:
            left, expected = stopped.units, units_after(graph, stopped.operations)
            stops += 1
            assert all(unit.is_intact for held in left.values() for unit in held.values())
        found = {u for held in left.values() for u, unit in held.items() if unit.is_intact}
        assert found >= {u for u in expected if lost not in u.devices}
        for held in left.values():
            for unit in held.values():
                if unit.is_intact:
                    check_unit(unit)
    assert stops


def units_after(graph: TransitionGraph, operations: int) -> set[Unit]:
    """What exists when so many operations have been carried out."""
    ledger = Ledger(graph)
    for batch in batches(graph):
        if batch.operations[-1] < operations:
            ledger.carry_out(batch)
    return set(ledger.units)


def delete_all(world: World, device: DeviceId) -> None:
    """What a device takes with it when it is gone."""
    handle = world.handles[device]
    for array in jax.live_arrays():
        if not array.is_deleted() and array.sharding.device_set == {handle}:
            array.delete()


def lose(units: Units, lost: set[DeviceId]) -> None:
    for of_stage in units.values():
        for unit in of_stage:
            for leaf in unit.blocks.values():
                for device in lost.intersection(leaf):
                    leaf[device].delete()


def test_what_lost_devices_leave_is_put_together_and_the_rest_restored(world: World) -> None:
    """The actor's two units are both broken, but their blocks make a whole; the critic's are not
    whole even together; the reference has an intact replica."""
    pool = world.pool.devices
    lost = {pool[0], pool[3], pool[4]}
    states = dict(STATES)
    states[CRITIC_TRAIN] = dataclasses.replace(
        STATES[CRITIC_TRAIN], recovery=(RecoverySource.CHECKPOINT,)
    )
    source = Plan(
        placements={
            ACTOR_TRAIN: placement(2, 1, 2, pool),
            CRITIC_TRAIN: placement(1, 2, 1, pool[4:]),
            REFERENCE_SCORE: placement(2, 1, 1, (pool[3], pool[7])),
        }
    )
    target = Plan(
        placements={
            ACTOR_TRAIN: placement(1, 1, 2, pool[6:]),
            CRITIC_TRAIN: placement(2, 1, 1, pool[1:]),
            REFERENCE_SCORE: placement(1, 1, 1, pool[5:]),
        }
    )
    graph = plan_it(source, target, states=states, lost=lost)
    units, whole = placed(world, source), placed(world, target)
    lose(units, lost)
    asked: list[Batch] = []

    def restore(batch: Batch) -> list[ElasticModelUnit]:
        asked.append(batch)
        return [u for u in whole[batch.model_stage] if u.unit in batch.targets]

    transfers = make_transfers(world, graph, lost=lost)
    executed = execute(world, graph, units, transfers, step=0, restore=restore)
    check_reached(executed, target)
    assert [batch.model_stage for batch in asked] == [CRITIC_TRAIN]
    assert {o.kind for o in graph.operations} == {
        OperationKind.DESTROY,
        OperationKind.RESHARD,
        OperationKind.RESTORE,
        OperationKind.EXTEND,
    }


def test_only_named_model_stages_are_carried_out(world: World) -> None:
    """The copies that weight edges fill are in the graph, but nothing is done for them."""
    source, target, graph = planned(1, world)
    units = placed(world, source)
    del units[REFERENCE_SCORE]
    executed = execute(world, graph, units, make_transfers(world, graph), step=0)
    assert set(executed.units) == {ACTOR_TRAIN, CRITIC_TRAIN} and not units
    wanted = {u for u in units_in(target) if u.model_stage != REFERENCE_SCORE}
    assert {u for held in executed.units.values() for u in held} == wanted


def test_two_that_change_places_meet_in_host_memory(world: World) -> None:
    pool = world.pool.devices
    one, other = placement(1, 1, 2, pool), placement(1, 1, 2, pool[2:])
    still = placement(1, 1, 1, pool[7:])
    source, target = (
        Plan(placements={ACTOR_TRAIN: a, CRITIC_TRAIN: b, REFERENCE_SCORE: still})
        for a, b in ((one, other), (other, one))
    )
    graph = plan_it(source, target, slack=0.5)
    kinds = {o.kind for o in graph.operations}
    assert {OperationKind.PARK, OperationKind.UNPARK} <= kinds
    check_reached(run(world, graph, source), target)
