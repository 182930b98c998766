"""Runs each callback in a thread of its own.

So one that takes long, such as a validation, delays neither the workers nor other callbacks, such as a time budget.
Two calls of one callback never overlap.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from distkeras.callbacks import Callback, CallbackContext, CenterWeights, Evaluation, JobLink, JobOver, TrainingSetup
from distkeras.keras_callbacks import with_keras_callbacks
from distkeras.ps.errors import ConfigurationError, DeadlineError, DistkerasError, JobStoppedError
from distkeras.ps.protocol.driver_messages import Status
from distkeras.ps.transport.driver_client import DriverClient

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from distkeras.keras_model.replica import KerasReplica
    from distkeras.results import MicroBatchProgress

log = logging.getLogger(__name__)

#: Seconds until a request to a lost server is repeated: the driver may be restarting the server.
_RETRY_SECONDS = 0.5
#: Seconds that a call in progress has to return when the job fails or is interrupted; then it is abandoned.
ABANDON_SECONDS = 5.0
_R = TypeVar("_R")


def require_callbacks(callbacks: Any, validation: DataFrame | None = None) -> Sequence[Callback]:
    """Return the callbacks, with those of Keras as one `KerasCallbacks`, which evaluates on the rows ``validation``."""
    if not isinstance(callbacks, Iterable):
        raise ConfigurationError(f"`callbacks` must be a list of `distkeras.Callback`s. Received: {callbacks!r}")
    all_callbacks = with_keras_callbacks(callbacks, validation)
    for callback in all_callbacks:
        if not isinstance(callback, Callback):
            expected = ", made ones: not the class itself" if isinstance(callback, type) else ", or of Keras'"
            raise ConfigurationError(f"`callbacks` must be of `distkeras.Callback`s{expected}. Received: {callback!r}")
        callback.check_intervals()
    return all_callbacks


def require_no_epochs(callbacks: Sequence[Callback]) -> None:
    """Raise ConfigurationError for a callback that counts epochs, which do not add up over a stream."""
    for callback in callbacks:
        if callback.needs_epochs:
            raise ConfigurationError(
                "`callbacks` of a stream must be called by commits or seconds (`every_commits`, `every_seconds`), "
                f"because each micro-batch has epochs of its own. Received: {type(callback).__name__}"
            )


def begin_callbacks(callbacks: Sequence[Callback], setup: TrainingSetup) -> None:
    """Call `Callback.on_begin` of each; if one raises, call `on_failure` of it and those before it."""
    for count, callback in enumerate(callbacks, start=1):
        try:
            callback.on_begin(setup)
        except BaseException as error:
            fail_callbacks(callbacks[:count], error)
            raise


def fail_callbacks(callbacks: Sequence[Callback], error: BaseException) -> None:
    """Call `Callback.on_failure` of each; log errors of these calls, since the caller raises the job's own error."""
    for callback in callbacks:
        try:
            callback.on_failure(error)
        except Exception:
            log.exception("%s.on_failure raised an error, after the job had failed", type(callback).__name__)


