"""Training on a stream: one server serves all of its micro-batches, each of which is one Spark job.

Spark sends a micro-batch again if it has not recorded it as done. The snapshots record which micro-batch the center
covers, and how far it has come within the current one, so that nothing counts twice. Rules:

1. A micro-batch is acknowledged to Spark when a snapshot covers all of it.
2. Every failure is raised to Spark, which then does not record the micro-batch as done.
3. A version is published after the snapshot that covers its micro-batch, which has the same weights, and before the
   micro-batch is acknowledged.

A `Publisher` publishes the versions of the center.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.callbacks import Callback, CenterWeights
from distkeras.keras_model import archive
from distkeras.keras_model.keras_config import applied
from distkeras.keras_model.published_rows import PublishedRows
from distkeras.keras_model.recipe import layout_identity
from distkeras.keras_model.variables import VariableVector, in_own_order, moving_statistics, trainable_variables
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.checkpoint.versions import Version, VersionFolder, Versions
from distkeras.ps.errors import (
    ConfigurationError,
    DeadlineError,
    DistkerasError,
    JobStoppedError,
    LocalProtocolError,
    ServerLostError,
    WorkerError,
    headline,
)
from distkeras.ps.protocol.driver_messages import NO_CHANGES, MicroBatchBegun
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.server.start_report import ResumePoint
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.validate import invalid
from distkeras.ps.world.files import below
from distkeras.results import JobRecords, JobResults, MicroBatchProgress, backlog_of
from distkeras.shown import Shown
from distkeras.spark.cluster import SparkFacts, hadoop_path, in_callers_scope
from distkeras.spark.failures import innermost, short_errors
from distkeras.spark.record_stream import MicroBatchSession
from distkeras.training.callback_runner import ABANDON_SECONDS, CallbackRunner, fail_callbacks
from distkeras.training.progress import Progress, StallDetector
from distkeras.training.run import PreparedJob, SparkJob, note_resumed
from distkeras.training.stream_halves import QueryState, covered_by, missing, query_state, require_same_halves
from distkeras.training.supervisor import Supervisor

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


log = logging.getLogger(__name__)

#: Seconds that the micro-batch in progress has to end when a stream is stopped.
STOP_SECONDS = 600.0
#: Seconds of one wait for the query's end, which is repeated.
_POLL_SECONDS = 3600
#: Sources whose rows Spark cannot read again, by Spark's names.
_READ_ONCE = ("socket",)
#: What is refused for a model whose rows are at the server, and what to do instead.
_INSTEAD_OF_A_MODEL = "`model` must not be called while a stream is active", "Call it when the stream has ended"
#: The local property in which Spark stores a query's id.
_QUERY_ID = "sql.streaming.queryId"


def require_stream(stream: DataFrame, facts: SparkFacts) -> None:
    """Raise ConfigurationError unless ``stream`` can be trained on: its sources can be read again, without Connect."""
    if not stream.isStreaming:
        raise ConfigurationError(
            "`stream` must be a streaming DataFrame, such as of `spark.readStream`; `train` takes any other. "
            f"Received: a DataFrame with columns={stream.columns}"
        )
    if facts.connect:
        raise ConfigurationError(
            "`stream` must be of a classic session: Spark Connect runs `foreachBatch` at its server, where this "
            "trainer is not. Run the driver in the cluster, or train on what the stream has written. "
            "Received: Spark Connect"
        )
    leaves = stream._jdf.queryExecution().analyzed().collectLeaves()  # noqa: SLF001 - PySpark has no public way to a plan
    for place in range(leaves.size()):
        leaf = str(leaves.apply(place).toString())
        if leaf.removeprefix("StreamingRelationV2 ").split(" ")[0] in _READ_ONCE:
            raise ConfigurationError(
                "`stream` must have sources that Spark can read again after a failure, such as files, Kafka or tables. "
                f"Received: {leaf.strip()}"
            )


def writer_of(stream: DataFrame, trigger: Mapping[str, Any] | None, name: str | None) -> DataStreamWriter:
    """Return the writer of ``stream``; raise ConfigurationError if Spark refuses a keyword of ``trigger``."""
    from pyspark.errors import PySparkException

    if trigger is not None and not isinstance(trigger, Mapping):
        raise invalid("trigger", trigger, "a dictionary of the keywords of `DataStreamWriter.trigger`, or None")
    try:
        writer = stream.writeStream if name is None else stream.writeStream.queryName(name)
        return writer if trigger is None else writer.trigger(**trigger)
    except (PySparkException, TypeError, ValueError) as error:
        raise ConfigurationError(
            "`trigger` must be keywords of `DataStreamWriter.trigger`, and `query_name` a name or None. "
            f"Received: trigger={trigger}, query_name={name!r}: {headline(str(error))}"
        ) from None


def center_of(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint of a stream's center, within the stream's own."""
    return replace(checkpoint, uri=below(checkpoint.uri, "center"))


