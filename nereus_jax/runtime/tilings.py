"""Any jax sharding as a tiling of named devices."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import DTYPE_BYTES
from nereus_jax.core.errors import ReshardError
from nereus_jax.core.tiling import LeafTiling, Position
from nereus_jax.runtime.world import DeviceHandle

DeviceNames = Mapping[DeviceHandle, DeviceId]


class Tiler:
    """Makes tilings; leaves that lie alike share their tuples, which planning groups them by."""

    def __init__(self, names: DeviceNames) -> None:
        self._names = names
        self._devices: dict[tuple[DeviceHandle, ...], tuple[DeviceId, ...]] = {}
        self._positions: dict[tuple[Position, ...], tuple[Position, ...]] = {}

    def tile(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        sharding: Sharding,
        logical_shape: Sequence[int] | None = None,
    ) -> LeafTiling:
        """How an array of this shape lies.

        Args:
          name: of the leaf, for messages.
          shape: of the global array.
          dtype: of its elements.
          sharding: any that cuts every dim evenly.
          logical_shape: what of it is no padding; default: all.

        Raises:
          ReshardError: the sharding does not divide the shape, has a device that the backend does
            not know, or the dtype cannot be moved.
        """
        if dtype not in DTYPE_BYTES:
            raise ReshardError(
                f"{name!r} has dtype {dtype}, which cannot be moved; "
                f"dtypes that can: {', '.join(sorted(DTYPE_BYTES))}"
            )
        shape = tuple(shape)
        local = self._local_shape(name, shape, sharding)
        blocks = sharding.devices_indices_map(shape)
        handles = tuple(blocks)
        if handles not in self._devices:
            unknown = [str(d) for d in handles if d not in self._names]
            if unknown:
                raise ReshardError(
                    f"the sharding of {name!r} has {', '.join(unknown[:4])}, which the backend "
                    f"does not have; build the mesh from jax.devices()"
                )
            self._devices[handles] = tuple(self._names[d] for d in handles)
        positions = tuple(
            tuple((s.start or 0) // n if n else 0 for s, n in zip(index, local, strict=True))
            for index in blocks.values()
        )
        return LeafTiling(
            name=name,
            shape=tuple(logical_shape) if logical_shape is not None else shape,
            dtype=dtype,
            local_shape=local,
            devices=self._devices[handles],
            positions=self._positions.setdefault(positions, positions),
        )

    def _local_shape(
        self, name: str, shape: tuple[int, ...], sharding: Sharding
    ) -> tuple[int, ...]:
        try:
            return tuple(sharding.shard_shape(shape))
        except ValueError as error:
            raise ReshardError(
                _indivisible(name, shape, sharding) or f"{name!r}: {error}"
            ) from None


def _indivisible(name: str, shape: tuple[int, ...], sharding: Sharding) -> str:
    """Which dim a named sharding does not divide, or an empty text."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return ""
    if len(sharding.spec) > len(shape):
        return (
            f"{name!r} has shape {shape}, {len(shape)} dims, but its sharding {sharding.spec} "
            f"names {len(sharding.spec)}"
        )
    for dim, axes in enumerate(sharding.spec):
        names = axes if isinstance(axes, tuple) else (axes,)
        sizes = [sharding.mesh.shape[a] for a in names if isinstance(a, str)]
        parts = int(np.prod(sizes))
        if parts and shape[dim] % parts:
            over = " x ".join(f"{a}={sharding.mesh.shape[a]}" for a in names)
            return (
                f"dim {dim} of {name!r}, shape {shape}, has {shape[dim]} elements, which "
                f"{over} does not divide; pad it to {-(-shape[dim] // parts) * parts} or leave "
                f"the dim uncut"
            )
    return ""
