"""Processes of a job: their identity, their session, and how a driver lives on while no server can see it.

A process is visible only from its own machine and PID namespace. A server elsewhere, such as in another container,
knows a driver by its heartbeat, and ends it by a fence.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_TEXT = re.compile(r"(\d{1,9}):(\d{1,15})@([0-9a-f]{16})")
#: Seconds between two heartbeats, and that a driver has to end by itself once it is fenced.
_BEAT, _GRACE = 1.0, 30.0


@cache
def here() -> str:
    """Return the place that processes are visible from: this boot of this machine, and this PID namespace."""
    try:
        boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not on Linux
        boot, namespace = socket.gethostname(), ""
    return hashlib.sha256(f"{boot}{namespace}".encode()).hexdigest()[:16]


def _started(process: psutil.Process) -> int:
    """Return when a process started, in ticks since the boot: seconds since the epoch change with the clock."""
    try:
        return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            raise psutil.NoSuchProcess(process.pid) from None
        return int(process.create_time() * 100)


@dataclass(frozen=True)
class ProcessId:
    """The identity of a process, which no other process ever has.

    Args:
        started: ticks from the boot of its machine to its start.
        place: where it is visible; see `here`.
    """

    pid: int
    started: int
    place: str

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a running process; raise ProcessLookupError if it does not run."""
        try:
            return cls(pid, _started(psutil.Process(pid)), here())
        except psutil.NoSuchProcess:
            raise ProcessLookupError(f"process {pid} must run. Received: none") from None

    @classmethod
    def parse(cls, text: str | None) -> ProcessId | None:
        """Return the process that `str` described; None for another text."""
        match = _TEXT.fullmatch(text or "")
        return None if match is None else cls(int(match[1]), int(match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}@{self.place}"

    @property
    def visible(self) -> bool:
        """Return whether this process can see it, so that `alive` and `session` know the truth."""
        return self.place == here()

    def alive(self) -> bool:
        """Return whether it still runs."""
        try:
            process = psutil.Process(self.pid)
            return self._is(process) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def terminate(self) -> None:
        """Ask it to end, if it is there."""
        _send(self.pid, signal.SIGTERM, self.alive)

    def session(self) -> list[int]:
        """Return the processes of the session that it leads or has led, without zombies."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if not self._is(psutil.Process(self.pid)):
                return []  # another one has its number: nothing of the session is left
        return [pid for pid in psutil.pids() if _session_of(pid) == self.pid]

    def memory(self) -> int:
        """Return the private memory of the processes of its session, in bytes."""
        total = 0
        for pid in self.session():
            with contextlib.suppress(psutil.Error):
                info = psutil.Process(pid).memory_info()
                total += info.rss - getattr(info, "shared", 0)
        return total

    def kill_session(self) -> bool:
        """Kill what is there of its session; return whether nothing was left to kill."""
        processes = self.session()
        for pid in processes:
            _send(pid, signal.SIGKILL, partial(self._has, pid))
        return not processes

    def _has(self, pid: int) -> bool:
        return _session_of(pid) == self.pid

    def _is(self, process: psutil.Process) -> bool:
        return self.visible and _started(process) == self.started


class LeaseRenewal:
    """A context in which a driver has a heartbeat, and ends when a server has fenced it.

    Args:
        beat: file that changes every second.
        fence: file with the number of the first attempt that may still work.
    """

    def __init__(self, beat: Path, fence: Path, attempt: int) -> None:
        self._beat, self._fence, self._attempt = beat, fence, attempt
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distkeras-heartbeat", daemon=True)

    def __enter__(self) -> LeaseRenewal:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join(_GRACE)

    def _run(self) -> None:
        beats = 0
        while not self._stop.wait(_BEAT):
            beats += 1
            with contextlib.suppress(OSError):  # without beats, the server takes this driver for dead
                self._beat.write_text(str(beats))
            if first_allowed(self._fence) > self._attempt:
                log.error("Another server has taken the job from attempt %d: this driver ends.", self._attempt)
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._stop.wait(_GRACE):
                    ProcessId.of(os.getpid()).kill_session()


def first_allowed(fence: Path) -> int:
    """Return the number of the first attempt that a fence allows; 0 where there is none."""
    try:
        return int(fence.read_text())
    except (OSError, ValueError):
        return 0


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of this container where that has fewer."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):  # "max", or no control groups
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def _send(pid: int, number: signal.Signals, is_it: Callable[[], bool]) -> None:
    """Send a signal to a process for which ``is_it`` holds, and to no other that has got its number meanwhile.

    The check comes after the process is held: where another one has its number by then, the held one is gone.
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