class CallbackRunner:
    """Runs the callbacks of one job, whose `Callback.on_begin` has been called; `changed` guards `status` and `over`.

    Args:
        on_stop, on_error: are called, from any thread, with the reason why a callback ends the job early, and with the
            error that one raised.
        scope: wraps a thread's function; called in the thread that makes this object.
        micro_batch: returns the latest micro-batch of a stream.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        build_replica: Callable[[], KerasReplica],
        connect: Callable[[], DriverClient],
        *,
        fetch_center: Callable[[DriverClient], CenterWeights],
        on_stop: Callable[[str], None],
        on_error: Callable[[BaseException], None],
        scope: Callable[[Callable[[], None]], Callable[[], None]] = lambda run: run,
        micro_batch: Callable[[], MicroBatchProgress | None] = lambda: None,
    ) -> None:
        self.build_replica, self.fetch_center = build_replica, fetch_center
        self.on_stop, self.on_error, self.micro_batch = on_stop, on_error, micro_batch
        self.changed = threading.Condition()
        self.status = Status(0, 0, 0, 0, 0, math.nan, math.nan)
        self.over = threading.Event()
        self.evaluations: list[Evaluation] = []
        self._began = time.monotonic()
        self._threads = [_CallbackThread(callback, connect(), self) for callback in callbacks]
        for thread in self._threads:
            thread.run = scope(thread.run)  # type: ignore[method-assign]  # the thread's function

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def begin(self, status: Callable[[], Status]) -> None:
        """Call `Callback.on_start` of those that act at the start; ``status`` returns the server's status."""
        for thread in self._threads:
            if thread.callback.acts_at_start:
                self.update(status())
                with suppress(JobOver):  # the job has failed already, as `SparkJob.run` will see
                    thread.callback.on_start(thread.context(self.status, self.seconds))

    def start(self) -> None:
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def calls_here(self) -> bool:
        """Return whether the current thread is one in which a callback is called."""
        return threading.current_thread() in self._threads

    def update(self, status: Status) -> None:
        with self.changed:
            self.status = status
            self.changed.notify_all()

    def stop_calling(self) -> None:
        """Start no more calls."""
        with self.changed:
            self.over.set()
            self.changed.notify_all()

    def wait_for_calls(self, timeout: float = ABANDON_SECONDS) -> None:
        """Start no more calls, and wait for those in progress; raise DeadlineError if one does not return in time."""
        self.stop_calling()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise DeadlineError(
                    f"waited {timeout:g} s for the callback {type(thread.callback).__name__} "
                    "to return from its last call"
                )

    def end(self, center: CenterWeights) -> CenterWeights:
        """Call `Callback.on_end` of each, and return the center to load into the model."""
        chosen = center
        for thread in self._threads:
            context = CallbackContext(
                self.status,
                self.seconds,
                lambda: center,
                thread.replica,
                lambda reason: None,
                final=True,
                link=replace(thread.link, ask=_refuse),
                micro_batch=self.micro_batch,
            )
            thread.callback.on_end(context)
            chosen = context.restored or chosen
        return chosen


class _CallbackThread(threading.Thread):
    """One callback, its copy of the model, and its connection to the server."""

    def __init__(self, callback: Callback, client: DriverClient, job: CallbackRunner) -> None:
        super().__init__(name=f"distkeras-callback-{type(callback).__name__}", daemon=True)
        self.callback = callback
        self._client, self._job = client, job
        self._replica: KerasReplica | None = None
        self._called_at, self._called_clock, self._called_epochs = 0.0, 0, 0
        self.link = JobLink(self._ask, job.evaluations, type(callback).__name__)

    def replica(self) -> KerasReplica:
        """Return the callback's own copy of the model, which the first call creates."""
        if self._replica is None:
            self._replica = self._job.build_replica()
        return self._replica

    def run(self) -> None:
        """Call the callback whenever it is due, until the job is over."""
        try:
            self.callback.warm_up(self.replica)
            while (context := self._next_context()) is not None:
                self.callback.on_center(context)
        except JobOver:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread, which raises it
            self._job.on_error(error)
        finally:
            self._client.close()

    def _next_context(self) -> CallbackContext | None:
        """Wait until a call is due; None when the job is over."""
        job, commits, seconds = self._job, self.callback.every_commits, self.callback.every_seconds
        epochs = self.callback.every_epochs
        with job.changed:
            while True:
                if job.over.is_set():
                    return None
                status, now = job.status, job.seconds
                due = math.inf if seconds is None else self._called_at + seconds
                if now >= due or (commits is not None and status.clock - self._called_clock >= commits):
                    break
                if epochs is not None and int(status.epochs / epochs) > self._called_epochs:
                    break
                job.changed.wait(min(due - now, threading.TIMEOUT_MAX))
        self._called_at, self._called_clock = now, status.clock
        self._called_epochs = 0 if epochs is None else int(status.epochs / epochs)
        return self.context(status, now)

    def context(self, status: Status, now: float) -> CallbackContext:
        """Return what the callback receives ``now``, in seconds since the job began."""
        job = self._job
        return CallbackContext(
            status,
            now,
            lambda: self._ask(job.fetch_center),
            self.replica,
            job.on_stop,
            link=self.link,
            micro_batch=job.micro_batch,
        )

    def _ask(self, call: Callable[[DriverClient], _R]) -> _R:
        while True:
            try:
                return call(self._client)
            except (DistkerasError, OSError) as error:
                # The job has failed: the driver's main thread receives the reason, and raises it.
                if self._job.over.is_set() or isinstance(error, JobStoppedError):
                    raise JobOver from None
                if not self._client.lost(error):
                    raise
                # The driver's main thread restarts the server, or ends the job.
                if self._job.over.wait(_RETRY_SECONDS):
                    raise JobOver from None


def _refuse(call: Callable[[DriverClient], Any]) -> Any:
    raise JobOver
