"""The possible targets of faults, found from outside: the job's processes and their connections."""

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

#: In the environment of every process that the program starts, so that it is found even if its parent is dead.
MARKER = "DISTKERAS_CHAOS"

_T = TypeVar("_T")

#: The number of this system call is the same on all architectures of Linux.
_PIDFD_GETFD = 438
#: States of a socket, as the system writes them.
_ESTABLISHED, _LISTENS = "01", "0A"
#: The system writes an address as a number in the machine's byte order.
_BYTES = -1 if sys.byteorder == "little" else 1


def mark() -> str:
    """Mark the processes that this one starts from now on."""
    os.environ[MARKER] = uuid.uuid4().hex
    return os.environ[MARKER]


def marked(mark: str) -> list[psutil.Process]:
    """Return all living processes with ``mark``, except this one."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and _query(process, lambda one: one.environ().get(MARKER), None) == mark
    ]


def _query(process: psutil.Process, query: Callable[[psutil.Process], _T], default: _T) -> _T:
    try:
        return default if process.status() == psutil.STATUS_ZOMBIE else query(process)
    except (psutil.Error, OSError):
        return default


def _children(has: Callable[[psutil.Process, list[str]], bool]) -> list[psutil.Process]:
    """Return the living descendants of this process, oldest first."""
    found = [
        process
        for process in psutil.Process().children(recursive=True)
        if _query(process, lambda one: has(one, one.cmdline()), False)
    ]
    return sorted(found, key=lambda process: process.pid)


def executors() -> list[psutil.Process]:
    """Return the JVMs of executors."""
    return _children(lambda process, words: any(word.endswith("CoarseGrainedExecutorBackend") for word in words))


def workers() -> list[psutil.Process]:
    """Return the Python workers that train; if some are connected to a server, only those."""
    found = servers()
    ports = {port for server in found for port in listening(server)}
    forks = [fork for fork in _forks() if fork not in found]
    return [fork for fork in forks if connections(fork, ports)] or forks


def servers() -> list[psutil.Process]:
    """Return the parameter servers: separate processes, and those Python workers that listen."""
    own = _children(lambda process, words: "distkeras.ps" in words)
    return [*own, *(fork for fork in _forks() if listening(fork))]


def _forks() -> list[psutil.Process]:
    """Return Spark's Python workers, which its daemons have forked."""
    return _children(
        lambda process, words: "pyspark.daemon" in words and "pyspark.daemon" in (process.parent() or process).cmdline()
    )


def listening(process: psutil.Process) -> list[int]:
    """Return the TCP ports at which the process listens."""
    return [each.port for each in _sockets(process) if each.state == _LISTENS]


def addresses(process: psutil.Process) -> list[tuple[str, int]]:
    """Return the IPv4 addresses at which the process listens."""
    found = [each for each in _sockets(process) if each.state == _LISTENS and len(each.address) == 8]
    return [(socket.inet_ntoa(bytes.fromhex(each.address)[::_BYTES]), each.port) for each in found]


def connections(process: psutil.Process, ports: set[int]) -> list[int]:
    """Return the file descriptors of the process' established connections to one of ``ports``."""
    found = _sockets(process)
    return [each.descriptor for each in found if each.state == _ESTABLISHED and each.peer_port in ports]


class _Socket(NamedTuple):
    descriptor: int
    address: str
    port: int
    peer_port: int
    state: str


def _sockets(process: psutil.Process) -> list[_Socket]:
    """Return the process' TCP sockets; psutil would search for them in this process' network."""
    home = Path("/proc", str(process.pid))
    descriptors, found = {}, []
    try:
        for path in (home / "fd").iterdir():
            with suppress(OSError):  # The descriptor was closed in the meantime.
                if (target := str(path.readlink())).startswith("socket:["):
                    descriptors[target[8:-1]] = int(path.name)
        for table in ("tcp", "tcp6"):
            for line in (home / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                (address, port), (_, peer_port) = (words[end].split(":") for end in (1, 2))
                if words[9] in descriptors:
                    own = descriptors[words[9]], address
                    found.append(_Socket(*own, int(port, 16), int(peer_port, 16), words[3]))
    except OSError:  # The process has ended.
        return []
    return found


def cut(process: psutil.Process, descriptor: int, *, reset: bool) -> bool:
    """End a connection of another process as a broken network would, without its cooperation and without privileges.

    Args:
        process: the process that has the connection.
        descriptor: the socket's descriptor in that process.
        reset: whether both ends see a reset; otherwise both see the end of the stream.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:  # The process has ended.
        return False
    try:
        copy = libc.syscall(_PIDFD_GETFD, handle, descriptor, 0)
    finally:
        os.close(handle)
    if copy < 0:
        error = ctypes.get_errno()
        if error == 1:  # This is EPERM.
            raise PermissionError(error, "this system does not let a parent take its children's sockets")
        return False
    with socket.socket(fileno=copy) as sock, suppress(OSError):
        if not reset:
            sock.shutdown(socket.SHUT_RDWR)
        # Connecting to an address without a family is how Linux dissolves a connection.
        elif libc.connect(copy, bytes(16), 16):
            return False
    return True
