"""Which processes of a run are at work, which have ended, and which will not be heard of again.

Every process writes a line about itself into the launcher's key-value store, again and again, and
reads the others' lines. Nothing ever blocks on another process: one that dies is noticed by its
silence, and at once by its process id on the same machine.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

State = Literal["working", "finished", "stopped", "failed"]
# Seconds between two signs of life.
_BEAT = 2.0
# A process on another machine is lost after so many seconds without one. Long, as reading a model's
# weights can keep Python from anything else.
_SILENCE = 300.0
_POLL = 0.2


class LostProcessError(OSError):
    """A process of the run died or failed, so that its work is missing."""


@dataclass(frozen=True)
class Member:
    """A process's line.

    Attributes:
        state: ``"stopped"`` from outside, or ``"failed"`` by an error.
        why: the error.
        beat: how many lines it has written.
    """

    rank: int
    host: str
    pid: int
    state: State = "working"
    why: str = ""
    beat: int = 0

    @property
    def place(self) -> str:
        """Where it runs."""
        return f"pid {self.pid} on {self.host}"


class RollCall:
    """The lines of all processes.

    Args:
        store: a ``torch.distributed.Store`` that all share.
        rank: of this process.
        count: of all processes.
        clock: seconds, like ``time.monotonic``.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._others = [other for other in range(count) if other != rank]
        self._me = Member(rank, socket.gethostname(), os.getpid())
        self._clock = clock
        # Rank -> beat last seen, and when.
        self._seen: dict[int, tuple[int, float]] = dict.fromkeys(self._others, (-1, clock()))
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, daemon=True)

    def begin(self) -> None:
        """Show signs of life from now on."""
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """Write this process's line."""
        with self._mutex:
            self._me = replace(self._me, beat=self._me.beat + 1)
            self._store.set(f"member/{self._me.rank}", json.dumps(asdict(self._me)))

    def end(self, state: State, why: str = "") -> None:
        """Say how this process ends; it shows no more signs of life."""
        self._ended.set()
        with self._mutex:
            self._me = replace(self._me, state=state, why=why)
        try:
            self.beat()
        except RuntimeError:
            return  # the store has ended with the process or launcher that kept it

    def tell(self, name: str, text: str) -> None:
        """Leave a text for the others."""
        self._store.set(f"text/{name}", text)

    def hear(self, name: str) -> str:
        """The text that the main process leaves, once it does.

        Raises:
            LostProcessError: the main process has ended without it.
        """
        try:
            while not self._store.check([f"text/{name}"]):
                absent = self.absent()
                if 0 in absent:
                    raise LostProcessError(f"process 0 {absent[0]}")
                time.sleep(_POLL)
            return self._store.get(f"text/{name}").decode()
        except RuntimeError as error:
            raise _unreachable(error) from None

    def wait_for_others(self) -> dict[int, str]:
        """Return once all others have ended, one way or another.

        Returns:
            Those that have not finished, and what became of them.
        """
        try:
            while True:
                absent = self.absent()
                if self._finished() | absent.keys() >= set(self._others):
                    return absent
                time.sleep(_POLL)
        except RuntimeError as error:
            raise _unreachable(error) from None

    def settle(self, seconds: float) -> dict[int, Member | None]:
        """The others' last lines, once all have ended or the time is up."""
        until = self._clock() + seconds
        members: dict[int, Member | None] = dict.fromkeys(self._others)
        try:
            while True:
                members |= {rank: self.member(rank) for rank in self._others}
                if not any(map(self._may_speak, members.values())) or self._clock() >= until:
                    break
                time.sleep(_POLL)
            self._part(members, until)
        except RuntimeError:
            pass  # the store has ended with whoever kept it: what was read before counts
        return members

    def _part(self, members: dict[int, Member | None], until: float) -> None:
        """Let process 0, which may keep the store, leave behind all that still read it."""
        if self._me.rank:
            self._store.set(f"parted/{self._me.rank}", "yes")
            return
        readers = [f"parted/{m.rank}" for m in members.values() if m and m.state == "stopped"]
        while readers and not self._store.check(readers) and self._clock() < until:
            time.sleep(_POLL)

    def _may_speak(self, member: Member | None) -> bool:
        """Whether another line may come from a process: it works, and isn't known to be dead."""
        if member is None:
            return True
        here = member.host == self._me.host
        return member.state == "working" and (not here or _is_alive(member.pid))

    def absent(self) -> dict[int, str]:
        """Processes that will not finish, and what became of them."""
        found = {rank: self._fate(rank, self.member(rank)) for rank in self._others}
        return {rank: fate for rank, fate in found.items() if fate is not None}

    def member(self, rank: int) -> Member | None:
        """The last line of a process, ``None`` before the first."""
        key = f"member/{rank}"
        # A get would wait for it, and everything else of this process's with it.
        return Member(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _finished(self) -> set[int]:
        members = (self.member(rank) for rank in self._others)
        return {m.rank for m in members if m is not None and m.state == "finished"}

    def _fate(self, rank: int, member: Member | None) -> str | None:
        """What became of a process; ``None`` while it works, or once it has finished."""
        now = self._clock()
        beat, since = self._seen[rank]
        if member is not None and member.beat != beat:
            self._seen[rank] = (member.beat, now)
            since = now
        silence = now - since
        if member is None:
            return f"has not begun in {silence:.0f} s" if silence > _SILENCE else None
        if member.state == "failed":
            return f"({member.place}) failed: {member.why}"
        if member.state == "stopped":
            return f"({member.place}) was stopped"
        if member.state == "finished":
            return None
        if silence > 2 * _BEAT and member.host == self._me.host and not _is_alive(member.pid):
            return died(member)
        if silence > _SILENCE:
            return f"({member.place}) has shown no sign of life for {silence:.0f} s"
        return None

    def _keep_beating(self) -> None:
        while not self._ended.wait(_BEAT):
            try:
                self.beat()
            except RuntimeError:
                return  # no store, no listener


def died(member: Member | None) -> str:
    """What is said of a process that ended without saying why."""
    place = "" if member is None else f"({member.place}) "
    return (
        f"{place}died without a word: it was killed, for example for want of memory, or its "
        "machine is gone; the launcher prints its exit code"
    )


def ranges(numbers: Collection[int], limit: int = 8) -> str:
    """Whole numbers for a reader: ``3, 5-9, 12``, and how many more there are."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and number == groups[-1][1] + 1:
            groups[-1][1] = number
        else:
            groups.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in groups[:limit]]
    rest = sum(b - a + 1 for a, b in groups[limit:])
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _is_alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # elsewhere signal 0 is no question
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _unreachable(error: RuntimeError) -> LostProcessError:
    reason = str(error).splitlines()[0]
    return LostProcessError(
        "the store at MASTER_ADDR, which process 0 or the launcher keeps, can't be reached any "
        f"more ({reason})"
    )
