"""Injects the planned faults while a job runs."""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from chaos import garbage, targets
from chaos.disk import Disk
from chaos.plan import PlannedFault

#: How long a fault waits for a target, in seconds: between two incarnations of a server there is none.
_PATIENCE = 20.0
_TICK = 0.1


class Injector:
    """Works off a plan. Its clock runs only inside `disturbing`.

    Args:
        faults: the plan.
        disk: the one with the snapshots.
        say: told one line a fault.
    """

    def __init__(self, faults: Sequence[PlannedFault], disk: Disk, say: Callable[[str], None]) -> None:
        self._left = list(reversed(faults))
        self._disk = disk
        self._say = say
        self._clock = 0.0
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._failure: Exception | None = None
        #: Faults that hit something, by kind; and those that found nothing to hit.
        self.injected: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()

    @property
    def done(self) -> bool:
        """Whether the plan is worked off."""
        return not self._left

    @contextmanager
    def disturbing(self) -> Iterator[None]:
        """Injects faults inside the context; what lasts is undone at its end."""
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
                while self._left and self._left[-1].at <= self._clock:
                    fault = self._left[-1]
                    what = self._inject(fault)
                    waited += passed
                    if what is None and waited < _PATIENCE:
                        break
                    waited = 0.0
                    self._left.pop()
                    (self.missed if what is None else self.injected)[fault.kind] += 1
                    self._say(f"{self._clock:6.1f} s  {fault.kind}: {what or 'nothing to hit'}")
        except Exception as error:  # noqa: BLE001 - raised in the main thread when the job is over
            self._failure = error
        finally:
            self._settle(float("inf"))

    def _settle(self, until: float) -> None:
        while self._undo and self._undo[0][0] <= until:
            heapq.heappop(self._undo)[-1]()

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (self._clock + seconds, next(self._numbers), undo))

    def _inject(self, fault: PlannedFault) -> str | None:
        """Returns what was done; None where there is no target now."""
        verb, _, noun = fault.kind.partition(" ")
        match verb:
            case "fork":
                return self._fork(fault.lasts)
            case "kill" | "stop" | "freeze":
                find = {"worker": targets.workers, "executor": targets.executors, "server": targets.servers}[noun]
                process = _picked(find(), fault)
                if process is None:
                    return None
                return self._kill(process) if verb == "kill" else self._stop(process, fault.lasts)
            case "cut":
                return self._cut(fault)
            case "fill":
                self._disk.fill()
                self._later(fault.lasts, self._disk.free)
                return f"for {fault.lasts:.1f} s"
            case _:
                server = _picked(targets.servers(), fault)
                ports = targets.listening(server) if server is not None else []
                visits = garbage.throw(ports[0], fault.seed) if ports else 0
                return f"{visits} visitors" if visits else None

    def _fork(self, seconds: float) -> str:
        """A child of the driver that has all its descriptors, as multiprocessing makes them; it may outlive the job."""
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
        def go_on() -> None:
            with suppress(psutil.NoSuchProcess):  # it may have been killed meanwhile
                process.send_signal(signal.SIGCONT)

        try:
            process.send_signal(signal.SIGSTOP)
        except psutil.NoSuchProcess:
            return None
        self._later(seconds, go_on)
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
