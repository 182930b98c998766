"""Servers and clients in separate processes, and the kernel's figures of a process.

As in production, no client shares an interpreter lock with the server or, up to `_PROCESSES` clients, with another
client; more clients are threads that are evenly distributed over these processes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from distkeras.ps.world.streams import SOCKET_BUFFER

_SPAWN = get_context("spawn")  # A fork would lose the threads and devices of a backend.
_PROCESSES = 8
#: Seconds for a process to start, to answer, or to end.
PATIENCE = 300.0

Where = tuple[str, int]


class Caller:
    """A process that calls functions of modules, each with picklable arguments; it ends with its pipe."""

    def __init__(self) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve_calls, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(PATIENCE)

    @property
    def pid(self) -> int:
        """Return the pid of the process."""
        return self._process.pid or 0

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function there; `result` must follow."""
        self._pipe.send((function, arguments))

    def result(self, seconds: float = 0.0) -> Any:
        """Return what the function returned, which takes at least ``seconds``."""
        if not self._pipe.poll(seconds + PATIENCE):
            raise TimeoutError(f"a process must answer within {PATIENCE:g} s")
        return self._pipe.recv()  # There is an EOFError if the process ended; it has logged the reason.

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function there, and return its result."""
        self.begin(function, *arguments)
        return self.result()


def _serve_calls(pipe: Connection) -> None:
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(function(*arguments))


class Exchanges(NamedTuple):
    """The results of all clients together: exchanges, and exchanges a second."""

    exchanges: int
    rate: float


class ExchangeClient(Protocol):
    """A connected client of a server. A picklable callable creates it in a client process, from its number."""

    def exchange(self) -> None:
        """Do one round trip."""


def tune(sock: socket.socket) -> socket.socket:
    """Set the options of the project's own channels: buffer sizes, and no delay of small segments."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    return sock


class Service(NamedTuple):
    """A server in a separate process."""

    address: Where
    pid: int


@contextmanager
def serving(make: Callable[[], Callable[[socket.socket], None]]) -> Iterator[Service]:
    """Yield a server process; ``make`` is called in it, and returns the function of each connection's thread."""
    with Caller() as process:
        yield Service(process.call(_listen, make), process.pid)


def _listen(make: Callable[[], Callable[[socket.socket], None]]) -> Where:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    threading.Thread(target=_accept, args=(listener, make()), daemon=True).start()
    host, port = listener.getsockname()
    return host, port


def _accept(listener: socket.socket, converse: Callable[[socket.socket], None]) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=converse, args=(sock,), daemon=True).start()


class Fleet:
    """Clients in separate processes, each connected to several servers: the same clients for every side of a case.

    ``sides`` has, for each side, the picklable function that creates its client with a given number.
    """

    def __init__(self, clients: int, sides: Mapping[str, Callable[[int], ExchangeClient]]) -> None:
        count = min(clients, _PROCESSES)
        self._processes = [Caller() for _ in range(count)]
        for first, process in enumerate(self._processes):
            process.begin(_connect, range(first, clients, count), dict(sides))

    def __enter__(self) -> Fleet:
        for process in self._processes:
            process.result()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            process.__exit__(*exc_info)

    @property
    def pids(self) -> list[int]:
        """Return the pids of the clients' processes."""
        return [process.pid for process in self._processes]

    def run(self, side: str, seconds: float, *, count: int = 0) -> Exchanges:
        """Let all clients exchange at the same time, as fast as they can, with the server of ``side``.

        Each client ends with its first exchange after ``seconds``, or after ``count`` exchanges, which is for clients
        that wait for each other.
        """
        for process in self._processes:
            process.begin(_run_clients, side, seconds, count)
        return _total([process.result(seconds) for process in self._processes])


#: The clients of this process, by the name of their side.
_CLIENTS: dict[str, list[ExchangeClient]] = {}
_pool = cache(ThreadPoolExecutor)


def _connect(numbers: range, sides: dict[str, Callable[[int], ExchangeClient]]) -> None:
    _CLIENTS.update({side: [connect(number) for number in numbers] for side, connect in sides.items()})


def _run_clients(side: str, seconds: float, count: int) -> Exchanges:
    clients = _CLIENTS[side]
    return _total(list(_pool(len(clients)).map(partial(_work, seconds=seconds, most=count), clients)))


def _total(parts: list[Exchanges]) -> Exchanges:
    return Exchanges(sum(part.exchanges for part in parts), sum(part.rate for part in parts))


def _work(client: ExchangeClient, seconds: float, most: int) -> Exchanges:
    began = now = time.perf_counter()
    count = 0
    while count < most if most else now - began < seconds:
        client.exchange()
        count += 1
        now = time.perf_counter()
    return Exchanges(count, count / (now - began))


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
