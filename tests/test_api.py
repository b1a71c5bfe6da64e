"""`reshard` and `TransitionProgram`: trees in, trees out, errors that leave the source alone."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import nereus_jax
from nereus_jax import CompileQueue, ReshardError, TransitionProgram, reshard
from nereus_jax.api import CACHED_PROGRAMS
from nereus_jax.api import _program as cached_program
from nereus_jax.runtime.world import World, take_stock

P = PartitionSpec


def on(spec: PartitionSpec, start: int = 0, **axes: int) -> NamedSharding:
    """A spec on a mesh of devices from `start` on."""
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[start : start + count]).reshape(tuple(axes.values()))
    return NamedSharding(Mesh(devices, tuple(axes)), spec)


ROWS, COLUMNS = on(P("x"), x=4), on(P(None, "x"), x=4)
ELSEWHERE = on(P("y", "x"), start=4, x=2, y=2)
VALUE = np.arange(32, dtype=np.float32).reshape(4, 8)


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    inside: Any


def state() -> dict[str, Any]:
    return {
        "layers": [{"w": jax.device_put(VALUE, ROWS)}, {"w": jax.device_put(VALUE + 1, ROWS)}],
        "pair": Pair(jax.device_put(VALUE, COLUMNS), (jax.device_put(VALUE[0], ROWS),)),
        "box": Box(jax.device_put(VALUE - 1, ROWS)),
        "none": None,
    }


def check_tree(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


# --- trees ---


@pytest.mark.parametrize("path", ["auto", "host", "collective"])
def test_one_sharding_for_a_whole_tree(path: Any) -> None:
    source = state()
    wanted = on(P("x"), start=2, x=2, y=2)
    moved = reshard(source, wanted, path=path)
    check_tree(moved, jax.tree.map(np.asarray, source))
    assert all(x.sharding == wanted for x in jax.tree.leaves(moved))
    assert not any(x.is_deleted() for x in jax.tree.leaves(source))


def test_shardings_for_subtrees() -> None:
    source = state()
    wanted = {"layers": ELSEWHERE, "pair": Pair(ROWS, (on(P(), x=1),)), "none": None}
    wanted["box"] = Box(COLUMNS)
    moved = reshard(source, wanted)
    check_tree(moved, jax.tree.map(np.asarray, source))
    assert [x["w"].sharding for x in moved["layers"]] == [ELSEWHERE] * 2
    assert moved["pair"].first.sharding == ROWS
    assert moved["pair"].second[0].sharding == on(P(), x=1)


def test_a_single_array_and_a_single_device() -> None:
    source = jax.device_put(VALUE, ROWS)
    one = SingleDeviceSharding(jax.devices()[5])
    moved = reshard(source, one)
    assert moved.sharding == one
    back = reshard(moved, ROWS, path="collective")
    np.testing.assert_array_equal(back, VALUE)
    assert back.sharding == ROWS
    assert reshard({}, ROWS) == {}


def test_shapes_with_a_dtype_are_casts() -> None:
    source = {"a": jax.device_put(VALUE, ROWS), "b": jax.device_put(VALUE, ROWS)}
    narrow = jax.ShapeDtypeStruct(VALUE.shape, jnp.bfloat16, sharding=ELSEWHERE)
    for path in ("host", "collective"):
        moved = reshard(source, {"a": narrow, "b": COLUMNS}, path=path)
        assert (moved["a"].dtype, moved["b"].dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_array_equal(moved["a"], VALUE.astype(jnp.bfloat16))
        wide = jax.ShapeDtypeStruct(VALUE.shape, jnp.float32, sharding=ROWS)
        np.testing.assert_array_equal(reshard(moved["a"], wide, path=path), VALUE)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("path", ["host", "collective"])
def test_random_keys(impl: str, path: Any) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), 8)
    source = {"key": jax.device_put(keys, on(P("x"), x=8)), "w": jax.device_put(VALUE, ROWS)}
    moved = reshard(source, {"key": on(P("x"), x=2), "w": COLUMNS}, path=path)
    assert moved["key"].dtype == keys.dtype and moved["key"].shape == (8,)
    assert moved["key"].sharding == on(P("x"), x=2)
    np.testing.assert_array_equal(jax.random.key_data(moved["key"]), jax.random.key_data(keys))


def test_a_program_of_shapes_runs_on_arrays() -> None:
    shape = jax.ShapeDtypeStruct(VALUE.shape, jnp.float32, sharding=ROWS)
    program = TransitionProgram(shape, ELSEWHERE, path="collective", max_inflight_bytes=64)
    program.compile()
    for seed in range(3):
        np.testing.assert_array_equal(program(jax.device_put(VALUE + seed, ROWS)), VALUE + seed)
    assert program.path == "collective" and program.wire_bytes == VALUE.nbytes
    assert program.temp_bytes <= VALUE.nbytes // 4 + 64
    assert [name for name, _ in program.compiled][-1] == "first"
    assert all(
        program.schedule.group_bytes(g) <= 64 for b in program.schedule.batches for g in b.groups
    )


@pytest.mark.parametrize("path", ["host", "collective"])
def test_what_is_donated_is_gone_and_what_stays_is_shared(path: Any) -> None:
    source = {"a": jax.device_put(VALUE, ROWS), "b": jax.device_put(VALUE, ROWS)}
    old = [s.data for s in source["a"].addressable_shards]
    moved = reshard(source, {"a": ELSEWHERE, "b": ROWS}, donate=True, path=path)
    assert all(block.is_deleted() for block in old)
    check_tree(moved, {"a": VALUE, "b": VALUE})


# --- errors ---


def dim(spec: PartitionSpec) -> dict[str, Any]:
    return {"w": {"k": on(spec, x=3, y=2)}}


def shape_of(dtype: Any, shape: tuple[int, ...] = VALUE.shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=ROWS)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"w": {"k": shape_of(jnp.float32, (8, 4))}},
            r"\['w'\]\['k'\] has shape \(4, 8\).*\(8, 4\)",
        ),
        (dim(P("x")), r"dim 0 of \"\['w'\]\['k'\]\", shape \(4, 8\), has 4 .*x=3 does not.*to 6"),
        (dim(P(None, ("x", "y"))), r"dim 1 of .* has 8 elements, which x=3 x y=2 does not"),
        (on(P("x", None, None), x=4), r"\['w'\]\['k'\] of shape \(4, 8\) cannot lie so"),
        ({"w": {"k": shape_of(jnp.float16)}}, r"float32, wanted float16, .*allow_range_loss=True"),
        ({"w": {"k": shape_of(jnp.int32)}}, r"float32, wanted int32, which holds a smaller range"),
        ({"w": {"k": jax.ShapeDtypeStruct((4, 8), "float32")}}, r"give a jax.sharding.Sharding"),
        ({"w": {"k": P("x")}}, r"the target of \['w'\]\['k'\] is .*\('x',\); give a jax.sharding"),
        ({"w": {"q": ROWS}}, r"it lacks \['w'\]\['k'\] and it has besides \['w'\]\['q'\]"),
        ({"w": [ROWS]}, r"it lacks \['w'\]\['k'\] and it has besides \['w'\]\[0\]"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_moves(wanted: Any, message: str) -> None:
    source = {"w": {"k": jax.device_put(VALUE, ROWS)}}
    for donate in (False, True):
        with pytest.raises(ReshardError, match=message):
            reshard(source, wanted, donate=donate)
        check_usable(source["w"]["k"])


def check_usable(x: jax.Array) -> None:
    assert not x.is_deleted() and x.sharding == ROWS
    np.testing.assert_array_equal(reshard(x, COLUMNS), VALUE)
    np.testing.assert_array_equal(x, VALUE)


def test_arguments_out_of_range() -> None:
    source = jax.device_put(VALUE, ROWS)
    wrong: Any = "nccl"
    for call in (reshard, TransitionProgram):
        with pytest.raises(
            ReshardError, match=r"path='nccl' is not known; .*auto, collective, host"
        ):
            call(source, COLUMNS, path=wrong)
    with pytest.raises(ReshardError, match="max_inflight_bytes=0 must be at least 1"):
        TransitionProgram(source, COLUMNS, max_inflight_bytes=0)
    check_usable(source)


def test_range_may_be_lost_on_demand() -> None:
    source = jax.device_put(VALUE, ROWS)
    half = shape_of(jnp.float16)
    moved = TransitionProgram(source, half, allow_range_loss=True)(source)
    np.testing.assert_array_equal(moved, VALUE.astype(np.float16))
    for wide in (jnp.bfloat16, jnp.complex64):  # the same range, and more than it
        assert TransitionProgram(source, shape_of(wide))(source).dtype == wide
    beyond = [("float32", "float8_e5m2"), ("uint16", "float16"), ("complex64", "float32")]
    beyond += [("int32", "int8"), ("int32", "uint32"), ("bfloat16", "float16"), ("int8", "bool")]
    within = [("int8", "float16"), ("bool", "int8"), ("float16", "bfloat16"), ("uint8", "int16")]
    for before, after in beyond + within:
        x = jax.device_put(np.ones((4, 8), before), ROWS)
        if (before, after) in within:
            assert (np.asarray(reshard(x, shape_of(after))) == 1).all()
        else:
            with pytest.raises(ReshardError, match=f"{before}, wanted {after}, which holds a sm"):
                reshard(x, shape_of(after))
    with pytest.raises(ReshardError, match="random keys are not cast"):
        keys = jax.device_put(jax.random.split(jax.random.key(0), 4), ROWS)
        reshard(keys, shape_of(jnp.uint32, (4,)))


def test_what_is_no_array_on_devices() -> None:
    source = jax.device_put(VALUE, ROWS)
    with pytest.raises(ReshardError, match=r"\['b'\] is of type ndarray, without a sharding; put"):
        reshard({"a": source, "b": VALUE}, COLUMNS)
    with pytest.raises(ReshardError, match=r"\['b'\] is of type float, not a jax.Array; put it"):
        reshard({"a": source, "b": 1.0}, COLUMNS)
    check_usable(source)


def test_deleted_and_donated_arrays() -> None:
    alive, gone = jax.device_put(VALUE, ROWS), jax.device_put(VALUE, ROWS)
    jax.jit(lambda x: x + 1, donate_argnums=0)(gone)
    assert gone.is_deleted()
    program = TransitionProgram({"a": alive, "b": alive}, COLUMNS)
    for call in (lambda tree: reshard(tree, COLUMNS), program):
        with pytest.raises(ReshardError, match=r"\['b'\] was deleted or donated; keep it until"):
            call({"a": alive, "b": gone})
        check_usable(alive)


def test_a_program_takes_what_it_was_made_for() -> None:
    source = jax.device_put(VALUE, ROWS)
    program = TransitionProgram({"a": source}, COLUMNS)
    wrong: list[tuple[Any, str]] = [
        ({"b": source}, r"other leaves than .*it lacks \['a'\] and it has besides \['b'\]"),
        ({"a": source.astype(jnp.int32)}, r"\['a'\] is int32\[4, 8\], .* made for float32\[4, 8\]"),
        ({"a": source[:, :4]}, r"\['a'\] is float32\[4, 4\]"),
        (
            {"a": jax.device_put(VALUE, COLUMNS)},
            r"\['a'\] lies as .*make a program for this source",
        ),
        ({"a": VALUE}, "without a sharding"),
    ]
    for tree, message in wrong:
        with pytest.raises(ReshardError, match=message):
            program(tree)
    # Another sharding that cuts alike is the same one.
    alike = jax.device_put(VALUE, on(P(("a", "b")), a=2, b=2))
    np.testing.assert_array_equal(program({"a": alike})["a"], VALUE)
    check_usable(source)


def test_a_device_that_the_backend_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    world = take_stock()
    some = dict(itertools.islice(world.handles.items(), 4))
    fewer = World(pool=world.pool, handles=some, process_index=0, num_processes=1)
    monkeypatch.setattr("nereus_jax.api.take_stock", lambda: fewer)
    source = jax.device_put(VALUE, ROWS)
    with pytest.raises(ReshardError, match=r"does not have; build the mesh from jax.devices\(\)"):
        TransitionProgram(source, ELSEWHERE)
    check_usable(source)


# --- compiling ---


def test_a_second_call_takes_the_program_of_the_first() -> None:
    cached_program.cache_clear()
    source, after = jax.device_put(VALUE, ROWS), on(P(None, "x"), start=3, x=2)
    for i in range(3):
        reshard(source, after, path="collective")
        info = cached_program.cache_info()
        assert (info.hits, info.misses, info.maxsize) == (i, 1, CACHED_PROGRAMS)
    reshard(source, after, path="host")
    reshard(source.astype(jnp.int32), after, path="collective")
    assert cached_program.cache_info().misses == 3


class Gate:
    """Holds the thread of a queue until it is opened."""

    def __init__(self, queue: CompileQueue) -> None:
        self._event = threading.Event()
        self.order: list[Any] = []
        self.first = queue.submit(self.compile(0))

    def compile(self, name: Any) -> Callable[[], Any]:
        def run() -> Any:
            assert self._event.wait(60)
            self.order.append(name)
            return name

        return run

    def open(self) -> None:
        self._event.set()


@pytest.fixture
def queue() -> Iterator[CompileQueue]:
    queue = CompileQueue()
    yield queue
    queue.close()


def test_the_queue_is_first_come_first_served(queue: CompileQueue) -> None:
    gate = Gate(queue)
    waiting = [queue.submit(gate.compile(i)) for i in range(1, 6)]
    assert not any(x.done for x in waiting) and gate.order == []
    gate.open()
    assert [x.result() for x in reversed(waiting)] == [5, 4, 3, 2, 1]
    assert gate.order == [0, 1, 2, 3, 4, 5]


def test_hidden_and_exposed_seconds_add_up(queue: CompileQueue) -> None:
    def sleep() -> None:
        time.sleep(0.2)

    hidden, exposed = queue.submit(sleep), queue.submit(sleep)
    exposed.result()  # waits for its own turn, and for that of the other
    hidden.result()
    for cost in (hidden.cost, exposed.cost):
        assert 0.2 <= cost.compile_s < 5
        assert 0 <= cost.exposed_s <= cost.compile_s
        assert cost.hidden_s == pytest.approx(cost.compile_s - cost.exposed_s)
    assert hidden.cost.exposed_s < 0.1 < exposed.cost.exposed_s


def test_a_program_compiles_in_the_background(queue: CompileQueue) -> None:
    source = jax.device_put(VALUE, ROWS)
    after = on(P("x"), start=1, x=2)
    gate = Gate(queue)
    program = TransitionProgram(source, after, path="collective")
    program.compile(queue)
    program.compile()  # is on its way already
    assert program.cost.compile_s == 0 and program.cost.first_run_s == 0
    gate.open()
    gate.first.result()
    np.testing.assert_array_equal(program(source), VALUE)
    cost = program.cost
    assert 0 <= cost.exposed_compile_s <= cost.compile_s and cost.compile_s > 0
    assert cost.first_run_s > 0 and cost.set_up_s > 0
    program(source)
    assert program.cost.first_run_s == cost.first_run_s and program.cost.compile_s == cost.compile_s


def test_an_error_of_the_compiler_comes_to_the_caller(
    queue: CompileQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of registers")

    monkeypatch.setattr("nereus_jax.runtime.transfers.CollectiveTransfer", broken)
    source = jax.device_put(VALUE, ROWS)
    program = TransitionProgram(source, ELSEWHERE, path="collective")
    program.compile(queue)
    with pytest.raises(RuntimeError, match="out of registers"):
        program(source)
    monkeypatch.undo()
    check_usable(source)
    assert queue.submit(lambda: 3).result() == 3  # the thread lives on


def test_the_package_offers_what_the_module_does() -> None:
    assert nereus_jax.reshard is reshard and nereus_jax.TransitionProgram is TransitionProgram
