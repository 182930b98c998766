"""What can be hit: the job's processes and their connections, found from outside."""

from __future__ import annotations

import ctypes
import os
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import psutil

#: In the environment of everything that the script starts, so that it is found even when its parent is dead.
MARKER = "DISTKERAS_CHAOS"

_T = TypeVar("_T")

#: The number of this system call is the same on all of Linux' architectures.
_PIDFD_GETFD = 438


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
    """Python workers: the forks of Spark's daemons. Those that talk to a server, where there are any."""
    forks = _children(
        lambda process, words: "pyspark.daemon" in words and "pyspark.daemon" in (process.parent() or process).cmdline()
    )
    ports = {port for server in servers() for port in listening(server)}
    return [fork for fork in forks if connections(fork, ports)] or forks


def servers() -> list[psutil.Process]:
    """Parameter servers."""
    return _children(lambda process, words: "distkeras.ps" in words)


def listening(process: psutil.Process) -> list[int]:
    """Its TCP ports."""
    found: list[Any] = _ask_process(process, lambda one: one.net_connections("tcp"), [])
    return [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN]


def connections(process: psutil.Process, ports: set[int]) -> list[int]:
    """File descriptors of its established connections to one of ``ports``."""
    found: list[Any] = _ask_process(process, lambda one: one.net_connections("tcp"), [])
    return [each.fd for each in found if each.status == psutil.CONN_ESTABLISHED and each.raddr.port in ports]


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