def query_folder(spark: SparkSession, checkpoint: Checkpoint) -> str:
    """Return the path for Hadoop of Spark's own checkpoint of a stream; ConfigurationError if there is none."""
    return f"{hadoop_path(spark, checkpoint.uri, 'checkpoint').rstrip('/')}/query"


class StreamTraining(Shown):
    """A stream that is trained on, like Spark's `StreamingQuery`; `Trainer.train_stream` returns one.

    Args:
        job: one without rows, whose server saves its state.
        results: its outcome is filled; callbacks receive it at the end.
        uri: the stream's checkpoint, for errors.
        publisher: publishes versions of the center; None: there are none.

    Attributes:
        query: Spark's own handle.
        convert: converts the Keras model that `model` returns; None: `model` returns it as it is.
    """

    query: StreamingQuery
    convert: Callable[[keras.Model], Any] | None = None

    def __init__(self, job: PreparedJob, results: JobResults, uri: str, publisher: Publisher | None = None) -> None:
        self._plan, self._publication, self._center = job
        self._results, self._outcome = results, results.outcome
        self._publisher, self._uri = publisher, uri
        self._session = MicroBatchSession()
        self._stack = ExitStack()
        self._process: ServerProcess
        self._server: Supervisor
        self._callbacks: CallbackRunner
        #: Closes the server when the query has ended, and calls the callbacks' hooks for the end.
        self._closing_thread: threading.Thread | None = None
        #: The job of the micro-batch in progress.
        self._job: SparkJob | None = None
        self._callback_error: BaseException | None = None
        #: Held while a micro-batch is trained, and for any other use of the server's supervisor.
        self._server_lock = threading.Lock()
        #: The stream's id, and the number of the current micro-batch.
        self._current: tuple[str, int] | None = None
        #: What Spark has recorded as done, or is about to record.
        self._query_state = QueryState("")
        self._handed_over: float | None = None
        self._progress: MicroBatchProgress | None = None
        self._progress_lock = threading.Lock()
        self._failure: BaseException | None = None
        #: The center when the stream ended; None: the stream is active, or the server was dead.
        self._last_center: CenterWeights | None = None
        #: No further micro-batch begins; the one in progress is canceled; the server is closed.
        self._stopping, self._canceling, self._ended = threading.Event(), threading.Event(), threading.Event()

    def start(self, writer: DataStreamWriter, folder: str) -> StreamTraining:
        """Start the server, and then the query, whose checkpoint is in ``folder``; return this handle. Call it once.

        Raises:
            DifferentJobError: the checkpoint is of a stream with another model, rule, columns or number of workers, or
                its snapshots do not have the rows that Spark has recorded as done.
            ConfigurationError: Spark refuses the query.
            LocalProtocolError: this is not the first call.
        """
        from pyspark.errors import PySparkException

        if hasattr(self, "_server"):
            raise LocalProtocolError("a stream must be started once. Received: another call of `start`")
        plan, events = self._plan, self._outcome.events
        job = {**plan.identity(), "stream": True}
        job |= {"num_workers": plan.server.workers, "num_epoch": plan.training.num_epoch}
        plan.server.check_store()
        with ExitStack() as stack:
            process = ServerProcess(plan.server, resume=True, job=job, tls=plan.training.tls, events=events)
            stack.enter_context(process)
            self._query_state = query_state(plan.df.sparkSession, folder)
            require_same_halves(process.resumed, self._query_state, self._uri)
            if self._publisher is not None and process.resumed is not None and process.resumed.complete:
                self._publisher.resume(process.resumed.stream, process.resumed.micro_batch)
            self._process = process
            self._server = stack.enter_context(Supervisor(process, self._publish, events))
            note_resumed(self._outcome, process.resumed)
            self._callbacks = CallbackRunner(
                plan.callbacks,
                self._center.build_evaluator,
                self._server.connect,
                fetch_center=self._center.fetch,
                on_stop=self._end_early,
                on_error=self._fail,
                scope=partial(in_callers_scope, plan.df.sparkSession),
                micro_batch=lambda: self.lastProgress,
            )
            try:
                self.query = writer.foreachBatch(self._train).option("checkpointLocation", folder).start()
            except PySparkException as error:
                raise ConfigurationError(
                    "`stream` must be a query of which each row is sent once (output mode append). "
                    f"Received: {headline(str(error))}"
                ) from None
            self._stack = stack.pop_all()
        self._callbacks.start()
        self._closing_thread = threading.Thread(target=self._wait_for_query, name="distkeras-stream", daemon=True)
        self._closing_thread.start()
        return self

    def _facts(self) -> Mapping[str, Any]:
        """Return whether the stream is active, and how far it is."""
        return {"active": self.isActive, "lastProgress": self._progress}

    @property
    def callbacks(self) -> Sequence[Callback]:
        """Return the callbacks of this stream, including those of the trainer."""
        return self._plan.callbacks

    @property
    def isActive(self) -> bool:
        """Return whether the stream has not ended."""
        return not self._ended.is_set()

    @property
    def status(self) -> dict[str, Any]:
        """The current state of Spark's query: message, isDataAvailable, isTriggerActive."""
        return dict(self.query.status)

    @property
    def lastProgress(self) -> MicroBatchProgress | None:
        """The outcome of the latest micro-batch; None before the first. Spark's own is ``query.lastProgress``."""
        with self._progress_lock:
            progress = self._progress
            if progress is not None and progress.backlog is None and not self._ended.is_set():
                reported = self.query.lastProgress
                if reported is not None and reported["batchId"] >= progress.batch:
                    progress = self._progress = replace(progress, backlog=backlog_of(reported["sources"]))
            return progress

    def exception(self) -> BaseException | None:
        """Return the error that ended the stream; None if it is active, or has ended successfully."""
        return self._failure if self._ended.is_set() else None

    @short_errors
    def awaitTermination(self, timeout: float | None = None) -> bool:
        """Wait until the stream has ended, for at most ``timeout`` seconds, and return whether it has.

        Raises:
            DistkerasError: it ended the stream.
            LocalProtocolError: a callback of this stream waits without a timeout for its own end.
        """
        if timeout is None and self._calls_back():
            raise LocalProtocolError(
                "a callback must not wait for the end of its own stream, which ends after its callbacks have returned. "
                "Received: a call of `awaitTermination` without a timeout"
            )
        ended = self._ended.wait(timeout)
        if ended and self._failure is not None:
            raise self._failure
        return ended

    @short_errors
    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Stop the stream after the micro-batch in progress, which is canceled if it takes longer than ``timeout``.

        The commits of a canceled micro-batch are saved, and a later stream on the same checkpoint continues from them.
        A call by a callback of this stream returns at once, since the stream ends after its callbacks have returned.

        Raises:
            DeadlineError: the stream has not ended ``timeout`` seconds after the micro-batch.
        """
        if self._calls_back():
            self._end_early("a callback has called `stop`")
            return
        self._stopping.set()
        self._stop_query(timeout)
        if not self._ended.wait(timeout):
            raise DeadlineError(f"waited {timeout:g} s for the stream to end")

    def _calls_back(self) -> bool:
        """Return whether this thread calls a callback of this stream."""
        return self._callbacks.calls_here() or threading.current_thread() is self._closing_thread

    def _stop_query(self, timeout: float) -> None:
        if self._server_lock.acquire(timeout=timeout):
            self._server_lock.release()
        self._canceling.set()
        self.query.stop()

    def _end_early(self, reason: str) -> None:
        """Stop the stream after the micro-batch in progress, as a callback requests."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._outcome.stopped = reason
            self._outcome.events.report(log, "stop", "the stream ends early: %s", reason, level=logging.INFO)
            self._callbacks.stop_calling()
            self._begin_to_stop()

    def _fail(self, error: BaseException) -> None:
        """End the stream with the error of a callback."""
        self._callback_error = self._callback_error or error
        self._stopping.set()
        if (job := self._job) is not None:
            job.fail(error)
        self._begin_to_stop()

    def _begin_to_stop(self) -> None:
        def stop() -> None:
            try:
                self._stop_query(STOP_SECONDS)
            except Exception as error:  # noqa: BLE001 - what a query raises is Spark's, Py4J's, or a source's own
                log.warning("Spark could not stop the query, whose next micro-batch is refused: %s", innermost(error))

        threading.Thread(target=stop, name="distkeras-stream-stop", daemon=True).start()

    @short_errors
    def model(self) -> Any:
        """Return a new `keras.Model` with the center's weights, compiled like the workers'.

        While a micro-batch is trained, these are the weights of the moment. The handle of an estimator returns a
        `KerasModel`.

        Raises:
            ServerLostError: the server is dead and cannot be restarted.
            ConfigurationError: the model has a WideEmbedding, and the stream is active.
        """
        if self._last_center is None and not self._ended.is_set():
            self._center.require_all_tables(_INSTEAD_OF_A_MODEL)
        replica = self._center.build_trained()
        self._fetch_center().load(replica)
        return replica.model if self.convert is None else self.convert(replica.model)

    @short_errors
    def remove_rows(self, table: str, ids: Iterable[int]) -> None:
        """Remove rows of a table while the stream is active; return when a snapshot has that.

        They have their initial values then, as before their first touch, until later rows of the stream touch them.

        Args:
            table: name of a `WideEmbedding`.
            ids: row numbers, integers in any order.

        Raises:
            ConfigurationError: there is no such table, or an id is not a row.
            LocalProtocolError: the stream has ended.
            ServerLostError: the server is dead and cannot be restarted.
        """
        numbers = {shape.name: number for number, shape in enumerate(self._plan.cut.tables) if shape.living}
        if table not in numbers:
            raise invalid("table", table, f"a WideEmbedding of the model: one of {[*numbers]}")
        given, last = np.asarray([*ids]), self._plan.cut.tables[numbers[table]].rows
        if given.size and not (given.dtype.kind in "iu" and given.ndim == 1 and 0 <= given.min() <= given.max() < last):
            raise invalid("ids", given.tolist()[:3], f"integers from 0 to {last - 1}")
        rows = np.unique(given.astype(np.int64))
        if not self._while_active(lambda driver: driver.remove_rows(numbers[table], rows)):
            raise LocalProtocolError("rows must be removed while a stream is active. Received: a stream that has ended")

    def _fetch_center(self) -> CenterWeights:
        fetched: list[CenterWeights] = []
        if self._while_active(lambda driver: fetched.append(self._center.fetch(driver))):
            return fetched[-1]
        if self._last_center is None:  # the server was dead when the stream ended
            raise ServerLostError("the stream has ended, and its last center is in its checkpoint alone")
        return self._last_center

    def _while_active(self, call: Callable[[DriverClient], object]) -> bool:
        """Call with a connection to the server, again after its restart; return False if the stream has ended."""
        if threading.current_thread() is self._closing_thread:  # which has the lock below, and calls callbacks
            return False
        if not self._ended.is_set():
            client = self._server.connect()
            try:
                call(client)
            except DistkerasError as error:
                if not client.lost(error):
                    raise
            else:
                return True
            finally:
                client.close()
        patience = self._plan.worker.deadlines.reply
        if not self._server_lock.acquire(timeout=patience):
            raise DeadlineError(f"waited {patience:g} s for the parameter server to be restarted")
        try:
            if self._ended.is_set():
                return False
            self._server.ask(call)
            return True
        finally:
            self._server_lock.release()

    def _publish(self, driver: DriverClient) -> None:
        """Publish the model and the current micro-batch to a server that was started or restarted.

        Raises:
            DifferentJobError: the server has restored a snapshot without rows that Spark has recorded as done.
        """
        if covered_by(self._process.resumed) < self._query_state.done:
            raise missing(covered_by(self._process.resumed), self._query_state, self._uri)
        self._publication.send(driver)
        if self._publisher is None and self._plan.cut.living:
            driver.begin_changes(NO_CHANGES)
        if self._current is not None:
            driver.begin_micro_batch(*self._current)

    def _train(self, df: DataFrame, number: int) -> None:
        """Train on a micro-batch; the function for ``foreachBatch``."""
        with self._server_lock:
            if self._stopping.is_set():
                raise JobStoppedError(
                    "the stream is stopping; Spark sends this micro-batch again when the stream is started again"
                )
            handed_over = time.monotonic()
            try:
                self._train_micro_batch(df, number, handed_over)
            except BaseException as error:
                if not self._canceling.is_set():
                    self._failure = error
                raise
            finally:
                self._job = None
            self._handed_over = handed_over

    def _train_micro_batch(self, df: DataFrame, number: int, handed_over: float) -> None:
        settings, server = self._plan.training, self._server
        current = self._current = (str(df.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)), number)
        if self._publisher is not None:
            self._publisher.begin(*current)
        begun = server.ask(lambda driver: driver.begin_micro_batch(*current))
        rows = self._session.take(df, self._plan.spec.row_bytes)
        plan = replace(self._plan, data=replace(self._plan.data, df=rows), micro_batch=number, callbacks=())
        events = self._outcome.events
        stalls = None if settings.stall_after is None else StallDetector(settings.stall_after, events)
        with Progress(settings.num_epoch, plan.worker.workers, shown=False, every=None) as progress:
            self._job = job = SparkJob(plan, self._center, server, progress, stalls, events, self._callbacks.update)
            if self._callback_error is not None:  # raised before there was a job to end
                raise self._callback_error
            summaries = job.run()
        records = server.ask(lambda driver: JobRecords.drain_micro_batch(driver, *current))
        began = ResumePoint(begun.clock, incarnation=0, exact=True, epoch=0, began_clock=begun.clock)
        records.check_exactly_once({row["worker"]: row["batches"] for row in summaries}, settings.num_epoch, began)
        self._outcome.records = records
        if self._publisher is not None:
            self._publisher.end(*current, lambda: server.ask(self._center.fetch), server)
        self._note_progress(number, begun, summaries, records, handed_over)
        state = self._query_state
        self._query_state = state._replace(stream=current[0], done=number, planned=state.planned | {number})

    def _note_progress(
        self, number: int, begun: MicroBatchBegun, summaries: list[Row], records: JobRecords, handed_over: float
    ) -> None:
        now, steps = time.monotonic(), records.steps_array
        samples, losses = steps[:, 1], steps[:, 2]
        progress = MicroBatchProgress(
            batch=number,
            rows=sum(row["rows"] for row in summaries),
            steps=len(steps),
            seconds=now - handed_over,
            lag=None if self._handed_over is None else now - self._handed_over,
            loss=float(np.average(losses, weights=samples)) if len(steps) else float("nan"),
            clock=self._server.ask(lambda driver: driver.ping()).clock,  # records may be lost with a damaged file
            repeated=begun.complete,
        )
        with self._progress_lock:
            self._progress = progress
        log.info("%s", progress)

    def _wait_for_query(self) -> None:
        """Close the server when the query has ended."""
        failure: BaseException | None = None
        try:
            while not self.query.awaitTermination(_POLL_SECONDS):
                pass
        except Exception as error:  # noqa: BLE001 - what a query raises is Spark's, Py4J's, or a source's own
            failure = self._failure
            if failure is None and not self._stopping.is_set():  # else a micro-batch was refused
                failure = WorkerError(f"Spark ended the stream: {innermost(error)}", remote_traceback=str(error))
        with self._server_lock:
            try:
                self._close(failure)
            finally:
                self._ended.set()

    def _close(self, failure: BaseException | None) -> None:
        """Close the server, and end the callbacks."""
        self._callbacks.stop_calling()
        try:
            self._callbacks.wait_for_calls(
                ABANDON_SECONDS if self._callback_error or failure else self._plan.worker.deadlines.reply
            )
        except DeadlineError as error:
            failure = failure or error
        self._failure = self._callback_error or failure
        self._last_center = self._fetch_last()
        try:
            if self._publisher is not None and self._last_center is not None and self._failure is None:
                self._publisher.end_stream(self._last_center, self._server)
        except DistkerasError as error:
            self._failure = error
        try:
            self._stack.close()
        except DistkerasError as error:
            self._failure = self._failure or error
        self._end_callbacks()

    def _fetch_last(self) -> CenterWeights | None:
        """Return the last center; None if it cannot be fetched, which is a failure of the stream."""
        # A server that has died since the last micro-batch is restarted, unless the stream has failed anyway.
        ask = self._server.ask if self._failure is None else self._server.ask_once
        try:
            last = ask(lambda driver: self._center.collect(driver, self._outcome.events))
        except DistkerasError as error:
            self._outcome.events.report(log, "lost", "the stream's last center cannot be fetched: %s", error.message)
            self._server.abandon(error)
            self._failure = self._failure or error
            return None
        self._load(last)
        return last

    def _load(self, center: CenterWeights) -> None:
        replica = self._plan.replica
        center.load(replica)
        self._outcome.model = replica.model

    def _end_callbacks(self) -> None:
        """Call the hooks for the end of the stream."""
        callbacks, error = self.callbacks, self._failure
        if error is None and self._last_center is not None:
            try:
                self._last_center = self._callbacks.end(self._last_center)
                self._load(self._last_center)
                for callback in callbacks:
                    callback.on_success(self._results)
            except Exception as raised:  # noqa: BLE001 - `awaitTermination` raises it
                error = self._failure = raised
        if self._failure is not None:
            self._outcome.failure = headline(f"{type(self._failure).__name__}: {self._failure}")
        if error is not None:
            fail_callbacks(callbacks, error)


