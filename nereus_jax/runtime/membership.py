"""How a process is told of the others of its job, and what of that can be wrong; without jax."""

import dataclasses
import socket
import time

from nereus_jax.core.errors import ConfigError

RESOLVE_S = 3.0
"""A name that is still unknown after this long is taken for a mistake."""
MAX_PORT = 65535


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes of a job find each other.

    Attributes:
      enabled: join a multi-process job.
      coordinator: host:port of process 0, or None to let jax detect it (SLURM, Kubernetes, ...).
      num_processes: number of processes, or None to detect it.
      process_id: this process's rank, or None to detect it.
    """

    enabled: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def check_numbers(distributed: DistributedConfig) -> None:
    """Raises ConfigError where number and rank cannot be right."""
    number, rank = distributed.num_processes, distributed.process_id
    if number is not None and number < 1:
        raise ConfigError(f"--num-processes must be at least 1, got {number}")
    if rank is not None and (rank < 0 or (number is not None and rank >= number)):
        allowed = (
            "at least 0" if number is None else f"0 to {number - 1} (--num-processes={number})"
        )
        raise ConfigError(f"--process-id must be {allowed}, got {rank}; count processes from 0")


def missing_flags(distributed: DistributedConfig) -> list[str]:
    """The flags that are not given."""
    given = {
        "--coordinator": distributed.coordinator,
        "--num-processes": distributed.num_processes,
        "--process-id": distributed.process_id,
    }
    return [flag for flag, value in given.items() if value is None]


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `--coordinator`.

    Raises:
      ConfigError: it has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= MAX_PORT:
        raise ConfigError(
            f"--coordinator must be HOST:PORT with a port from 1 to {MAX_PORT}, got {address!r}; "
            f"such as --coordinator=10.0.0.1:1234, where process 0 runs"
        )
    return host.strip("[]"), int(port)


def resolve(host: str, port: int, address: str) -> None:
    """Raises ConfigError if the host of `--coordinator` is not known; waits a moment for it."""
    deadline_s = time.monotonic() + RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"--coordinator={address}: host {host!r} is not known "
                    f"({error.strerror or error}); give the name or the address of the machine "
                    f"of process 0"
                ) from error
        time.sleep(0.5)


def check_port_is_free(port: int) -> None:
    """Raises ConfigError if process 0 cannot listen on this port."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ConfigError(
            f"--coordinator: process 0 cannot listen on port {port} of this machine "
            f"({error.strerror or error}); choose a free port for all processes"
        ) from error
