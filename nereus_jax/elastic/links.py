"""Connections between supervisors: one asks, the other welcomes it, sends it on, or refuses."""

import asyncio
import contextlib
import dataclasses
import socket
from typing import Any

from nereus_jax.core.errors import ConfigError
from nereus_jax.elastic.messages import MAX_LINE_BYTES, decode, encode


@dataclasses.dataclass(kw_only=True)
class Link:
    """A connection, line by line."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, message: dict[str, Any]) -> None:
        """Sends without waiting; a broken connection shows when it is read."""
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    async def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message.

        Raises:
          OSError: the other end is gone, or silent for so long.
          ValueError: what came is no message.
        """
        line = await asyncio.wait_for(self.reader.readline(), timeout_s)  # TimeoutError: an OSError
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the connection was closed")
        return decode(line)

    def close(self) -> None:
        """Ends it; what was sent before may still arrive."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a call to an address brought.

    Attributes:
      link: to the leader, who answered.
      own_address: this supervisor's, as the leader sees it.
      elsewhere: where the leader is, says another supervisor; '' if it knows of none.
      gone: nobody is there who could be the leader, for certain.
    """

    link: Link | None = None
    own_address: str = ""
    elsewhere: str | None = None
    gone: bool = False


async def call(address: str, hello: dict[str, Any], timeout_s: float) -> Answer:
    """Asks whoever listens at host:port to be its follower.

    Raises:
      ConfigError: it is a supervisor, but of another job, or itself has this slot.
    """
    link = None
    try:
        link = await _connect(address, timeout_s)
        link.send(hello)
        reply = await link.receive(timeout_s)
        if "refused" in reply:
            raise ConfigError(str(reply["refused"]))
        if "welcome" in reply:
            return Answer(link=link, own_address=str(reply["welcome"]))
        if "elsewhere" in reply:
            link.close()
            return Answer(elsewhere=str(reply["elsewhere"]))
        if "taken" in reply:
            link.close()
            return Answer()
        raise ValueError("an unknown reply")
    except ConfigError:
        raise
    except (ConnectionRefusedError, ValueError):  # nobody, or something that is no supervisor
        answer = Answer(gone=True)
    except OSError:
        answer = Answer()
    if link is not None:
        link.close()
    return answer


async def is_gone(address: str, timeout_s: float) -> bool:
    """Whether the machine answers that nobody listens there."""
    try:
        link = await _connect(address, timeout_s)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    link.close()
    return False


async def _connect(address: str, timeout_s: float) -> Link:
    host, _, port = address.rpartition(":")
    opening = asyncio.open_connection(host.strip("[]"), int(port), limit=MAX_LINE_BYTES)
    reader, writer = await asyncio.wait_for(opening, timeout_s)
    return Link(reader=reader, writer=writer)


def join_host_port(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host of host:port."""
    return address.rpartition(":")[0].strip("[]")


def listen(port: int) -> socket.socket:
    """Listens on all addresses of this machine; 0 finds a free port.

    Raises:
      OSError: the port is taken.
    """
    if socket.has_dualstack_ipv6():  # one port for both; two sockets would have two
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def peer_host(writer: asyncio.StreamWriter) -> str:
    """The address that a connection comes from."""
    host: str = writer.get_extra_info("peername")[0]
    return host.removeprefix("::ffff:")


def free_port() -> int:
    """A TCP port that nobody on this machine listens on."""
    with listen(0) as server:
        port: int = server.getsockname()[1]
    return port
