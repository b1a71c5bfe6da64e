"""A process of a world that is formed anew: RANK, and the ports of the worlds that it sees.

Two processes form a world, one leaves it, the other goes on alone, and a third one joins it.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nereus_jax.runtime import host
from nereus_jax.runtime.membership import DistributedConfig
from nereus_jax.runtime.world import World, form_world, reform_world


def membership(port: str, rank: int) -> DistributedConfig:
    return DistributedConfig(
        enabled=True, coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=rank
    )


def values() -> dict[str, Any]:
    """Bits that a sum or a conversion on the way would change."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((16, 6)).astype(np.float32)
    weights[0] = -0.0
    return {
        "weights": weights,
        "moments": [rng.standard_normal(8).astype(ml_dtypes.bfloat16), np.array(7, np.int32)],
    }


def put(world: World, trees: Any) -> Any:
    """Rows over all devices of the world where they divide."""
    mesh = Mesh(np.array([world.handles[d] for d in world.pool.devices]), ("x",))

    def place(value: np.ndarray) -> jax.Array:
        divides = value.ndim > 0 and value.shape[0] % len(world.pool) == 0
        spec = PartitionSpec("x") if divides else PartitionSpec()
        return host.put(value, NamedSharding(mesh, spec))

    return jax.tree.map(place, trees)


def check(trees: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), trees, values())


def bits(value: np.ndarray) -> np.ndarray:
    return np.atleast_1d(value).view(np.uint8)


def total(arrays: Any) -> float:
    """A computation over all devices, of programs compiled in this world."""
    summed = jax.jit(lambda x: jnp.sum(jnp.abs(x)))(arrays["weights"])
    return float(summed.addressable_data(0))


def main(rank: int, first_port: str, second_port: str) -> None:
    wanted = float(np.abs(values()["weights"]).sum())
    if rank < 2:
        world = form_world(membership(first_port, rank), emulated_devices=4)
        assert (len(world.pool), world.num_processes) == (8, 2)
        arrays = put(world, values())
        np.testing.assert_allclose(total(arrays), wanted, rtol=1e-5)
        reformed = reform_world(arrays)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(arrays))
        world = reformed.world
        assert (len(world.pool), world.num_processes, world.process_index) == (4, 1, 0)
        check(reformed.trees)
        if rank == 1:
            print("left", flush=True)
            return
        arrays = put(world, reformed.trees)
        np.testing.assert_allclose(total(arrays), wanted, rtol=1e-5)
        reformed = reform_world(arrays, membership(second_port, 0))
        world, trees = reformed.world, reformed.trees
    else:
        world, trees = form_world(membership(second_port, 1), emulated_devices=4), values()
    assert (len(world.pool), world.num_processes) == (8, 2)
    check(trees)
    arrays = put(world, trees)
    np.testing.assert_allclose(total(arrays), wanted, rtol=1e-5)
    check(host.fetch({"weights": arrays["weights"]}) | {"moments": values()["moments"]})
    print("joined", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
