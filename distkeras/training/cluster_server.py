"""The driver's handle to a server in the cluster: a Spark job of one task, and requests that tasks carry.

If the center is divided, another Spark job has one task for each shard. They find the server by themselves, again after
it was restarted, so that job runs until the training ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from distkeras.data.ordering import require_rows
from distkeras.data.schema import map_in_arrow
from distkeras.ps.checkpoint.ownership import AnnouncedAddress
from distkeras.ps.errors import ConfigurationError, DeadlineError, DistkerasError, ServerLostError, headline
from distkeras.ps.events import Events, handle, record_from_json
from distkeras.ps.server.start_report import (
    NotStarted,
    ResumePoint,
    Started,
    StartReport,
    report_from_json,
    started_from_json,
)
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.spark.cluster import SparkAction, is_stopped
from distkeras.spark.failures import named_error
from distkeras.training.remote_requests import RemoteClient, Search, search
from distkeras.training.server_task import LOGGED, OUTPUT, REPORT, ServerTask
from distkeras.training.supervisor import RestartLimit, Supervisor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

#: Seconds from one request for the status to the next: each is a small Spark job.
STATUS_SECONDS = 5.0
#: Seconds from one check of two Spark jobs to the next.
_POLL_SECONDS = 0.2
#: Seconds from one search for a restarted server to the next.
_SEARCH_SECONDS = 2.0
#: Seconds for a canceled job to end, for the server to end with a last snapshot, and then for its shards.
_CANCEL, _END_SAVING, _END_SHARDS = 60.0, 120.0, 15.0
#: The most tasks that check whether executors reach the server.
_PROBES_MAX = 64
#: The error text if the server's task ends by itself.
_ENDED = "the parameter server's task has ended before its job. See the log of the Spark task"
_R = TypeVar("_R")


class ClusterServer:
    """A server in the cluster, which runs while this context is entered; its log goes to ``events`` when it ends."""

    def __init__(self, df: DataFrame, task: ServerTask, events: Events) -> None:
        settings, certificate = task.request.settings, task.request.certificate
        assert settings.checkpoint is not None
        self._df, self._session = df, df.sparkSession
        self._task = task
        self._events = events
        self._deadlines = settings.deadlines
        pinned = "" if certificate is None else certificate.certificate
        self.address = AnnouncedAddress("", 0, task.request.key, pinned, settings.checkpoint.uri)
        self.resumed: ResumePoint | None = None
        self.status_seconds = STATUS_SECONDS
        #: Whether the request in progress may restart the server.
        self._may_restart = False
        self._shards = settings.shards if settings.shards > 1 else 0
        self._driver = self.connect(self._check_during_request)
        self._end_reason: str | None = None
        self._end_sent_at = 0.0
        self._action: SparkAction | None = None
        #: The tasks of the shards, when they were started, and how often that was of no use.
        self._shard_action: SparkAction | None = None
        self._shards_began, self._shard_limit = 0.0, RestartLimit()
        #: When the server last answered, and when it was last started.
        self._active_at = self._started_at = time.monotonic()
        #: A task that searches for the server, when it was sent, and whether the server was restarted.
        self._search: SparkAction | None = None
        self._searched_at, self._restarting = 0.0, False
        #: Whether the server answered the latest search, and has not announced itself: it waits for its shards.
        self._starting = False
        self._limit = RestartLimit()
        #: The number of restarts by the driver.
        self.restarts = 0

    def __enter__(self) -> ClusterServer:
        try:
            report = self._start()
            if report.resumed is not None and report.resumed.row_sum is not None and not self._task.rows_checked:
                require_rows(self._df, report.resumed.row_sum)
                self._task = replace(self._task, rows_checked=True, start=self._task.start + 1)
                report = self._start()
            self.resumed = report.resumed
            self._require_reached()
        except BaseException:
            self._cancel()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            if self.alive():
                with contextlib.suppress(DistkerasError):  # `_cancel` ends it then
                    self._driver.goodbye()
                    self._server.ended(_END_SAVING)
            for action in filter(None, (self._server, self._shard_action)):
                if self._server.ended() and action.ended(_END_SHARDS):
                    with contextlib.suppress(Exception):  # callers have received the server's errors already
                        self._collect_report(action)
        finally:
            self._cancel()

    def _start(self) -> Started:
        """Run the server, and return its report once a task has found it."""
        self._run_task()
        began = time.monotonic()
        while True:
            row = self._search_at_start()
            if isinstance(row, Started):
                return row
            if not row["error"]:
                return started_from_json(json.loads(row["place"])["report"])
            waited = time.monotonic() - began
            if not row["starting"] or waited >= self._deadlines.rows:
                slots = f"{1 + self._shards} slots" if self._shards else "a slot"
                raise DeadlineError(
                    f"waited {waited:.0f} s for the parameter server, which needs {slots} in addition to that of "
                    f"the task that connects to it; on host {row['host']}: {row['error']}"
                )

    def _search_at_start(self) -> Any:
        """Return the row of a task that has looked for the server, or the report of a server that has ended."""
        # Only one task: several could take the slot that the server needs, and wait for the server.
        search_action = self._search_for(self._start_timeout)
        try:
            if not self._wait_for_either(search_action):
                raise DeadlineError(
                    f"waited {self._deadlines.rows:g} s for Spark to run the parameter server's task and a task that "
                    "connects to it: each needs a free slot"
                )
            if self._shard_action is not None and self._shard_action.ended():
                raise self._error_of_shards()
            if self._server.ended():
                report = self._collect_report(self._server)
                if not isinstance(report, Started):
                    raise ServerLostError(_ENDED)
                return report
            return search_action.rows()[0]
        finally:
            search_action.cancel(_CANCEL)

    def _run_task(self) -> None:
        one_row, task = self._session.range(0, 1, 1, 1), self._task
        self._action = SparkAction(self._session, map_in_arrow(one_row, task.run, OUTPUT).collect, "distkeras-server")
        self._active_at = self._started_at = time.monotonic()
        if self._shards and (self._shard_action is None or self._shard_action.ended()):
            self._run_shards()

    def _run_shards(self) -> None:
        parts, tasks = self._session.range(0, self._shards, 1, self._shards), self._task.shards()
        collect = map_in_arrow(parts, tasks.run, OUTPUT).collect
        self._shard_action = SparkAction(self._session, collect, "distkeras-shards")
        self._shards_began = time.monotonic()

    @property
    def _start_timeout(self) -> float:
        """Seconds in which a started server must be found: Spark may have to schedule it on another executor.

        One that waits for its shards has as long as it waits for them.
        """
        return self._deadlines.rows if self._starting else self._deadlines.publish + self._deadlines.standstill

    def _search_for(self, seconds: float) -> SparkAction:
        return search(self._session, Search(self.address, self._deadlines, seconds), 1)

    def _wait_for_either(self, action: SparkAction) -> bool:
        deadline = time.monotonic() + self._deadlines.rows
        while time.monotonic() < deadline:
            shards_ended = self._shard_action is not None and self._shard_action.ended()
            if action.ended(_POLL_SECONDS) or self._server.ended() or shards_ended:
                return True
        return False

    def _require_reached(self) -> None:
        """Check that executors reach the server, with as many tasks as there are workers.

        A server that accepts connections is reached. If it does not answer, it is suspended; `watch` sees to that.
        """
        asked = min(self._task.request.settings.workers, _PROBES_MAX)
        task = Search(self.address, self._deadlines, self._deadlines.connect, shards=bool(self._shards))
        search_action = search(self._session, task, asked)
        try:
            if not search_action.ended(self._deadlines.rows):
                raise DeadlineError(
                    f"waited {self._deadlines.rows:g} s for Spark to run tasks that look for the server: "
                    "they need free slots"
                )
            for row in search_action.rows():
                if row["error"] and not row["unanswered"]:
                    raise ConfigurationError(
                        "every executor must reach the parameter server, its shards, and `checkpoint`, which has the "
                        "server's address (a folder on one machine is not enough). "
                        f"Received: on host {row['host']}, {row['error']}"
                    )
        finally:
            search_action.cancel(_CANCEL)

    def _collect_report(self, action: SparkAction) -> StartReport | None:
        """Log the records of the server's task, and return its report; only a server that did not serve has one."""
        rows = self._rows_of(action)
        for row in rows:
            record = record_from_json(row["text"]) if row["kind"] == LOGGED else None
            if record is not None:
                self._events.add(record, "server")
                handle(record)
        for row in rows:
            if row["kind"] == REPORT:
                report = report_from_json(row["text"])
                if isinstance(report, NotStarted):
                    raise report.to_error()
                return report
        return None

    def _rows_of(self, action: SparkAction) -> list[Any]:
        try:
            return list(action.rows())
        except Exception as error:
            typed = named_error(error)
            tasks = "the parameter server's task" if action is self._action else "the tasks of the shards"
            raise typed or ServerLostError(f"Spark has given up {tasks}: {headline(str(error))}") from error

    @property
    def _server(self) -> SparkAction:
        assert self._action is not None, "the server must have been started"
        return self._action

    def connect(self, meanwhile: Callable[[], object] = lambda: None) -> RemoteClient:
        return RemoteClient(self._session, self.address, self._deadlines, meanwhile, divided=bool(self._shards))

    def alive(self) -> bool:
        """Return whether the server's task runs, or Spark will run it again."""
        return not self._server.ended()

    def record_activity(self) -> None:
        """Record that the server has answered over a connection of the driver; thread-safe."""
        self._active_at = time.monotonic()

    def watch(self) -> None:
        """Restart a server that does not respond or that Spark gave up; raise DistkerasError if that is futile."""
        if not self.alive():
            try:
                self._rows_of(self._server)
            except DistkerasError as error:  # it has died as often as Spark allows a task to fail
                self._start_again(error)
                return
            self._collect_report(self._server)
            raise ServerLostError(_ENDED)
        self._check_server()
        if self._end_reason is not None and time.monotonic() - self._end_sent_at >= self.status_seconds:
            self._send_end(self._end_reason)  # the server may be a new one

    def ask(self, call: Callable[[DriverClient], _R]) -> _R:
        """Return the result of ``call`` with the driver's connection, repeated while the server may be restarted."""
        began = time.monotonic()
        while True:
            try:
                self._may_restart = True
                answer = call(self._driver)
            except DistkerasError as error:
                if not self._driver.lost(error):
                    raise
                self.watch()
                since = time.monotonic() - max(began, self._started_at)
                if since > self._start_timeout + self._deadlines.reconnect and self._search is None:
                    raise
            else:
                self.record_activity()
                return answer
            finally:
                self._may_restart = False

    def ask_once(self, call: Callable[[DriverClient], _R]) -> _R:
        return call(self._driver)

    def abandon(self, error: DistkerasError) -> None:
        """Cancel a server whose failure to answer was ``error``."""
        if self._driver.lost(error):
            self._cancel()

    def end_early(self, reason: str) -> None:
        """End the job early at the workers; `watch` repeats the request, for restarted servers."""
        self._end_reason = reason
        self.ask(lambda driver: driver.finish(reason))
        self._end_sent_at = time.monotonic()

    def _send_end(self, reason: str) -> None:
        self._end_sent_at = time.monotonic()
        try:
            self._driver.finish(reason)
        except DistkerasError as error:
            if not self._driver.lost(error):
                raise

    def _check_during_request(self) -> None:
        """Check the server while a request is in progress; end the request if a search may need its slot."""
        if not self._may_restart:
            return
        was_searching = self._search is not None
        self._check_server()
        if self._search is not None and not was_searching:
            silence = time.monotonic() - self._active_at
            raise ServerLostError(f"the parameter server has not answered for {silence:.0f} s")

    def _check_server(self) -> None:
        """Send a task to a server that has been silent for too long, and restart it if it does not answer."""
        self._check_shards()
        # This does not wait: as long as that task has no free slot, the server's state is unknown, and it is kept.
        now = time.monotonic()
        silence = now - self._active_at
        if self._search is None:
            # After a restart, search in short tasks: a long one could take the slot that the server needs.
            due = (
                now - self._searched_at >= _SEARCH_SECONDS
                if self._restarting
                else silence >= self._deadlines.standstill
            )
            if due:
                self._searched_at = now
                self._search = self._search_for(self._deadlines.handshake)
            return
        if not self._search.ended():
            return
        search_action, self._search = self._search, None
        try:
            (row,) = search_action.rows()
        except Exception as error:  # noqa: BLE001 - an error of Spark says nothing about the server
            log.warning("a task that looks for the parameter server has failed: %s", headline(str(error)))
            return
        place, self._starting = json.loads(row["place"]) if row["place"] else None, row["starting"]
        if place is not None and not row["error"]:
            self.record_activity()
            if self._restarting:
                self._restarting = False
                self._count_restart(started_from_json(place["report"]))
            return
        patience = self._deadlines.standstill
        if self._restarting or place is None:  # it may be starting
            patience = self._start_timeout
        answered = self._active_at > self._searched_at  # over another connection, meanwhile
        if not answered and silence >= patience:
            self._replace(row["incarnation"], row["error"])

    def _replace(self, incarnation: int, error: str) -> None:
        """Restart the server; earlier ones, up to ``incarnation``, end if they resume and find a higher claim."""
        if self._restarting and not self._limit.failed():
            raise ServerLostError(
                f"the parameter server stopped responding, and did not come back after a restart: {error}. See the log "
                "of its Spark task"
            )
        self._events.report(log, "standstill", "the parameter server does not respond, and is started again: %s", error)
        self._server.cancel(_CANCEL)
        self._run_next(max(self._task.given_up, incarnation))

    def _start_again(self, error: DistkerasError) -> None:
        """Restart a server that Spark has given up; raise ``error`` if the session or the limit does not allow it."""
        if not self._may_run() or (self._restarting and not self._limit.failed()):
            raise error
        text = "Spark does not retry the parameter server's task any more; the driver starts it again: %s"
        self._events.report(log, "restart", text, error.message)
        self._run_next(self._task.given_up)

    def _check_shards(self) -> None:
        """Run the tasks of the shards again if Spark has given them up; raise its error if that has been futile."""
        if self._shard_action is None or not self._shard_action.ended():
            return
        error = self._error_of_shards()
        if time.monotonic() - self._shards_began >= self._start_timeout:
            self._shard_limit = RestartLimit()  # the shards have worked meanwhile
        if not (self._may_run() and self._shard_limit.failed()):
            raise error
        text = "Spark does not retry the tasks of the shards any more; the driver starts them again: %s"
        self._events.report(log, "restart", text, error.message)
        self._run_shards()

    def _error_of_shards(self) -> DistkerasError:
        """Return why the tasks of the shards have ended."""
        assert self._shard_action is not None
        try:
            self._rows_of(self._shard_action)
        except DistkerasError as error:
            return error
        return ServerLostError("the tasks of the shards have ended before their job. See the logs of these Spark tasks")

    def _may_run(self) -> bool:
        return not is_stopped(self._session)

    def _run_next(self, given_up: int) -> None:
        self._task = replace(self._task, start=self._task.start + 1, given_up=given_up)
        self._run_task()
        self.restarts += 1
        self._restarting, self._searched_at = True, time.monotonic()

    def _count_restart(self, report: Started) -> None:
        clock = 0 if report.resumed is None else report.resumed.clock
        text = "the driver has started the parameter server again; it is back with commit %d of a snapshot"
        self._events.report(log, "restart", text, clock)
        self._limit.back(clock)

    def _cancel(self) -> None:
        self._driver.close()
        if self._search is not None:
            self._search.cancel(_CANCEL)
        for action in filter(None, (self._action, self._shard_action)):
            action.cancel(_CANCEL)


#: The driver's handle to a server that may die, on the driver's machine or in the cluster.
ServerHandle = Supervisor | ClusterServer
