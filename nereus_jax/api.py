"""What other codebases call: moving any sharded pytree to another layout or other devices.

    params = nereus_jax.reshard(params, new_shardings)

or, to compile once and ahead of time and to know what it costs:

    program = nereus_jax.TransitionProgram(params, new_shardings)
    program.wire_bytes, program.compile()
    params = program(params)
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.errors import ReshardError
from nereus_jax.core.transfer import TransferSchedule
from nereus_jax.planning.transfers import MAX_INFLIGHT_BYTES, plan_transfer
from nereus_jax.runtime.compile_queue import CompileQueue
from nereus_jax.runtime.parking import is_parked
from nereus_jax.runtime.tilings import Tiler
from nereus_jax.runtime.transfers import Path, Transfer, TransferCost
from nereus_jax.runtime.world import take_stock

__all__ = ["CompileQueue", "EmuSpec", "TransferCost", "TransitionProgram", "reshard"]

PyTree = Any
CACHED_PROGRAMS = 64
PATHS = get_args(Path)


def reshard(
    tree: PyTree, shardings: PyTree, *, donate: bool = False, path: Path = "auto"
) -> PyTree:
    """The same values on other shardings: another layout, other devices, or both.

    Only what a device lacks is moved to it. The program of a pair of shardings is compiled on
    first use and kept (the last 64 of them); `TransitionProgram` compiles ahead of time.

    Args:
      tree: a pytree of `jax.Array`, whose shardings cut every dim evenly.
      shardings: a `Sharding` for each leaf, or for each subtree, or one for all.
      donate: give the source up: what does not stay is freed while the rest still moves.
      path: `collective` (programs on the devices, in one process or several), `host` (through
        host memory, for parked state), or `auto`.

    Returns:
      The tree of new arrays. Blocks that stay where they are are shared with the source, not
      copied: `x.delete()` on one end, or donating it to a program, ends the other too.

    Raises:
      ReshardError: the tree and the shardings do not fit; nothing has moved, and the source is
        untouched.
    """
    sources, treedef = _flatten(tree)
    targets = _targets(tree, sources, shardings)
    _check_path(path)
    for name, array in sources:
        _check_alive(name, array)
    key = tuple((_abstract(n, x), t) for (n, x), t in zip(sources, targets, strict=True))
    program = _program(key, treedef, donate, path)
    return program(tree)


@functools.lru_cache(maxsize=CACHED_PROGRAMS)
def _program(key: Any, treedef: Any, donate: bool, path: Path) -> "TransitionProgram":
    source = jax.tree.unflatten(treedef, [k[0] for k in key])
    target = jax.tree.unflatten(treedef, [k[1] for k in key])
    return TransitionProgram(source, target, donate=donate, path=path)


class TransitionProgram:
    """A compiled move of a pytree from its shardings to others.

    With several processes every process of the devices makes it, compiles it and calls it, in the
    same order.
    """

    def __init__(
        self,
        source: PyTree,
        target: PyTree,
        *,
        donate: bool = False,
        path: Path = "auto",
        max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
        allow_range_loss: bool = False,
    ) -> None:
        """Plans the move; compiles nothing yet.

        Args:
          source: the tree to move, of arrays or of `jax.ShapeDtypeStruct` with shardings.
          target: for each leaf or subtree a `Sharding`, or for each leaf a `ShapeDtypeStruct` with
            the sharding and the dtype wanted.
          donate: the source of each call is given up, and freed batch by batch.
          path: as in `reshard`.
          max_inflight_bytes: bound of send and receive buffers on a device; with `donate` also of
            the new blocks that are made before the old ones are freed.
          allow_range_loss: let a cast go to a dtype of smaller range, such as float32 to float16.

        Raises:
          ReshardError: the two ends do not fit.
        """
        _check_path(path)
        if max_inflight_bytes < 1:
            raise ReshardError(f"max_inflight_bytes={max_inflight_bytes} must be at least 1")
        sources, self._treedef = _flatten(source)
        self._names = [name for name, _ in sources]
        targets = _targets(source, sources, target)
        self._source = [_abstract(name, x) for name, x in sources]
        for name, x, t in zip(self._names, self._source, targets, strict=True):
            _check_cast(name, x.dtype, t.dtype, allow_range_loss)
        data = [_data(x) for x in self._source], [_data(x) for x in targets]
        self._transfer = _transfer(self._names, *data, donate, path, max_inflight_bytes)

    @property
    def schedule(self) -> TransferSchedule:
        """What moves, to the last box."""
        return self._transfer.schedule

    @property
    def path(self) -> str:
        """`collective` or `host`."""
        return self._transfer.path

    @property
    def wire_bytes(self) -> int:
        """Bytes that devices send each other: those that the destinations lack."""
        return self.schedule.wire_bytes

    @property
    def temp_bytes(self) -> int:
        """Largest temporary of a compiled program on a device; 0 on the host path."""
        collective = self._transfer.collective
        return collective.temp_bytes if collective is not None else 0

    @property
    def compiled(self) -> tuple[tuple[str, jax.stages.Compiled], ...]:
        """The programs and what each does, for a look at their text; none on the host path.

        The last one, `first`, exchanges a single value: it sets up communicators.
        """
        collective = self._transfer.collective
        programs = collective.programs if collective is not None else ()
        return tuple((p.name, p.compiled) for p in programs)

    @property
    def cost(self) -> TransferCost:
        """Seconds of compilation, set-up and first run so far."""
        return self._transfer.cost

    def compile(self, queue: CompileQueue | None = None) -> None:
        """Compiles now, or in the background thread of a queue; the first call waits for it."""
        if queue is None:
            self._transfer.compile()
        else:
            self._transfer.compile_in(queue)

    def __call__(self, tree: PyTree) -> PyTree:
        """Moves a tree that has the structure, shapes, dtypes and shardings of the source.

        Raises:
          ReshardError: it has others, or an array was deleted or donated; nothing has moved.
        """
        leaves, treedef = _flatten(tree)
        if treedef != self._treedef:
            raise ReshardError(
                f"the tree has other leaves than the program was made for: "
                f"{_difference(self._names, [name for name, _ in leaves])}"
            )
        for (name, array), source in zip(leaves, self._source, strict=True):
            _check_alive(name, array)
            _check_same(name, array, source)
        arrays = [_key_data(array) for _, array in leaves]
        kinds = [jax.random.key_impl(a) if _is_key(a) else None for _, a in leaves]
        moved = self._transfer.run(arrays)
        wrapped = [
            x if kind is None else jax.random.wrap_key_data(x, impl=kind)
            for x, kind in zip(moved, kinds, strict=True)
        ]
        return jax.tree.unflatten(treedef, wrapped)


def _transfer(
    names: Sequence[str],
    source: Sequence[jax.ShapeDtypeStruct],
    target: Sequence[jax.ShapeDtypeStruct],
    donate: bool,
    path: Path,
    max_inflight_bytes: int,
) -> Transfer:
    handles = dict(take_stock().handles)
    tiler = Tiler({handle: device for device, handle in handles.items()})

    def tile(name: str, x: jax.ShapeDtypeStruct) -> Any:
        assert x.sharding is not None
        return tiler.tile(name, x.shape, str(x.dtype), x.sharding)

    schedule = plan_transfer(
        [tile(name, x) for name, x in zip(names, source, strict=True)],
        [tile(name, x) for name, x in zip(names, target, strict=True)],
        max_inflight_bytes=max_inflight_bytes,
        max_batch_bytes=max_inflight_bytes if donate else None,
    )
    used: Mapping[DeviceId, Any] = {d: handles[d] for d in schedule.devices}
    parked = any(is_parked(x.sharding) for x in source)
    return Transfer(schedule, target, used, path=path, donate=donate, parked=parked)


def _flatten(tree: PyTree) -> tuple[list[tuple[str, Any]], Any]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path) or "the tree", leaf) for path, leaf in leaves], treedef


def _targets(
    tree: PyTree, sources: Sequence[tuple[str, Any]], wanted: PyTree
) -> list[jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding wanted of each leaf."""
    try:
        ends = jax.tree.leaves(jax.tree.broadcast(wanted, tree, is_leaf=_is_end), is_leaf=_is_end)
    except ValueError:
        ends = []
    if len(ends) != len(sources):
        names = [n for n, _ in _flatten(jax.tree.map(lambda _: 0, wanted, is_leaf=_is_end))[0]]
        raise ReshardError(
            f"the tree does not match its shardings: "
            f"{_difference([name for name, _ in sources], names)}"
        )
    return [_target(name, x, end) for (name, x), end in zip(sources, ends, strict=True)]


