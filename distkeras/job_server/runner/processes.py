"""Processes of a job: their identity, their session, and the lease of a driver that its server cannot see.

A process is visible only from its own machine and PID namespace. A server elsewhere, such as in another container,
observes a driver by its heartbeat, and ends it by a fence.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_TEXT = re.compile(r"(\d{1,9}):(\d{1,15})@([0-9a-f]{16})")
#: Seconds between two heartbeats, and for a fenced driver to end by itself.
_BEAT, _GRACE = 1.0, 30.0


@cache
def process_namespace() -> str:
    """Return an identifier of the place in which processes see each other: a boot of a machine, a PID namespace."""
    try:
        boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not on Linux
        boot, namespace = socket.gethostname(), ""
    return hashlib.sha256(f"{boot}{namespace}".encode()).hexdigest()[:16]


def _started(process: psutil.Process) -> int:
    """Return when a process started, in ticks since the boot, which do not change when the clock is set."""
    try:
        return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            raise psutil.NoSuchProcess(process.pid) from None
        return int(process.create_time() * 100)


@dataclass(frozen=True)
class ProcessId:
    """The unique identity of a process."""

    pid: int
    started: int  # ticks from the boot of its machine to its start
    place: str  # from where it is visible: `process_namespace`

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a running process; raise ProcessLookupError if it does not run."""
        try:
            return cls(pid, _started(psutil.Process(pid)), process_namespace())
        except psutil.NoSuchProcess:
            raise ProcessLookupError(f"process {pid} must run. Received: none") from None

    @classmethod
    def parse(cls, text: str | None) -> ProcessId | None:
        """Return the process that a text of `str` describes; None for another text."""
        match = _TEXT.fullmatch(text or "")
        return None if match is None else cls(int(match[1]), int(match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}@{self.place}"

    @property
    def visible(self) -> bool:
        """Return whether the calling process can see it, so that `alive` and `session` are correct."""
        return self.place == process_namespace()

    def alive(self) -> bool:
        """Return whether it still runs."""
        try:
            process = psutil.Process(self.pid)
            return self._is(process) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def terminate(self) -> None:
        """Send it SIGTERM, if it is alive."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def session(self) -> list[int]:
        """Return the processes of the session that it leads or has led, without zombies."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if not self._is(psutil.Process(self.pid)):
                return []  # its pid was reused: nothing of the session is left
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
        """Kill all processes of its session; return whether there were none."""
        processes = self.session()
        for pid in processes:
            if _session_of(pid) == self.pid:  # still: another process may have its id by now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return not processes

    def _is(self, process: psutil.Process) -> bool:
        return self.visible and _started(process) == self.started


class LeaseRenewal:
    """A context in which a driver writes heartbeats to ``beat``, and ends when a server has fenced it by ``fence``."""

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
            with contextlib.suppress(OSError):  # without heartbeats, the server considers this driver dead
                self._beat.write_text(str(beats))
            if first_allowed(self._fence) > self._attempt:
                log.error("Another server has taken the job from attempt %d: this driver ends.", self._attempt)
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._stop.wait(_GRACE):
                    ProcessId.of(os.getpid()).kill_session()


def first_allowed(fence: Path) -> int:
    """Return the number of the first attempt that a fence allows; 0 if there is no fence."""
    try:
        return int(fence.read_text())
    except (OSError, ValueError):
        return 0


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of this container if that has fewer."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):  # "max", or no control groups
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def _session_of(pid: int) -> int | None:
    try:
        session = os.getsid(pid)
        return None if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE else session
    except (OSError, psutil.NoSuchProcess):
        return None
