"""Spark actions in separate threads, with deadlines on waits, and cancellation."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distkeras.ps.errors import DeadlineError
from distkeras.spark.cluster import context_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds from one attempt to cancel a job to the next: Spark may not know the job yet.
_RETRY_SECONDS = 1.0


class SparkAction:
    """A Spark action in a separate thread, which starts at once.

    Args:
        on_end: called in the thread after the action has succeeded or failed.
    """

    def __init__(
        self,
        session: SparkSession,
        collect: Callable[[], list[Any]],
        name: str,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._session = session
        self._collect, self._on_end = collect, on_end
        self._tag = f"{name}-{uuid.uuid4().hex}"
        self._rows: list[Any] = []
        self._error: Exception | None = None
        self._ended = threading.Event()
        threading.Thread(target=in_callers_scope(session, self._run), name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            with tagged(self._session, self._tag):
                self._rows = self._collect()
        except Exception as error:  # noqa: BLE001 - raised again by `rows`
            self._error = error
        finally:
            self._ended.set()
            self._on_end()

    def ended(self, timeout: float = 0.0) -> bool:
        """Wait at most ``timeout`` seconds for the action to end, and return whether it has."""
        return self._ended.wait(timeout)

    def rows(self) -> list[Any]:
        """Return the rows of an action that has ended, or raise Spark's error; raise DeadlineError before its end."""
        if not self.ended():
            raise DeadlineError(
                "a Spark action must have ended before its rows are read. Received: one that still runs"
            )
        if self._error is not None:
            raise self._error
        return self._rows

    def cancel(self, seconds: float) -> None:
        """Cancel the action, and wait at most ``seconds`` until it has ended."""
        deadline = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # a session that has ended raises
                cancel_tagged(self._session, self._tag)
            self.ended(_RETRY_SECONDS)


def in_callers_scope(session: SparkSession, function: Callable[[], None]) -> Callable[[], None]:
    """Return ``function`` for another thread, with the calling thread's job group, pool, description and tags.

    Spark stores these per thread. Without them, ``cancelJobGroup`` and fair pools have no effect on our Spark jobs.
    """
    from pyspark import inheritable_thread_target

    wrapped: Callable[[], None] = inheritable_thread_target(session)(function)
    return wrapped


# A classic session's tags belong to one thread, and other threads cannot interrupt its jobs. So the tags of the Spark
# context are used, whose jobs any thread can cancel; Spark Connect has no context, but its session's tags are shared.


@contextlib.contextmanager
def tagged(session: SparkSession, tag: str) -> Iterator[None]:
    """Give the jobs of this thread a tag."""
    context = context_of(session)
    (context.addJobTag if context else session.addTag)(tag)
    try:
        yield
    finally:
        (context.removeJobTag if context else session.removeTag)(tag)


def cancel_tagged(session: SparkSession, tag: str) -> None:
    """Cancel the jobs that have a tag, from any thread."""
    context = context_of(session)
    (context.cancelJobsWithTag if context else session.interruptTag)(tag)