def _is_end(x: Any) -> bool:
    return isinstance(x, Sharding | jax.ShapeDtypeStruct)


def _target(name: str, x: Any, end: Any) -> jax.ShapeDtypeStruct:
    if isinstance(end, Sharding):
        try:
            return jax.ShapeDtypeStruct(np.shape(x), _dtype(name, x), sharding=end)
        except ValueError as error:  # it names more dims than there are
            raise ReshardError(f"{name} of shape {np.shape(x)} cannot lie so: {error}") from None
    if not isinstance(end, jax.ShapeDtypeStruct) or end.sharding is None:
        raise ReshardError(
            f"the target of {name} is {end!r}; give a jax.sharding.Sharding, or a "
            f"jax.ShapeDtypeStruct with a sharding"
        )
    if end.shape != np.shape(x):
        raise ReshardError(
            f"{name} has shape {np.shape(x)}, its target {end.shape}; resharding changes where "
            f"values lie, not their shape"
        )
    return end


def _dtype(name: str, x: Any) -> Any:
    if not hasattr(x, "dtype"):
        raise ReshardError(
            f"{name} is of type {type(x).__name__}, not a jax.Array; put it on a device first, "
            f"with jax.device_put"
        )
    return x.dtype


def _abstract(name: str, x: Any) -> jax.ShapeDtypeStruct:
    dtype, sharding = _dtype(name, x), getattr(x, "sharding", None)
    if not isinstance(sharding, Sharding):
        raise ReshardError(
            f"{name} is of type {type(x).__name__}, without a sharding; put it on devices first, "
            f"with jax.device_put"
        )
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if _is_key(x) else x


