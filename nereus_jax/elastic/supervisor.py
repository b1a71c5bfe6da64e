"""The supervisor of one slot: has a worker when the leader says so, and leads when it must.

There is one for each process of the job. It imports no jax, so that nothing that ends a worker ends
it. All of it runs on one thread; every wait has an end.
"""

import asyncio
import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Mapping
from typing import Any

from nereus_jax.core.errors import ConfigError, StorageError, WorldError
from nereus_jax.elastic.exit_codes import INTERRUPTED
from nereus_jax.elastic.lease import Lease, beat, claim, finish, read_lease
from nereus_jax.elastic.links import (
    Link,
    call,
    free_port,
    host_of,
    is_gone,
    join_host_port,
    listen,
    peer_host,
)
from nereus_jax.elastic.messages import (
    MAX_LINE_BYTES,
    Action,
    Order,
    Report,
    order_message,
    read_order,
    read_report,
    report_message,
)
from nereus_jax.elastic.register import Register
from nereus_jax.elastic.screen import say, show
from nereus_jax.elastic.settings import Settings
from nereus_jax.elastic.worker import Worker

QUIET_S = 5.0
"""A supervisor says what it waits for only after this long."""


def supervise(settings: Settings) -> int:
    """Runs a slot to the end of the job; returns the exit code.

    Raises:
      ConfigError: another job is at the address, or another process has this slot.
      WorldError: the supervisors did not find each other, or the workers crash again and again.
      StorageError: the run directory cannot be used.
    """
    return asyncio.run(Supervisor(settings).run())


