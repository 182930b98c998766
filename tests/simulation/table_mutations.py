"""Faults planted in tables that travel by rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.protocol.driver_messages import RowsPublished
from distkeras.ps.protocol.loop import CommitRecord
from distkeras.ps.protocol.tables import initial_rows
from distkeras.ps.server.table_requests import TableRequests
from distkeras.ps.transport.worker_client import WorkerClient
from simulation.planting import Patch, mutation


@mutation
def _a_pull_brings_the_rows_of_the_window_before() -> list[Patch]:
    """If a commit is applied but its reply is lost, the next window starts with the rows of the previous one."""
    commit, pull = WorkerClient.commit, WorkerClient._pull  # noqa: SLF001 - a fault within
    latest: dict[WorkerClient, CommitRecord] = {}

    def committed(self: WorkerClient, record: CommitRecord) -> Any:
        latest[self] = record
        return commit(self, record)

    def pulled(self: WorkerClient, wants: Any) -> Any:
        record = latest.get(self)
        same = record is not None and [ids.size for ids in record.touched] == [ids.size for ids in record.wants]
        return pull(self, record.touched if record is not None and same and wants is record.wants else wants)

    return [(WorkerClient, "commit", committed), (WorkerClient, "_pull", pulled)]


@mutation
def _the_rows_of_a_reply_are_those_before_its_commit() -> list[Patch]:
    """A reply has the rows before its commit, and the center after it."""
    commit, release = Center.commit, Center.release
    before: dict[Center, list[np.ndarray]] = {}

    def committed(self: Center, message: Any, *arguments: Any) -> bool:
        before[self] = [table.array.copy() for table in self.tables if not table.shape.partial]
        return commit(self, message, *arguments)

    def released(self: Center, worker: int, attempt: int, wants: Any = ()) -> Any:
        rows = [array[ids].reshape(-1) for array, ids in zip(before.get(self, ()), wants, strict=False)]
        found = release(self, worker, attempt, wants)
        return found._replace(rows=(*rows, *found.rows[len(rows) :])) if rows else found

    return [(Center, "commit", committed), (Center, "release", released)]


@mutation
def _rows_that_a_driver_wants_are_as_they_were_initially() -> list[Patch]:
    """If only touched rows of a table exist, an evaluation reads rows of another clock than the center's."""
    inspect = Center.inspect

    def initial(self: Center, moved: Any = ()) -> Any:
        found = inspect(self, moved)
        rows = [
            initial_rows(table.shape, ids).reshape(-1) if table.shape.partial else rows
            for table, ids, rows in zip(self.tables, moved, found.rows, strict=False)
        ]
        return found._replace(rows=tuple(rows))

    return [(Center, "inspect", initial)]


@mutation
def _rows_that_are_published_again_are_taken() -> list[Patch]:
    """A server that continues from a snapshot has the initial rows of the job."""
    publish = TableRequests.publish

    def taken(self: TableRequests, center: Center | None, message: Any) -> Any:
        if center is None:
            return publish(self, center, message)
        table, rows = center.tables[message.table], message.rows.reshape(-1, center.tables[message.table].shape.width)
        table.array[message.start : message.start + len(rows)] = rows
        return RowsPublished(message.start + len(rows))

    return [(TableRequests, "publish", taken)]
