"""An injector of planned faults, the plan, and the garbage that strangers send to a port."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from chaos import targets
from chaos.drivers import Drivers
from chaos.hosts import Disk, Hosts
from chaos.store import Store

#: Each kind of fault with its shortest and longest duration, in seconds.
KINDS: dict[str, tuple[float, float]] = {
    "kill worker": (0.0, 0.0),
    "kill executor": (0.0, 0.0),
    "kill server": (0.0, 0.0),
    "stop worker": (1.0, 20.0),
    "stop executor": (1.0, 15.0),
    "stop server": (0.5, 5.0),
    "freeze server": (30.0, 60.0),
    "fork driver": (1.0, 30.0),
    "kill driver": (0.0, 0.0),
    "double driver": (0.0, 0.0),
    "cut connections": (0.0, 0.0),
    "cut off host": (2.0, 45.0),
    "fill disk": (2.0, 12.0),
    "slow store": (5.0, 20.0),
    "tear store": (5.0, 20.0),
    "throw garbage": (0.0, 0.0),
}

#: Kinds that concern a driver of a job in processes of its own; they wait for such a job.
OF_DRIVERS = ("kill driver", "double driver")

#: The time of the first fault, and the mean time between two faults, in seconds.
FIRST, GAP = 3.0, 9.0
#: The probability that a fault follows immediately on the previous one.
BURST = 0.2


@dataclass(frozen=True)
class PlannedFault:
    """One fault to inject.

    Args:
        at: time of the fault, in seconds of disturbed training.
        kind: one of `KINDS`.
        lasts: seconds until it is undone; 0 if there is nothing to undo.
        pick: in [0, 1); selects one of the targets that are alive.
        seed: seed of all other random choices.
    """

    at: float
    kind: str
    lasts: float
    pick: float
    seed: int


def plan(seed: int, seconds: float) -> list[PlannedFault]:
    """Return the faults of ``seconds`` of training, in the order of their times.

    Each round contains all kinds in a new order, so that every period of two rounds has them all. A longer plan of the
    same seed starts with the shorter one.
    """
    rng = np.random.default_rng(seed)
    faults: list[PlannedFault] = []
    at = FIRST
    while True:
        for number in rng.permutation(len(KINDS)):
            kind, (shortest, longest) = list(KINDS.items())[number]
            # Values are drawn for every kind, so that what one kind needs does not change the others.
            lasts, pick, own = rng.uniform(shortest, longest), rng.random(), int(rng.integers(2**31))
            burst, gap = rng.random() < BURST, GAP * rng.uniform(0.5, 1.5)
            if faults and not burst:
                at += gap
            if at >= seconds:
                return faults
            faults.append(PlannedFault(at, kind, float(lasts), float(pick), own))


_VISITORS = 40


def throw_garbage(address: tuple[str, int], seed: int) -> int:
    """Connect many times, send unexpected data, and return the number of established connections.

    Some close at once, some reset, some send data and wait for an answer, and some are silent for a short time.
    """
    rng = random.Random(seed)
    open_ones: list[socket.socket] = []
    visits = 0
    for _ in range(_VISITORS):
        try:
            sock = socket.create_connection(address, timeout=1.0)
        except OSError:  # The server is down or busy.
            continue
        visits += 1
        try:
            sock.settimeout(0.2)
            sock.sendall(_bytes(rng))
            if rng.random() < 0.3:
                sock.recv(4096)
        except OSError:  # The server has closed the connection, as expected.
            pass
        if rng.random() < 0.3:
            # Closing resets the connection.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if rng.random() < 0.5:
            open_ones.append(sock)
        else:
            sock.close()
    for sock in open_ones:
        sock.close()
    return visits


def _bytes(rng: random.Random) -> bytes:
    match rng.randrange(6):
        case 0:
            return b""
        case 1:
            return b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        case 2:
            # These bytes are the start of a TLS handshake.
            return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200)
        case 3:
            return b"\xff" * rng.randrange(1, 5000)
        case 4:
            return bytes(rng.randrange(1, 5000))
        case _:
            return rng.randbytes(rng.randrange(1, 100_000))


#: Seconds that a fault waits for a target; between two incarnations of a server there is none.
_PATIENCE = 20.0
_TICK = 0.1


@dataclass
class Scene:
    """The targets of faults besides processes and connections.

    Args:
        disk: the disk with the snapshots.
        store: the store of snapshots, as the servers see it.
        hosts: the hosts of the executors.
        drivers: the drivers of the running job, if they are processes of their own.
    """

    disk: Disk
    store: Store
    hosts: Hosts
    drivers: Drivers | None = None


class Injector:
    """An injector of a plan's faults, whose clock runs only inside `disturbing`.

    Args:
        faults: the plan.
        scene: the targets.
        say: called with one line about each fault.
    """

    def __init__(self, faults: Sequence[PlannedFault], scene: Scene, say: Callable[[str], None]) -> None:
        self._left = list(reversed(faults))
        #: The faults of drivers that are due.
        self._waiting: list[PlannedFault] = []
        self._scene = scene
        self._disk = scene.disk
        self._say = say
        self._clock = 0.0
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._failure: Exception | None = None
        #: The numbers of faults that had a target, by kind, and of those that had none.
        self.injected: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()

    @property
    def done(self) -> bool:
        """Return whether all faults of the plan were injected, except those that wait for a target."""
        return not self._left

    def give_up_waiting(self) -> None:
        """Record that the waiting faults have had no target."""
        self.missed.update(fault.kind for fault in self._waiting)
        self._waiting.clear()

    @property
    def waiting(self) -> set[str]:
        """Return the kinds of the faults that wait for a job with drivers in processes of their own."""
        return {fault.kind for fault in self._waiting}

    @contextmanager
    def disturbing(self) -> Iterator[None]:
        """Inject faults inside the context; lasting ones are undone at its end."""
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,), name="chaos-injector", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self, over: threading.Event) -> None:
        last = time.monotonic()
        waited = 0.0
        try:
            while not over.wait(_TICK):
                now = time.monotonic()
                passed, last = now - last, now
                self._clock += passed
                self._settle(self._clock)
                if self._disk.full:
                    self._disk.fill()
                self._hit_driver()
                while self._left and self._left[-1].at <= self._clock:
                    fault = self._left[-1]
                    if fault.kind in OF_DRIVERS:
                        self._waiting.append(self._left.pop())
                        continue
                    what = self._inject(fault)
                    waited += passed
                    if what is None and waited < _PATIENCE:
                        break
                    waited = 0.0
                    self._left.pop()
                    self._tell(fault, what)
        except Exception as error:  # noqa: BLE001 - raised in the main thread when the job is over
            self._failure = error
        finally:
            self._settle(float("inf"))

    def _tell(self, fault: PlannedFault, what: str | None) -> None:
        (self.missed if what is None else self.injected)[fault.kind] += 1
        self._say(f"{self._clock:6.1f} s  {fault.kind}: {what or 'nothing to hit'}")

    def _hit_driver(self) -> None:
        drivers = self._scene.drivers
        if not self._waiting or drivers is None:
            return
        for fault in self._waiting:
            what = drivers.kill() if fault.kind == "kill driver" else drivers.double()
            if what is not None:
                self._waiting.remove(fault)
                self._tell(fault, what)
                return

    def _settle(self, until: float) -> None:
        while self._undo and self._undo[0][0] <= until:
            heapq.heappop(self._undo)[-1]()

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (self._clock + seconds, next(self._numbers), undo))

    def _inject(self, fault: PlannedFault) -> str | None:
        """Inject a fault; return what was done, or None if there is no target now."""
        verb, _, noun = fault.kind.rpartition(" ")
        match verb:
            case "fork":
                return self._fork(fault.lasts)
            case "kill" | "stop" | "freeze":
                return self._hit_process(verb, noun, fault)
            case "cut":
                return self._cut(fault)
            case "cut off":
                return self._cut_off(fault)
            case "throw":
                return self._throw(fault)
            case _:
                return self._hit_disk(verb, fault.lasts)

    def _hit_process(self, verb: str, noun: str, fault: PlannedFault) -> str | None:
        find = {"worker": targets.workers, "executor": targets.executors, "server": targets.servers}[noun]
        process = _picked(find(), fault)
        if process is None:
            return None
        return self._kill(process) if verb == "kill" else self._stop(process, fault.lasts)

    def _hit_disk(self, verb: str, seconds: float) -> str:
        disk, store = self._scene.disk, self._scene.store
        hit, undo = {
            "fill": (disk.fill, disk.free),
            "slow": (store.slow, store.hurry),
            "tear": (store.tear, store.mend),
        }[verb]
        hit()
        self._later(seconds, undo)
        return f"for {seconds:.1f} s"

    def _cut_off(self, fault: PlannedFault) -> str:
        hosts = self._scene.hosts
        host = _picked(range(len(hosts.addresses)), fault)
        hosts.cut_off(host)
        self._later(fault.lasts, lambda: hosts.connect(host))
        return f"{hosts.addresses[host]} for {fault.lasts:.1f} s"

    @staticmethod
    def _throw(fault: PlannedFault) -> str | None:
        server = _picked(targets.servers(), fault)
        addresses = targets.addresses(server) if server is not None else []
        visits = throw_garbage(addresses[0], fault.seed) if addresses else 0
        return f"{visits} visitors" if visits else None

    def _fork(self, seconds: float) -> str:
        """Fork a child of the driver that inherits all its descriptors, as multiprocessing does; it may outlive the
        job.
        """
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)

        def end() -> None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

        self._later(seconds, end)
        return f"process {child} for {seconds:.1f} s"

    def _kill(self, process: psutil.Process) -> str | None:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return None
        return f"process {process.pid}"

    def _stop(self, process: psutil.Process, seconds: float) -> str | None:
        def resume() -> None:
            with suppress(psutil.NoSuchProcess):  # The process may have been killed in the meantime.
                process.send_signal(signal.SIGCONT)

        try:
            process.send_signal(signal.SIGSTOP)
        except psutil.NoSuchProcess:
            return None
        self._later(seconds, resume)
        return f"process {process.pid} for {seconds:.1f} s"

    def _cut(self, fault: PlannedFault) -> str | None:
        ports = {port for server in targets.servers() for port in targets.listening(server)}
        how = "reset" if fault.pick < 0.5 else "ended"
        workers = self._cut_all(targets.workers(), ports, how)
        driver = self._cut_all([psutil.Process()], ports, how) if workers else 0
        return f"{workers} of workers and {driver} of the driver {how}" if workers else None

    @staticmethod
    def _cut_all(processes: Sequence[psutil.Process], ports: set[int], how: str) -> int:
        found = [(process, descriptor) for process in processes for descriptor in targets.connections(process, ports)]
        return sum(targets.cut(process, descriptor, reset=how == "reset") for process, descriptor in found)


def _picked(found: Sequence[Any], fault: PlannedFault) -> Any:
    return found[int(fault.pick * len(found))] if found else None
