"""Time, random numbers, threads, connections, files and processes, in one object that is passed to its users.

`REAL` is that of the system, and the default. A simulation passes another `World`, in which one thread runs at a time,
time advances when all threads wait, and connections and files are in memory: the same code then runs in any order,
which a seed determines.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from distkeras.ps.world.files import Files, open_files, scratch
from distkeras.ps.world.processes import Child, ChildProcess
from distkeras.ps.world.shared_memory import AnonymousFile, SharedMemory, map_shared
from distkeras.ps.world.streams import Listener, Stream, TcpListener, connect


class Lock(AbstractContextManager[bool], Protocol):
    """Like `threading.Lock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...


class Condition(AbstractContextManager[bool], Protocol):
    """Like `threading.Condition`."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...


class Flag(Protocol):
    """Like `threading.Event`."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Thread(Protocol):
    """Like `threading.Thread`; `start` raises a RuntimeError if the system cannot start another thread."""

    @property
    def name(self) -> str: ...
    @property
    def ident(self) -> int | None: ...
    def start(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class World:
    """The system's time, threads, connections, files and processes."""

    #: The monotonic clock, and the time since the epoch, in seconds.
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)
    #: Returns a random number between two others. It uses the system's source, so that it is independent of users'
    #: seeds and differs in forked processes.
    uniform = staticmethod(random.SystemRandom().uniform)
    #: Random bytes that cannot be guessed.
    token = staticmethod(secrets.token_bytes)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def lock(self) -> Lock:
        return threading.Lock()

    def reentrant_lock(self) -> Lock:
        """Return a new lock that its holder may acquire again."""
        return threading.RLock()

    def condition(self, lock: Lock | None = None) -> Condition:
        """Return a condition around ``lock``, or around a new one."""
        return threading.Condition(lock)  # type: ignore[arg-type]  # one of this world's

    def event(self) -> Flag:
        return threading.Event()

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """Return a thread that calls ``target`` once it is started, and that does not delay the process' exit."""
        return threading.Thread(target=target, name=name, daemon=True)

    def connect(self, address: tuple[str, int], timeout: float) -> Stream:
        return connect(address, timeout)

    def listen(self, host: str, port: int) -> Listener:
        return TcpListener(host, port)

    def files(self, uri: str, *, create: bool = True) -> Files:
        return open_files(uri, create=create)

    def scratch(self, size: int) -> memoryview:
        """Return ``size`` bytes of an unnamed file, which is freed with them; raise OSError if the disk is full."""
        return scratch(size)

    def share(self, size: int) -> SharedMemory:
        """Return ``size`` bytes of memory that another process of this host may map: see `AnonymousFile`."""
        return AnonymousFile(size)

    def map_shared(self, place: str, size: int) -> memoryview:
        """Return memory that another process has created with `share`: see `shared_memory.map_shared`."""
        return map_shared(place, size)

    def spawn(self, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        return ChildProcess(command, environment)


#: The system's world, and the default.
REAL = World()
