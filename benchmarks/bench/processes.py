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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from distkeras.ps.world.streams import SOCKET_BUFFER

_SPAWN = get_context("spawn")  # A fork would lose TensorFlow's threads.
_PROCESSES = 8
#: Seconds for a process to start, or to answer after the end of its run.
_PATIENCE = 120.0

Where = tuple[str, int]


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


@dataclass(frozen=True)
class Service:
    """A server in a separate process."""

    address: Where
    pid: int


@contextmanager
def serving(make: Callable[[], Callable[[socket.socket], None]]) -> Iterator[Service]:
    """Yield a server process with a thread per connection.

    Args:
        make: picklable function; it is called in the new process and returns the function that each connection's
            thread calls.
    """
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs, make), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Service(_answer(ours, 0.0), process.pid or 0)
    finally:
        ours.close()  # Closing the pipe ends the server, as the death of this process would.
        process.join(_PATIENCE)


def _serve(pipe: Connection, make: Callable[[], Callable[[socket.socket], None]]) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    threading.Thread(target=_accept, args=(listener, make()), daemon=True).start()
    pipe.send(listener.getsockname()[:2])
    with suppress(EOFError):
        pipe.recv()


def _accept(listener: socket.socket, converse: Callable[[socket.socket], None]) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=converse, args=(sock,), daemon=True).start()


class Fleet:
    """Clients in separate processes, each connected to several servers: the same clients for every side of a case.

    Args:
        clients: number of clients.
        sides: for each side, the picklable function that creates its client with a given number.
    """

    def __init__(self, clients: int, sides: Mapping[str, Callable[[int], ExchangeClient]]) -> None:
        processes = min(clients, _PROCESSES)
        self._pipes: list[Connection] = []
        self._processes = []
        for first in range(processes):
            ours, theirs = _SPAWN.Pipe()
            numbers = range(first, clients, processes)
            process = _SPAWN.Process(target=_run_clients, args=(theirs, numbers, dict(sides)), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Fleet:
        for pipe in self._pipes:
            _answer(pipe, 0.0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # Closing the pipe ends the process.
        for process in self._processes:
            process.join(_PATIENCE)

    @property
    def pids(self) -> list[int]:
        """Return the pids of the clients' processes."""
        return [process.pid or 0 for process in self._processes]

    def run(self, side: str, seconds: float, *, count: int = 0) -> Exchanges:
        """Let all clients exchange at the same time, as fast as they can.

        Args:
            side: side whose server they use.
            seconds: duration; each client ends with its first exchange after it.
            count: number of exchanges of each client, instead of ``seconds``, for clients that wait for each other.
        """
        for pipe in self._pipes:
            pipe.send((side, seconds, count))
        return _total([_answer(pipe, seconds) for pipe in self._pipes])


def _run_clients(pipe: Connection, numbers: range, sides: dict[str, Callable[[int], ExchangeClient]]) -> None:
    clients = {side: [connect(number) for number in numbers] for side, connect in sides.items()}
    pipe.send(True)
    with ThreadPoolExecutor(len(numbers)) as pool:
        while True:
            try:
                side, seconds, count = pipe.recv()
            except EOFError:
                return
            pipe.send(_total(list(pool.map(partial(_work, seconds=seconds, most=count), clients[side]))))


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


def _answer(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds + _PATIENCE):
        raise TimeoutError(f"a process must answer within {_PATIENCE:g} s")
    return pipe.recv()  # There is an EOFError if the process ended without an answer; it has logged the reason.


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
