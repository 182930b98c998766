"""Processes as they are known to those that did not start them: by id and start, and by their session.

A driver leads a session of its own. All that it starts stays in it, also Spark's Python workers, which make themselves
a group of processes; and the system gives the session's number to no other process while one of its processes lives.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import psutil

#: Seconds by which two looks at a process' start may differ: the system computes it from its own clock.
_SAME_START = 1.5
_TEXT = re.compile(r"(\d{1,9}):(\d{1,12}\.\d\d)")


@dataclass(frozen=True)
class ProcessId:
    """A process, never mistaken for a later one of the same number.

    Args:
        pid: its number.
        started: seconds since the epoch.
    """

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Of a process that is there.

        Raises:
            ProcessLookupError: it is not.
        """
        try:
            return cls(pid, round(psutil.Process(pid).create_time(), 2))
        except psutil.NoSuchProcess:
            raise ProcessLookupError(f"process {pid} must run. Received: none") from None

    @classmethod
    def parse(cls, text: str | None) -> ProcessId | None:
        """From what `str` gave; None for what it did not give."""
        match = _TEXT.fullmatch(text or "")
        return None if match is None else cls(int(match[1]), float(match[2]))

    def __str__(self) -> str:
        return f"{self.pid}:{self.started:.2f}"

    def alive(self) -> bool:
        """Return whether it still runs."""
        try:
            process = psutil.Process(self.pid)
            return self._is(process) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def terminate(self) -> None:
        """Asks it to end, if it is there."""
        _send(self.pid, signal.SIGTERM, self.alive)

    def session(self) -> list[int]:
        """The processes of the session that it leads or has led, but for those that only wait to be forgotten."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if not self._is(psutil.Process(self.pid)):
                return []  # another one has its number: nothing of the session is left
        return [pid for pid in psutil.pids() if _session_of(pid) == self.pid]

    def kill_session(self) -> bool:
        """Kills what is there of its session; whether nothing was left to kill."""
        processes = self.session()
        for pid in processes:
            _send(pid, signal.SIGKILL, partial(self._has, pid))
        return not processes

    def _has(self, pid: int) -> bool:
        return _session_of(pid) == self.pid

    def _is(self, process: psutil.Process) -> bool:
        return bool(abs(process.create_time() - self.started) < _SAME_START)


def _send(pid: int, number: signal.Signals, is_it: Callable[[], bool]) -> None:
    """Sends a signal to a process for which ``is_it`` holds, and to no other that has got its number meanwhile.

    What is held on to is looked at: where that is another process by now, what is held on to is gone.
    """
    with contextlib.suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):  # not on Linux
            if is_it():
                os.kill(pid, number)
            return
        held = os.pidfd_open(pid)
        try:
            if is_it():
                signal.pidfd_send_signal(held, number)
        finally:
            os.close(held)


def _session_of(pid: int) -> int | None:
    try:
        session = os.getsid(pid)
        return None if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE else session
    except (OSError, psutil.NoSuchProcess):
        return None
