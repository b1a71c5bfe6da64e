"""How the processes of a job find each other."""

import dataclasses
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from nereus_jax.core.errors import ConfigError, WorldError

RESOLVE_S = 3.0
"""A name that is still unknown after this long is taken for a mistake."""
JOIN_S = 300
"""How long the processes wait for each other."""
QUIET_S = 5.0
"""A process says what it waits for only after this long."""
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


def join_processes(distributed: DistributedConfig) -> None:
    """Brings this process together with the others of the job.

    Raises:
      ConfigError: numbers that do not fit, an address that cannot work, or no scheduler to ask.
      WorldError: the others did not come. Where process 0 waits for them in vain, XLA ends it.
    """
    _check_numbers(distributed)
    if distributed.coordinator is not None:
        host, port = _parse_address(distributed.coordinator)
        _resolve(host, port, distributed.coordinator)
        # jax reports neither of the two in a form to show: it logs, and aborts after 5 minutes.
        if distributed.process_id == 0:
            _check_port_is_free(port)
        elif distributed.process_id is not None:
            _await_coordinator(host, port)
    try:
        with _ended_by_interrupt():
            jax.distributed.initialize(
                coordinator_address=distributed.coordinator,
                num_processes=distributed.num_processes,
                process_id=distributed.process_id,
                initialization_timeout=JOIN_S,
            )
    except ValueError as error:  # a value is neither given nor to be detected
        raise ConfigError(
            f"{', '.join(_missing(distributed)) or 'a description of the job'} not given, and no "
            f"scheduler (SLURM, Kubernetes, MPI, ...) found that knows: {_one_line(error)}; give "
            f"--coordinator, --num-processes and --process-id together, or none of them"
        ) from error
    except RuntimeError as error:
        raise WorldError(
            f"the processes did not come together: {_one_line(error)}; check --coordinator, "
            f"--num-processes and --process-id, or the scheduler's environment"
        ) from error


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process: Python would see it only after the wait, which is not in Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_numbers(distributed: DistributedConfig) -> None:
    number, rank = distributed.num_processes, distributed.process_id
    if number is not None and number < 1:
        raise ConfigError(f"--num-processes must be at least 1, got {number}")
    if rank is not None and (rank < 0 or (number is not None and rank >= number)):
        allowed = (
            "at least 0" if number is None else f"0 to {number - 1} (--num-processes={number})"
        )
        raise ConfigError(f"--process-id must be {allowed}, got {rank}; count processes from 0")


def _missing(distributed: DistributedConfig) -> list[str]:
    given = {
        "--coordinator": distributed.coordinator,
        "--num-processes": distributed.num_processes,
        "--process-id": distributed.process_id,
    }
    return [flag for flag, value in given.items() if value is None]


def _parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= MAX_PORT:
        raise ConfigError(
            f"--coordinator must be HOST:PORT with a port from 1 to {MAX_PORT}, got {address!r}; "
            f"such as --coordinator=10.0.0.1:1234, where process 0 runs"
        )
    return host.strip("[]"), int(port)


def _resolve(host: str, port: int, address: str) -> None:
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


def _check_port_is_free(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ConfigError(
            f"--coordinator: process 0 cannot listen on port {port} of this machine "
            f"({error.strerror or error}); choose a free port for all processes"
        ) from error


def _await_coordinator(host: str, port: int) -> None:
    start_s, said = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=QUIET_S).close()
            return
        except OSError as error:
            waited_s = time.monotonic() - start_s
            if waited_s > JOIN_S:
                raise WorldError(
                    f"process 0 does not answer at {host}:{port} after {JOIN_S} s "
                    f"({error.strerror or error}); start it, or correct --coordinator"
                ) from error
        if not said and waited_s > QUIET_S:
            said = True
            logging.getLogger(__name__).warning(
                "waiting for process 0 at %s:%d, for at most %d s", host, port, JOIN_S
            )
        time.sleep(0.5)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")
