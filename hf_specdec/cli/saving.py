"""A run of `hf-specdec generate` that saves its texts: one process, or several that share them.

Boundary: who writes what and when, and what is said if a process ends before its time. Generating
is the caller's, the files are `ResultsFile`'s, and who is still there is the `RollCall`'s.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hf_specdec.cli.processes import Processes
from hf_specdec.cli.results_file import ResultsFile, WriteRow
from hf_specdec.cli.roll_call import LostProcessError, RollCall, died, ranges

# A shared folder's files may be seen late on other machines (NFS: a minute).
_VISIBLE = 90.0
# A launcher that stops the processes gives them half a minute, and less on some. Nobody waits for
# the dead of the same host, so that it is over at once unless a process is slow.
_SETTLE = 10.0


@dataclass(frozen=True)
class SavedRun:
    """What is done, and by whom.

    Attributes:
        results: where the rows go.
        settings: what rows are made with, for JSON.
        count: of prompts; their indices are 0 to count - 1.
        processes: that share them.
        log: takes messages.
        overwrite: begin anew, whatever is there.
    """

    results: ResultsFile
    settings: dict[str, Any]
    count: int
    processes: Processes
    log: Console
    overwrite: bool = False

    def run(self, generate: Callable[[list[int], WriteRow], None]) -> None:
        """Have every prompt answered once, in order.

        Args:
            generate: writes a row for each of some prompts.

        Raises:
            LostProcessError: another process died or failed. What is finished is kept.
            ValueError: a file that can't be continued, or that another run writes.
        """
        with _sigterm_ends():
            try:
                with ExitStack() as stack:
                    left = self._begin(stack)
                    mine = self.processes.share(left)
                    if mine:
                        part = self.processes.rank if self.processes.count > 1 else None
                        with self.results.append(part) as write:
                            generate(mine, write)
                    if self.processes.is_main:
                        self._finish(left)
                self._leave("finished")
            except (SystemExit, KeyboardInterrupt):
                _ignore_sigterm()
                self._leave("stopped")
                self._say_what_is_left()
                raise
            except BaseException as error:
                reason = (str(error).splitlines() or [""])[0]
                self._leave("failed", f"{type(error).__name__}: {reason}")
                if self.processes.is_main and self.processes.roll is not None:
                    # It may keep the store in which the others read that.
                    self.processes.roll.settle(_SETTLE)
                raise

    def _begin(self, stack: ExitStack) -> list[int]:
        """Take the lock; returns the prompts that are left for all processes."""
        roll = self.processes.roll
        if not self.processes.is_main:
            assert roll is not None
            begun = json.loads(self._word_of_main(roll))
            self._wait_until_visible(begun["fingerprint"])
            self.results.check(self.settings)
            stack.enter_context(self.results.lock(self.processes.rank))
        else:
            stack.enter_context(self.results.lock())
            self.results.prepare(self.settings, self.overwrite)
            if roll is not None:
                roll.tell("begun", json.dumps({"fingerprint": self.results.fingerprint()}))
        finished = self.results.finished()
        if finished and self.processes.is_main:
            self.log.print(f"{len(finished)} of {self.count} prompts are done already")
        return [index for index in range(self.count) if index not in finished]

    def _word_of_main(self, roll: RollCall) -> str:
        try:
            return roll.hear("begun")
        except LostProcessError as error:
            raise LostProcessError(
                f"process {self.processes.rank} has nothing to do: {error}"
            ) from None

    def _wait_until_visible(self, fingerprint: str) -> None:
        until = time.monotonic() + _VISIBLE
        while self.results.fingerprint() != fingerprint:
            if time.monotonic() > until:
                roll = self.processes.roll
                main = roll.member(0) if roll is not None else None
                raise ValueError(
                    f"--output {self.results.path}: process {self.processes.rank} doesn't see the "
                    f"file that process 0 ({main.place if main else 'elsewhere'}) has begun. All "
                    "machines must see the same folder under the same name; without a shared "
                    "folder, run each machine alone, with its own part of the prompts and its own "
                    "--output, and put the files together"
                )
            time.sleep(0.2)

    def _finish(self, left: list[int]) -> None:
        """Wait for the others, then join what all have written."""
        if self.processes.roll is not None:
            lost = self.processes.roll.wait_for_others()
            if lost:
                raise LostProcessError(self._report(left, lost))
        self.results.join()
        missing = set(range(self.count)) - self.results.finished()
        if missing:
            raise ValueError(
                f"prompts {ranges(missing)} have no text in {self.results.path}, though every "
                "process has finished: were its parts moved away? Run the same command again"
            )
        self.log.print(f"{self.count} texts are in {self.results.path}", soft_wrap=True)

    def _leave(self, state: Any, why: str = "") -> None:
        if self.processes.roll is not None:
            self.processes.roll.end(state, why)

    def _say_what_is_left(self) -> None:
        """After a signal: once for all processes, which the launcher has stopped as well."""
        members = self.processes.roll.settle(_SETTLE) if self.processes.roll is not None else {}
        stopped = {rank for rank, m in members.items() if m is not None and m.state == "stopped"}
        if any(rank < self.processes.rank for rank in stopped):
            return  # that one says it
        lost = {
            rank: f"({member.place}) failed: {member.why}"
            if member is not None and member.state == "failed"
            else died(member)
            for rank, member in members.items()
            if member is None or member.state in ("working", "failed")
        }
        finished = self.results.finished()
        left = [index for index in range(self.count) if index not in finished]
        self.log.print(self._report(left, lost), highlight=False, markup=False, soft_wrap=True)

    def _report(self, left: list[int], lost: dict[int, str]) -> str:
        """What is missing, by whom, and how to go on.

        Args:
            left: prompts that were left when the run began.
            lost: processes, and what became of them.
        """
        missing = set(range(self.count)) - self.results.finished(parts=True)
        lines = []
        for rank, fate in sorted(lost.items()):
            share = set(self.processes.share(left, rank))
            lines.append(f"Process {rank} of {self.processes.count} {fate}.")
            if open_ := share & missing:
                lines.append(
                    f"Of its {len(share)} prompts {len(open_)} have no text: {ranges(open_)}."
                )
        lines.append(
            f"{self.count - len(missing)} of {self.count} texts are kept. Run the same command "
            "again to go on where this stopped; the number of processes may change."
        )
        return "\n".join(lines)


class _TerminatedError(SystemExit):
    """SIGTERM, as an exception, so that what is open is closed."""


@contextmanager
def _sigterm_ends() -> Iterator[None]:
    """Inside, SIGTERM raises ``SystemExit`` with the code that a shell would show."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what signals do
        return

    def end(number: int, frame: Any) -> None:
        _ignore_sigterm()
        raise _TerminatedError(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ignore_sigterm() -> None:
    """A second one, while the first is being dealt with, changes nothing."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
