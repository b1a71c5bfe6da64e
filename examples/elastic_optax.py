"""A plain optax loop that changes its layout, and then its devices, in the middle of training.

python examples/elastic_optax.py             # (2, 4) -> (4, 2) -> four of the eight devices
python examples/elastic_optax.py --static    # no change: the same losses
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nereus_jax

jax.config.update("jax_platforms", "cpu")  # leave out these two lines where there are real devices
jax.config.update("jax_num_cpu_devices", 8)

SPECS = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None)}
optimizer = optax.adam(1e-2)


def layout(state, data, model):
    """A sharding for each leaf of (params, opt_state): a moment lies as its parameter does."""
    mesh = Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))
    return jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(mesh, SPECS.get(getattr(path[-1], "key", ""), P())), state
    )


def loss_of(params, x, y):
    """The mean squared error of a small MLP."""
    hidden = jax.nn.gelu(x @ params["w1"] + params["b1"][None])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def train(state, shardings, batches):
    """Trains on some batches, in a layout."""

    @jax.jit
    def step(state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(state[0], x, y)
        updates, opt_state = optimizer.update(gradients, state[1], state[0])
        return jax.lax.with_sharding_constraint(
            (optax.apply_updates(state[0], updates), opt_state), shardings
        ), loss

    mesh = shardings[0]["w1"].mesh
    for batch in batches:
        state, loss = step(state, *jax.device_put(batch, NamedSharding(mesh, P("data"))))
        print(f"{dict(mesh.shape)} loss {loss:.6f}")
    return state


rng = np.random.default_rng(0)
inputs = rng.standard_normal((30, 64, 16), np.float32)
batches = list(zip(inputs, np.sin(inputs.sum(-1, keepdims=True)), strict=True))
w1, w2 = rng.standard_normal((16, 256), np.float32), rng.standard_normal((256, 1), np.float32)
params = {"w1": w1 / 4, "b1": np.zeros(256, np.float32), "w2": w2 / 16}
state = params, optimizer.init(params)
first = second = third = layout(state, 2, 4)
if "--static" not in sys.argv:
    second, third = layout(state, 4, 2), layout(state, 1, 4)

state = train(jax.device_put(state, first), first, batches[:10])

# Another layout, at once: old arrays are freed while new ones are made.
state = nereus_jax.reshard(state, second, donate=True)

# Other devices, with notice: the program that moves the state is compiled while training goes on.
queue = nereus_jax.CompileQueue()
move = nereus_jax.TransitionProgram(state, third, donate=True, path="collective")
move.compile(queue)
state = train(state, second, batches[10:20])
state = move(state)
print(f"moved {move.wire_bytes} bytes between devices")
print(f"compiled for {move.cost.compile_s:.2f} s, waited {move.cost.exposed_compile_s:.2f} s")
train(state, third, batches[20:])
queue.close()
