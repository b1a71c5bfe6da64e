"""The register of a job: who lives, which processes form the world now, and what each is to do.

One supervisor keeps it, the leader. It holds no socket and no process: it hears reports, is told
the time, and answers with the order that goes to every slot. An epoch is one world of processes:

    GATHER -> RUN -> STOP or KILL -> GATHER -> ...      a slot came, left or was lost; a crash
              RUN -> FINISH -> END                      a worker ended for good
"""

import dataclasses
import enum
import signal
from collections.abc import Callable, Iterable, Mapping

from nereus_jax.elastic.exit_codes import INTERRUPTED, Ending, ending, in_words, job_code
from nereus_jax.elastic.messages import Action, Order, Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """How long is waited for what.

    Attributes:
      beat_s: between two reports and orders.
      silence_s: after this a worker without its leader is ended; half as much later the leader
        counts a silent slot as lost.
      join_s: for all slots at the start of a job.
      finish_s: for the other workers after one has ended.
    """

    beat_s: float = 1.0
    silence_s: float = 15.0
    join_s: float = 300.0
    finish_s: float = 30.0

    @property
    def lost_s(self) -> float:
        """Silence after which a slot is lost: by then its supervisor has ended its worker."""
        return 1.5 * self.silence_s


class Phase(enum.Enum):
    """Where the register is."""

    GATHER = "gather"
    RUN = "run"
    STOP = "stop"
    KILL = "kill"
    FINISH = "finish"
    END = "end"


ACTIONS = {
    Phase.GATHER: Action.WAIT,
    Phase.RUN: Action.RUN,
    Phase.STOP: Action.STOP,
    Phase.KILL: Action.KILL,
    Phase.FINISH: Action.RUN,
    Phase.END: Action.END,
}
MAX_STRIKES = 3
"""Crashes in a row without a new checkpoint that end a job."""


@dataclasses.dataclass(kw_only=True)
class Seen:
    """What is known of a slot that is connected."""

    address: str
    report: Report
    heard_s: float


