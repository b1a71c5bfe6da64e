"""The processes and devices of the job. Nothing else keeps a `jax.Device` from one step to the
next.

Devices are named by (host, index on the host) everywhere above; backends number them as they like
(with two CPU processes the second one's ids start at 2048).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import ConfigError, WorldError
from nereus_jax.core.layout import MESH_AXES
from nereus_jax.core.plan import Placement

DeviceHandle: TypeAlias = Any
"""A `jax.Device`, which is no class to a type checker."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes of a job find each other.

    Attributes:
      enabled: join a multi-process job.
      coordinator: host:port of process 0, or None to let jax detect it (SLURM, Kubernetes, ...).
      num_processes: number of processes, or None to detect it.
      process_id: this process's rank, or None to detect it.
    """

    enabled: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


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
      ConfigError: the backend runs already with other devices than asked for.
      WorldError: the processes did not find each other.
    """
    if emulated_devices:
        _emulate(emulated_devices)
    if distributed is not None and distributed.enabled:
        try:
            jax.distributed.initialize(
                coordinator_address=distributed.coordinator,
                num_processes=distributed.num_processes,
                process_id=distributed.process_id,
            )
        except (RuntimeError, ValueError) as error:
            raise WorldError(
                f"the processes did not come together: {error}; check --coordinator, "
                f"--num-processes and --process-id, or the scheduler's environment"
            ) from error
    return take_stock()


def _emulate(num_devices: int) -> None:
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
    for device in sorted(jax.devices(), key=lambda d: (d.process_index, d.id)):
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
