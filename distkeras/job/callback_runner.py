"""Callbacks at work: each runs in a thread of its own.

So one that takes long, such as a validation, holds up neither the workers nor the others, a time budget least of all.
Two calls of one callback never overlap.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distkeras.callbacks import Callback, CallbackContext, Center, Training
from distkeras.ps.errors import ConfigurationError, DeadlineError, DistkerasError, ServerLostError
from distkeras.ps.protocol.messages import Status
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient

if TYPE_CHECKING:
    from distkeras.keras_model.replica import KerasReplica

#: Seconds until a server that is lost is asked again: the driver may be bringing it back.
_PATIENCE = 0.5
#: Seconds that a call which is under way when the job fails or is interrupted has to return; then it is left alone.
ABANDONED = 5.0


class Callbacks:
    """Runs the callbacks of one job.

    Args:
        callbacks: any number of them.
        training: what they are told first.

    Raises:
        ConfigurationError: something that is no `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback], training: Training) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigurationError(f"`callbacks` must be of `Callback`s. Received: {callback!r}")
        self._training = training
        self._changed = threading.Condition()
        self._status = Status(0, 0, 0, 0, 0, math.nan, math.nan)
        self._over = threading.Event()
        self._began = time.monotonic()
        self._runs = [_Run(self, callback) for callback in callbacks]

    def begin(self) -> None:
        """Tells them; before any work starts."""
        for run in self._runs:
            run.callback.on_begin(self._training)

    def start(self, address: Address, tell: Callable[[str, Any], None]) -> None:
        """Calls them from now on.

        Args:
            address: the server's.
            tell: takes ("stop", reason), and ("raised", error) of a callback that failed, from any thread.
        """
        self._began = time.monotonic()
        for run in self._runs:
            run.start(address, tell)

    def update(self, status: Status) -> None:
        """Takes in what the server tells."""
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def halt(self) -> None:
        """Begins no more calls."""
        with self._changed:
            self._over.set()
            self._changed.notify_all()

    def close(self, timeout: float = ABANDONED) -> None:
        """Begins no more calls, and waits for those under way.

        Raises:
            DeadlineError: one has not returned in time.
        """
        self.halt()
        deadline = time.monotonic() + timeout
        for run in self._runs:
            run.close(max(0.0, deadline - time.monotonic()), timeout)

    def end(self, center: Center) -> Center:
        """Tells them that the job is over; returns the center that the model is to have."""
        with self._changed:
            status = self._status
        chosen = center
        for run in self._runs:
            moment = CallbackContext(status, self.seconds, lambda: center, run.replica, lambda reason: None, final=True)
            run.callback.on_end(moment)
            chosen = moment.restored or chosen
        return chosen

    @property
    def seconds(self) -> float:
        """Since the job began."""
        return time.monotonic() - self._began


class _Run:
    """One callback and its thread."""

    def __init__(self, owner: Callbacks, callback: Callback) -> None:
        self.callback = callback
        self._owner = owner
        self._replica: KerasReplica | None = None
        self._thread: threading.Thread | None = None

    def replica(self) -> KerasReplica:
        """The callback's own copy of the model."""
        if self._replica is None:
            self._replica = self._owner._training.build()
        return self._replica

    def start(self, address: Address, tell: Callable[[str, Any], None]) -> None:
        self._client, self._tell = DriverClient(address), tell
        name = f"distkeras-callback-{type(self.callback).__name__}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, left: float, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(left)
            if self._thread.is_alive():
                raise DeadlineError(f"waited {timeout:g} s for {type(self.callback).__name__} to return")

    def _run(self) -> None:
        try:
            while (moment := self._next()) is not None:
                self.callback.on_center(moment)
        except _Over:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread, which raises it
            self._tell("raised", error)
        finally:
            self._client.close()

    _called_at, _called_clock = 0.0, 0

    def _next(self) -> CallbackContext | None:
        """Waits until a call is due; None when the job is over."""
        owner, commits, seconds = self._owner, self.callback.every_commits, self.callback.every_seconds
        with owner._changed:
            while True:
                if owner._over.is_set():
                    return None
                status, now = owner._status, owner.seconds
                due = math.inf if seconds is None else self._called_at + seconds
                if now >= due or (commits is not None and status.clock - self._called_clock >= commits):
                    break
                owner._changed.wait(min(due - now, threading.TIMEOUT_MAX))
        self._called_at, self._called_clock = now, status.clock
        return CallbackContext(status, now, self._fetch, self.replica, lambda reason: self._tell("stop", reason))

    def _fetch(self) -> Center:
        while True:
            try:
                reply = self._client.center()
                return Center(reply.clock, reply.center, reply.moving_statistics)
            except ServerLostError:  # whether that matters is for the driver's main thread to find
                if self._owner._over.wait(_PATIENCE):
                    raise _Over from None
            except (DistkerasError, OSError):
                if self._owner._over.is_set():
                    raise _Over from None
                raise


class _Over(Exception):
    """The job is over, and the center is not to be had here any more."""
