"""One training job: the Spark action in a thread, the server's news in another, and the driver waiting for both."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from distkeras.job.callback_runner import ABANDONED, Callbacks
from distkeras.job.progress import Progress
from distkeras.job.stalls import Stalls
from distkeras.job.supervisor import Supervisor
from distkeras.job.task import SUMMARY, Task
from distkeras.ps.errors import DeadlineError, DistkerasError, ServerLostError, WorkerError
from distkeras.ps.events import Events
from distkeras.ps.protocol.messages import Status
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

#: Seconds that Spark may take to end a cancelled job.
_CANCEL = 60.0
#: Seconds after which a thread that has nothing to tell looks around.
_PATIENCE = 1.0


class Job:
    """Runs ``task`` on every partition of ``df``.

    Args:
        df: one partition a worker.
        task: what each runs.
        address: the server's.
        supervisor: of the server's process.
        progress: told the server's news.
        callbacks: likewise, and may end the job early.
        events: takes the end that they ask for, and what ``stalls`` finds.
        stalls: looks for workers that are silent; None: nobody does.

    Attributes:
        stopped: why a callback ended the job early; None: none did.
    """

    def __init__(
        self,
        df: DataFrame,
        task: Task,
        address: Address,
        *,
        supervisor: Supervisor,
        progress: Progress,
        callbacks: Callbacks,
        events: Events,
        stalls: Stalls | None = None,
    ) -> None:
        self._df = df
        self._task = task
        self._address = address
        self._supervisor = supervisor
        self._progress = progress
        self._callbacks = callbacks
        self._events = events
        self._stalls = stalls
        self.stopped: str | None = None
        self._observer = DriverClient(address)
        self._news: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._tag = f"distkeras-{uuid.uuid4().hex}"

    def run(self) -> list[Row]:
        """The tasks' figures, one row each.

        Raises:
            DistkerasError: what a worker reported, or that the server is gone, or that Spark gave up.
            DeadlineError: a callback does not return.
            Exception: what a callback raised.
            KeyboardInterrupt: the Spark job is cancelled by then.
        """
        threads = [
            threading.Thread(target=self._act, name=f"{self._tag}-spark", daemon=True),
            threading.Thread(target=self._observe, name=f"{self._tag}-server", daemon=True),
        ]
        for thread in threads:
            thread.start()
        self._callbacks.start(self._address, lambda kind, news: self._news.put((kind, news)))
        try:
            rows = self._wait()
            self._callbacks.close(self._task.deadlines.reply)
            self._last_words()
            return rows
        except BaseException:
            self._callbacks.halt()
            self._cancel(threads[0])
            with contextlib.suppress(DeadlineError):  # the first error is the one to tell
                self._callbacks.close(ABANDONED)
            raise
        finally:
            self._over.set()
            self._observer.close()
            threads[1].join(_CANCEL)

    def _wait(self) -> list[Row]:
        while True:
            try:
                kind, news = self._news.get(timeout=_PATIENCE)
            except queue.Empty:
                if not self._supervisor.alive():
                    self._supervisor.revive()
                continue
            if kind == "status":
                self._progress.update(news)
                self._callbacks.update(news)
            elif kind == "stop":
                self._finish(news)
            elif kind == "rows":
                return news
            elif kind in ("fault", "raised"):
                raise news
            else:
                raise self._reason(news) from news

    def _finish(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped = reason
            self._events.report(log, "stop", "the job ends early: %s", reason, level=logging.INFO)
            self._callbacks.halt()
            self._supervisor.finish(reason)

    def _last_words(self) -> None:
        """What a callback may have raised while Spark's tasks came to their end."""
        with contextlib.suppress(queue.Empty):
            while True:
                kind, news = self._news.get_nowait()
                if kind == "raised":
                    raise news

    def _reason(self, failure: Exception) -> DistkerasError:
        """Why Spark gave up: a worker's own report, which may still be on its way, else what Spark says."""
        deadline = time.monotonic() + 3 * _PATIENCE
        with contextlib.suppress(queue.Empty):
            while True:
                kind, news = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
                if kind == "fault":
                    return news
        return WorkerError(f"Spark must run every task to its end. Received: {failure}")

    def _act(self) -> None:
        session = self._df.sparkSession
        # Bound to a local name: Spark pickles the function, and must not meet this object's threads and queues.
        task = self._task

        def run(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from task.run(records)

        try:
            with _tagged(session, self._tag):
                rows = self._df.mapInArrow(run, SUMMARY).collect()
            self._news.put(("rows", rows))
        except Exception as error:  # noqa: BLE001 - handed to the waiting thread, which raises it
            self._news.put(("failure", error))

    def _observe(self) -> None:
        clock, called = -1, time.monotonic()
        while not self._over.is_set():
            try:
                status: Status = self._observer.observe(clock, _PATIENCE)
                if self._stalls is not None and time.monotonic() - called >= self._stalls.interval:
                    called = time.monotonic()
                    self._stalls.look(self._observer.list_workers())
            except ServerLostError:  # whether that matters is for `_wait` to find
                clock = -1  # a server that comes back has gone back
                self._over.wait(_PATIENCE)
                continue
            except DistkerasError as error:  # a `DeadlineError` too, which is an `OSError` as well
                self._news.put(("fault", error))
                return
            except OSError:
                return
            if status.clock > clock:
                clock = status.clock
                self._news.put(("status", status))
                self._over.wait(0.1)  # enough for the eye, and no load on the server

    def _cancel(self, spark: threading.Thread) -> None:
        deadline = time.monotonic() + _CANCEL
        while spark.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                _interrupt(self._df.sparkSession, self._tag)
            spark.join(_PATIENCE)  # Spark may not have known the job yet


# A session's tags belong to one thread, but under Spark Connect: what one thread tagged, another cannot interrupt.
# Those of the Spark context can be canceled from anywhere; Connect has no context.


@contextlib.contextmanager
def _tagged(session: SparkSession, tag: str) -> Iterator[None]:
    context = _context(session)
    (context.addJobTag if context else session.addTag)(tag)
    try:
        yield
    finally:
        (context.removeJobTag if context else session.removeTag)(tag)


def _interrupt(session: SparkSession, tag: str) -> None:
    context = _context(session)
    (context.cancelJobsWithTag if context else session.interruptTag)(tag)


def _context(session: SparkSession) -> SparkContext | None:
    try:
        return session.sparkContext
    except PySparkException:  # Spark Connect
        return None
