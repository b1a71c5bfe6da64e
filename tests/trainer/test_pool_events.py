"""What a running job may be told of its pool: by a file, by HTTP, by whoever embeds it."""

import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.config import parse_config
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.testing import tiny_run_config
from nereus_jax.trainer import loop
from nereus_jax.trainer.pool_events import PoolFile, PoolInbox, PoolStatus, open_pool_sources
from nereus_jax.trainer.pool_hook import MOST_BYTES, TOKEN_VARIABLE, open_hook, parse_address

POOL = DevicePool.uniform(1, 4)
REVOKE = {"change": "revoke", "devices": ["0:3"], "deadline_s": 30}


def status(**changes: Any) -> PoolStatus:
    placement = Placement(layout=ParallelLayout(2, 1, 1), devices=POOL.devices[:2])
    plan = ExecutionPlan(
        plan=Plan(placements={ACTOR_TRAIN: placement}),
        choices={ACTOR_TRAIN: StageChoice(microbatch_size=1)},
    )
    values: dict[str, Any] = {"every": POOL, "pool": POOL, "leaving": {}, "plan": plan, "step": 7}
    return PoolStatus(**values | changes)


@pytest.fixture
def inbox() -> PoolInbox:
    made = PoolInbox()
    made.publish(status())
    return made


def taken(inbox: PoolInbox) -> list[tuple[str, list[str]]]:
    return [(e.change.value, [str(d) for d in e.devices]) for e in inbox.take()]


# --- the inbox ---


def test_messages_wait_for_the_boundary_and_come_once(inbox: PoolInbox) -> None:
    inbox.submit(REVOKE)
    inbox.submit({"change": "lost", "devices": ["0:2"]})
    assert [e["change"] for e in inbox.to_json()["waiting"]] == ["revoke", "lost"]
    assert taken(inbox) == [("revoke", ["0:3"]), ("lost", ["0:2"])]
    assert taken(inbox) == []


def test_what_cannot_be_is_refused_at_the_door(inbox: PoolInbox) -> None:
    with pytest.raises(ConfigError, match="the run does not listen yet"):
        PoolInbox().submit(REVOKE)
    inbox.submit({"change": "lost", "devices": ["0:2"]})
    for devices in (["0:2"], ["0:9"]):
        with pytest.raises(ConfigError, match=r"pool: device 0:[29]") as caught:
            inbox.submit({"change": "lost", "devices": devices})
        assert "\n" not in str(caught.value)
    assert taken(inbox) == [("lost", ["0:2"])]
    # The job has taken note of it, and of a loss that nobody told.
    inbox.publish(status(pool=POOL.without([DeviceId(0, 1), DeviceId(0, 2)])))
    with pytest.raises(ConfigError, match="0:1 is not there"):
        inbox.submit({"change": "lost", "devices": ["0:1"]})
    inbox.submit({"change": "joined", "devices": ["0:2"]})


