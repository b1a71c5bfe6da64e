"""Lost devices, full devices: the one place where the backend's errors are read.

A device that is gone takes its buffers with it; what stands on the others is whole. A program that
was given a lost buffer must never be launched (on a CPU it would crash the process), so state is
looked at before it is used.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import jax

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import DeviceFullError, DevicesLostError, NereusError, WorldError
from nereus_jax.runtime import host
from nereus_jax.runtime.blocks import BlockViews
from nereus_jax.runtime.world import World

FULL = "RESOURCE_EXHAUSTED"
"""What the error of a device says that has no memory left."""
GONE = ("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "ABORTED", "deleted", "unhealthy", "disconnected")
"""What errors of a lost device say; each is followed by a look at the devices."""
BROKEN = ("gloo", "nccl", "coordination", "connection", "socket closed", "preempted")
"""What errors of a world that has lost a process say, whatever their case."""


def find_lost(world: World, arrays: Iterable[jax.Array], views: BlockViews) -> frozenset[DeviceId]:
    """Devices of this process whose blocks of live arrays are deleted."""
    return frozenset(
        device
        for array in arrays
        for device, block in views.of(world, array).items()
        if block.is_deleted()
    )


def take_away(world: World, arrays: Iterable[jax.Array], devices: Iterable[DeviceId]) -> None:
    """Deletes what emulated devices of this process hold, as if they were gone."""
    gone = {world.handles[d] for d in devices if world.is_local(d)}
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.device in gone:
                shard.data.delete()


def probe(world: World) -> frozenset[DeviceId]:
    """Devices of this process that no longer take a value and give it back."""
    lost: set[DeviceId] = set()
    for device, handle in world.handles.items():
        if not world.is_local(device):
            continue
        try:
            jax.block_until_ready(jax.device_put(0, handle))
        except jax.errors.JaxRuntimeError:
            lost.add(device)
    return frozenset(lost)


def check_devices(world: World, arrays: Iterable[jax.Array], views: BlockViews) -> None:
    """Raises DevicesLostError, on every process alike, if a block of live arrays is gone."""
    here = find_lost(world, arrays, views)
    if host.agree_any(bool(here)):
        raise lost_error(here)


@contextmanager
def watch(
    world: World, missing: Callable[[], frozenset[DeviceId]] = frozenset[DeviceId]
) -> Iterator[None]:
    """Turns an error of the backend into DeviceFullError, or into DevicesLostError where devices
    are gone.

    Other errors pass: a program that is wrong is no lost device.

    Args:
      world: the devices.
      missing: those that state which was there has no blocks on any more.
    """
    try:
        yield
    except NereusError:
        raise
    except RuntimeError as error:  # JaxRuntimeError, and what jax says of a deleted array
        if FULL in str(error):
            raise DeviceFullError(
                f"a device has no memory left: {' '.join(str(error).split())}; use more devices, a "
                f"smaller microbatch, remat or zero1"
            ) from error
        if not any(word in str(error) for word in GONE):
            raise
        lost = probe(world) | missing()
        if not lost:
            raise
        raise lost_error(lost) from error


@contextmanager
def watch_processes(world: World) -> Iterator[None]:
    """Turns an error of the backend into WorldError where another process of the job is gone.

    Often there is none: the process waits in a collective, or the coordination service ends it.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said = " ".join(str(error).split())
        if world.num_processes == 1 or not any(word in said.lower() for word in BROKEN):
            raise
        raise WorldError(
            f"another process of the job is gone: {said}; run the same command again for each "
            f"process, or with --elastic, which does so by itself"
        ) from error


def lost_error(devices: frozenset[DeviceId]) -> DevicesLostError:
    """The error that names the devices."""
    named = ", ".join(str(d) for d in sorted(devices)) or "of another process"
    return DevicesLostError(f"lost devices: {named}", devices)
