"""What can be hit: the job's processes and their connections, found from outside."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

#: In the environment of everything that the script starts, so that it is found even when its parent is dead.
MARKER = "DISTKERAS_CHAOS"

_T = TypeVar("_T")

#: The number of this system call is the same on all of Linux' architectures.
_PIDFD_GETFD = 438
#: States of a socket, as the system writes them.
_ESTABLISHED, _LISTENS = "01", "0A"
#: It writes an address as a number in the machine's own order.
_BYTES = -1 if sys.byteorder == "little" else 1


def mark() -> str:
    """Marks the processes that this one starts from now on."""
    os.environ[MARKER] = uuid.uuid4().hex
    return os.environ[MARKER]


def marked(mark: str) -> list[psutil.Process]:
    """All living processes with ``mark`` but this one."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and _ask_process(process, lambda one: one.environ().get(MARKER), None) == mark
    ]


def _ask_process(process: psutil.Process, ask: Callable[[psutil.Process], _T], default: _T) -> _T:
    try:
        return default if process.status() == psutil.STATUS_ZOMBIE else ask(process)
    except (psutil.Error, OSError):
        return default


def _children(has: Callable[[psutil.Process, list[str]], bool]) -> list[psutil.Process]:
    """Living descendants of this process, oldest first."""
    found = [
        process
        for process in psutil.Process().children(recursive=True)
        if _ask_process(process, lambda one: has(one, one.cmdline()), False)
    ]
    return sorted(found, key=lambda process: process.pid)


def executors() -> list[psutil.Process]:
    """Executor JVMs."""
    return _children(lambda process, words: any(word.endswith("CoarseGrainedExecutorBackend") for word in words))


def workers() -> list[psutil.Process]:
    """Return the Python workers that train; those that are connected to a server, where there are any."""
    found = servers()
    ports = {port for server in found for port in listening(server)}
    forks = [fork for fork in _forks() if fork not in found]
    return [fork for fork in forks if connections(fork, ports)] or forks


def servers() -> list[psutil.Process]:
    """Return the parameter servers: processes of their own, and among the Python workers those that listen."""
    own = _children(lambda process, words: "distkeras.ps" in words)
    return [*own, *(fork for fork in _forks() if listening(fork))]


def _forks() -> list[psutil.Process]:
    """Return Spark's Python workers, which its daemons have forked."""
    return _children(
        lambda process, words: "pyspark.daemon" in words and "pyspark.daemon" in (process.parent() or process).cmdline()
    )


def listening(process: psutil.Process) -> list[int]:
    """Its TCP ports."""
    return [each.port for each in _sockets(process) if each.state == _LISTENS]


def addresses(process: psutil.Process) -> list[tuple[str, int]]:
    """Where it listens, by IPv4."""
    found = [each for each in _sockets(process) if each.state == _LISTENS and len(each.address) == 8]
    return [(socket.inet_ntoa(bytes.fromhex(each.address)[::_BYTES]), each.port) for each in found]


def connections(process: psutil.Process, ports: set[int]) -> list[int]:
    """File descriptors of its established connections to one of ``ports``."""
    found = _sockets(process)
    return [each.descriptor for each in found if each.state == _ESTABLISHED and each.peer_port in ports]


class _Socket(NamedTuple):
    descriptor: int
    address: str
    port: int
    peer_port: int
    state: str


def _sockets(process: psutil.Process) -> list[_Socket]:
    """Its TCP sockets; psutil would look for them in this process' network."""
    home = Path("/proc", str(process.pid))
    descriptors, found = {}, []
    try:
        for path in (home / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if (target := str(path.readlink())).startswith("socket:["):
                    descriptors[target[8:-1]] = int(path.name)
        for table in ("tcp", "tcp6"):
            for line in (home / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                (address, port), (_, peer_port) = (words[end].split(":") for end in (1, 2))
                if words[9] in descriptors:
                    own = descriptors[words[9]], address
                    found.append(_Socket(*own, int(port, 16), int(peer_port, 16), words[3]))
    except OSError:  # it has ended
        return []
    return found


def cut(process: psutil.Process, descriptor: int, *, reset: bool) -> bool:
    """Ends a connection of another process under its feet, as a broken network would: no cooperation, no privileges.

    Args:
        process: whose.
        descriptor: its socket, in its own numbering.
        reset: both ends see a reset; otherwise both see the end of the stream.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:  # it has ended
        return False
    try:
        copy = libc.syscall(_PIDFD_GETFD, handle, descriptor, 0)
    finally:
        os.close(handle)
    if copy < 0:
        error = ctypes.get_errno()
        if error == 1:  # EPERM
            raise PermissionError(error, "this system does not let a parent take its children's sockets")
        return False
    with socket.socket(fileno=copy) as sock, suppress(OSError):
        if not reset:
            sock.shutdown(socket.SHUT_RDWR)
        elif libc.connect(copy, bytes(16), 16):  # to an address of no family: how Linux dissolves a connection
            return False
    return True