#: The parts of a job's identity that all versions of a model share.
_SHARED = ("model", "layout", "moving_statistics")


def _to_publish(job: PreparedJob) -> bytes:
    """Return the compiled model with its attributes, made under the settings with which workers compute."""
    plan = job.plan
    with applied(plan.recipe.settings):
        data = archive.with_optimizer(job.center.build_trained().model)
    return archive.with_attributes(data, archive.attributes_in(plan.model_file))


class Publisher:
    """Publishes versions of one stream."""

    def __init__(self, versions: Versions, job: PreparedJob) -> None:
        self._versions = versions
        self._folder = VersionFolder(versions.uri, create=True)
        self._rows = PublishedRows(versions.uri, job.plan.cut.partial)
        self._plan = job.plan
        identity: dict[str, Any] = job.plan.identity()
        model, vectors = job.plan.replica.model, (trainable_variables, moving_statistics)
        layouts = (layout_identity(VariableVector(variables(model)).layout) for variables in vectors)
        identity |= dict(zip(("layout", "moving_statistics"), layouts, strict=True))
        self._folder.take({name: identity[name] for name in _SHARED}, partial(_to_publish, job))
        #: The current micro-batch and its stream, if it has ended without a version.
        self._ended: tuple[str, int] | None = None
        self._begun = False

    def resume(self, stream: str, number: int) -> None:
        """Take over a micro-batch that an earlier driver has ended; it may have died before it published a version."""
        self._ended = stream, number

    def begin(self, stream: str, number: int) -> None:
        """Record that a micro-batch begins; DifferentJobError if the directory has versions of others."""
        self._ended = None
        if not self._begun:
            self._folder.require_stream(stream, number)
            self._begun = True

    def end(self, stream: str, number: int, fetch_center: Callable[[], CenterWeights], server: Supervisor) -> None:
        """Publish the center at the end of a micro-batch, if it is due, and delete old versions."""
        self._ended = stream, number
        if number % self._versions.every == 0:
            self.end_stream(fetch_center(), server)

    def end_stream(self, weights: CenterWeights, server: Supervisor) -> None:
        """Publish the micro-batch that has ended, unless it has a version; see `end`."""
        if self._ended is None:
            return
        (stream, number), rows = self._ended, self._rows

        def write_rows(before: Version | None) -> Mapping[str, Any]:
            known = {} if before is None else self._folder.rows_of(before)
            return server.ask(lambda driver: self._rows.write(driver, number, known))

        writes = write_rows if rows.tables else None
        self._folder.publish(stream, number, *self._in_own_order(weights), writes)
        self._ended = None
        self._folder.prune(self._versions.keep)
        if rows.tables:
            rows.prune(number, [self._folder.rows_of(version) for version in self._folder.versions()])
        log.info("version %d is published in %s", number, self._versions.uri)

    def _in_own_order(self, weights: CenterWeights) -> tuple[np.ndarray, np.ndarray]:
        """Return both vectors as models have them that are not cut at their tables."""
        replica, order = self._plan.replica, self._plan.cut.order
        if order is None:
            return weights.vector, weights.moving_statistics
        return (
            in_own_order(weights.vector, replica.layout, order.trainable),
            in_own_order(weights.moving_statistics, replica.moving_statistics, order.statistics),
        )
