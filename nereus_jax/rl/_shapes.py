"""Shape checks of the rl functions: they run while tracing and cost nothing once compiled."""

from typing import TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array | np.ndarray


def check_same_shape(rank: int, **arrays: Array) -> None:
    """Raises ValueError unless all arrays have this rank and one shape (no silent broadcast)."""
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != rank for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"expected one shape of rank {rank}, got {listed}")
