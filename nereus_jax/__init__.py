"""nereus_jax: adaptive parallelism for RL post-training on JAX.

Public names resolve on first use (PEP 562), so that `import nereus_jax.planning` loads no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from nereus_jax.api import CompileQueue, TransferCost, TransitionProgram, reshard
    from nereus_jax.core.emu_spec import EmuSpec
    from nereus_jax.core.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DeviceFullError,
        DevicesLostError,
        DigestError,
        DivergenceError,
        InfeasiblePlanError,
        LostStateError,
        NereusError,
        OutOfMemoryError,
        PlanTooLargeError,
        ReshardError,
        RewardError,
        StorageError,
        TransitionError,
        WorldError,
    )
    from nereus_jax.trainer.pool_events import PoolInbox

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CompileQueue",
    "ConfigError",
    "DataError",
    "DeviceFullError",
    "DevicesLostError",
    "DigestError",
    "DivergenceError",
    "EmuSpec",
    "InfeasiblePlanError",
    "LostStateError",
    "NereusError",
    "OutOfMemoryError",
    "PlanTooLargeError",
    "PoolInbox",
    "ReshardError",
    "RewardError",
    "StorageError",
    "TransferCost",
    "TransitionError",
    "TransitionProgram",
    "WorldError",
    "__version__",
    "reshard",
]

# Public name -> the module that defines it. A name stands here, in __all__ and under TYPE_CHECKING.
_MODULE_OF: Final = {
    "CheckpointError": "nereus_jax.core.errors",
    "CompileQueue": "nereus_jax.runtime.compile_queue",
    "ConfigError": "nereus_jax.core.errors",
    "DataError": "nereus_jax.core.errors",
    "DeviceFullError": "nereus_jax.core.errors",
    "DevicesLostError": "nereus_jax.core.errors",
    "DigestError": "nereus_jax.core.errors",
    "DivergenceError": "nereus_jax.core.errors",
    "EmuSpec": "nereus_jax.core.emu_spec",
    "InfeasiblePlanError": "nereus_jax.core.errors",
    "LostStateError": "nereus_jax.core.errors",
    "NereusError": "nereus_jax.core.errors",
    "OutOfMemoryError": "nereus_jax.core.errors",
    "PlanTooLargeError": "nereus_jax.core.errors",
    "PoolInbox": "nereus_jax.trainer.pool_events",
    "ReshardError": "nereus_jax.core.errors",
    "RewardError": "nereus_jax.core.errors",
    "StorageError": "nereus_jax.core.errors",
    "TransferCost": "nereus_jax.runtime.transfers",
    "TransitionError": "nereus_jax.core.errors",
    "TransitionProgram": "nereus_jax.api",
    "WorldError": "nereus_jax.core.errors",
    "reshard": "nereus_jax.api",
}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
