"""How the processes of a job find each other."""

import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from nereus_jax.core.errors import ConfigError, WorldError
from nereus_jax.runtime.membership import (
    DistributedConfig,
    check_numbers,
    check_port_is_free,
    missing_flags,
    parse_address,
    resolve,
)

JOIN_S = 300
"""How long the processes wait for each other."""
QUIET_S = 5.0
"""A process says what it waits for only after this long."""


def join_processes(distributed: DistributedConfig) -> None:
    """Brings this process together with the others of the job.

    Raises:
      ConfigError: numbers that do not fit, an address that cannot work, or no scheduler to ask.
      WorldError: the others did not come. Where process 0 waits for them in vain, XLA ends it.
    """
    check_numbers(distributed)
    if distributed.coordinator is not None:
        host, port = parse_address(distributed.coordinator)
        resolve(host, port, distributed.coordinator)
        # jax reports neither of the two in a form to show: it logs, and aborts after 5 minutes.
        if distributed.process_id == 0:
            check_port_is_free(port)
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
        missing = ", ".join(missing_flags(distributed)) or "a description of the job"
        raise ConfigError(
            f"{missing} not given, and no "
            f"scheduler (SLURM, Kubernetes, MPI, ...) found that knows: {_one_line(error)}; give "
            f"--coordinator, --num-processes and --process-id together, or none of them"
        ) from error
    except RuntimeError as error:
        raise WorldError(
            f"the processes did not come together: {_one_line(error)}; check --coordinator, "
            f"--num-processes and --process-id, or the scheduler's environment"
        ) from error


def leave_processes() -> None:
    """Takes leave of the other processes; returns when all that are left have come here, too."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def alone() -> DistributedConfig:
    """A job of this process only: after another one, jax would go on with the rank it had there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return DistributedConfig(
        enabled=True, coordinator=f"127.0.0.1:{port}", num_processes=1, process_id=0
    )


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
