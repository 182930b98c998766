"""The messages between the driver and the server: a job's data and progress, and its end."""

from __future__ import annotations

import math
from dataclasses import field

from distkeras.ps.protocol.loop import NO_BYTES, NO_FLOATS, NO_ROWS, Bytes, Floats, Rows
from distkeras.ps.protocol.messages import Message
from distkeras.ps.protocol.tables import NO_IDS, Ids


class Publish(Message):
    """Driver → server: the job's initial center, its statistics, and the model file that workers request.

    A server that was restored from a snapshot uses only the model file. ``names`` are the names of the arrays in center
    and statistics, for the texts of errors: see `layout.encode`.
    """

    center: Floats
    moving_statistics: Floats = field(default_factory=lambda: NO_FLOATS)
    model: Bytes = field(default_factory=lambda: NO_BYTES)
    names: Bytes = field(default_factory=lambda: NO_BYTES)


class PublishRows(Message):
    """Driver → server: the initial rows of table number ``table`` from ``start`` on, flat; answered by `RowsPublished`.

    They are sent before `Publish`, the blocks of a table in order. For a partial table, ``start`` is a place, and
    ``ids`` are the row numbers.
    """

    table: int
    start: int
    rows: Floats
    ids: Ids = field(default_factory=lambda: NO_IDS)


class RowsPublished(Message):
    """Server → driver: the table's rows below ``rows`` have been received; all of them, if the server was restored."""

    rows: int


class InspectRows(Message):
    """Driver → server: send ``count`` rows of table number ``table`` from ``start`` on, or the changes among them.

    With ``changed``, the places are those of the rows that were touched: see `BeginChanges`.
    """

    table: int
    start: int
    count: int
    changed: bool = False


class TableRows(Message):
    """Server → driver: rows, flat, at ``clock``; of a partial table the touched ones, with their numbers ``ids``.

    There are ``count`` places to ask for. A place of a partial table may have no row. Among changes, ``gone`` are the
    numbers of the rows that have their initial values again.
    """

    clock: int
    count: int
    rows: Floats
    ids: Ids = field(default_factory=lambda: NO_IDS)
    gone: Ids = field(default_factory=lambda: NO_IDS)


#: For `BeginChanges`: all rows will be read; and no changes will be asked for.
ALL_ROWS, NO_CHANGES = -1, -2


class BeginChanges(Message):
    """Driver → server: the changes of all tracked tables since clock ``since`` are asked for; or see `ALL_ROWS`."""

    since: int


class ChangesBegun(Message):
    """Server → driver: the present clock, and whether the changes since the other one are ``known``."""

    clock: int
    known: bool


class BeginMicroBatch(Message):
    """Driver → server: begin micro-batch ``number`` of a stream, unless it has begun before: see `MicroBatchBegun`."""

    stream: str
    number: int


class MicroBatchBegun(Message):
    """Server → driver: the micro-batch has begun at ``clock``, before commit record number ``records``.

    ``began``: it begins now, and had not begun before. ``complete``: all of its partitions have ended.
    """

    clock: int
    records: int
    began: bool
    complete: bool


class Observe(Message):
    """Driver → server: send the `Status` when the clock is above ``clock``, or after ``patience`` seconds."""

    clock: int
    patience: float


class Status(Message):
    """Server → driver: progress. ``loss`` and ``staleness`` are means over the latest commits.

    ``epochs`` is the mean number of completed epochs over the partitions, including the completed share of the present
    epoch, as known to each worker. ``saved_clock`` is the clock of the server's latest snapshot, which was taken
    ``saved_seconds`` ago; -1 and NaN: there is none. ``tables`` are float64 ``(tables, 4)``, for the tables whose
    touches are counted, in their order: see `LivingTable.counts`. ``lent``: mini-batches that another worker than their
    partition's own one has trained.
    """

    clock: int
    joined: int
    finished: int
    batches: int
    samples: int
    loss: float
    staleness: float
    epochs: float = 0.0
    saved_clock: int = -1
    saved_seconds: float = math.nan
    tables: Rows = field(default_factory=lambda: NO_ROWS)
    lent: int = 0


class Inspect(Message):
    """Driver → server: send the present center.

    ``moved_after`` also requests the rows of whole tables that commits after that clock have moved; -1: none.
    ``wants`` requests rows of partial tables: an array for each table, strictly ascending, empty for whole tables; an
    empty tuple: none.
    """

    moved_after: int = -1
    wants: tuple[Ids, ...] = ()


class SetValues(Message):
    """Driver → server: set numbers for all workers: float64 ``(numbers, 2)``, place and value; see `driver_values`.

    The ``clock`` of the `Ack`, sent once they are saved, is that of the first commit after the change. ``number`` rises
    with each request of a driver, and a repeated one keeps its number: a place keeps what a later request has set, if
    an older connection delivers an earlier one late.
    """

    rows: Rows
    number: int


class RemoveRows(Message):
    """Driver → server: remove rows of table number ``table``; the `Ack` is sent once that is saved."""

    table: int
    ids: Ids


class Drain(Message):
    """Driver → server: send the commit records from number ``start`` on, at most ``count``."""

    start: int
    count: int


class Records(Message):
    """Server → driver: commit records (bytes of `commit_log.COMMIT`) and their history rows, in order.

    ``metrics`` are the history's column names; ``total`` is the number of all commit records, and ``missing`` that of
    the mini-batches whose records were lost.
    """

    total: int
    missing: int
    metrics: str
    commits: Bytes
    history: Rows


class Abort(Message):
    """Driver → server: end the job; every worker's next request is answered by a `Fault`."""

    reason: str


class EndEarly(Message):
    """Driver → server: end the job successfully; the next reply to each worker asks it to leave."""

    reason: str


class Goodbye(Message):
    """Driver → server: this is the last request; the server may end."""


class ListWorkers(Message):
    """Driver → server: send the worker table."""


class WorkerTable(Message):
    """Server → driver: worker, attempt, last commit and silence of each lease that has data left and was joined.

    The worker is the one that trains it. Helpers without rows have the numbers after those of the workers.

    The silence is in seconds, since that commit or the attempt's join; 0 while the worker waits for a reply.
    """

    rows: Rows
