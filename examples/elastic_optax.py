"""A plain optax loop that changes its layout, and then its devices, in the middle of training.

python examples/elastic_optax.py             # (2, 4) -> (4, 2) -> four of the eight devices
python examples/elastic_optax.py --static    # no change: the same losses
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nereus_jax

# Eight emulated devices to try it on; leave these two lines out where there are real ones.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

OPTIMIZER = optax.adam(1e-2)
SPECS = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None)}


def make_mesh(data: int, model: int) -> Mesh:
    """A mesh of the first data x model devices."""
    return Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


def layout(state: Any, mesh: Mesh) -> Any:
    """A sharding for each leaf of (params, opt_state): a moment lies as its parameter does."""

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, SPECS.get(getattr(path[-1], "key", ""), P()))

    return jax.tree_util.tree_map_with_path(sharding, state)


def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error of a small MLP."""
    hidden = jax.nn.gelu(x @ params["w1"] + params["b1"][None])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def update(state: Any, x: jax.Array, y: jax.Array) -> Any:
    """The next (params, opt_state), and the loss before it."""
    params, opt_state = state
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def fit(state: Any, mesh: Mesh, batches: Any) -> Any:
    """Trains on some batches, in the layout of a mesh."""
    step = jax.jit(update, donate_argnums=0, out_shardings=(layout(state, mesh), None))
    for batch in batches:
        state, loss = step(state, *jax.device_put(batch, NamedSharding(mesh, P("data"))))
        print(f"{dict(mesh.shape)} loss {loss:.6f}")
    return state


def train(meshes: list[Mesh]) -> None:
    """Trains for ten steps on each of three meshes."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((30, 64, 16), np.float32)
    batches = list(zip(inputs, np.sin(inputs.sum(-1, keepdims=True)), strict=True))
    w1, w2 = rng.standard_normal((16, 256), np.float32), rng.standard_normal((256, 1), np.float32)
    params = {"w1": w1 / 4, "b1": np.zeros(256, np.float32), "w2": w2 / 16}
    first, second, third = meshes

    state = params, OPTIMIZER.init(params)
    state = fit(jax.device_put(state, layout(state, first)), first, batches[:10])

    # Another layout, at once. The old arrays are freed while the new ones are made.
    lacking = nereus_jax.TransitionProgram(state, layout(state, second)).wire_bytes
    state = nereus_jax.reshard(state, layout(state, second), donate=True)
    print(f"moved {lacking} bytes")

    # Other devices, with notice: what moves the state is compiled while training goes on. Emulated
    # devices of one process would move it through the host; "collective" is what real ones do.
    queue = nereus_jax.CompileQueue()
    program = nereus_jax.TransitionProgram(
        state, layout(state, third), donate=True, path="collective"
    )
    program.compile(queue)
    state = fit(state, second, batches[10:20])
    state = program(state)
    queue.close()
    cost = program.cost
    print(f"moved {program.wire_bytes} bytes")
    print(f"compiled for {cost.compile_s:.2f} s, waited {cost.exposed_compile_s:.2f} s for it")
    fit(state, third, batches[20:])


if __name__ == "__main__":
    whole = make_mesh(data=2, model=4)
    changed = [whole, make_mesh(data=4, model=2), make_mesh(data=1, model=4)]
    train([whole] * 3 if "--static" in sys.argv else changed)
