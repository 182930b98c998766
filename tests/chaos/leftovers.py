"""Checks of what a run leaves behind: processes, ports, threads, files."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil

from chaos import targets
from chaos.store import Store

_PATIENCE = 30.0
#: Seconds that a job's threads and its server have to end after it. Spark waits two seconds after it has cancelled a
#: task before it kills the task's Python, and only that ends a server that is suspended at the time.
_PATIENCE_OF_A_JOB = 10.0


class Before:
    """The state before the run, with which leftovers are found afterwards.

    Args:
        mark: mark of the processes that the run starts.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._threads = set(threading.enumerate())
        self._ports = set(targets.listening(psutil.Process()))

    def left(self) -> list[str]:
        """Return one line for each leftover. Processes have half a minute to end."""
        deadline = time.monotonic() + _PATIENCE
        while (found := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        ports = set(targets.listening(psutil.Process())) - self._ports
        return found + [f"port {port}" for port in sorted(ports)] + self._new_threads()

    def _processes(self) -> list[str]:
        alive = {process.pid: process for process in targets.marked(self._mark)}
        # This includes zombies.
        alive |= {process.pid: process for process in psutil.Process().children(recursive=True)}
        return [f"process {pid}: {_command(process)}" for pid, process in alive.items()]

    def _new_threads(self) -> list[str]:
        new = [thread for thread in threading.enumerate() if thread not in self._threads]
        return [f"thread {thread.name}" for thread in new if not _of_a_library(thread)]


def of_a_job(before: set[threading.Thread]) -> list[str]:
    """Return what a job must not leave to the next one: its threads and its server."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(("distkeras-", "ps-"))]
    for thread in threads:
        thread.join(_PATIENCE_OF_A_JOB)
    left = [f"thread {thread.name}" for thread in threads if thread.is_alive() and thread not in before]
    deadline = time.monotonic() + _PATIENCE_OF_A_JOB
    while (servers := targets.servers()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left + [f"process {server.pid}: a parameter server" for server in servers]


def files(scratch: Path, *folders: str) -> list[str]:
    """Return the project's files and folders that are left in the folders for temporary files."""
    found = []
    for folder in folders:
        for path, names, more in os.walk(scratch / folder):
            found += [f"file {Path(path, name)}" for name in names + more if name.startswith("distkeras")]
    return found


def drafts(folder: Path, store: Store) -> list[str]:
    """Return incomplete snapshots.

    A server that dies in its last write, or whose store fails, leaves one that the next server removes. Such a draft is
    newer than all snapshots.
    """
    youngest = max((path.stat().st_mtime for path in folder.rglob("*.dks")), default=0.0)
    found = [path for path in folder.rglob("*.part") if path.stat().st_mtime < youngest or not store.tore(path)]
    return [f"file {path}" for path in found]


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.status()} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return "gone"


def _of_a_library(thread: threading.Thread) -> bool:
    return type(thread).__module__.startswith(("py4j", "pyspark", "tqdm")) or not thread.is_alive()
