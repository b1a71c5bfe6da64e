"""How global arrays go to an orbax checkpoint and come back on another layout.

A pytree is stored flat, under names made of its paths. Every process writes and reads only what its
own devices hold, in pieces of at most `CHUNK_BYTES`. An array is stored with the padding of its
mesh; padding is zero and at the end of each dim, so on the way back it is cut or grown to whatever
the new mesh needs and the logical values stay the same bits. A checksum of the logical values shows
that they did: tensorstore takes a flipped bit in a stored array for a value.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax

from nereus_jax.runtime import host
from nereus_jax.runtime.parking import is_parked, on_devices

Tree = Any
"""A pytree of `jax.Array`s, or of `jax.ShapeDtypeStruct`s that stand for them."""

# A reader on another layout has to decode every stored piece that it needs a part of. With pieces
# of this size that is little more than its own shard, whatever layout has written them.
CHUNK_BYTES = 64 * 2**20


def flatten(tree: Tree) -> dict[str, Any]:
    """The leaves of a pytree by name, such as `actor/opt_state/1/0/mu/layers.q`."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    if len(set(names)) != len(names):
        raise ValueError(f"paths of the pytree give the same name twice: {sorted(names)}")
    return dict(zip(names, (leaf for _, leaf in paths), strict=True))


def unflatten(like: Tree, flat: dict[str, Any]) -> Tree:
    """The inverse of `flatten`, for a pytree built like `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in flatten(like)])


def save_args(flat: dict[str, jax.Array]) -> ocp.args.PyTreeSave:
    """What orbax needs to know to write these arrays."""
    chunks = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in flat}
    return ocp.args.PyTreeSave(flat, save_args=chunks)


def restore_args(flat: dict[str, jax.ShapeDtypeStruct]) -> ocp.args.PyTreeRestore:
    """What orbax needs to know to read these arrays straight onto their shardings."""
    targets = {
        name: ocp.ArrayRestoreArgs(
            sharding=x.sharding,
            global_shape=x.shape,
            dtype=x.dtype,
            strict=False,  # cut or pad with zeros at the end of each dim
        )
        for name, x in flat.items()
    }
    return ocp.args.PyTreeRestore(item=flat, restore_args=targets)


def differences(stored: dict[str, Any], wanted: dict[str, jax.ShapeDtypeStruct]) -> str:
    """Says how the stored arrays differ from the wanted ones beyond padding; empty if not at all.

    Args:
      stored: name -> anything with a shape and a dtype.
      wanted: name -> target.
    """
    missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or extra:
        parts = [f"it lacks {_some(missing)}"] if missing else []
        parts += [f"it holds {_some(extra)}, which this run has not"] if extra else []
        return " and ".join(parts)
    for name, target in wanted.items():
        have = stored[name]
        if len(have.shape) != len(target.shape) or np.dtype(have.dtype) != target.dtype:
            return (
                f"{name} is {have.dtype}{list(have.shape)} there and "
                f"{target.dtype}{list(target.shape)} here"
            )
    return ""


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def checksums(flat: dict[str, jax.Array]) -> dict[str, int]:
    """A 32-bit checksum of each array, the same on every layout and with any padding.

    The sum over all elements of (bits of the element) * (odd hash of its coordinates) mod 2**32: a
    zero adds nothing, and one flipped bit always shows. Computed on the devices of the arrays; what
    is parked comes there one array at a time.
    """
    groups: dict[Any, dict[str, jax.Array]] = {}
    sums: dict[str, int] = {}
    for name, array in flat.items():
        if is_parked(array.sharding):
            one = {"": on_devices(array)}  # without its name: arrays that are alike share a program
            sums[name] = int(host.fetch(_device_checksums(one))[""])
            continue
        groups.setdefault(getattr(array.sharding, "mesh", array.sharding), {})[name] = array
    for group in groups.values():
        sums |= {name: int(x) for name, x in host.fetch(_device_checksums(group)).items()}
    return sums


@jax.jit
def _device_checksums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _checksum(x) for name, x in arrays.items()}


def _checksum(array: jax.Array) -> jax.Array:
    unsigned = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    if array.dtype == jnp.bool_:
        bits = array.astype(jnp.uint32)
    else:
        bits = lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.floating):
        # -0 counts as 0: padding may have become either.
        sign = jnp.uint32(1 << (8 * array.dtype.itemsize - 1))
        bits = jnp.where(bits == sign, jnp.uint32(0), bits)
    weights = jnp.full(array.shape, 0x811C9DC5, jnp.uint32)
    for dim in range(array.ndim):
        weights = (weights ^ lax.broadcasted_iota(jnp.uint32, array.shape, dim)) * jnp.uint32(
            0x9E3779B1
        )
        weights = weights ^ (weights >> 15)
    return jnp.sum(bits * (weights | 1), dtype=jnp.uint32)


def handler() -> ocp.PyTreeCheckpointHandler:
    """An orbax handler for flat dicts of global arrays."""
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _GlobalArrayHandler()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


@dataclasses.dataclass(frozen=True)
class _GlobalView:
    """A `jax.Array` whose devices all belong to this process of several.

    orbax takes such an array for one that each process has its own copy of, and refuses it. In a
    job where every model-stage has its own devices it is as global as any other.
    """

    array: jax.Array
    is_fully_addressable: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.array, name)


class _GlobalArrayHandler(ocp.type_handlers.TypeHandler):
    """orbax's own handler, also for arrays that this process holds nothing or everything of."""

    def __init__(self) -> None:
        self._handler = ocp.type_handlers.ArrayHandler(
            # Each owner describes its arrays: process 0 may own none of one.
            primary_host=None,
            # Writing by all replicas would take slices on the devices: memory that is not planned.
            use_replica_parallel=False,
            enable_write_sharding_file=False,
        )

    def typestr(self) -> str:
        return self._handler.typestr()

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        async with _settled():
            return await self._handler.metadata(infos)

    async def serialize(
        self, values: Sequence[jax.Array], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        mine = [
            (_GlobalView(value), info, arg)
            for value, info, arg in zip(values, infos, args, strict=True)
            if value.sharding.addressable_devices
        ]
        if not mine:
            return []
        views, infos, args = zip(*mine, strict=True)
        return await self._handler.serialize(views, infos, args)  # pyright: ignore[reportArgumentType]

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[jax.Array]:
        here = [bool(arg.sharding.addressable_devices) for arg in args]
        mine = [
            (info, arg) for info, arg, is_here in zip(infos, args, here, strict=True) if is_here
        ]
        async with _settled():
            read = iter(await self._handler.deserialize(*zip(*mine, strict=True)) if mine else ())
        return [
            next(read) if is_here else _elsewhere(arg)
            for arg, is_here in zip(args, here, strict=True)
        ]

    def finalize(self, directory: Any) -> None:
        self._handler.finalize(directory)


@asynccontextmanager
async def _settled() -> AsyncIterator[None]:
    """Waits for all reads that were started inside, also when one of them fails.

    orbax closes the event loop after the first failure; the others would end in it later, each with
    a traceback on stderr.
    """
    before = asyncio.all_tasks()
    try:
        yield
    except BaseException:
        await asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True)
        raise


def _elsewhere(arg: ocp.ArrayRestoreArgs) -> jax.Array:
    """This process's handle of an array that lies on the devices of others."""
    shape, sharding = arg.global_shape, arg.sharding
    assert shape is not None and isinstance(sharding, jax.sharding.Sharding)
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=arg.dtype)
