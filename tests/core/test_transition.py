"""The values of a transition: bytes add up, edges join, tuples that are made late."""

import pickle

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.core.transition import (
    Later,
    LinkBytes,
    Operation,
    OperationKind,
    RecoverySource,
    TransitionGraph,
    Unit,
)

DEVICES = tuple(DeviceId(0, i) for i in range(4))


def unit(*devices: int, parked: bool = False) -> Unit:
    where = tuple(DEVICES[i] for i in devices)
    return Unit(model_stage=ACTOR_TRAIN, tp=len(devices), pp=1, devices=where, parked=parked)


def extend(source: Unit, target: Unit, num_bytes: int) -> Operation:
    return Operation(
        kind=OperationKind.EXTEND,
        model_stage=ACTOR_TRAIN,
        reads=(source,),
        consumes=(),
        produces=(target,),
        source=RecoverySource.REPLICA,
        link_bytes=LinkBytes(intra_node=num_bytes),
        seconds=1.0,
        produced_bytes=num_bytes // 2,
        consumed_bytes=0,
    )


def graph(capacity_bytes: int) -> TransitionGraph:
    first, second = extend(unit(1, 0), unit(2, 3), 20), extend(unit(2, 3), unit(0, 1), 20)
    return TransitionGraph(
        operations=(first, second),
        data_edges=((), (0,)),
        resource_edges=((), (0,)),
        local_order=(0, 1),
        start_s=(0.0, 1.0),
        end_s=(1.0, 2.0),
        transition_s=2.0,
        exposed_compile_s=0.0,
        critical_path=(0, 1),
        initial_units=(unit(1, 0),),
        final_units=(unit(1, 0), unit(2, 3), unit(0, 1)),
        initial_bytes=(10,),
        devices=DEVICES,
        capacity_bytes=(capacity_bytes,) * 4,
        peak_bytes=(20, 20, 10, 10),
        choices={},
    )


def test_a_unit_is_a_value() -> None:
    assert unit(0, 1) == unit(0, 1) != unit(1, 0)
    assert len({unit(0, 1), unit(0, 1), unit(0, 1, parked=True)}) == 2
    assert str(unit(0, 1, parked=True)) == "actor-TRAIN[pp=1,tp=2 on 0:0,0:1] parked"


def test_bytes_add_up() -> None:
    one, other = LinkBytes(local=1, intra_node=2), LinkBytes(intra_node=3, inter_node=4, host=5)
    assert one + other == LinkBytes(local=1, intra_node=5, inter_node=4, host=5)
    assert (one + other).wire == 9
    assert graph(20).link_bytes == LinkBytes(intra_node=40)


def test_an_operation_knows_its_devices() -> None:
    assert graph(20).operations[0].devices == DEVICES


def test_both_kinds_of_edges_are_waited_for_once() -> None:
    assert [graph(20).predecessors(i) for i in range(2)] == [(), (0,)]


def test_old_state_fits_if_all_units_do() -> None:
    assert graph(20).old_state_fits  # devices 0 and 1 hold 10 + 10
    assert not graph(19).old_state_fits


def test_a_late_tuple_is_made_once_when_looked_at() -> None:
    made: list[int] = []

    def make() -> list[int]:
        made.append(1)
        return [3, 4, 5]

    late = Later(make)
    assert not made
    assert len(late) == 3 and late[1] == 4 and tuple(late[1:]) == (4, 5) and list(late) == [3, 4, 5]
    assert late == (3, 4, 5) and late == Later(lambda: (3, 4, 5)) and late != Later(lambda: (3,))
    assert hash(late) == hash((3, 4, 5)) and repr(late) == "(3, 4, 5)"
    assert pickle.loads(pickle.dumps(late)) == (3, 4, 5)
    assert made == [1]