class Register:
    """Keeps the members of a job.

    Args:
      num_slots: of the job.
      leader: the slot that keeps this register.
      timing: see there.
      new_coordinator: a fresh host:port on the leader's machine, for process 0.
      progress: the step of the newest checkpoint, -1 without one.
      now_s: any clock that only goes forward.
      epoch: the last one that there was; 0 founds a job, and then all slots are waited for.
      members: the slots of that epoch that may live, without the one that led it.
      resuming: the job was founded before, and all that knew of it are gone: what does not come in
        `join_s` is done without.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        leader: int,
        timing: Timing,
        new_coordinator: Callable[[], str],
        progress: Callable[[], int],
        now_s: float,
        epoch: int = 0,
        members: Iterable[int] = (),
        resuming: bool = False,
    ) -> None:
        self._leader, self._timing = leader, timing
        self._new_coordinator, self._progress = new_coordinator, progress
        self._founding, self._resuming = epoch == 0, resuming
        self._all_slots = frozenset(range(num_slots))
        self._slots: dict[int, Seen] = {}
        self._unsure_until_s = {s: now_s + timing.lost_s for s in members if s != leader}
        self._epoch = epoch
        self._phase = Phase.GATHER if self._founding else Phase.KILL
        self._members: dict[int, str] = {}
        self._coordinator = ""
        self._code, self._reason, self._error = 0, "", ""
        if not self._founding:
            self._reason = "the leader was lost"
        self._strikes, self._progress_at_start = 0, -1
        self._deadline_s = now_s + timing.join_s if self._founding else now_s
        self._final_s = now_s

    @property
    def unsure(self) -> frozenset[int]:
        """Slots that are lost, but may have a worker that still runs."""
        return frozenset(self._unsure_until_s)

    @property
    def is_between_epochs(self) -> bool:
        """Whether no worker runs, and none is about to."""
        return self._phase is Phase.GATHER

    def is_alive(self, slot: int) -> bool:
        """Whether the slot is connected."""
        return slot in self._slots

    def hear(self, slot: int, address: str, report: Report, now_s: float) -> None:
        """Takes a slot's report."""
        self._slots[slot] = Seen(address=address, report=report, heard_s=now_s)
        self._unsure_until_s.pop(slot, None)
        if self._founding and report.epoch:
            # The job is older than this leader, and some of its slots may be gone for good.
            self._founding = False
            self._deadline_s = now_s + self._timing.lost_s

    def lose(self, slot: int, now_s: float) -> None:
        """A slot's connection broke; a worker of it may run on until `bury`, or for a while."""
        seen = self._slots.pop(slot, None)
        if seen is not None and slot in self._members and self._phase is not Phase.GATHER:
            self._unsure_until_s[slot] = now_s + self._timing.lost_s

    def bury(self, slot: int) -> None:
        """A lost slot's process is known to be gone, and with it its worker."""
        self._unsure_until_s.pop(slot, None)

    def advance(self, now_s: float) -> Order:
        """Draws what follows from what was heard; gives the order that holds now."""
        silent_since_s = now_s - self._timing.lost_s
        self._slots = {s: x for s, x in self._slots.items() if x.heard_s > silent_since_s}
        self._unsure_until_s = {s: t for s, t in self._unsure_until_s.items() if t > now_s}
        before = None
        while before is not self._phase:
            before = self._phase
            self._step(now_s)
        return Order(
            epoch=self._epoch,
            action=ACTIONS[self._phase],
            members=dict(self._members),
            leader=self._leader,
            coordinator=self._coordinator,
            code=self._code,
            reason=self._reason,
            error=self._error,
        )

    def _step(self, now_s: float) -> None:
        if self._phase is Phase.GATHER:
            self._gather(now_s)
        elif self._phase is Phase.RUN:
            self._run(now_s)
        elif self._phase is Phase.STOP:
            self._stop(now_s)
        elif self._phase is Phase.KILL and not self._unsure_until_s and self._have_obeyed():
            self._phase = Phase.GATHER
        elif self._phase is Phase.FINISH:
            self._finish(now_s)

    def _enter(self, phase: Phase, reason: str) -> None:
        self._phase, self._reason = phase, reason

    def _end(self, code: int, reason: str, error: str = "") -> None:
        self._code, self._error = code, error
        self._enter(Phase.END, reason)

    def _gather(self, now_s: float) -> None:
        """Starts an epoch as soon as everybody who is to be in it is there."""
        if any(seen.report.interrupted for seen in self._slots.values()):
            return self._end(INTERRUPTED, "interrupted")
        staying = {s: x.address for s, x in self._slots.items() if not x.report.leaving}
        if not staying:
            return self._end(0, "all slots have left") if self._slots else None
        if self._leader not in staying:
            return None  # it goes as soon as it sees this, and another one leads
        absent = sorted(self._all_slots - self._slots.keys())
        if absent and now_s < self._deadline_s:
            self._reason = f"waiting for slots {', '.join(map(str, absent))}"
            return None
        if absent and self._founding and not self._resuming:
            error = (
                f"the supervisors of slots {', '.join(map(str, absent))} did not come in "
                f"{self._timing.join_s:.0f} s; start `nereus train --elastic` for each process"
            )
            return self._end(1, "slots are missing", error)
        self._founding, self._deadline_s = False, now_s
        self._epoch = 1 + max([self._epoch, *(x.report.epoch for x in self._slots.values())])
        self._members = staying
        self._coordinator = self._new_coordinator()
        self._progress_at_start = self._progress()
        return self._enter(Phase.RUN, "")

    def _run(self, now_s: float) -> None:
        if lost := self._lost():
            return self._enter(Phase.KILL, f"slot {lost[0]} is lost")
        if codes := self._codes():
            return self._ended(codes, now_s)
        if leaving := [s for s in self._members if self._slots[s].report.leaving]:
            return self._enter(Phase.STOP, f"slot {leaving[0]} leaves")
        others = {s: x for s, x in self._slots.items() if s not in self._members}
        if new := [s for s, x in sorted(others.items()) if not x.report.leaving]:
            return self._enter(Phase.STOP, f"slot {new[0]} joins")
        return None

    def _lost(self) -> list[int]:
        return sorted(self._members.keys() - self._slots.keys())

    def _codes(self) -> dict[int, int]:
        """Exit codes of the workers of this epoch that have ended."""
        return {
            slot: seen.report.code
            for slot, seen in self._slots.items()
            if slot in self._members
            and seen.report.epoch == self._epoch
            and seen.report.code is not None
        }

    def _ended(self, codes: Mapping[int, int], now_s: float) -> None:
        """Draws what follows from workers that have ended."""
        for slot, code in codes.items():
            if ending(code) is Ending.CRASH:
                return self._crash(slot, code)
        slot = max(codes, key=lambda s: abs(codes[s]))  # a mistake says more than a success
        self._code = job_code(codes[slot])
        self._final_s = now_s
        return self._enter(Phase.FINISH, f"the worker of slot {slot} ended {in_words(codes[slot])}")

    def _crash(self, slot: int, code: int) -> None:
        step = self._progress()
        self._strikes = self._strikes + 1 if step <= self._progress_at_start else 1
        how = f"the worker of slot {slot} ended {in_words(code)}"
        if self._strikes < MAX_STRIKES:
            return self._enter(Phase.KILL, how)
        since = f"checkpoint of step {step}" if step >= 0 else "start, without a checkpoint"
        return self._end(
            1,
            how,
            f"{how}: {self._strikes} crashes since the {since}; mend the cause and run the same "
            f"command again",
        )

    def _stop(self, now_s: float) -> None:
        """The workers save and end by themselves."""
        if lost := self._lost():
            return self._enter(Phase.KILL, f"slot {lost[0]} is lost")
        codes = self._codes()
        wrong = {s: c for s, c in codes.items() if c not in (0, -signal.SIGTERM)}
        if wrong:
            return self._ended(wrong, now_s)
        if self._have_obeyed():
            self._phase = Phase.GATHER
        elif -signal.SIGTERM in codes.values():
            # It was still starting, with nothing to save; the others would wait for it.
            self._phase = Phase.KILL
        elif not codes:
            self._final_s = now_s
        elif now_s >= self._final_s + self._timing.finish_s:
            self._phase = Phase.KILL
        return None

    def _finish(self, now_s: float) -> None:
        """A worker ended for good; the others are about to."""
        lost = self._lost()
        if lost and self._code not in (0, INTERRUPTED):
            # It was not heard after the error, and its loss may well be the cause.
            return self._enter(Phase.KILL, f"slot {lost[0]} is lost")
        members = [self._slots[s] for s in self._members if s in self._slots]
        if any(seen.heard_s < self._final_s for seen in members):
            return None
        running = any(seen.report.running for seen in members)
        grace_s = 0 if self._code == INTERRUPTED else self._timing.finish_s
        if not running or now_s >= self._final_s + grace_s:
            self._end(self._code, self._reason)
        return None

    def _have_obeyed(self) -> bool:
        """Whether every slot has seen the order, and has no worker."""
        tag = f"{self._leader} {self._epoch} {ACTIONS[self._phase]}"
        reports = [seen.report for seen in self._slots.values()]
        return all(report.obeys == tag and not report.running for report in reports)
