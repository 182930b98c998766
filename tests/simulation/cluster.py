"""A server that is a task in the cluster: the driver's real handle of it, with a simulated Spark that runs attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from distkeras.ps.checkpoint.ownership import AnnouncedAddress
from distkeras.ps.errors import DistkerasError, LedgerError, ServerLostError
from distkeras.ps.events import Events
from distkeras.ps.protocol.driver_messages import Publish
from distkeras.ps.protocol.framing import encode
from distkeras.ps.protocol.messages import Message
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.server.announced import serve_announced
from distkeras.ps.server.process import StartRequest
from distkeras.ps.server.start_report import StartReport, report_to_json
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.world.world import Thread
from distkeras.training import cluster_server
from distkeras.training.cluster_server import ClusterServer
from distkeras.training.remote_requests import RemoteClient, RemoteRequest, Search
from distkeras.training.server_task import ATTEMPTS_PER_START, REPORT, ServerTask
from simulation.scheduler import Process, Scheduler, Task
from simulation.world import Surroundings, VirtualWorld

#: Failed attempts of a task that Spark allows; seconds that Spark takes to start another one, and that executors take
#: to
#: detect their driver's death.
_MOST_FAILURES, _AGAIN, _ORPHANED = 4, 1.0, 20.0
#: Seconds between two checks for other events while a request is in progress.
_POLL_SECONDS = 1.0


class ServerAttempt:
    """One attempt of the server's task, as a process on a host of its own."""

    def __init__(self, action: ServerAction, number: int, surroundings: Surroundings, driver: Process) -> None:
        self.number, self.driver = number, driver
        self.shards: list[Process] = []
        surroundings.servers.append(self)
        pid = len(surroundings.servers)
        self.process = Process(f"server{pid}", f"node{pid}")
        self.process.watched = True
        surroundings.child_of[self.process] = self
        #: The server, once it serves.
        self.server: Any = None
        self.report: StartReport | None = None
        world = _AttemptWorld(surroundings, self)

        def main() -> None:
            scheduler = surroundings.scheduler
            scheduler.wait(None, surroundings.startup)
            try:
                self.report = action.serve(world, self.process.host, number)
            except DistkerasError:
                scheduler.kill(self.process, 1)
            else:
                scheduler.kill(self.process, 0)

        surroundings.scheduler.start(self.process, main, "main")
        surroundings.strike_awaiting(self.process)

    @property
    def family(self) -> list[Process]:
        """Return the processes that serve together."""
        return [self.process]


class _AttemptWorld(VirtualWorld):
    """A world that learns from the thread that accepts connections which server its process runs."""

    def __init__(self, surroundings: Surroundings, attempt: ServerAttempt) -> None:
        super().__init__(surroundings, attempt.process, "server")
        self._attempt = attempt

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """See `World`."""
        if name == "ps-accept":
            self._attempt.server = target.__self__  # type: ignore[attr-defined]  # a server's own method
        return super().thread(target, name)


