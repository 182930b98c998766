"""What runs on an executor: one partition's worker, from Arrow batches to commits.

The prefetch thread of `source.BatchSource` reads and cuts mini-batches while this thread trains and talks to the
parameter server. The task's output is one row of figures; history travels with the commits.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from distkeras.data.batches import Batch
from distkeras.data.source import BatchSource
from distkeras.data.spec import DataSpec
from distkeras.keras_model.recipe import Recipe
from distkeras.keras_model.replica import KerasReplica
from distkeras.ps.errors import (
    ConfigurationError,
    DeadlineError,
    DistkerasError,
    JobStoppedError,
    LeaseLostError,
    ServerLostError,
    WorkerError,
)
from distkeras.ps.protocol.messages import Welcome
from distkeras.ps.protocol.requests import Loop
from distkeras.ps.rules import Rule
from distkeras.ps.rules.base import MOST_STEPS_A_CALL
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.auto_window import AutoWindow
from distkeras.ps.worker.driver import run_worker
from distkeras.ps.worker.loop import work

#: The task's output, as Spark spells a schema.
SUMMARY = (
    "worker int, attempt long, host string, rows long, batches long, commits long, ready double, seconds double, "
    "window int"
)

#: Errors of this attempt or of the job, not of the user's code or data: Spark may try again, or is told to end.
_NOT_THE_USERS = (LeaseLostError, ServerLostError, JobStoppedError, DeadlineError)


@dataclass(frozen=True)
class Task:
    """Everything a worker needs, in Spark's own task closure; weights come from the server.

    Args:
        address: the parameter server's, with the job's key.
        rule: the update rule.
        spec: columns, mini-batches, epochs.
        recipe: how to rebuild the model.
        size: elements of the parameter vector, as the driver counted them.
        moving_statistics: elements of the moving statistics.
        metrics: history columns, loss first.
        workers: number of workers of the job.
        threads: compute threads of one worker; None: as many as Spark gives cores to a task.
        deadlines: of every wait.
        wire_format: what vectors look like on the wire.
        overlap: compute while commits travel.
        share: of the time, which communication may take: the window is chosen so. None: it is the rule's.
    """

    address: Address
    rule: Rule
    spec: DataSpec
    recipe: Recipe
    size: int
    moving_statistics: int
    metrics: tuple[str, ...]
    workers: int
    threads: int | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    wire_format: str = "float32"
    overlap: bool = False
    share: float | None = None

    def run(self, records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The function for ``mapInArrow``."""
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            raise ConfigurationError("a task must run inside Spark. Received: no task context")
        worker, attempt = context.partitionId(), context.taskAttemptId()
        if worker >= self.workers:
            raise ConfigurationError(
                f"`df` must have {self.workers} partitions, one a worker. Received: partition {worker}", worker=worker
            )
        gpus = context.resources().get("gpu")
        _prepare_process(self.threads or context.cpus(), gpus.addresses if gpus else None)
        began = time.monotonic()
        client = WorkerClient(
            self.address,
            worker=worker,
            attempt=attempt,
            size=self.size,
            moving_statistics=self.moving_statistics,
            metrics=self.metrics,
            deadlines=self.deadlines,
            wire_format=self.wire_format,
        )
        position, stream = _Position(), _Stream(records)
        windows = None if self.share is None else AutoWindow(self.rule, self.share, overlap=self.overlap)
        try:
            rows, batches, ready = self._train(client, stream, position, windows)
        except _NOT_THE_USERS:
            raise
        except DistkerasError as error:
            error.worker = worker if error.worker is None else error.worker
            error.step = position.step if error.step is None else error.step
            error.remote_traceback = traceback.format_exc()
            client.report(error)
            raise
        except Exception as error:
            if stream.broken:
                raise
            wrapped = WorkerError(
                f"{type(error).__name__}: {error}",
                worker=worker,
                step=position.step,
                remote_traceback=traceback.format_exc(),
            )
            client.report(wrapped)
            raise wrapped from error
        finally:
            client.close()
        seconds = time.monotonic() - began
        window = windows.rule.window if windows is not None and windows.chosen else None
        figures = (worker, attempt, socket.gethostname(), rows, batches, client.sequence, ready, seconds, window)
        columns = [pa.array([figure], kind) for figure, kind in zip(figures, _ARROW_SUMMARY.types, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=_ARROW_SUMMARY)

    def _train(
        self,
        client: WorkerClient,
        records: Iterator[pa.RecordBatch],
        position: _Position,
        windows: AutoWindow | None,
    ) -> tuple[int, int, float]:
        """Returns rows and batches an epoch (-1 where the job ended early), and seconds until the first step."""
        began = time.monotonic()
        welcome = client.join()
        if welcome.finished and welcome.stopping:
            return 0, -1, 0.0
        if welcome.finished:
            # Spark lost what a predecessor returned, perhaps along with the stream that it read: an end of the stream
            # that was none looks like the end of the data. The rows are counted again for the driver's check.
            rows = sum(batch.num_rows for batch in records)
            return rows, -(-rows // self.spec.batch_size), 0.0
        with ExitStack() as stack:
            source: BatchSource | None = None
            model_file, ready = b"", 0.0

            def begin(welcome: Welcome) -> Loop:
                nonlocal source, model_file, ready
                place = (welcome.epoch, welcome.batch)
                if source is None:
                    model_file = client.fetch_model()
                    options = _place(welcome) | {"worker": client.worker, "timeout": self.deadlines.rows}
                    window = self.rule.window or MOST_STEPS_A_CALL
                    source = stack.enter_context(BatchSource(records, self.spec, window=window, **options))
                elif place != position.next:
                    if not self.spec.rewindable:
                        raise LeaseLostError("this attempt cannot go back: its rows are not kept", worker=client.worker)
                    source.rewind(**_place(welcome))
                position.next = place
                # The optimizer's own state belongs to steps that are forgotten: another replica is sure to have none.
                replica = KerasReplica(self.recipe.build(model_file))
                ready = ready or time.monotonic() - began
                return work(
                    self.rule,
                    replica,
                    position.following(source),
                    lambda: client.payload(self.rule.traits.parts),
                    moving_statistics=self.moving_statistics,
                    overlap=self.overlap,
                    windows=windows,
                )

            run_worker(client, welcome, begin)
            if source is None or client.stopping:
                return 0 if source is None else source.rows, -1, ready
            source.read_to_end()  # where another attempt, or an earlier life, has trained on the rest
            return source.rows, source.batches_per_epoch, ready


def _place(welcome: Welcome) -> dict[str, Any]:
    """Where the partition stands, as `BatchSource` takes it."""
    checksum = None if welcome.checksum < 0 else welcome.checksum
    return {"start": (welcome.epoch, welcome.batch), "checksum": checksum}


class _Stream:
    """What Spark sends, and whether reading it failed: Spark knows why, and runs the task again if it can."""

    def __init__(self, records: Iterator[pa.RecordBatch]) -> None:
        self._records = records
        self.broken = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            return next(self._records)
        except StopIteration:
            raise
        except BaseException:
            self.broken = True
            raise


class _Position:
    """The mini-batch that training has reached, for error texts, and the one that comes next."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.next = (0, 0)

    def following(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.step = batch.index
            self.next = (batch.epoch + 1, 0) if batch.last else (batch.epoch, batch.index + 1)
            yield batch


_ARROW_SUMMARY = pa.schema(
    [
        ("worker", pa.int32()),
        ("attempt", pa.int64()),
        ("host", pa.string()),
        ("rows", pa.int64()),
        ("batches", pa.int64()),
        ("commits", pa.int64()),
        ("ready", pa.float64()),
        ("seconds", pa.float64()),
        ("window", pa.int32()),
    ]
)


def _prepare_process(threads: int, gpus: list[str] | None) -> None:
    """Settings that libraries read once, on their first import; a user's own are left alone."""
    settings = {
        # A worker for each core: more threads than that would only fight each other.
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": str(threads),
        # Several workers may share a GPU; by default the first one would take all of its memory.
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if gpus:
        settings["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # PyArrow and Keras import it when they first need it: two threads at once, and one would find half of it.
    import pandas  # noqa: F401
