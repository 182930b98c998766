"""The driver's hold on a server that runs in the cluster: a Spark job of one task, and requests that tasks carry."""

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
from distkeras.ps.errors import ERRORS, ConfigurationError, DeadlineError, DistkerasError, ServerLostError, headline
from distkeras.ps.events import Events, handle, record_from_json
from distkeras.ps.server.start import ResumePoint, StartReport
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.spark.actions import SparkAction
from distkeras.spark.cluster import is_stopped
from distkeras.spark.failures import named_error
from distkeras.training.remote_requests import RemoteClient, Search, search
from distkeras.training.server_task import LOGGED, OUTPUT, REPORT, ServerTask
from distkeras.training.supervisor import RestartLimit, Supervisor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

#: Seconds from one question for news to the next: each is a small Spark job.
NEWS_SECONDS = 5.0
#: Seconds from one look at two Spark jobs to the next.
_LOOK = 0.2
#: Seconds from one look for a server that was started again to the next.
_AGAIN = 2.0
#: Seconds for a canceled job to end, and for the server to end with a last snapshot.
_CANCEL, _END_SAVING = 60.0, 120.0
#: Executors that are asked whether they find the server, at most.
_ASKED_MAX = 64
_R = TypeVar("_R")


class ClusterServer:
    """A server in the cluster, for as long as it is entered.

    Args:
        df: the job's data, one partition a worker; its session runs the server.
        events: takes what the server has logged, when it ends.
    """

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
        self.news_seconds = NEWS_SECONDS
        #: Whether a request is in progress that is worth a restart of the server.
        self._insists = False
        self._driver = RemoteClient(self._session, self.address, self._deadlines, self._look_while_asking)
        self._end_reason: str | None = None
        self._end_sent_at = 0.0
        self._action: SparkAction | None = None
        #: When the server was last known to live, and when it was last started.
        self._active_at = self._started_at = time.monotonic()
        #: A task that looks whether the server answers, when it was sent, and whether a new server is to be found.
        self._search: SparkAction | None = None
        self._searched_at, self._restarting = 0.0, False
        self._limit = RestartLimit()
        #: How often the driver has started the server again.
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
                with contextlib.suppress(DistkerasError):  # it is canceled then
                    self._driver.goodbye()
                    self._server.ended(_END_SAVING)
            if self._server.ended():
                with contextlib.suppress(Exception):  # the callers of the server have their errors already
                    self._take_in(self._server)
        finally:
            self._cancel()

    def _start(self) -> StartReport:
        """Run the server, and return its report once a task has found it."""
        self._run_task()
        # One task alone: several could take the very slot that the server needs, and wait for it.
        patience = self._patience_at_start
        search_action = self._search_for(patience)
        try:
            if not self._either_ends(search_action):
                raise DeadlineError(
                    f"waited {self._deadlines.rows:g} s for Spark to run the parameter server's task and a task that "
                    "connects to it: each needs a free slot"
                )
            if self._server.ended():
                return self._require_served(self._take_in(self._server))
            row = search_action.rows()[0]
        finally:
            search_action.cancel(_CANCEL)
        if row["error"]:
            raise DeadlineError(
                f"waited {patience:g} s for the parameter server, which needs a slot in addition to that of the task "
                f"that connects to it; on host {row['host']}: {row['error']}"
            )
        return StartReport.from_json(json.loads(row["place"])["report"])

    def _run_task(self) -> None:
        one, task = self._session.range(0, 1, 1, 1), self._task
        self._action = SparkAction(self._session, map_in_arrow(one, task.run, OUTPUT).collect, "distkeras-server")
        self._active_at = self._started_at = time.monotonic()

    @property
    def _patience_at_start(self) -> float:
        """Seconds until a server that was started must be found: Spark may have to find another executor."""
        return self._deadlines.publish + self._deadlines.standstill

    def _search_for(self, seconds: float) -> SparkAction:
        return search(self._session, Search(self.address, self._deadlines, seconds), 1)

    @staticmethod
    def _require_served(report: StartReport | None) -> StartReport:
        """Return the output of a task that ended while it was to start, if it has not served to the end."""
        if report is None or report.ended:
            raise ServerLostError("the parameter server's task has ended before its job. See the log of the Spark task")
        return report

    def _either_ends(self, action: SparkAction) -> bool:
        deadline = time.monotonic() + self._deadlines.rows
        while time.monotonic() < deadline:
            if action.ended(_LOOK) or self._server.ended():
                return True
        return False

    def _require_reached(self) -> None:
        """Check that executors reach the server, with as many tasks as there are workers."""
        asked = min(self._task.request.settings.workers, _ASKED_MAX)
        search_action = search(self._session, Search(self.address, self._deadlines, self._deadlines.connect), asked)
        try:
            if not search_action.ended(self._deadlines.rows):
                raise DeadlineError(
                    f"waited {self._deadlines.rows:g} s for Spark to run tasks that look for the server: "
                    "they need free slots"
                )
            for row in search_action.rows():
                if row["error"]:
                    raise ConfigurationError(
                        "every executor must reach the parameter server, and `checkpoint`, which has the server's "
                        "address (a folder on one machine is not enough). "
                        f"Received: on host {row['host']}, {row['error']}"
                    )
        finally:
            search_action.cancel(_CANCEL)

    def _take_in(self, action: SparkAction) -> StartReport | None:
        """Log what the server's task has logged, and return its report, which it has put out if it did not serve."""
        rows = self._rows_of(action)
        for row in rows:
            record = record_from_json(row["text"]) if row["kind"] == LOGGED else None
            if record is not None:
                self._events.add(record, "server")
                handle(record)
        for row in rows:
            if row["kind"] == REPORT:
                report = StartReport.from_json(row["text"])
                if report.error:
                    raise ERRORS[report.code](f"the parameter server must start. Received: {report.error}")
                return report
        return None

    @staticmethod
    def _rows_of(action: SparkAction) -> list[Any]:
        try:
            return list(action.rows())
        except Exception as error:
            named = named_error(error)
            raise named or ServerLostError(
                f"Spark has given up the parameter server's task: {headline(str(error))}"
            ) from error

    @property
    def _server(self) -> SparkAction:
        assert self._action is not None, "the server must have been started"
        return self._action

    def connect(self) -> RemoteClient:
        """Return another connection of the driver's."""
        return RemoteClient(self._session, self.address, self._deadlines)

    def alive(self) -> bool:
        """Return whether the server's task runs, or is to be run again."""
        return not self._server.ended()

    def record_activity(self) -> None:
        """Note that the server has answered, over any connection of the driver; from any thread."""
        self._active_at = time.monotonic()

    def watch(self) -> None:
        """Start a server again that stands still or was given up, if due; raise DistkerasError if that is futile."""
        if not self.alive():
            try:
                self._rows_of(self._server)
            except DistkerasError as error:  # it has died as often as Spark lets a task fail in the whole of a job
                self._start_again(error)
                return
            self._require_served(self._take_in(self._server))
            raise ServerLostError("the parameter server's task has ended before its job. See the log of the Spark task")
        self._look_after()
        if self._end_reason is not None and time.monotonic() - self._end_sent_at >= self.news_seconds:
            self._send_end(self._end_reason)  # it may be another one

    def ask(self, call: Callable[[DriverClient], _R]) -> _R:
        """Return ``call`` of the driver's connection, repeated while Spark may bring the server back."""
        began = time.monotonic()
        while True:
            try:
                self._insists = True
                answer = call(self._driver)
            except DistkerasError as error:
                if not self._driver.lost(error):
                    raise
                self.watch()
                since = time.monotonic() - max(began, self._started_at)
                if since > self._patience_at_start + self._deadlines.reconnect and self._search is None:
                    raise
            else:
                self.record_activity()
                return answer
            finally:
                self._insists = False

    def try_to_ask(self, call: Callable[[DriverClient], _R]) -> _R:
        """Return ``call`` of the driver's connection."""
        return call(self._driver)

    def abandon(self, error: DistkerasError) -> None:
        """Cancel a server that gave no answer but ``error``."""
        if self._driver.lost(error):
            self._cancel()

    def end_early(self, reason: str) -> None:
        """Let the workers leave; a server that comes back is asked again."""
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

    def _look_while_asking(self) -> None:
        """Check the server while a request is in progress; end the request if its slot may be needed for that."""
        if not self._insists:
            return
        under_way = self._search is not None
        self._look_after()
        if self._search is not None and not under_way:
            silence = time.monotonic() - self._active_at
            raise ServerLostError(f"the parameter server has not answered for {silence:.0f} s")

    def _look_after(self) -> None:
        """Send a task to a server that has been silent for too long, and start it again if it does not answer."""
        # Nothing here waits: without a free slot for that task nothing is known of the server, and nothing is done.
        now = time.monotonic()
        silence = now - self._active_at
        if self._search is None:
            # After a restart in short tasks: a long one could take the very slot that the server needs.
            due = now - self._searched_at >= _AGAIN if self._restarting else silence >= self._deadlines.standstill
            if due:
                self._searched_at = now
                self._search = self._search_for(self._deadlines.handshake)
            return
        if not self._search.ended():
            return
        search_action, self._search = self._search, None
        try:
            (row,) = search_action.rows()
        except Exception as error:  # noqa: BLE001 - Spark's: nothing is known of the server
            log.warning("a task that looks for the parameter server has failed: %s", headline(str(error)))
            return
        place = json.loads(row["place"]) if row["place"] else None
        if place is not None and not row["error"]:
            self.record_activity()
            if self._restarting:
                self._restarting = False
                self._count_restart(StartReport.from_json(place["report"]))
            return
        patience = self._deadlines.standstill
        if self._restarting or place is None:  # it is on its way, as far as is known
            patience = self._patience_at_start
        answered = self._active_at > self._searched_at  # over another connection, meanwhile
        if not answered and silence >= patience:
            self._replace(row["incarnation"], row["error"])

    def _replace(self, incarnation: int, error: str) -> None:
        """Start the server again, without those up to ``incarnation``, which find a higher claim if they wake."""
        if self._restarting and not self._limit.failed():
            raise ServerLostError(
                f"the parameter server stopped responding, and did not come back after a restart: {error}. See the log "
                "of its Spark task"
            )
        self._events.report(log, "standstill", "the parameter server does not respond, and is started again: %s", error)
        self._server.cancel(_CANCEL)
        self._run_next(max(self._task.given_up, incarnation))

    def _start_again(self, error: DistkerasError) -> None:
        """Start a server again that Spark has given up; raise ``error`` if that cannot help."""
        if not self._may_run() or (self._restarting and not self._limit.failed()):
            raise error
        text = "Spark does not retry the parameter server's task any more; the driver starts it again: %s"
        self._events.report(log, "restart", text, error.message)
        self._run_next(self._task.given_up)

    def _may_run(self) -> bool:
        return not is_stopped(self._session)

    def _run_next(self, given_up: int) -> None:
        self._task = replace(self._task, start=self._task.start + 1, given_up=given_up)
        self._run_task()
        self.restarts += 1
        self._restarting, self._searched_at = True, time.monotonic()

    def _count_restart(self, report: StartReport) -> None:
        clock = 0 if report.resumed is None else report.resumed.clock
        text = "the driver has started the parameter server again; it is back with commit %d of a snapshot"
        self._events.report(log, "restart", text, clock)
        self._limit.back(clock)

    def _cancel(self) -> None:
        self._driver.close()
        if self._search is not None:
            self._search.cancel(_CANCEL)
        if self._action is not None:
            self._action.cancel(_CANCEL)


#: The driver's side of a server that may die, wherever the server runs.
ServerHandle = Supervisor | ClusterServer
