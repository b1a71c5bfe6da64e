"""Memory of each device in a step: what is held, and the largest program on top.

A device with a memory of its own says itself when it is full. Emulated devices share the host's, so
that the ledger refuses for them what a device of the budgeted size would refuse, with its error.
"""

import dataclasses
from collections.abc import Mapping

import jax


@dataclasses.dataclass(kw_only=True)
class MemoryLedger:
    """The books of a process; devices of other processes do not occur.

    Attributes:
      budget_bytes: of a device; 0: as much as there is.
      held: device -> bytes of the state that stays while programs run.
      peak: device -> most bytes at a time since the step began.
    """

    budget_bytes: int = 0
    held: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    peak: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    def start_step(self, held: Mapping[str, int]) -> None:
        """Peaks are those of the step that begins now.

        Args:
          held: device -> bytes of the state.
        """
        self.held = held
        self.peak = dict(held)

    def hold(self, held: Mapping[str, int]) -> None:
        """What is held has changed in the middle of the step: parked state has come or gone.

        Args:
          held: device -> bytes of the state now.

        Raises:
          JaxRuntimeError: RESOURCE_EXHAUSTED, as a device says it, if the budget is exceeded.
        """
        for device, num_bytes in held.items():
            if self.budget_bytes and num_bytes > self.budget_bytes:
                raise jax.errors.JaxRuntimeError(
                    f"RESOURCE_EXHAUSTED: Out of memory on device {device}: parked state comes "
                    f"back, and makes {num_bytes} of {self.budget_bytes} bytes."
                )
        self.held = held
        self.peak = {d: max(self.peak.get(d, 0), n) for d, n in held.items()}

    def launch(self, program: str, devices: tuple[str, ...], num_bytes: int) -> None:
        """Enters a program that is about to run.

        Args:
          program: its name, for the message.
          devices: that it runs on.
          num_bytes: that it needs on each of them beside its arguments.

        Raises:
          JaxRuntimeError: RESOURCE_EXHAUSTED, as a device says it, if the budget is exceeded.
        """
        for device in devices:
            if device not in self.held:
                continue
            needs = self.held[device] + num_bytes
            if self.budget_bytes and needs > self.budget_bytes:
                raise jax.errors.JaxRuntimeError(
                    f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {num_bytes} bytes "
                    f"for {program} on device {device}, which holds {self.held[device]} of "
                    f"{self.budget_bytes} bytes."
                )
            self.peak[device] = max(self.peak[device], needs)

    @property
    def peak_bytes(self) -> int:
        """Of the fullest device."""
        return max(self.peak.values(), default=0)
