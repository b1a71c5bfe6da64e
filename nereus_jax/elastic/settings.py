"""What a supervisor is told, and what of that can be wrong."""

import dataclasses
import os
from pathlib import Path

from nereus_jax.core.errors import ConfigError
from nereus_jax.elastic.messages import Order
from nereus_jax.elastic.register import Timing
from nereus_jax.runtime.checkpoint_files import finished_steps
from nereus_jax.runtime.membership import (
    MAX_PORT,
    DistributedConfig,
    check_numbers,
    missing_flags,
    parse_address,
    resolve,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a supervisor is told.

    Attributes:
      slot: its number; slot 0 founds the job.
      num_slots: of the job.
      host: of slot 0, as the others reach it.
      port: that the supervisor of slot 0 listens on.
      workdir: of the run, which all slots share.
      command: that starts a worker alone.
      again: arguments that it also gets after the first epoch.
      checkpoints: directory of the run's checkpoints.
      timing: see there.
    """

    slot: int
    num_slots: int
    host: str
    port: int
    workdir: Path
    command: tuple[str, ...]
    again: tuple[str, ...] = ()
    checkpoints: Path
    timing: Timing = dataclasses.field(default_factory=Timing)

    @property
    def job(self) -> str:
        """What the supervisors of one job have in common."""
        return f"{self.host}:{self.port}/{self.num_slots}"

    def progress(self) -> int:
        """The step of the newest checkpoint, -1 without one."""
        return max(finished_steps(self.checkpoints), default=-1)

    def worker_command(self, order: Order) -> tuple[str, ...]:
        """The command of the worker of an epoch."""
        command = (*self.command, f"--worker-of={os.getpid()}")
        if order.epoch > 1:
            command += self.again
        if len(order.members) == 1:
            return command
        return (
            *command,
            f"--coordinator={order.coordinator}",
            f"--num-processes={len(order.members)}",
            f"--process-id={order.process_id(self.slot)}",
        )


def find_slot(distributed: DistributedConfig) -> tuple[int, int, str, int]:
    """Slot, number of slots, and host and port of the supervisor of slot 0.

    Raises:
      ConfigError: they are not given, or cannot be right.
    """
    if not distributed.enabled:
        return 0, 1, "127.0.0.1", 0
    if missing := missing_flags(distributed):
        raise ConfigError(
            f"--elastic needs {', '.join(missing)} too; give --coordinator, --num-processes and "
            f"--process-id, or none of them for a job of one process"
        )
    assert distributed.coordinator and distributed.num_processes is not None
    assert distributed.process_id is not None
    check_numbers(distributed)
    host, port = parse_address(distributed.coordinator)
    if port == MAX_PORT:
        raise ConfigError(
            f"--elastic listens on the port after that of --coordinator, got the last one, {port}; "
            f"use a smaller one"
        )
    resolve(host, port, distributed.coordinator)
    return distributed.process_id, distributed.num_processes, host, port + 1
