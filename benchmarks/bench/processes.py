"""Servers and clients as processes of their own, and what the kernel says of a process.

As in production, no client shares an interpreter lock with the server or, up to `_PROCESSES` of them, with another
client; beyond that they share processes as threads, evenly.
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

_SPAWN = get_context("spawn")  # a fork would take TensorFlow's threads along, or rather not
_PROCESSES = 8
#: For a process to come up, or to answer beyond the time that it is to run, in seconds.
_PATIENCE = 120.0

Where = tuple[str, int]


class Exchanges(NamedTuple):
    """What clients did: exchanges, and exchanges a second of all of them together."""

    exchanges: int
    rate: float


class ExchangeClient(Protocol):
    """One client of some server, connected. Made in a client process by a picklable callable, from its number."""

    def exchange(self) -> None:
        """One round trip."""


def tune(sock: socket.socket) -> socket.socket:
    """The options that the project's own channels have: buffers, and no waiting for more to send."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    return sock


@dataclass(frozen=True)
class Service:
    """A server in a process of its own."""

    address: Where
    pid: int


@contextmanager
def serving(make: Callable[[], Callable[[socket.socket], None]], host: str = "127.0.0.1") -> Iterator[Service]:
    """A server process with a thread a connection.

    Args:
        make: picklable; called in the new process, gives what each connection's thread runs on its socket.
        host: address to bind.
    """
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs, make, host), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Service(_answer(ours, 0.0), process.pid or 0)
    finally:
        ours.close()  # which ends it, as the death of this process would
        process.join(_PATIENCE)


def _serve(pipe: Connection, make: Callable[[], Callable[[socket.socket], None]], host: str) -> None:
    listener = socket.create_server((host, 0), backlog=1024)
    threading.Thread(target=_accept, args=(listener, make()), daemon=True).start()
    pipe.send(listener.getsockname()[:2])
    with suppress(EOFError):
        pipe.recv()


def _accept(listener: socket.socket, converse: Callable[[socket.socket], None]) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=converse, args=(sock,), daemon=True).start()


class Fleet:
    """Clients in processes of their own, each connected to several servers: the same clients for every side of a case.

    Args:
        clients: how many.
        sides: for each side, what makes its client of a given number; picklable.
    """

    def __init__(self, clients: int, sides: Mapping[str, Callable[[int], ExchangeClient]]) -> None:
        self.clients = clients
        processes = min(clients, _PROCESSES)
        self._members: list[tuple[Connection, int]] = []
        self._processes = []
        for first in range(processes):
            ours, theirs = _SPAWN.Pipe()
            numbers = range(first, clients, processes)
            process = _SPAWN.Process(target=_run_clients, args=(theirs, numbers, dict(sides)), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._members.append((ours, first))
        self._stride = processes

    def __enter__(self) -> Fleet:
        for pipe, _ in self._members:
            _answer(pipe, 0.0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pipe, _ in self._members:
            pipe.close()  # the end of its orders ends a process
        for process in self._processes:
            process.join(_PATIENCE)

    @property
    def pids(self) -> list[int]:
        """The clients' processes."""
        return [process.pid or 0 for process in self._processes]

    def run(
        self, side: str, seconds: float, *, pause: float = 0.0, active: int | None = None, count: int = 0
    ) -> Exchanges:
        """Lets the clients exchange, all at once, as fast as they can.

        Args:
            side: which of the servers.
            seconds: how long; each client ends with its first exchange after that.
            pause: seconds that a client sleeps before each exchange, in place of computing.
            active: how many of the clients take part; None: all.
            count: exchanges of each client, in place of ``seconds``: for those that wait for one another.
        """
        for pipe, first in self._members:
            share = len(range(first, self.clients if active is None else active, self._stride))
            pipe.send((side, seconds, pause, share, count))
        return _total([_answer(pipe, seconds) for pipe, _ in self._members])


def _run_clients(pipe: Connection, numbers: range, sides: dict[str, Callable[[int], ExchangeClient]]) -> None:
    clients = {side: [connect(number) for number in numbers] for side, connect in sides.items()}
    pipe.send(True)
    with ThreadPoolExecutor(len(numbers)) as pool:
        while True:
            try:
                side, seconds, pause, share, count = pipe.recv()
            except EOFError:
                return
            work = partial(_work, seconds=seconds, pause=pause, most=count)
            pipe.send(_total(list(pool.map(work, clients[side][:share]))))


def _total(parts: list[Exchanges]) -> Exchanges:
    return Exchanges(sum(part.exchanges for part in parts), sum(part.rate for part in parts))


def _work(client: ExchangeClient, seconds: float, pause: float, most: int) -> Exchanges:
    began = now = time.perf_counter()
    count = 0
    while count < most if most else now - began < seconds:
        if pause:
            time.sleep(pause)
        client.exchange()
        count += 1
        now = time.perf_counter()
    return Exchanges(count, count / (now - began))


def _answer(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds + _PATIENCE):
        raise TimeoutError(f"a process must answer within {_PATIENCE:g} s")
    return pipe.recv()  # an end without an answer raises EOFError; the process has said why


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status(pid: int, name: str) -> int:
    """A number of the kernel's account of a process: "Threads", or "VmHWM" (peak memory) in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
