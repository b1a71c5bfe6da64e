"""The GPipe schedule (Huang et al. 2019) inside a manual `shard_map`.

M microbatches pass through the pp ranks in M + pp - 1 ticks; in tick t, rank r works on microbatch
t - r, and a ring of `ppermute` hands the results on. Under autodiff the backward pass runs the same
ticks in reverse.

Memory bound: the activations of all M microbatches of a flush live until its backward pass, M *
(what one microbatch keeps in the layers held here); with recomputation by layer that is M * L/pp *
B * S * D elements. Accumulating over several flushes (`pipeline_microbatches`) bounds M. The bubble
is (pp - 1) / (M + pp - 1) of the ticks; a rank computes nothing in it. Ticks of microbatches that
hold nothing are passed over.

Shapes: M microbatches, B rows of one, S sequence, D embed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from nereus_jax.models.mesh_axes import MeshAxes, axis_index, axis_size, varying


def run_pipeline(
    layers: Callable[[jax.Array, jax.Array], jax.Array],
    x_MBSD: jax.Array,
    active: jax.Array | int,
    axes: MeshAxes,
) -> jax.Array:
    """Runs every microbatch through the layers of all pp ranks.

    Args:
      layers: the layers held by this rank, ([B, S, D], index of the microbatch) -> [B, S, D].
      x_MBSD: the embedded microbatches, the same on every pp rank.
      active: microbatches that hold anything, the first ones; the others are not run.
      axes: mesh axes in use.

    Returns:
      [M, B, S, D]: the last layer's output, meaningful on the last pp rank only (`from_last_rank`)
      and for the active microbatches only.
    """
    num_ranks = axis_size(axes.pp)
    num_microbatches = x_MBSD.shape[0]
    # Cast here and not inside the loop, where the backward pass would sum over pp in every tick.
    x_MBSD = varying(x_MBSD, axes.pp)
    if num_ranks == 1:
        if num_microbatches == 1:
            return layers(x_MBSD[0], jnp.int32(0))[None]
        return lax.map(lambda a: layers(*a), (x_MBSD, jnp.arange(num_microbatches)))
    rank = axis_index(axes.pp)
    ring = [(r, (r + 1) % num_ranks) for r in range(num_ranks)]

    def work(received_BSD: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        first_BSD = lax.dynamic_index_in_dim(
            x_MBSD, jnp.minimum(t, num_microbatches - 1), keepdims=False
        )
        index = t - rank
        entering_BSD = jnp.where(rank == 0, first_BSD, received_BSD)
        out_BSD = lax.cond(
            (index >= 0) & (index < active),
            lambda x: layers(x, jnp.clip(index, 0, num_microbatches - 1)),
            lambda x: x,
            entering_BSD,
        )
        return lax.ppermute(out_BSD, axes.pp, ring), out_BSD

    def tick(received_BSD: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        if isinstance(active, int):
            return work(received_BSD, t)
        # All ranks agree on which tick is the last; after it they do not wait for each other.
        last = active + num_ranks - 2
        return lax.cond(t <= last, work, lambda x, t: (x, x), received_BSD, t)

    _, outs = lax.scan(
        tick, jnp.zeros_like(x_MBSD[0]), jnp.arange(num_microbatches + num_ranks - 1)
    )
    return outs[num_ranks - 1 :]


def from_last_rank(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """The last pp rank's value, on every pp rank."""
    if not axes.pp or axis_size(axes.pp) == 1:
        # A sum over one rank: only tells shard_map that the value no longer differs along pp.
        return lax.psum(x, axes.pp) if axes.pp else x
    last = axis_index(axes.pp) == axis_size(axes.pp) - 1
    return lax.psum(jnp.where(last, x, jnp.zeros_like(x)), axes.pp)
