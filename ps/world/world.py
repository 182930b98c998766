"""Time, chance, threads, connections, files and processes, in one object that is passed to the code that needs them.

`REAL` has the system's own and is the default. A simulation hands in another `World`, in which one thread runs
at a time, time passes when all of them wait, and connections and files are in memory: the same code then runs in any
order that a seed says.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from distkeras.ps.world.files import Files, open_files
from distkeras.ps.world.processes import Child, ChildProcess
from distkeras.ps.world.streams import Listener, Stream, TcpListener, connect


class Lock(Protocol):
    """As `threading.Lock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Takes it; False where it is not to be had in ``timeout`` seconds, or at once."""

    def release(self) -> None:
        """Gives it back."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class Condition(Protocol):
    """As `threading.Condition`."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for news, for ``timeout`` seconds; the caller holds the lock."""

    def notify_all(self) -> None:
        """There is news; the caller holds the lock."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class Flag(Protocol):
    """As `threading.Event`."""

    def is_set(self) -> bool:
        """Return whether it was set."""

    def set(self) -> None:
        """Wakes all who wait."""

    def clear(self) -> None:
        """As before it was set."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, for ``timeout`` seconds; whether it is."""


class Thread(Protocol):
    """As `threading.Thread`."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def ident(self) -> int | None:
        """None before it was started."""

    def start(self) -> None:
        """Begins; RuntimeError where the system has no room for it."""

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end, for ``timeout`` seconds."""

    def is_alive(self) -> bool:
        """Return whether it was started and has not ended."""


class World:
    """The system's own."""

    #: Seconds, never going back; and seconds since the epoch.
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)
    #: A random number between two others, of the system: the user's seeds are the user's, and a forked process draws
    #: others; and so many random bytes that they cannot be guessed.
    uniform = staticmethod(random.SystemRandom().uniform)
    token = staticmethod(secrets.token_bytes)

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

    def lock(self) -> Lock:
        """A new lock."""
        return threading.Lock()

    def reentrant_lock(self) -> Lock:
        """One that its holder may take again."""
        return threading.RLock()

    def condition(self, lock: Lock | None = None) -> Condition:
        """A condition around ``lock``, a new one where it is None."""
        return threading.Condition(lock)  # type: ignore[arg-type]  # one of this world's

    def event(self) -> Flag:
        """One that is not set."""
        return threading.Event()

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """Return a thread that calls ``target`` once it is started, and that does not delay the process' exit."""
        return threading.Thread(target=target, name=name, daemon=True)

    def connect(self, address: tuple[str, int], timeout: float) -> Stream:
        """Return a connection to the listener at ``address``, in at most ``timeout`` seconds.

        Raises:
            OSError: nothing listens there, or it was not reached in time.
        """
        return connect(address, timeout)

    def listen(self, host: str, port: int) -> Listener:
        """Takes connections at ``host`` and ``port``; 0: at a port that is free.

        Raises:
            OSError: the port cannot be bound.
        """
        return TcpListener(host, port)

    def files(self, uri: str) -> Files:
        """The files in the directory ``uri``, which is made if it is not there.

        Raises:
            ConfigurationError: nothing opens this URI.
            OSError: the directory cannot be made.
        """
        return open_files(uri)

    def spawn(self, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """A new process.

        Args:
            command: program and arguments.
            environment: all of its variables.

        Raises:
            OSError: it cannot be started.
        """
        return ChildProcess(command, environment)


#: The one that everything runs in.
REAL = World()