def test_threads_do_not_lose_messages(inbox: PoolInbox) -> None:
    every = DevicePool.uniform(1, 64)
    inbox.publish(status(every=every, pool=every))
    got: list[tuple[str, list[str]]] = []

    def send(first: int) -> None:
        for i in range(first, 64, 4):
            inbox.submit({"change": "lost", "devices": [f"0:{i}"]})

    threads = [threading.Thread(target=send, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        got += taken(inbox)
    got += taken(inbox)
    assert sorted(d for _, devices in got for d in devices) == sorted(map(str, every.devices))


# --- the file ---


def test_whole_lines_that_come_are_read_once(inbox: PoolInbox, tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_text(json.dumps({"change": "lost", "devices": ["0:0"]}) + "\n")  # history
    file = PoolFile(path)
    assert (file.poll(inbox), taken(inbox)) == ([], [])
    line = json.dumps(REVOKE)
    with open(path, "a") as writer:
        writer.write(line[:10])
        writer.flush()
        assert (file.poll(inbox), taken(inbox)) == ([], [])
        writer.write(line[10:] + "\n\n" + json.dumps({"change": "lost", "devices": 1}))
    assert (file.poll(inbox), taken(inbox)) == ([], [("revoke", ["0:3"])])
    with open(path, "a") as writer:
        writer.write("\n")
    assert (file.poll(inbox), taken(inbox)) == ([], [("lost", ["0:2"])])


def test_a_wrong_line_is_told_and_passed_over(inbox: PoolInbox, tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    file = PoolFile(path)
    assert file.poll(inbox) == []  # it is still to come
    wrong = [b"no json", b"[1]", b'{"change": "lost", "devices": ["0:7"]}', b"\xff", b"[" * 10_000]
    path.write_bytes(b"\n".join([*wrong, json.dumps(REVOKE).encode()]) + b"\n")
    said = file.poll(inbox)
    assert len(said) == len(wrong) and all("is passed over" in line for line in said)
    assert all("\n" not in line for line in said)
    assert "device 0:7 does not exist" in said[2]
    assert taken(inbox) == [("revoke", ["0:3"])]


def test_a_file_that_begins_anew_is_read_from_its_beginning(
    inbox: PoolInbox, tmp_path: Path
) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_text("\n" * 200)
    file = PoolFile(path)
    path.write_text(json.dumps(REVOKE) + "\n")
    assert (file.poll(inbox), taken(inbox)) == ([], [("revoke", ["0:3"])])
    path.unlink()
    assert file.poll(inbox) == []
    with pytest.raises(ConfigError, match="is no directory"):
        PoolFile(tmp_path / "none" / "pool.jsonl")


# --- HTTP ---


@contextmanager
def client(inbox: PoolInbox, token_file: str = "") -> Iterator[http.client.HTTPConnection]:
    with open_hook("127.0.0.1:0", token_file, inbox.submit, inbox.to_json) as url:
        port = int(url.split(":")[2].split("/")[0])
        yield http.client.HTTPConnection("127.0.0.1", port, timeout=10)


def ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str = "/pool",
    body: bytes | str = "",
    **headers: str,
) -> tuple[int, Any]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if method == "POST":
        names = {"Content-Type": "application/json"} | names
    connection.request(method, path, body, names)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert text.count("\n") == 1 and response.getheader("Content-Type") == "application/json"
    return response.status, json.loads(text)


def test_a_scheduler_tells_and_asks(inbox: PoolInbox) -> None:
    inbox.publish(status(leaving={DeviceId(0, 1): 20.0}))
    with client(inbox) as connection:
        code, answer = ask(connection, "POST", body=json.dumps(REVOKE))
        assert (code, answer["accepted"]) == (202, REVOKE)
        code, answer = ask(connection, "GET", "/pool?now=1")
        assert code == 200 and answer["pool"] == ["0:0", "0:1", "0:2", "0:3"]
        assert answer["step"] == 7 and answer["plan"]["actor-TRAIN"]["dp"] == 2
        assert 15 < answer["leaving_s"]["0:1"] <= 20
        assert [e["devices"] for e in answer["waiting"]] == [["0:3"]]
    assert taken(inbox) == [("revoke", ["0:3"])]


def test_bad_requests_get_a_reason_and_change_nothing(inbox: PoolInbox) -> None:
    large = b" " * (MOST_BYTES + 1)
    cases: list[tuple[str, str, bytes | str, dict[str, str], int, str]] = [
        ("GET", "/", "", {}, 404, "nothing but /pool"),
        ("POST", "/other", json.dumps(REVOKE), {}, 404, "nothing but /pool"),
        ("PUT", "/pool", "", {}, 405, ""),
        ("OPTIONS", "/pool", "", {}, 405, ""),
        ("POST", "/pool", "lost", {}, 400, "is no JSON"),
        ("POST", "/pool", b"\xff\xfe", {}, 400, "is no JSON"),
        ("POST", "/pool", b"[" * 50_000, {}, 400, "is no JSON"),
        ("POST", "/pool", "[1]", {}, 400, "one JSON object"),
        ("POST", "/pool", '{"change": "lost", "devices": ["0:9"]}', {}, 400, "0:9 does not exist"),
        ("POST", "/pool", '{"change": "lost"}', {}, 400, "devices is missing"),
        ("POST", "/pool", large, {}, 413, "65536 bytes"),
        ("POST", "/pool", json.dumps(REVOKE), {"Content_Type": "text/plain"}, 415, "json"),
        ("POST", "/pool", "", {"Content_Length": "-4"}, 411, "Content-Length"),
    ]
    with client(inbox) as connection:
        for method, path, body, headers, code, reason in cases:
            got, answer = ask(connection, method, path, body, **headers)
            assert (got, reason in answer["error"]) == (code, True), (method, path, body[:20])
        with socket.create_connection((connection.host, connection.port or 0)) as raw:
            raw.sendall(b"NONSENSE\r\n\r\n")
            assert b" 400 " in raw.recv(1000)
        with socket.create_connection((connection.host, connection.port or 0)) as raw:
            raw.sendall(b"POST /pool HTTP/1.1\r\nContent-Length: 10\r\n")  # and goes away
        assert ask(connection, "GET")[0] == 200
    assert taken(inbox) == []


def test_a_token_is_asked_of_every_request(
    inbox: PoolInbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    with client(inbox, str(file)) as connection:
        assert ask(connection, "GET")[0] == 401
        for given in ("Bearer other", "s3cret", "Bearer s3cret\u00e9"):
            assert ask(connection, "POST", body="{}", Authorization=given)[0] == 401
        assert ask(connection, "GET", Authorization="Bearer s3cret")[0] == 200
    monkeypatch.setenv(TOKEN_VARIABLE, "other")
    with client(inbox) as connection:
        assert ask(connection, "GET")[0] == 401
        assert ask(connection, "GET", Authorization="Bearer other")[0] == 200


def test_elsewhere_than_on_this_machine_it_needs_a_token(
    inbox: PoolInbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)

    def refused(address: str, token_file: str = "") -> str:
        opened = open_hook(address, token_file, inbox.submit, inbox.to_json)
        with pytest.raises(ConfigError) as caught, opened:
            pass
        assert "\n" not in str(caught.value)
        return str(caught.value)

    for address in ("0.0.0.0:0", "some.host.example:80", "[::]:0"):
        assert "there is no token; set control.pool_hook_token_file" in refused(address)
    for address in ("8642", ":8642", "127.0.0.1:http", "127.0.0.1:70000"):
        assert "must be HOST:PORT" in refused(address)
    assert "cannot be read: No such file" in refused("127.0.0.1:0", str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    assert "must hold one line" in refused("127.0.0.1:0", str(tmp_path / "empty"))
    with socket.socket() as taken_port:
        taken_port.bind(("127.0.0.1", 0))
        taken_port.listen()
        said = refused(f"127.0.0.1:{taken_port.getsockname()[1]}")
    assert "cannot listen at 127.0.0.1" in said and "Address already in use" in said
    (tmp_path / "token").write_text("s3cret")
    with open_hook("0.0.0.0:0", str(tmp_path / "token"), inbox.submit, inbox.to_json) as url:
        assert url.startswith("http://0.0.0.0:")
    assert parse_address("[::1]:80") == ("::1", 80)


# --- as configured ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_ask_for_an_end_at_the_boundary(number: int) -> None:
    before = signal.getsignal(number)
    with loop._interrupts() as asked:
        assert not asked.is_set()
        os.kill(os.getpid(), number)
        assert asked.wait(10)
    assert signal.getsignal(number) is before


def test_sources_are_those_of_the_configuration(tmp_path: Path) -> None:
    config = tiny_run_config()
    config.checkpoint.every = 1
    config.control.pool_file = str(tmp_path / "pool.jsonl")
    with pytest.raises(ConfigError, match=r"control\.pool_file is given, but no control\.policy"):
        parse_config(config)
    config.control.policy = "payback"
    config.control.pool_hook = "127.0.0.1:0"
    checked = parse_config(config)
    with open_pool_sources(checked, is_main=True) as sources:
        assert sources.address.startswith("http://127.0.0.1:")
        sources.inbox.publish(status())
        (tmp_path / "pool.jsonl").write_text(json.dumps(REVOKE) + "\nnothing\n")
        events, said = sources.take()
        assert [e.change.value for e in events] == ["revoke"] and len(said) == 1
    with open_pool_sources(checked, is_main=False) as sources:
        assert sources.file is None and not sources.address
    config.control.pool_hook = ""
    config.control.pool_hook_token_file = "token"
    with pytest.raises(ConfigError, match=r"pool_hook_token_file is given, but no control\.pool_h"):
        parse_config(config)
