"""The driver's hold on a server process that may die: one connection, and how to bring the server back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from distkeras.ps.errors import ServerLostError
from distkeras.ps.events import Events
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.transport.driver_client import DriverClient

log = logging.getLogger(__name__)

#: Restarts in a row that may bring no newer snapshot; then the server is given up.
_IN_VAIN = 5
#: Seconds that a process whose connections have ended may take to end itself.
_LAST_BREATH = 2.0
_R = TypeVar("_R")


class Supervisor:
    """Asks the server for the driver, and starts it again when it is dead, where it has a checkpoint.

    Args:
        process: the server's.
        publish: hands over the initial center and the model file; called again after each restart, for the model file
            is in no snapshot.
        events: takes the restarts.
    """

    def __init__(
        self, process: ServerProcess, publish: Callable[[DriverClient], None], events: Events | None = None
    ) -> None:
        self._process = process
        self._publish = publish
        self._events = events or Events()
        self._finishing: str | None = None
        self._driver = DriverClient(process.address, process.deadlines)
        self._clock, self._in_vain = -1, 0
        #: How often the server was started again.
        self.restarts = 0

    def __enter__(self) -> Supervisor:
        try:
            self._publish(self._driver)
        except ServerLostError:
            if not self._process.exited(_LAST_BREATH):
                raise
            self.revive()
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
        again = True
        while True:
            try:
                return call(self._driver)
            except ServerLostError:
                if self._process.exited(_LAST_BREATH):
                    self.revive()
                elif again:
                    again = False  # only the connection is gone: the driver may have had nothing to say for a day
                else:
                    raise

    def finish(self, reason: str) -> None:
        """Has the workers leave, in this life of the server and in those that may follow.

        Raises:
            ServerLostError: see `ask`.
        """
        self._finishing = reason
        self.ask(lambda driver: driver.finish(reason))

    def revive(self) -> None:
        """Starts the dead server again from its latest snapshot.

        Raises:
            ServerLostError: it has no checkpoint, or dies again and again without getting on.
        """
        while not self._revived():
            pass

    def _revived(self) -> bool:
        """One restart; False if the server died again before it was told what it needs."""
        self._driver.close()
        code = self._process.exit_code
        try:
            self._process.restart()
        except ServerLostError:
            if self._process.checkpoint is None or self._in_vain + 1 >= _IN_VAIN:
                raise
            self._in_vain += 1
            return False
        resumed = self._process.resumed
        clock = 0 if resumed is None else resumed["clock"]
        self._in_vain = 0 if clock > self._clock else self._in_vain + 1
        self._clock = clock
        self.restarts += 1
        text = "the parameter server had ended (exit %s); it is back with commit %d of a snapshot"
        self._events.report(log, "restart", text, code, clock)
        if self._in_vain >= _IN_VAIN:
            raise ServerLostError(
                f"the server must live long enough to get on. Received: {self._in_vain} ends in a row at clock {clock}"
            )
        try:
            self._publish(self._driver)
            if self._finishing is not None:
                self._driver.finish(self._finishing)
        except ServerLostError:
            if not self._process.exited(_LAST_BREATH):
                raise
            return False
        return True
