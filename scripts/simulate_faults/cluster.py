"""A server that is a task in the cluster: the driver's real hold on it, over a Spark that runs attempts at the task."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from distkeras.job import cluster_server
from distkeras.job.cluster_server import ClusterServer
from distkeras.job.server_task import REPORT, ServerTask
from distkeras.ps.checkpoint.announcement import AnnouncedAddress, find
from distkeras.ps.errors import DeadlineError, DistkerasError, LedgerError, ServerLostError
from distkeras.ps.events import Events
from distkeras.ps.protocol.framing import encode
from distkeras.ps.protocol.messages import Message, Publish
from distkeras.ps.server.announced import serve_announced
from distkeras.ps.server.start import StartReport, StartRequest
from distkeras.ps.transport.backoff import Backoff
from distkeras.ps.transport.client import Client
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.world import Thread
from simulate_faults.scheduler import Process, Scheduler, Task
from simulate_faults.world import Surroundings, VirtualWorld

#: Attempts at a task that may fail; seconds that Spark takes to start another one, and executors to find out that their
#: driver is gone.
_MOST_FAILURES, _AGAIN, _ORPHANED = 4, 1.0, 20.0
#: Seconds between two tries to reach the server, at most.
_LONGEST_PAUSE = 2.0


class ServerAttempt:
    """One attempt at the server's task: a process of its own, on a host of its own."""

    def __init__(self, action: ServerAction, number: int, surroundings: Surroundings, driver: Process) -> None:
        self.number, self.driver = number, driver
        surroundings.servers.append(self)
        pid = len(surroundings.servers)
        self.process = Process(f"server{pid}", f"node{pid}")
        self.process.watched = True
        surroundings.child_of[self.process] = self
        #: What it serves, once it does.
        self.server: Any = None
        self.told: StartReport | None = None
        world = _AttemptWorld(surroundings, self)

        def main() -> None:
            scheduler = surroundings.scheduler
            scheduler.wait(None, surroundings.startup)
            try:
                self.told = action.serve(world, self.process.host, number)
            except DistkerasError:
                scheduler.kill(self.process, 1)
            else:
                scheduler.kill(self.process, 0)

        surroundings.scheduler.start(self.process, main, "main")
        surroundings.strike_awaiting(self.process)


class _AttemptWorld(VirtualWorld):
    """Knows what its process serves from the thread that accepts connections."""

    def __init__(self, surroundings: Surroundings, attempt: ServerAttempt) -> None:
        super().__init__(surroundings, attempt.process, "server")
        self._attempt = attempt

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """See `World`."""
        if name == "ps-accept":
            self._attempt.server = target.__self__  # type: ignore[attr-defined]  # a server's own method
        return super().thread(target, name)


