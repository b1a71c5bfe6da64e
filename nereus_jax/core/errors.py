"""The errors that a caller can meet; each is also the fitting standard-library error.

A message is one line: what is wrong, what was got, what is allowed, and what to do. The command
line prints the message of a `NereusError` without a traceback and exits with `exit_code`.
"""

from collections.abc import Mapping

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.roles import ModelStage


class NereusError(Exception):
    """Base class: everything that nereus_jax raises on purpose."""

    exit_code = 1


class ConfigError(NereusError, ValueError):
    """The configuration, or a value given on the command line, is not usable."""

    exit_code = 2


class DataError(NereusError, ValueError):
    """Prompts, tokenizer or model files are missing, malformed or do not fit together."""

    exit_code = 2


class InfeasiblePlanError(NereusError, ValueError):
    """A plan that the devices or the model cannot take."""

    exit_code = 2


class PlanTooLargeError(InfeasiblePlanError):
    """A plan that the devices have no memory for.

    Attributes:
      working_bytes: by model-stage, what its programs need on a device beside all that is resident,
        as the compiler counts it; 0 where none is compiled.
    """

    def __init__(self, message: str, working_bytes: Mapping[ModelStage, int] | None = None) -> None:
        super().__init__(message)
        self.working_bytes = dict(working_bytes or {})


class ReshardError(NereusError, ValueError):
    """A tree, its shardings and the devices do not fit together; the source is untouched."""

    exit_code = 2


class LostStateError(NereusError, RuntimeError):
    """A part of the state was on lost devices only; it must come from a snapshot or checkpoint."""


class DigestError(NereusError, RuntimeError):
    """State differs from what it was before it moved, or its copies differ."""


class DevicesLostError(NereusError, RuntimeError):
    """Devices are gone; what they held is lost, what others hold is not.

    Attributes:
      devices: those that are gone.
    """

    def __init__(self, message: str, devices: frozenset[DeviceId] = frozenset()) -> None:
        super().__init__(message)
        self.devices = devices


class TransitionError(NereusError, RuntimeError):
    """A transition stopped half way; what is intact of the state is known."""


class CheckpointError(NereusError, RuntimeError):
    """A checkpoint could not be written or read, or belongs to another model."""

    exit_code = 2


class OutOfMemoryError(NereusError, MemoryError):
    """A device has no memory for what the running job needs now.

    Attributes:
      room_tokens: response tokens that there is no memory for; 0: as many as the job had room for.
    """

    def __init__(self, message: str, room_tokens: int = 0) -> None:
        super().__init__(message)
        self.room_tokens = room_tokens


class DeviceFullError(OutOfMemoryError):
    """A device refused a program for want of memory; other processes may not know of it."""


class RewardError(NereusError, RuntimeError):
    """The reward function raised, or did not return one finite number per sample."""


class DivergenceError(NereusError, RuntimeError):
    """Training produced a non-finite loss or gradient."""


class WorldError(NereusError, RuntimeError):
    """The processes or the devices of the job could not be brought together, or were lost."""


class StorageError(NereusError, OSError):
    """A file of the run could not be written: the disk is full, or the place cannot be written."""