class ServerAction:
    """A simulated `SparkAction`: the Spark job of the server's task.

    Args:
        surroundings: surroundings of the run.
        driver: the driver of the job.
        serve: the task, called with its world, its host and its number.
    """

    def __init__(
        self, surroundings: Surroundings, driver: Process, serve: Callable[[VirtualWorld, str, int], StartReport | None]
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
        """Start a second attempt next to a running one, as Spark does for a slow task."""
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
            self._rows = [] if attempt.report is None else [{"kind": REPORT, "text": report_to_json(attempt.report)}]
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


class VirtualAction:
    """A simulated `SparkAction`: the Spark job of one small task.

    Args:
        surroundings: surroundings of the run.
        driver: the driver of the job.
        task: called with its world; returns its output.
    """

    def __init__(self, surroundings: Surroundings, driver: Process, task: Callable[[VirtualWorld], Any]) -> None:
        self._scheduler = surroundings.scheduler
        self._rows: list[Any] = []
        surroundings.tasks += 1
        self._process = Process(f"task{surroundings.tasks}", f"executor of task {surroundings.tasks}")
        world = VirtualWorld(surroundings, self._process, "driver")
        driver.at_end.append(lambda: self._scheduler.kill(self._process))

        def main() -> None:
            try:
                self._rows.append(task(world))
            except DistkerasError:
                self._scheduler.kill(self._process, 1)
            else:
                self._scheduler.kill(self._process, 0)

        self._scheduler.start(self._process, main, "main")

    def ended(self, timeout: float = 0.0) -> bool:
        """See `SparkAction`."""
        deadline = self._scheduler.now + timeout
        while self._process.alive and self._scheduler.now < deadline:
            self._scheduler.wait(self._process.waiters, deadline - self._scheduler.now)
        return not self._process.alive

    def rows(self) -> list[Any]:
        """See `SparkAction`."""
        if not self._rows:
            raise RuntimeError("Task 0 in stage 0.0 failed")
        return self._rows

    def cancel(self, seconds: float) -> None:
        """See `SparkAction`."""
        if not self._scheduler.silent:
            self._scheduler.kill(self._process)


class VirtualRemoteClient(RemoteClient):
    """The driver's connection, with Spark's jobs replaced by tasks in memory.

    Args:
        surroundings: surroundings of the run.
        address, deadlines: address and deadlines of the server.
        world: world of the driver.
        look: called while a request is in progress.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        address: AnnouncedAddress,
        deadlines: Deadlines,
        world: VirtualWorld,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(None, address, deadlines, look, world)  # type: ignore[arg-type]  # it starts no job of Spark
        self._surroundings, self._look = surroundings, look

    def _fetch(self, remote_request: RemoteRequest) -> list[tuple[bool, Message]]:
        """See `RemoteClient`."""
        assert isinstance(self.world, VirtualWorld)
        action = VirtualAction(self._surroundings, self.world.process, lambda world: list(remote_request.fetch(world)))
        try:
            while not action.ended(_POLL_SECONDS):
                self._look()
            answers: list[tuple[bool, Message]] = action.rows()[0]
        except DistkerasError:
            raise
        except Exception as error:
            raise ServerLostError(f"the Spark task that asks the parameter server has failed: {error}") from error
        finally:
            action.cancel(0.0)
        return answers


class VirtualClusterServer(ClusterServer):
    """The driver's handle, with Spark's jobs replaced by attempts and tasks in memory.

    Args:
        request: the start request of the server.
        publication: publication of the driver.
        tables: the initial rows.
        surroundings: surroundings of the run.
        world: world of the driver.
        row_sum: checksum of the rows of the run's data.
    """

    def __init__(
        self,
        request: StartRequest,
        publication: Publish,
        tables: Sequence[tuple[TableShape, np.ndarray]],
        surroundings: Surroundings,
        world: VirtualWorld,
        row_sum: int,
    ) -> None:
        self._surroundings, self._world = surroundings, world
        task = ServerTask(request, b"".join(encode(publication)), tables)
        super().__init__(SimpleNamespace(sparkSession=None, row_sum=row_sum), task, Events())  # type: ignore[arg-type]  # no other attribute is used

    def connect(self, meanwhile: Callable[[], object] = lambda: None) -> Any:
        """See `ClusterServer`."""
        return VirtualRemoteClient(self._surroundings, self.address, self._deadlines, self._world, meanwhile)

    def _run_task(self) -> None:
        task = self._task

        def serve(world: VirtualWorld, host: str, number: int) -> StartReport | None:
            settings = replace(task.request.settings, host=host)
            return serve_announced(
                replace(task.request, settings=settings),
                task.publication,
                tables=task.tables,
                attempt=task.start * ATTEMPTS_PER_START + number,
                given_up=task.given_up,
                rows_checked=task.rows_checked,
                require_driver=require_driver,
                world=world,
            )

        def require_driver() -> None:
            if not driver.alive:
                raise ServerLostError("the driver of this server has ended")

        driver = self._world.process
        action: Any = ServerAction(self._surroundings, driver, serve)
        self._action = self._surroundings.actions[driver] = action
        self._active_at = self._started_at = self._surroundings.scheduler.now

    def _search_for(self, seconds: float) -> Any:
        search = Search(self.address, self._deadlines, seconds)
        return VirtualAction(
            self._surroundings, self._world.process, lambda world: {"host": world.process.host, **search.look(world)}
        )

    def _may_run(self) -> bool:
        """Return whether the Spark session exists, which ends with its driver."""
        return True

    def _require_reached(self) -> None:
        """Accept any address, because every executor reaches it."""


def patches(scheduler: Scheduler) -> dict[str, Any]:
    """Yield the replacements for time and Spark in `cluster_server`."""

    def require_rows(df: Any, expected: int) -> None:
        if df.row_sum != expected:
            raise LedgerError(f"the rows must be the same again: {expected}. Received: {df.row_sum}")

    return {"time": SimpleNamespace(monotonic=lambda: scheduler.now), "require_rows": require_rows}


MODULE = cluster_server
