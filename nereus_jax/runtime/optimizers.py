"""Optimizers from the configuration, and how their state lies on a mesh."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from nereus_jax.config import OptimizerConfig
from nereus_jax.core.emu_spec import EmuSpec, LeafSpec
from nereus_jax.runtime.emu import Site

OptState = Any
"""A pytree of optax: scalars, and dicts of arrays named like the parameters."""


def make_optimizer(config: OptimizerConfig, num_updates: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) with clipping by global norm and a schedule.

    Args:
      config: rates and coefficients.
      num_updates: updates of the whole run, over which the schedule decays to 0.
    """
    steps: list[optax.GradientTransformation] = []
    if config.max_grad_norm > 0:
        steps.append(optax.clip_by_global_norm(config.max_grad_norm))
    steps.append(
        optax.adamw(
            _schedule(config, num_updates),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
    )
    return optax.chain(*steps)


def _schedule(config: OptimizerConfig, num_updates: int) -> optax.Schedule:
    peak, warmup = config.learning_rate, config.warmup_steps
    decay_updates = max(num_updates - warmup, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, decay_updates),
        "cosine": optax.cosine_decay_schedule(peak, decay_updates),
    }[config.schedule]
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def state_spec(optimizer: optax.GradientTransformation, spec: EmuSpec) -> OptState:
    """The optimizer's state with a LeafSpec in the place of every parameter-shaped array.

    Other arrays (update counters) stay `jax.ShapeDtypeStruct`s. Shapes are logical.
    """
    params = {leaf.name: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in spec}
    abstract = jax.eval_shape(optimizer.init, params)
    leaves = {leaf.name: leaf for leaf in spec}
    return optax.tree.map_params(optimizer, lambda _, leaf: leaf, abstract, leaves)


def is_leaf_spec(node: object) -> bool:
    """Whether a node of `state_spec`'s result stands for an array like a parameter."""
    return isinstance(node, LeafSpec)


def abstract_state(site: Site, spec: EmuSpec, state: OptState) -> OptState:
    """Padded shapes and shardings of an optimizer's state on a site; counters are replicated."""

    def one(node: LeafSpec | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if isinstance(node, LeafSpec):
            return jax.ShapeDtypeStruct(
                node.padded_shape(spec.rules, site.mesh_shape),
                jnp.dtype(node.dtype),
                sharding=site.leaf_sharding(node, spec.rules),
            )
        return jax.ShapeDtypeStruct(node.shape, node.dtype, sharding=site.sharding())

    return jax.tree.map(one, state, is_leaf=is_leaf_spec)


def init_state(
    optimizer: optax.GradientTransformation, params: Mapping[str, jax.Array], abstract: OptState
) -> OptState:
    """A fresh state for these parameters, every array on its own sharding from the start."""
    # Without out_shardings the moments would land on one device: zeros carry no sharding.
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(optimizer.init, out_shardings=shardings)(params)
