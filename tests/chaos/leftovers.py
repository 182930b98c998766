"""What a run leaves behind: processes, ports, threads, files."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil

from chaos import targets
from chaos.store import Store

_PATIENCE = 30.0
#: Seconds that a job's threads and its server have to end after it. Spark gives a task that it has cancelled two
#: seconds before it kills its Python, which is what ends a server that is stopped at that moment.
_PATIENCE_OF_A_JOB = 10.0


class Before:
    """How things stand before the run; to be asked afterwards what is left.

    Args:
        mark: of the processes that the run starts.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._threads = set(threading.enumerate())
        self._ports = set(targets.listening(psutil.Process()))

    def left(self) -> list[str]:
        """One line a leftover. Processes get half a minute to end."""
        deadline = time.monotonic() + _PATIENCE
        while (found := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        ports = set(targets.listening(psutil.Process())) - self._ports
        return found + [f"port {port}" for port in sorted(ports)] + self._new_threads()

    def _processes(self) -> list[str]:
        alive = {process.pid: process for process in targets.marked(self._mark)}
        alive |= {process.pid: process for process in psutil.Process().children(recursive=True)}  # zombies too
        return [f"process {pid}: {_command(process)}" for pid, process in alive.items()]

    def _new_threads(self) -> list[str]:
        new = [thread for thread in threading.enumerate() if thread not in self._threads]
        return [f"thread {thread.name}" for thread in new if not _of_a_library(thread)]


def of_a_job(before: set[threading.Thread]) -> list[str]:
    """What a job must not leave to the next one: its threads and its server."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(("distkeras-", "ps-"))]
    for thread in threads:
        thread.join(_PATIENCE_OF_A_JOB)
    left = [f"thread {thread.name}" for thread in threads if thread.is_alive() and thread not in before]
    deadline = time.monotonic() + _PATIENCE_OF_A_JOB
    while (servers := targets.servers()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left + [f"process {server.pid}: a parameter server" for server in servers]


def files(scratch: Path, *folders: str) -> list[str]:
    """Files and folders of ours that are left in the folders for temporary ones."""
    found = []
    for folder in folders:
        for path, names, more in os.walk(scratch / folder):
            found += [f"file {Path(path, name)}" for name in names + more if name.startswith("distkeras")]
    return found


def drafts(folder: Path, store: Store) -> list[str]:
    """Half-written snapshots.

    A server that dies in its last write leaves one to the next server, which removes it; so does one whose store fails.
    Such a draft is younger than all snapshots.
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
