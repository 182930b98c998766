"""Tasks without rows, in slots that are free: each trains what workers lend, for as long as it may stay."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from distkeras.data.schema import map_in_arrow
from distkeras.ps.errors import DistkerasError, sorted_error
from distkeras.ps.events import Events
from distkeras.settings import TrainSettings
from distkeras.spark.cluster import SparkAction, in_callers_scope
from distkeras.spark.failures import typed_error
from distkeras.spark.task_process import task_context
from distkeras.training.task import SUMMARY, Task, TaskAttempt

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

log = logging.getLogger(__name__)

#: Seconds until a helper that has left asks Spark for a slot again; and at most, after several failures in a row.
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 5.0, 320.0
#: Seconds after which a thread checks whether the job is over, and that Spark may take to end a cancelled helper.
_POLL_SECONDS, _CANCEL_SECONDS = 1.0, 60.0


class _HelperAttempt(TaskAttempt):
    """One attempt of a helper, which has no partition."""

    def _train(self) -> tuple[int, int]:
        self._help()
        return 0, -1

    def _report_error(self, error: Exception) -> DistkerasError:
        """Return the typed error: the job goes on without this helper, and the driver reports it."""
        return sorted_error(error)


@dataclass(frozen=True)
class HelperTask:
    """A helper, whose number follows those of the workers; it travels in Spark's own task closure."""

    task: Task
    number: int

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Help, and yield the summary; the function for ``mapInArrow``."""
        yield self.task.attempt(_HelperAttempt, self.number, task_context().taskAttemptId(), records)


class Helpers:
    """The helpers of a job: each is a Spark job of one task, which Spark starts when a slot is free.

    A helper leaves when a task of the job needs a slot, and asks for one again later. What it has in hand is lent to
    another worker, so that its failure is no failure of the job.
    """

    def __init__(self, session: SparkSession, task: Task, training: TrainSettings, events: Events) -> None:
        self._session, self._task, self._training, self._events = session, task, training, events
        self._over = threading.Event()
        #: Set while helpers may have slots.
        self._allowed = threading.Event()
        self._allowed.set()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Ask Spark for the slots; repeated calls do nothing."""
        if self._threads:
            return
        for number in range(self._training.helpers):
            run = in_callers_scope(self._session, partial(self._run, self._task.settings.workers + number))
            thread = threading.Thread(target=run, name=f"distkeras-helper-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def allow(self, allowed: bool) -> None:
        """Let helpers have slots, or not: the server needs one, and helpers cannot learn that; thread-safe."""
        (self._allowed.set if allowed else self._allowed.clear)()

    def close(self) -> None:
        """Cancel the helpers, and wait for their ends."""
        self._over.set()
        deadline = time.monotonic() + _CANCEL_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, number: int) -> None:
        task, pause = HelperTask(self._task, number), _PAUSE_SECONDS
        while not self._over.is_set():
            if not self._allowed.wait(_POLL_SECONDS):
                continue
            error = self._attempt(task)
            if error is None:
                pause = _PAUSE_SECONDS
            elif not self._over.is_set():
                text = "a helper has failed, and is started again in %.0f s: %s"
                self._events.report(log, "helper", text, pause, typed_error(error, self._session), worker=number)
            self._over.wait(pause)
            pause = pause if error is None else min(2 * pause, _PAUSE_SECONDS_MAX)

    def _attempt(self, task: HelperTask) -> Exception | None:
        """Run a helper once; return why it has failed. What it had in hand is lent to another worker."""
        try:
            action = SparkAction(self._session, partial(self._collect, task), f"distkeras-help-{task.number}")
            while not action.ended(_POLL_SECONDS):
                if self._over.is_set() or not self._allowed.is_set():
                    action.cancel(_CANCEL_SECONDS)
                    return None
            action.rows()
        except Exception as error:  # noqa: BLE001 - its caller reports it
            return error
        return None

    def _collect(self, task: HelperTask) -> list[Row]:
        one_task = self._session.range(1).coalesce(1)
        return map_in_arrow(one_task, task.run, SUMMARY, self._training.resources).collect()