class ServerAction:
    """A Spark job of the server's task, as `SparkAction`.

    Args:
        surroundings: of the run.
        driver: whose job it is.
        serve: the task: given its world, its host and its number.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        driver: Process,
        serve: Callable[[VirtualWorld, str, int], StartReport | None],
    ) -> None:
        self._surroundings, self._scheduler, self._driver = surroundings, surroundings.scheduler, driver
        self.serve = serve
        self._attempts: list[ServerAttempt] = []
        self._failures = 0
        self._rows: list[dict[str, str]] | None = None
        self._failed = False
        self._news: list[Task] = []
        driver.at_end.append(self._lose)
        self._start()

    def speculate(self) -> None:
        """Spark runs a second attempt next to one that it takes for slow."""
        if not self.ended() and len(self._running()) == 1:
            self._start()

    def _running(self) -> list[ServerAttempt]:
        return [attempt for attempt in self._attempts if attempt.process.alive]

    def _start(self) -> None:
        if self._over() or not self._driver.alive or self._scheduler.over:
            return
        attempt = ServerAttempt(self, len(self._attempts), self._surroundings, self._driver)
        self._attempts.append(attempt)
        attempt.process.at_end.append(lambda: self._attempt_ended(attempt))

    def _attempt_ended(self, attempt: ServerAttempt) -> None:
        if self._over() or not self._driver.alive:
            return
        if attempt.process.exit_code == 0:
            self._rows = [] if attempt.told is None else [{"kind": REPORT, "text": attempt.told.to_json()}]
            self._end_all()
        else:
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                self._failed = True
                self._end_all()
            elif not self._running():
                self._scheduler.later(_AGAIN, self._start)
        self._scheduler.wake_all(self._news)

    def _end_all(self) -> None:
        for attempt in self._running():
            self._scheduler.kill(attempt.process)

    def _lose(self) -> None:
        for attempt in self._running():
            seconds = _ORPHANED * self._scheduler.random.random()
            self._scheduler.later(seconds, partial(self._scheduler.kill, attempt.process))
        self._scheduler.wake_all(self._news)

    def _over(self) -> bool:
        return self._failed or self._rows is not None

    def ended(self, timeout: float = 0.0) -> bool:
        """See `SparkAction`."""
        deadline = self._scheduler.now + timeout
        while not self._over() and self._scheduler.now < deadline:
            self._scheduler.wait(self._news, deadline - self._scheduler.now)
        return self._over()

    def rows(self) -> list[dict[str, str]]:
        """See `SparkAction`."""
        if self._failed:
            raise RuntimeError("Task 0 in stage 0.0 failed 4 times")
        assert self._rows is not None
        return self._rows

    def cancel(self, seconds: float) -> None:
        """See `SparkAction`."""
        if not self._scheduler.silent:
            self._rows = self._rows or []
            self._end_all()


class VirtualRelay(DriverClient):
    """The driver's connection, of tasks that carry one request each."""

    def __init__(self, address: AnnouncedAddress, deadlines: Deadlines, world: VirtualWorld) -> None:
        super().__init__(address, deadlines, world, met=True)

    def exchange(self, message: Message, timeout: float) -> Message:
        """See `RelayClient`."""
        client = Client(self.address, self.deadlines, self.world)
        backoff = Backoff(longest=_LONGEST_PAUSE, timeout=timeout, world=self.world)
        try:
            while True:
                client.close()
                try:
                    return client.exchange(message, timeout)
                except DistkerasError as error:
                    if not backoff.pause():
                        raise ServerLostError(f"a task must reach the server. Received: {error.message}") from error
        finally:
            client.close()


class VirtualClusterServer(ClusterServer):
    """The driver's hold, with Spark's jobs replaced by attempts and requests in memory.

    Args:
        request: what is to be served.
        publication: the driver's.
        surroundings: of the run.
        world: the driver's.
        row_sum: over the rows of the run's data.
    """

    def __init__(
        self,
        request: StartRequest,
        publication: Publish,
        surroundings: Surroundings,
        world: VirtualWorld,
        row_sum: int,
    ) -> None:
        self._surroundings, self._world = surroundings, world
        task = ServerTask(request, b"".join(encode(publication)))
        super().__init__(SimpleNamespace(sparkSession=None, row_sum=row_sum), task, Events())  # type: ignore[arg-type]  # all that is asked of it

    def connect(self) -> Any:
        """See `ClusterServer`."""
        return VirtualRelay(self.address, self._deadlines, self._world)

    def _start(self) -> StartReport:
        task = self._task

        def serve(world: VirtualWorld, host: str, number: int) -> StartReport | None:
            settings = replace(task.request.settings, host=host)
            return serve_announced(
                replace(task.request, settings=settings),
                task.publication,
                attempt=number,
                rows_checked=task.rows_checked,
                world=world,
            )

        action = ServerAction(self._surroundings, self._world.process, serve)
        self._action = self._surroundings.actions[self._world.process] = action  # type: ignore[assignment]  # as far as it is used
        patience = self._deadlines.publish + self._deadlines.standstill
        backoff = Backoff(longest=_LONGEST_PAUSE, timeout=patience, world=self._world)
        while not action.ended():
            try:
                place = find(self.address.uri, self._world)
                self._driver.ping()
            except DistkerasError as error:
                if not backoff.pause():
                    raise DeadlineError(f"waited {patience:g} s for the server. Received: {error.message}") from error
            else:
                return StartReport.from_json(json.loads(json.dumps(place))["report"])
        return self._take_in(action)  # type: ignore[arg-type]  # as far as it is used

    def _require_reached(self) -> None:
        """Every executor does."""


def patches(scheduler: Scheduler) -> dict[str, Any]:
    """What `cluster_server` has in place of time and Spark."""

    def require_rows(df: Any, expected: int) -> None:
        if df.row_sum != expected:
            raise LedgerError(f"the rows must be the same again: {expected}. Received: {df.row_sum}")

    return {"time": SimpleNamespace(monotonic=lambda: scheduler.now), "require_rows": require_rows}


MODULE = cluster_server