def _data(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The array that moves: of random keys the integers they are made of."""
    if not _is_key(x):
        return x
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *[None] * (data.ndim - len(sharding.spec)))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _check_path(path: str) -> None:
    if path not in PATHS:
        raise ReshardError(f"path={path!r} is not known; it is one of {', '.join(PATHS)}")


def _check_alive(name: str, x: Any) -> None:
    if isinstance(x, jax.Array) and x.is_deleted():
        raise ReshardError(
            f"{name} was deleted or donated; keep it until it has been moved, or move what the "
            f"program that took it returned"
        )


def _check_same(name: str, x: Any, source: jax.ShapeDtypeStruct) -> None:
    got = _abstract(name, x)
    if (got.shape, got.dtype) != (source.shape, source.dtype):
        raise ReshardError(
            f"{name} is {got.dtype}{list(got.shape)}, the program was made for "
            f"{source.dtype}{list(source.shape)}"
        )
    assert got.sharding is not None and source.sharding is not None
    if not got.sharding.is_equivalent_to(source.sharding, len(got.shape)):
        raise ReshardError(
            f"{name} lies as {got.sharding}, the program was made for {source.sharding}; "
            f"make a program for this source"
        )


def _check_cast(name: str, source: Any, target: Any, allow_range_loss: bool) -> None:
    if source == target:
        return
    if jnp.issubdtype(source, jax.dtypes.prng_key) or jnp.issubdtype(target, jax.dtypes.prng_key):
        raise ReshardError(f"{name} is {source}, wanted {target}; random keys are not cast")
    if not allow_range_loss and _loses_range(jnp.dtype(source), jnp.dtype(target)):
        raise ReshardError(
            f"{name} is {source}, wanted {target}, which holds a smaller range: large values would "
            f"become infinite or wrong; pass allow_range_loss=True if they cannot occur"
        )


def _loses_range(source: Any, target: Any) -> bool:
    """Whether `target` does not reach as far as the finite values of `source`."""
    order = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    rank = [
        next(i for i, kind in enumerate(order) if jnp.issubdtype(d, kind)) for d in (source, target)
    ]
    if rank[0] > rank[1]:
        return True
    if rank[0] == 0:
        return False
    if rank[0] >= 2:  # by exponents: bfloat16 ends a little before float32, but reaches as far
        return bool(jnp.finfo(source).maxexp > jnp.finfo(target).maxexp)
    low, high = _range(source)
    lowest, highest = _range(target)
    return low < lowest or high > highest


def _range(dtype: Any) -> tuple[float, float]:
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return int(info.min), int(info.max)
    finfo = jnp.finfo(dtype)
    return float(finfo.min), float(finfo.max)


def _difference(wanted: Sequence[str], got: Sequence[str]) -> str:
    missing = [n for n in wanted if n not in set(got)]
    extra = [n for n in got if n not in set(wanted)]
    parts = [
        f"{what} {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for what, names in (("it lacks", missing), ("it has besides", extra))
        if names
    ]
    return " and ".join(parts) or f"{len(wanted)} leaves against {len(got)}"
