"""The hosts of a small cluster, a small disk for snapshots, and checks of what a run leaves behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from chaos import targets
from chaos.store import Store
from distkeras.ps.world.files import file_system

_SECONDS = 30.0


class Hosts:
    """A number of hosts, until they are closed.

    Args:
        count: the number of hosts.

    Attributes:
        driver: address of this machine as the hosts reach it.
        addresses: addresses of the hosts.
        whole: why the hosts cannot be cut off; empty if they can.
    """

    def __init__(self, count: int) -> None:
        number = os.getpid()
        network = f"10.214.{number % 250}"
        self._bridge = f"ch{number % 10**6}"
        self._names = [f"chaos-{number}-{host}" for host in range(count)]
        self._outside = [f"{self._bridge}o{host}" for host in range(count)]
        self.driver, self.addresses = f"{network}.1", [f"{network}.{host + 2}" for host in range(count)]
        self.whole = ""
        try:
            self._make()
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            output = getattr(error, "stderr", None)
            self.whole = f"network namespaces are not allowed here: {output.strip() if output else error}"
            self._names, self._outside, self._bridge = [], [], ""
            self.driver, self.addresses = "127.0.0.1", ["127.0.0.1"] * count
            if sys.platform == "linux":  # Other systems have only one loopback address.
                self.addresses = [f"127.0.0.{host + 2}" for host in range(count)]

    def _make(self) -> None:
        if shutil.which("ip") is None:
            raise OSError("there is no `ip`")
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.driver}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host, (name, outside) in enumerate(zip(self._names, self._outside, strict=True)):
            inside = f"{self._bridge}i{host}"
            _ip("netns", "add", name)
            _ip("link", "add", inside, "netns", name, "type", "veth", "peer", "name", outside)
            _ip("link", "set", outside, "master", self._bridge, "up")
            _ip("-n", name, "address", "add", f"{self.addresses[host]}/24", "dev", inside)
            for link in ("lo", inside):
                _ip("-n", name, "link", "set", link, "up")

    def command(self, host: int) -> list[str]:
        """Return the words that precede a command to run it on the host."""
        return ["ip", "netns", "exec", self._names[host]] if self._names else []

    def cut_off(self, host: int) -> None:
        """Drop all packets from and to the host from now on, without an error to any process."""
        _ip("link", "set", self._outside[host], "nomaster")

    def connect(self, host: int) -> None:
        """Undo `cut_off`."""
        _ip("link", "set", self._outside[host], "master", self._bridge)

    def close(self) -> None:
        """Remove the hosts."""
        for name in self._names:
            with suppress(OSError, subprocess.SubprocessError):
                _ip("netns", "del", name)
        for link in (*self._outside, self._bridge):
            with suppress(OSError, subprocess.SubprocessError):
                _ip("link", "del", link)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=_SECONDS)


_BYTES = 16 << 20
_BALLAST = "ballast"


class Disk:
    """A tmpfs of a few megabytes or, if this user may not mount one, a folder that can be made read-only.

    Args:
        folder: its mount point, which is created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={_BYTES}", "tmpfs", str(folder)]
        try:
            self.mounted = subprocess.run(command, capture_output=True).returncode == 0
        except OSError:  # The program does not exist.
            self.mounted = False
        self.how = f"a tmpfs of {_BYTES >> 20} MiB" if self.mounted else "a folder closed to writing (no mount here)"
        self.full = False

    def fill(self) -> None:
        """Fill the disk; this is repeated at intervals, because deletions in the meantime free space."""
        self.full = True
        if not self.mounted:
            self._set_modes(0o555)
            return
        try:
            with (self.folder / _BALLAST).open("ab", buffering=0) as file:
                for size in (1 << 16, 1 << 12):
                    piece = bytes(size)
                    while file.write(piece) == size:
                        pass
        except OSError:  # The disk is full.
            return

    def free(self) -> None:
        """Free the filled space."""
        self.full = False
        if self.mounted:
            (self.folder / _BALLAST).unlink(missing_ok=True)
        else:
            self._set_modes(0o755)

    def _set_modes(self, mode: int) -> None:
        for folder in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
            folder.chmod(mode)

    def close(self) -> None:
        """Unmount the disk."""
        self.free()
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True, capture_output=True)
            self.mounted = False


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


def left_by_a_job(before: set[threading.Thread]) -> list[str]:
    """Return what a job must not leave to the next one: its threads and its server."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(("distkeras-", "ps-"))]
    for thread in threads:
        thread.join(_PATIENCE_OF_A_JOB)
    left = [f"thread {thread.name}" for thread in threads if thread.is_alive() and thread not in before]
    deadline = time.monotonic() + _PATIENCE_OF_A_JOB
    while (servers := targets.servers()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left + [f"process {server.pid}: a parameter server" for server in servers]


def files_left(scratch: Path, *folders: str) -> list[str]:
    """Return the project's files and folders that are left in the folders for temporary files."""
    found = []
    for folder in folders:
        for path, names, more in os.walk(scratch / folder):
            found += [f"file {Path(path, name)}" for name in names + more if name.startswith("distkeras")]
    return found


def drafts_left(place: str, store: Store) -> list[str]:
    """Return incomplete snapshots in a folder, a path or a URI.

    A server that dies in its last write, or whose store fails, leaves one that the next server removes. Such a draft is
    newer than all snapshots.
    """
    from pyarrow import fs

    system, root = file_system(place)
    selector = fs.FileSelector(root, recursive=True, allow_not_found=True)
    files = system.get_file_info(selector)
    written = {file.path: file.mtime.timestamp() for file in files if file.type == fs.FileType.File}
    youngest = max((time for path, time in written.items() if path.endswith(".dks")), default=0.0)
    drafts = {path: time for path, time in written.items() if path.endswith(".part")}
    return [f"file {path}" for path, time in drafts.items() if time < youngest or not store.tore(time)]


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.status()} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return "gone"


def _of_a_library(thread: threading.Thread) -> bool:
    library = type(thread).__module__.startswith(("py4j", "pyspark", "tqdm"))
    # Clients of S3 keep their connections, each of which has a thread of the server.
    return library or thread.name.endswith("(process_request_thread)") or not thread.is_alive()
