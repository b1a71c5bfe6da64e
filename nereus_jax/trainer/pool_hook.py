"""A small HTTP server through which a cluster's scheduler talks to a running job.

    GET  /pool   the pool, the plan, and what waits for the next step boundary
    POST /pool   {"change": "revoke", "devices": ["0:4-7"], "deadline_s": 120}: 202, or 4xx and why

A body is JSON and says so (`Content-Type: application/json`): no web page can post that to a
loopback address without being asked. Where a token is set, every request must bear it
(`Authorization: Bearer TOKEN`); elsewhere than on a loopback address there must be one.
"""

import hmac
import ipaddress
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from nereus_jax.core.errors import ConfigError

PATH = "/pool"
TOKEN_VARIABLE = "NEREUS_POOL_TOKEN"
MOST_BYTES = 64 << 10
"""Of a request's body."""
MOST_DISCARDED_BYTES = 1 << 20
"""Of a body that is refused."""
PATIENCE_S = 10.0
"""For a client that has begun a request."""
POLL_S = 0.1
"""How often the server looks whether it is to end."""

Submit = Callable[[Mapping[str, Any]], object]


def parse_address(text: str) -> tuple[str, int]:
    """Host and port; port 0 is any that is free.

    Raises:
      ConfigError: it is not HOST:PORT.
    """
    name, _, port = text.rpartition(":")
    name = name.removeprefix("[").removesuffix("]")
    if not name or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"control.pool_hook must be HOST:PORT, such as 127.0.0.1:8642, got {text!r}"
        )
    return name, int(port)


def is_loopback(name: str) -> bool:
    """Whether only this machine can reach an address."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:  # a name: who knows
        return False


def read_token(file: str) -> str:
    """The token that requests must bear; empty: none is set.

    Args:
      file: that it is in; empty: it is in the environment, if anywhere.

    Raises:
      ConfigError: the file cannot be read, or has nothing in it.
    """
    if not file:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        token = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"control.pool_hook_token_file: {file} cannot be read: {reason}"
        ) from None
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"control.pool_hook_token_file: {file} must hold one line of printable ASCII"
        )
    return token


@contextmanager
def open_hook(
    address: str, token_file: str, submit: Submit, status: Callable[[], Mapping[str, Any]]
) -> Iterator[str]:
    """Answers requests in threads of its own; gives the URL.

    Args:
      address: HOST:PORT.
      token_file: see `read_token`.
      submit: takes a message; a ValueError of it is the answer.
      status: what GET shows.

    Raises:
      ConfigError: the address cannot be listened at, or others reach it and there is no token.
    """
    name, port = parse_address(address)
    token = read_token(token_file)
    if not token and not is_loopback(name):
        raise ConfigError(
            f"control.pool_hook={address!r} can be reached by others, and there is no token; set "
            f"control.pool_hook_token_file or {TOKEN_VARIABLE}, or listen at 127.0.0.1"
        )
    try:
        server = _Server(name, port, token, submit, status)
    except OSError as error:
        raise ConfigError(
            f"control.pool_hook: cannot listen at {address}: {error.strerror or error}; choose "
            f"another port or address"
        ) from None
    thread = threading.Thread(
        target=server.serve_forever, args=(POLL_S,), name="pool hook", daemon=True
    )
    thread.start()
    try:
        shown = f"[{name}]" if ":" in name else name
        yield f"http://{shown}:{server.server_address[1]}{PATH}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that says nothing does not keep the run from its end

    def __init__(
        self,
        name: str,
        port: int,
        token: str,
        submit: Submit,
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.token, self.submit, self.status = token, submit, status
        if ":" in name:
            self.address_family = socket.AF_INET6
        super().__init__((name, port), _Handler)

    def server_bind(self) -> None:
        """Without http.server's search for the name of the host, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no matter of the run's."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = PATIENCE_S
    default_request_version = "HTTP/1.0"  # an answer has a status line whatever was asked
    body: bytes | None = None

    def do_GET(self) -> None:
        """The pool and the plan."""
        if self._is_let_in():
            self._answer(HTTPStatus.OK, self.server.status())

    def do_POST(self) -> None:
        """A message."""
        if not self._is_let_in():
            return
        message = self._message()
        if message is None:
            return
        try:
            self.server.submit(message)
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        self._answer(HTTPStatus.ACCEPTED, {"accepted": message, "when": "next step boundary"})

    def _is_let_in(self) -> bool:
        token = self.server.token
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            self._refuse(HTTPStatus.UNAUTHORIZED, "send Authorization: Bearer TOKEN")
            return False
        if self.path.partition("?")[0].rstrip("/") != PATH:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is nothing but {PATH}")
            return False
        return True

    def _message(self) -> Any:
        """The body; None: it was refused."""
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send Content-Type: application/json")
            return None
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "send Content-Length")
            return None
        if len(length) > 9 or int(length) > MOST_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has up to {MOST_BYTES} bytes"
            )
            return None
        try:
            self.body = self.rfile.read(int(length))
            message = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}")
            return None
        if not isinstance(message, dict):
            self._refuse(HTTPStatus.BAD_REQUEST, "the body must be one JSON object")
            return None
        return message

    def _refuse(self, code: int, reason: str) -> None:
        self.close_connection = True
        self._discard_body()
        self._answer(code, {"error": " ".join(reason.split())})

    def _discard_body(self) -> None:
        """Reads what a client sends on, within bounds: else it would not see the answer."""
        headers = getattr(self, "headers", None)
        length = "" if headers is None else headers.get("Content-Length", "")
        if self.body is None and length.isascii() and length.isdecimal() and len(length) < 10:
            left = min(int(length), MOST_DISCARDED_BYTES)
            while left > 0 and (part := self.rfile.read(min(left, MOST_BYTES))):
                left -= len(part)

    def _answer(self, code: int, content: Mapping[str, Any]) -> None:
        body = json.dumps(content).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, POST")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses by itself, in the form of all answers."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code = HTTPStatus.METHOD_NOT_ALLOWED
        self._refuse(code, message or HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """The screen belongs to the run."""
