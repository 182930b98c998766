"""The driver's hold on a server process that may die: one connection, and how to bring the server back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from distkeras.ps.errors import ServerLostError
from distkeras.ps.events import Events
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.world import REAL, World

log = logging.getLogger(__name__)

#: Restarts in a row that may bring no newer snapshot; then the server is given up.
_MAX_FUTILE_RESTARTS = 5
#: Seconds that a process whose connections have ended may take to end itself.
_EXIT_SECONDS = 2.0
_R = TypeVar("_R")


class Supervisor:
    """Asks the server for the driver, and starts it again when it is dead, where it has a checkpoint.

    Args:
        process: the server's.
        publish: hands over the initial center and the model file; called again after each restart, for the model file
            is in no snapshot.
        events: takes the restarts.
        world: time and connections.
    """

    def __init__(
        self,
        process: ServerProcess,
        publish: Callable[[DriverClient], None],
        events: Events | None = None,
        world: World = REAL,
    ) -> None:
        self._process = process
        self._publish = publish
        self._events = events or Events()
        self._end_reason: str | None = None
        self._driver = DriverClient(process.address, process.settings.deadlines, world)
        self._restored_clock, self._futile_restarts = -1, 0
        #: How often the server was started again.
        self.restarts = 0

    def __enter__(self) -> Supervisor:
        try:
            self._publish(self._driver)
        except ServerLostError:
            if not self._process.exited(_EXIT_SECONDS):
                raise
            self.restart()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._driver.close()

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.alive()

    def ask(self, call: Callable[[DriverClient], _R]) -> _R:
        """``call`` with the driver's connection, once more after each time that the server had to be brought back.

        Raises:
            ServerLostError: it cannot be, or it lives and cannot be reached.
            DistkerasError: what the server answered.
        """
        reconnected = False
        while True:
            try:
                return call(self._driver)
            except ServerLostError:
                if self._process.exited(_EXIT_SECONDS):
                    self.restart()
                elif not reconnected:
                    reconnected = True  # only the connection is gone: the driver may have had nothing to say for a day
                else:
                    raise

    def end_early(self, reason: str) -> None:
        """Has the workers leave, in this incarnation of the server and in those that may follow.

        Raises:
            ServerLostError: see `ask`.
        """
        self._end_reason = reason
        self.ask(lambda driver: driver.finish(reason))

    def restart(self) -> None:
        """Starts the dead server again from its latest snapshot.

        Raises:
            ServerLostError: it has no checkpoint, or dies again and again without getting on.
        """
        while not self._try_restart():
            pass

    def _try_restart(self) -> bool:
        """One restart; False if the server died again before it was told what it needs."""
        self._driver.close()
        code = self._process.exit_code
        try:
            self._process.restart()
        except ServerLostError:
            if self._process.settings.checkpoint is None or self._futile_restarts + 1 >= _MAX_FUTILE_RESTARTS:
                raise
            self._futile_restarts += 1
            return False
        resumed = self._process.resumed
        clock = 0 if resumed is None else resumed.clock
        self._futile_restarts = 0 if clock > self._restored_clock else self._futile_restarts + 1
        self._restored_clock = clock
        self.restarts += 1
        text = "the parameter server had ended (exit %s); it is back with commit %d of a snapshot"
        self._events.report(log, "restart", text, code, clock)
        if self._futile_restarts >= _MAX_FUTILE_RESTARTS:
            raise ServerLostError(
                "the server must live long enough to get on. "
                f"Received: {self._futile_restarts} ends in a row at clock {clock}"
            )
        try:
            self._publish(self._driver)
            if self._end_reason is not None:
                self._driver.finish(self._end_reason)
        except ServerLostError:
            if not self._process.exited(_EXIT_SECONDS):
                raise
            return False
        return True
