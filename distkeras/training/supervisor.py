"""The driver's handle to a server process that may die: its connection, and the restarts of the server."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TypeVar

from distkeras.ps.errors import DistkerasError, ServerLostError
from distkeras.ps.events import Events
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.server.start_report import ResumePoint
from distkeras.ps.shards.spread_driver import SpreadDriverClient
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.world import REAL, World

_R = TypeVar("_R")

log = logging.getLogger(__name__)

#: Consecutive restarts without a newer snapshot after which the server is given up.
_MAX_FUTILE_RESTARTS = 5
#: Seconds that a process whose connections have ended may take to exit; after them, it is connected to again.
_EXIT_SECONDS = 2.0


class RestartLimit:
    """Counts consecutive restarts of a server without a newer snapshot: after too many the server is given up."""

    def __init__(self) -> None:
        self._clock, self._futile = -1, 0

    def failed(self) -> bool:
        """Count a server that did not start; return whether another restart may be tried."""
        if self._futile + 1 >= _MAX_FUTILE_RESTARTS:
            return False
        self._futile += 1
        return True

    def back(self, clock: int) -> None:
        """Count a restart from commit ``clock``; raise ServerLostError after too many without a newer one."""
        self._futile = 0 if clock > self._clock else self._futile + 1
        self._clock = clock
        if self._futile >= _MAX_FUTILE_RESTARTS:
            raise ServerLostError(
                f"the parameter server died {self._futile} times without progress (clock {clock}). See its log above"
            )


class Supervisor:
    """The driver's connection to a server process, which it restarts when the process is dead and has a checkpoint.

    Args:
        publish: sends the initial center and the model file; called again after each restart, since snapshots do not
            contain the model file.
    """

    def __init__(
        self,
        process: ServerProcess,
        publish: Callable[[DriverClient], object],
        events: Events | None = None,
        world: World = REAL,
    ) -> None:
        self._process = process
        self._publish = publish
        self._events = events or Events()
        self._end_reason: str | None = None
        deadlines = process.settings.deadlines
        self._world = world
        self._driver = self.connect()
        self.status_seconds = 0.0
        #: Seconds without a response after which a running server is killed.
        self._patience = deadlines.reply if process.settings.checkpoint is None else deadlines.standstill
        self._active_at = world.monotonic()
        self._limit = RestartLimit()
        #: The number of restarts.
        self.restarts = 0

    def __enter__(self) -> Supervisor:
        self.ask(self._publish)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._driver.close()

    @property
    def address(self) -> Address:
        return self._process.address

    @property
    def resumed(self) -> ResumePoint | None:
        """The snapshot that the center continues from; None: the center is new."""
        return self._process.resumed

    def connect(self) -> DriverClient:
        settings = self._process.settings
        kind = DriverClient if settings.shards == 1 else SpreadDriverClient
        return kind(self._process.address, settings.deadlines, self._world, met=True)

    def alive(self) -> bool:
        return self._process.alive()

    def record_activity(self) -> None:
        """Record that the server has answered over a connection of the driver; thread-safe."""
        self._active_at = self._world.monotonic()

    def watch(self) -> None:
        """Restart the server if it is dead or does not respond; ServerLostError without checkpoint or progress."""
        if self._process.alive():
            silence = self._world.monotonic() - self._active_at
            if silence < self._patience or self._answers():
                return
            self._kill_unresponsive(
                ServerLostError(
                    f"the parameter server has not answered for {silence:.0f} s: its machine may be "
                    "overloaded, or its process suspended"
                )
            )
        self.restart()

    def _answers(self) -> bool:
        """Return whether the server answers over a new connection: it may be the driver that was suspended."""
        self._driver.close()
        try:
            self._driver.ping()
        except DistkerasError as error:
            if self._lost(error):
                return False
        self.record_activity()
        return True

    def _lost(self, error: DistkerasError) -> bool:
        """Return whether ``error`` is not the server's answer; at a dead server's port, any process may answer."""
        return self._driver.lost(error) or not self._process.alive()

    def _kill_unresponsive(self, error: DistkerasError) -> None:
        """Kill a running server that does not answer; without a checkpoint, raise ``error`` instead."""
        if self._process.settings.checkpoint is None:
            raise error
        text = "the parameter server does not respond, and is killed: %s"
        self._events.report(log, "standstill", text, error.message)
        self._process.kill()

    def ask(self, call: Callable[[DriverClient], _R]) -> _R:
        """Return the result of ``call`` with the driver's connection, repeated over a new one, and after a restart."""
        while True:
            try:
                return self._call_reconnecting(call)
            except _ServerGone:
                self.restart()

    def ask_once(self, call: Callable[[DriverClient], _R]) -> _R:
        """Return the result of ``call`` over at most two connections, without waits and restarts; raise its error."""
        try:
            return call(self._driver)
        except DistkerasError as error:
            if not self._lost(error):
                raise
        return call(self._driver)

    def abandon(self, error: DistkerasError) -> None:
        """Kill a server whose failure to answer was ``error``, unless it has a snapshot to write."""
        if self._lost(error) and self._process.settings.checkpoint is None:
            self._process.kill()

    def _call_reconnecting(self, call: Callable[[DriverClient], _R]) -> _R:
        """Repeat ``call`` over new connections while the process runs; raise `_ServerGone` after its end."""
        first: DistkerasError | None = None
        deadline = math.inf
        while True:
            try:
                answer = call(self._driver)
            except DistkerasError as error:
                if not self._lost(error):
                    self.record_activity()
                    raise
                first = first or error
            else:
                self.record_activity()
                return answer
            if self._process.exited(_EXIT_SECONDS):
                raise _ServerGone from first
            if self._world.monotonic() > deadline:
                self._kill_unresponsive(first)
                raise _ServerGone from first
            deadline = min(deadline, self._world.monotonic() + self._patience)

    def end_early(self, reason: str) -> None:
        """End the job early at the workers, by this server and by those that may be restarted; see `ask`."""
        self._end_reason = reason
        self.ask(lambda driver: driver.finish(reason))

    def restart(self) -> None:
        """Restart the dead server from its latest snapshot; it raises as `watch` does."""
        while not self._try_restart():
            pass

    def _try_restart(self) -> bool:
        """Restart the server; return False if it did not start, or died before it received the model."""
        self._driver.close()
        code = self._process.exit_code
        try:
            self._process.restart()
        except (ServerLostError, OSError):  # it died, could not read, or there is no memory for a process
            if self._process.settings.checkpoint is None or not self._limit.failed():
                raise
            return False
        resumed = self._process.resumed
        clock = 0 if resumed is None else resumed.clock
        self.restarts += 1
        text = "the parameter server had ended (exit %s); it is back with commit %d of a snapshot"
        self._events.report(log, "restart", text, code, clock)
        self._limit.back(clock)
        reason = self._end_reason
        try:
            self._call_reconnecting(self._publish)
            if reason is not None:
                self._call_reconnecting(lambda driver: driver.finish(reason))
        except _ServerGone:
            return False
        return True


class _ServerGone(Exception):
    """The server's process has ended, or did not respond and was killed."""
