"""What the tests of checkpoints run in processes of their own: FUNCTION ARGUMENTS."""

import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nereus_jax.runtime.checkpoints import CheckpointStore


def noise(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((512, 256)).astype(np.float32)


def put(step: int) -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return {"x": jax.device_put(noise(step), NamedSharding(mesh, PartitionSpec("x")))}


def killed(what: str, directory: str, delay_s: str) -> None:
    """Saves without end, and is killed after a while."""
    store = CheckpointStore(directory, keep=2, fingerprint="m")
    if what == "frozen":
        store.save_frozen(put(0))
    else:
        store.save(1, put(1), {"step": 1})
        store.wait()
    print(1, flush=True)
    kill = threading.Timer(float(delay_s), os.kill, (os.getpid(), signal.SIGKILL))
    kill.start()
    for step in range(2, 1000):
        if what == "frozen":
            store.save_frozen(put(step))
        else:
            store.save(step, put(step), {"step": step})  # waits for the one before
        print(step - 1, flush=True)


def limited(directory: str) -> None:
    """Meets the end of the disk at step 2."""
    store = CheckpointStore(directory, keep=2, fingerprint="m")
    store.save(1, {"x": put(1)["x"][:16]}, {})
    store.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    store.save(2, put(2), {})
    try:
        store.wait()
    except OSError as error:
        print(type(error).__name__, error)
    print(sorted(os.listdir(Path(directory) / "steps")))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.save(3, put(3), {})
    store.close()


def member(directory: str, port: str, rank: str) -> None:
    """One of two processes, each with two devices."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    first, second = devices[:2], devices[2:]
    value = noise(0)[:4, :6]

    def target(
        devices: Sequence[Any], *spec: str | None, shape: tuple[int, ...] = value.shape
    ) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    def make(devices: Sequence[Any], *spec: str | None) -> jax.Array:
        sharding = target(devices, *spec).sharding
        assert sharding is not None
        return jax.make_array_from_callback(
            value.shape, sharding, lambda i: value[i], dtype=np.float32
        )

    state = {"first": make(first, "x"), "second": make(second, None, "x"), "all": make(devices)}
    store = CheckpointStore(directory, keep=1, fingerprint="m")
    store.save_frozen({"r": state["second"]})
    for step in (1, 2):
        store.save(step, state, {"step": step})
    store.wait()
    assert store.latest_step() == 2 and store.read_meta(2) == {"step": 2} and store.has_frozen()
    wanted = {
        "first": target(second, "x"),
        "second": target(devices, "x"),
        "all": target(first[1:], shape=(5, 6)),
    }
    restored = {**store.restore(2, wanted), **store.restore_frozen({"r": target(first)})}
    for name, x in restored.items():
        whole = np.zeros(x.shape, np.float32)
        whole[:4] = value
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index], name)
    store.close()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    globals()[sys.argv[1]](*sys.argv[2:])