class Supervisor:
    """One slot."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._timing = settings, settings.timing
        self._changed = asyncio.Event()
        self._worker = Worker(self._changed.set)
        self._leaving = self._interrupted = False
        self._order: Order | None = None
        """The last one that was obeyed."""
        self._address = join_host_port(settings.host, settings.port) if settings.slot == 0 else ""
        self._port = 0
        self._register: Register | None = None
        """Only while it leads."""
        self._followers: dict[int, Link] = {}
        self._leader_address = ""
        self._resuming = False

    async def run(self) -> int:
        """The exit code."""
        server = await self._listen()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        loop.add_signal_handler(signal.SIGUSR1, self._on_interrupt)  # the job's end is announced
        code = None
        try:
            while code is None:
                found = await self._find_leader()
                if isinstance(found, int):
                    code = found
                elif isinstance(found, Link):
                    code = await self._follow(found)
                else:
                    code = await self._lead(found)
            return code
        finally:
            await self._worker.kill()
            server.close()

    async def _listen(self) -> asyncio.Server:
        port = self._settings.port if self._settings.slot == 0 else 0
        try:
            sock = listen(port)
        except OSError as error:
            raise ConfigError(
                f"--elastic: slot 0 cannot listen on port {port} of this machine, the one after "
                f"that of --coordinator ({error.strerror or error}); choose two free ports"
            ) from error
        self._port = sock.getsockname()[1]
        return await asyncio.start_server(self._accept, sock=sock, limit=MAX_LINE_BYTES)

    def _on_interrupt(self) -> None:
        self._interrupted = True
        self._worker.interrupt()
        self._changed.set()

    def _on_terminate(self) -> None:
        self._leaving = True
        self._changed.set()

    def _report(self) -> Report:
        worker = self._worker
        return Report(
            epoch=worker.epoch,
            running=worker.running,
            code=worker.code,
            leaving=self._leaving,
            interrupted=self._interrupted,
            obeys=self._order.tag if self._order is not None else "",
        )

    async def _pause(self, seconds: float) -> None:
        """Waits for so long, or until something changes here."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return
        self._changed.clear()

    # Finding the leader, or becoming it.

    async def _find_leader(self) -> "Link | Lease | int":
        """A link to the leader, or the term that this slot leads, or the exit code of the job."""
        settings, timing = self._settings, self._timing
        deadline_s = time.monotonic() + timing.join_s
        said, watched = False, None
        watched_since_s = 0.0
        while True:
            if self._interrupted or self._leaving:
                return INTERRUPTED if self._interrupted else 0
            lease = await asyncio.to_thread(read_lease, settings.workdir)
            if lease is not None and lease.code is not None:
                if self._order is not None:
                    return lease.code
                lease = dataclasses.replace(lease, address="")  # of an earlier run
            if lease != watched:
                watched, watched_since_s = lease, time.monotonic()
            link, gone, waits = await self._ask_around(lease.address if lease else "")
            if link is not None:
                return link
            stale = time.monotonic() - watched_since_s > timing.silence_s
            leaderless = lease is None or not lease.address or lease.address in gone or stale
            if leaderless and not waits:
                term = 1 + (lease.term if lease is not None else 0)
                if await asyncio.to_thread(claim, settings.workdir, term, self._address):
                    self._resuming = lease is not None and bool(lease.address)
                    return Lease(term=term, address=self._address)
            if not said and time.monotonic() > deadline_s - timing.join_s + QUIET_S:
                said = True
                say(f"looking for the leader, for at most {timing.join_s:.0f} s")
            if time.monotonic() > deadline_s:
                raise WorldError(
                    f"no leader took slot {settings.slot} in {timing.join_s:.0f} s; start process "
                    f"0, correct --coordinator, or end another process with this --process-id"
                )
            await self._pause(timing.beat_s / 2)

    async def _ask_around(self, leader: str) -> tuple[Link | None, set[str], bool]:
        """Calls whoever may lead.

        Returns:
          A link to the leader; the addresses where no leader is; whether this slot leaves it to
          another one to lead.
        """
        settings = self._settings
        members = dict(self._order.members) if self._order is not None else {}
        lower = [members[s] for s in sorted(members) if s < settings.slot]
        first = [leader, join_host_port(settings.host, settings.port), *lower]
        asked: set[str] = {self._address, ""}
        gone: set[str] = {self._address}
        waits = settings.slot != 0 and not members
        hello = {"slot": settings.slot, "port": self._port, "job": settings.job}
        while first:
            address = first.pop(0)
            if address in asked:
                continue
            asked.add(address)
            answer = await call(address, hello, 2 * self._timing.beat_s)
            if answer.link is not None:
                self._address, self._leader_address = answer.own_address, address
                return answer.link, gone, waits
            if answer.elsewhere is not None:
                gone.add(address)  # who answers so does not lead
                first.append(answer.elsewhere)
                waits = waits or address in lower
            elif answer.gone:
                gone.add(address)
        return None, gone, waits

    # Following.

    async def _follow(self, link: Link) -> int | None:
        """Obeys a leader; returns the exit code, or None when the leader is lost."""
        reading = asyncio.create_task(self._read_orders(link))
        try:
            while not reading.done():
                link.send(report_message(self._report()))
                await self._pause(self._timing.beat_s)
            return reading.result()
        finally:
            reading.cancel()
            link.close()
            self._leader_address = ""
            await self._worker.kill()  # a world without its leader does not go on

    async def _read_orders(self, link: Link) -> int | None:
        try:
            while True:
                message = await link.receive(self._timing.silence_s)
                order = read_order(message)
                code = await self._obey(order)
                if code is not None:
                    return code
                link.send(report_message(self._report()))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        finally:
            self._changed.set()

    async def _obey(self, order: Order) -> int | None:
        """Does what an order says; returns the exit code if that is the end."""
        if self._order is None or order.tag != self._order.tag:
            show(order)
        worker = self._worker
        is_member = self._settings.slot in order.members
        if order.action is Action.RUN and is_member:
            if worker.epoch < order.epoch:
                await worker.kill()
                await worker.start(self._settings.worker_command(order), order.epoch)
                if self._interrupted:
                    worker.interrupt()
        elif order.action is Action.STOP:
            worker.stop(time.monotonic())
        else:
            await worker.kill()
        self._order = order
        if order.action is Action.END:
            if order.error:
                raise WorldError(order.error)
            return order.code
        idle = order.action is Action.WAIT or (order.action is Action.RUN and not is_member)
        return 0 if self._leaving and idle and not self._leads else None

    @property
    def _leads(self) -> bool:
        return self._register is not None

    # Leading.

    async def _lead(self, lease: Lease) -> int | None:
        """Keeps the register; returns the exit code, or None when another one leads."""
        settings = self._settings
        last = self._order
        members = (
            {} if last is None else {s: a for s, a in last.members.items() if s != last.leader}
        )
        self._register = register = Register(
            num_slots=settings.num_slots,
            leader=settings.slot,
            timing=self._timing,
            new_coordinator=lambda: join_host_port(host_of(self._address), free_port()),
            progress=settings.progress,
            now_s=time.monotonic(),
            epoch=0 if last is None else last.epoch,
            members=members,
            resuming=self._resuming,
        )
        start_s = time.monotonic()
        keeping = asyncio.create_task(self._keep_lease(lease))
        burying = asyncio.create_task(self._bury(register, members))
        try:
            while not keeping.done():
                now_s = time.monotonic()
                register.hear(settings.slot, self._address, self._report(), now_s)
                order = register.advance(now_s)
                for follower in self._followers.values():
                    follower.send(order_message(order))
                if order.action is Action.END:
                    with contextlib.suppress(StorageError):  # a full disk may be what ends the job
                        await asyncio.to_thread(finish, settings.workdir, lease, order.code)
                    await self._say_goodbye()
                if order.epoch == 0 and order.reason and now_s - start_s > QUIET_S:
                    start_s = math.inf
                    say(f"{order.reason}, for at most {self._timing.join_s:.0f} s")
                code = await self._obey(order)
                if code is not None:
                    return code
                if self._leaving and register.is_between_epochs:
                    return 0
                await self._pause(self._timing.beat_s)
            return keeping.result()
        finally:
            self._register = None
            keeping.cancel()
            burying.cancel()
            for follower in self._followers.values():
                follower.close()
            self._followers.clear()
            await self._worker.kill()

    async def _keep_lease(self, lease: Lease) -> None:
        """Shows that this leader lives, until another one has the lease."""
        failing_since_s: float | None = None
        while True:
            try:
                if not await asyncio.to_thread(beat, self._settings.workdir, lease.term):
                    break
                failing_since_s = None
            except OSError as error:
                now_s = time.monotonic()
                failing_since_s = now_s if failing_since_s is None else failing_since_s
                if now_s - failing_since_s > self._timing.silence_s / 2:
                    self._changed.set()
                    raise StorageError(
                        f"{self._settings.workdir} cannot be written any more: {error.strerror}"
                    ) from error
            await asyncio.sleep(self._timing.beat_s)
        self._changed.set()

    async def _bury(self, register: Register, before: Mapping[int, str]) -> None:
        """Asks the machines of lost slots whether their processes are gone: it saves waiting."""
        while True:
            members = {**before, **(self._order.members if self._order is not None else {})}
            for slot in register.unsure:
                if slot in members and await is_gone(members[slot], self._timing.beat_s):
                    register.bury(slot)
                    self._changed.set()
            await asyncio.sleep(self._timing.beat_s / 4)

    async def _say_goodbye(self) -> None:
        """Waits a little until the followers have left."""
        deadline_s = time.monotonic() + 5 * self._timing.beat_s
        while self._followers and time.monotonic() < deadline_s:
            await asyncio.sleep(self._timing.beat_s / 10)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers another supervisor, and hears it as long as this one leads."""
        link = Link(reader=reader, writer=writer)
        try:
            hello = await link.receive(self._timing.silence_s)
            slot, port = int(hello["slot"]), int(hello["port"])
            refusal = self._refusal(slot, hello)
            if refusal:
                link.send({"refused": refusal})
            elif self._register is None:
                link.send({"elsewhere": self._leader_address})
            elif self._register.is_alive(slot):
                link.send({"taken": slot})  # or its old connection has not been missed yet
            else:
                address = join_host_port(peer_host(writer), port)
                link.send({"welcome": address})
                await self._hear(self._register, slot, address, link)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        except asyncio.CancelledError:  # at the end; asyncio would print that nobody waited for it
            pass
        finally:
            link.close()

    def _refusal(self, slot: int, hello: dict[str, Any]) -> str:
        if hello.get("job") != self._settings.job:
            return (
                f"slot {slot} has other values of --coordinator or --num-processes than slot "
                f"{self._settings.slot}; give all processes the same"
            )
        if slot == self._settings.slot:
            return f"another process has --process-id={slot}; give each process its own"
        return ""

    async def _hear(self, register: Register, slot: int, address: str, link: Link) -> None:
        try:
            register.hear(slot, address, Report(), time.monotonic())
            self._followers[slot] = link
            said: Report | None = None
            while self._register is register:
                report = read_report(await link.receive(self._timing.lost_s))
                register.hear(slot, address, report, time.monotonic())
                if report != said:  # else two supervisors would answer each other without end
                    said = report
                    self._changed.set()
        finally:
            if self._followers.get(slot) is link:
                del self._followers[slot]
                register.lose(slot, time.monotonic())
                self._changed.set()
