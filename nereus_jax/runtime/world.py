"""The processes and devices of the job: the only place that looks devices up. Meshes are made here,
and others hold a device through its mesh alone.

Devices are named by (host, index on the host) everywhere above; backends number them as they like
(with two CPU processes the second one's ids start at 2048).
"""

import ctypes
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.backend import clear_backends
from jax.sharding import AxisType, Mesh

from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.layout import MESH_AXES
from nereus_jax.core.plan import Placement
from nereus_jax.runtime import host
from nereus_jax.runtime.membership import DistributedConfig
from nereus_jax.runtime.processes import alone, join_processes, leave_processes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
"""Options of glibc's mallopt."""
KEPT_BYTES, PAD_BYTES = 2**31 - 1, 64 * 2**20

DeviceHandle: TypeAlias = Any
"""A `jax.Device`, which is no class to a type checker."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """The pool of devices, and the backend's handle of each."""

    pool: DevicePool
    handles: Mapping[DeviceId, DeviceHandle]
    process_index: int
    num_processes: int

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.process_index == 0

    @property
    def every(self) -> DevicePool:
        """The devices that it was formed with, whatever has become of them."""
        return dataclasses.replace(self.pool, devices=tuple(sorted(self.handles)))

    def without(self, lost: Iterable[DeviceId]) -> "World":
        """The world when these devices are gone; their handles stay for what is left of them."""
        return dataclasses.replace(self, pool=self.pool.without(lost))

    def joined(self, new: Iterable[DeviceId]) -> "World":
        """The world when devices are back that it had been formed with."""
        return dataclasses.replace(self, pool=self.pool.joined(new))

    def is_local(self, device: DeviceId) -> bool:
        """Whether the device is this process's."""
        return self.handles[device].process_index == self.process_index

    def mesh(self, placement: Placement, num_kv_heads: int) -> Mesh:
        """The mesh (dp, pp, kv, kvr) of a placement."""
        handles = np.array([self.handles[d] for d in placement.devices], dtype=object)
        shape = placement.layout.mesh_shape(num_kv_heads)
        axis_types = (AxisType.Auto,) * len(MESH_AXES)
        return Mesh(handles.reshape(shape), MESH_AXES, axis_types=axis_types)


def form_world(distributed: DistributedConfig | None = None, emulated_devices: int = 0) -> World:
    """Starts the backend (and joins the other processes) and takes stock of the devices.

    Args:
      distributed: how to find the other processes; None: this process alone.
      emulated_devices: run on this many emulated CPU devices in each process; 0: the real ones.

    Raises:
      ConfigError: the backend runs already with other devices than asked for, there is none, or
        the description of the job cannot be right.
      WorldError: the processes did not find each other.
    """
    if emulated_devices:
        _emulate(emulated_devices)
    if distributed is not None and distributed.enabled:
        join_processes(distributed)
    return take_stock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reformed:
    """What `reform_world` leaves.

    Attributes:
      world: the new one.
      trees: the values of the trees, as numpy arrays, whole on every process.
    """

    world: World
    trees: Mapping[str, Any]


def reform_world(
    trees: Mapping[str, Any], distributed: DistributedConfig | None = None
) -> Reformed:
    """Forms the world anew at a step boundary: with fewer processes, with more, or with others.

    Every process of the old world calls this; where one has died, its collectives would wait for
    it, and the processes are started again instead. The trees go to host memory and their arrays
    are deleted; no other array, mesh or compiled program of the old world may be used after this.

    Args:
      trees: of global arrays, by name; the same on every process.
      distributed: how to find the processes of the new world; None: this process is alone, as one
        is that the others go on without.

    Raises:
      ConfigError, WorldError: as in `form_world`; the values are lost with the old world then.
    """
    leaves, structure = jax.tree.flatten(dict(trees))
    fetched = host.fetch({str(i): leaf for i, leaf in enumerate(leaves)})
    # On one process a fetch may be a view of a device's memory, which goes with its client.
    values = [np.array(fetched[str(i)]) for i in range(len(leaves))]
    for leaf in leaves:
        leaf.delete()
    leave_processes()
    clear_backends()
    world = form_world(alone() if distributed is None else distributed)
    return Reformed(world=world, trees=jax.tree.unflatten(structure, values))


def _keep_freed_memory() -> None:
    """Has the allocator keep what is freed.

    On a CPU a program's temporaries are allocated anew at every launch. Given back to the system in
    between, they come back as pages that the kernel has to clear: 4 % of a step's CPU seconds. An
    arena of a thread gives large blocks back whatever the thresholds, so that there is but one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library than glibc: it keeps to its own ways
        return
    for option, value in (
        (M_TRIM_THRESHOLD, KEPT_BYTES),
        (M_MMAP_THRESHOLD, KEPT_BYTES),
        (M_TOP_PAD, PAD_BYTES),
        (M_ARENA_MAX, 1),
    ):
        mallopt(option, value)


def _emulate(num_devices: int) -> None:
    _keep_freed_memory()
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        if jax.default_backend() != "cpu" or jax.local_device_count() != num_devices:
            raise ConfigError(
                f"emulated_devices={num_devices}, but jax runs already with "
                f"{jax.local_device_count()} {jax.default_backend()} devices; set it in a fresh "
                f"process, or to {jax.local_device_count()}"
            ) from None


def take_stock() -> World:
    """The devices that the backend has now, named by host and index."""
    handles: dict[DeviceId, DeviceHandle] = {}
    counts: dict[int, int] = {}
    for device in sorted(_devices(), key=lambda d: (d.process_index, d.id)):
        index = counts.get(device.process_index, 0)
        counts[device.process_index] = index + 1
        handles[DeviceId(device.process_index, index)] = device
    pool = DevicePool(devices=tuple(handles), kind=jax.devices()[0].device_kind)
    return World(
        pool=pool,
        handles=handles,
        process_index=jax.process_index(),
        num_processes=jax.process_count(),
    )


def _devices() -> Sequence[DeviceHandle]:
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a platform without its plugin
        reason = " ".join(str(error).split()) or "it starts no backend"
        wanted = os.environ.get("JAX_PLATFORMS", "")
        raise ConfigError(
            f"jax finds no devices, with JAX_PLATFORMS={wanted!r}: {reason}; correct "
            f"JAX_PLATFORMS or the installation (extra cuda12 or cuda13), or set emulated_devices"
        ) from error
