"""The state of a TRAIN model-stage as named leaves and counters, and back.

A unit moves named leaves. The arrays of an optimizer that are like parameters become leaves; its
counters are the same on every device, and go from one plan to the next as host values.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from nereus_jax.core.emu_spec import EmuSpec, LeafSpec
from nereus_jax.runtime import host
from nereus_jax.runtime.blocks import Blocks, BlockViews
from nereus_jax.runtime.emu import Params
from nereus_jax.runtime.engines.train import TrainEngine, TrainState
from nereus_jax.runtime.optimizers import is_leaf_spec, state_spec
from nereus_jax.runtime.world import World

PARAMETERS = "parameters."
OPTIMIZER = "optimizer."

OptimizerCounters = tuple[np.ndarray, ...]
"""The counters of an optimizer, in the order of its tree."""


def parameter_leaves(engine: TrainEngine) -> EmuSpec:
    """The parameters, by the names that they have in a unit."""
    return _renamed(engine.spec, PARAMETERS)


def optimizer_leaves(engine: TrainEngine, spec: EmuSpec | None = None) -> EmuSpec:
    """The optimizer's arrays that are like parameters, by their names in a unit.

    Args:
      engine: of the model-stage.
      spec: the parameters' leaves that they take after; None: as the engine holds them, under
        ZeRO-1 split over dp too.
    """
    tree = engine.opt_state_spec if spec is None else state_spec(engine.optimizer, spec)
    leaves = [dataclasses.replace(leaf, name=name) for name, leaf in _named(tree).items()]
    return EmuSpec(leaves=tuple(leaves), rules=engine.spec.rules)


def unit_leaves(engine: TrainEngine) -> EmuSpec:
    """All leaves of a unit of the model-stage, as the engine holds them."""
    optimizer = optimizer_leaves(engine)
    return dataclasses.replace(
        optimizer, leaves=(*parameter_leaves(engine).leaves, *optimizer.leaves)
    )


def flatten(engine: TrainEngine, state: TrainState) -> Params:
    """The arrays of `unit_leaves`."""
    arrays = {PARAMETERS + name: x for name, x in state.params.items()}
    spec = jax.tree.leaves(engine.opt_state_spec, is_leaf=is_leaf_spec)
    values = jax.tree.leaves(state.opt_state)
    names = iter(_named(engine.opt_state_spec))
    arrays |= {
        next(names): x for leaf, x in zip(spec, values, strict=True) if isinstance(leaf, LeafSpec)
    }
    return arrays


def read_counters(
    engine: TrainEngine, state: TrainState, world: World, views: BlockViews
) -> OptimizerCounters:
    """The optimizer's counters, from any copy that is there."""
    spec = jax.tree.leaves(engine.opt_state_spec, is_leaf=is_leaf_spec)
    values = jax.tree.leaves(state.opt_state)
    counters = [x for leaf, x in zip(spec, values, strict=True) if not isinstance(leaf, LeafSpec)]
    return tuple(_any_copy(x, views.of(world, x)) for x in counters)


def _any_copy(counter: jax.Array, blocks: Blocks) -> np.ndarray:
    """The value of a counter, which some process has; its blocks here may be gone."""
    here = [np.asarray(block) for block in blocks.values() if not block.is_deleted()]
    value = here[0] if here else np.zeros(counter.shape, counter.dtype)
    held = host.gather(np.array(bool(here)))
    if not held.any():
        raise AssertionError(
            "a counter has no copy left, though a unit of its model-stage is intact"
        )
    return host.gather(value)[int(np.argmax(held))]


def unflatten(
    engine: TrainEngine, arrays: Mapping[str, jax.Array], counters: OptimizerCounters
) -> TrainState:
    """The state on an engine's site, from the arrays of its `unit_leaves` and the counters."""
    params = {leaf.name: arrays[PARAMETERS + leaf.name] for leaf in engine.spec}
    names, numbers = iter(_named(engine.opt_state_spec)), iter(counters)
    everywhere = engine.site.sharding()

    def one(leaf: Any) -> jax.Array:
        if isinstance(leaf, LeafSpec):
            return arrays[next(names)]
        return host.put(next(numbers), everywhere)

    opt_state = jax.tree.map(one, engine.opt_state_spec, is_leaf=is_leaf_spec)
    return TrainState(params, opt_state)


def _named(tree: Any) -> dict[str, LeafSpec]:
    """Path -> leaf of every parameter-like array of an optimizer's state, in the tree's order."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf_spec)[0]
    return {
        OPTIMIZER + jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in flat
        if isinstance(leaf, LeafSpec)
    }


def _renamed(spec: EmuSpec, prefix: str) -> EmuSpec:
    leaves = [dataclasses.replace(leaf, name=prefix + leaf.name) for leaf in spec]
    return dataclasses.replace(spec, leaves=tuple(leaves))
