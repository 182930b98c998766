"""The commit log: the server's record of every commit, with its rows of history."""

from __future__ import annotations

import logging
import os
import struct
import tempfile
import typing
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distkeras.ps.events import report
from distkeras.ps.protocol.loop import FIXED_HISTORY, NO_ROWS
from distkeras.ps.protocol.messages import Commit

#: The largest number of commits in one block of the file.
BLOCK_COMMITS = 4096


class LogRows(NamedTuple):
    """Commits in clock order (`COMMIT`), the ``lengths`` of their histories, and these: float64 ``(rows, columns)``."""

    commits: np.ndarray
    lengths: np.ndarray
    history: np.ndarray

    def blocks(self) -> Iterator[LogRows]:
        """Yield them in pieces of at most `BLOCK_COMMITS` commits."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        for first in range(0, len(self.commits), BLOCK_COMMITS):
            last = min(first + BLOCK_COMMITS, len(self.commits))
            yield LogRows(self.commits[first:last], self.lengths[first:last], self.history[ends[first] : ends[last]])


def joined(pieces: list[LogRows], dtype: np.dtype) -> LogRows:
    if len(pieces) == 1:
        return pieces[0]
    history = [piece.history for piece in pieces if piece.history.size]
    return LogRows(
        np.concatenate([np.empty(0, dtype), *(piece.commits for piece in pieces)]),
        np.concatenate([np.empty(0, np.int64), *(piece.lengths for piece in pieces)]),
        np.concatenate(history) if history else NO_ROWS,
    )


class _Block(NamedTuple):
    """The position of a block in the file: first commit, number of commits, first byte, and the history's shape."""

    first: int
    commits: int
    offset: int
    rows: int
    columns: int


class CommitFile:
    """An unnamed temporary file, which the system removes when the process ends, even by a crash."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._descriptor = -1
        self._size = 0
        self._blocks: list[_Block] = []
        self._firsts: list[int] = []

    def __len__(self) -> int:
        return self._blocks[-1].first + self._blocks[-1].commits if self._blocks else 0

    def append(self, rows: LogRows) -> None:
        """Append at most `BLOCK_COMMITS` commits. If an OSError is raised, as for a full disk, nothing is appended."""
        if self._descriptor < 0:
            self._open()
        offset = self._size
        for part in rows:
            offset = self._write(np.ascontiguousarray(part), offset)
        height, width = rows.history.shape
        block = _Block(len(self), len(rows.commits), self._size, height, width)
        self._size = offset
        self._blocks.append(block)
        self._firsts.append(block.first)

    def read(self, first: int, count: int) -> list[LogRows]:
        pieces, end = [], first + count
        place = max(0, bisect_right(self._firsts, first) - 1)
        while place < len(self._blocks) and self._blocks[place].first < end:
            block = self._blocks[place]
            pieces.append(self._read(block, max(0, first - block.first), min(block.commits, end - block.first)))
            place += 1
        return pieces

    def _read(self, block: _Block, low: int, high: int) -> LogRows:
        after_commits = block.offset + block.commits * self._dtype.itemsize
        after_lengths = after_commits + 8 * block.commits
        lengths = self._array(after_commits, block.commits, np.dtype(np.int64))
        ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        begin, rows = ends[low], ends[high] - ends[low]
        history = self._array(after_lengths + 8 * block.columns * begin, rows * block.columns, np.dtype(np.float64))
        return LogRows(
            self._array(block.offset + low * self._dtype.itemsize, high - low, self._dtype),
            lengths[low:high],
            history.reshape(rows, block.columns),
        )

    def _array(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        array = np.empty(count, dtype)
        space, at = _bytes_of(array), 0
        while at < len(space):
            read = os.preadv(self._descriptor, [space[at:]], offset + at)
            if not read:
                raise OSError(f"the file of commits must have {offset + len(space)} bytes. Received: {offset + at}")
            at += read
        return array

    def _write(self, array: np.ndarray, offset: int) -> int:
        data = _bytes_of(array)
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written
        return offset

    def _open(self) -> None:
        descriptor, path = tempfile.mkstemp(prefix="distkeras-commits-")
        Path(path).unlink()
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B") if array.size else memoryview(b"")  # type: ignore[arg-type]  # any dtype has bytes


log = logging.getLogger(__name__)


class CommitOutcome(NamedTuple):
    """The columns that the server adds to the record of a commit that it applies or skips.

    Args:
        clock: commits applied before this one. A skipped commit has the same clock as the next commit.
        staleness: commits applied since the clock at which the commit's window began.
        timestamp: seconds since the epoch.
        learning_rate: the server's for gradient rules, else the worker optimizer's.
        gap: ``||center - sent|| / sqrt(size)``; NaN if it was not measured.
        scale: mean scale factor of the payload, of the worker's half of the rule or of the server's.
        skipped: the commit was skipped for a NaN or infinity, and has not moved the center.
        lease: the lease under which it was made: the number of its partition, or of a loan of a part of it.
        trained_by: the worker that trained the mini-batches; other than the partition's own one if they were lent.
    """

    clock: int
    staleness: int
    timestamp: float
    learning_rate: float
    gap: float
    scale: float
    skipped: bool = False
    lease: int = -1
    trained_by: int = -1


_FORMATS = {int: "<i8", bool: "<i8", float: "<f8"}
_KINDS = typing.get_type_hints(Commit)
#: The fields that a commit declares as columns, by field; then its properties that are columns.
_FIELDS = {own.name: own.metadata["column"] for own in fields(Commit) if "column" in own.metadata}
_PROPERTIES = {
    "steps": "steps",
    "payload_bytes": "bytes",
    "rows_moved": "table_rows",
    "row_bytes": "table_bytes",
    "rows_wanted": "table_rows_back",
}
_of_commit = attrgetter(*_FIELDS, *_PROPERTIES)

#: The dtype of a commit's record: the columns that the commit declares, its properties, and those of `CommitOutcome`.
COMMIT = np.dtype(
    [(column, _FORMATS[_KINDS[name]]) for name, column in _FIELDS.items()]
    + [(column, "<i8") for column in _PROPERTIES.values()]
    + [(column, _FORMATS[kind]) for column, kind in typing.get_type_hints(CommitOutcome).items()]
)

#: Converts a record from a tuple to bytes, five times as fast as numpy.
_packed = struct.Struct("<" + "".join("d" if COMMIT[name].kind == "f" else "q" for name in COMMIT.names or ())).pack

_RECENT = 64
_STEPS, _STALENESS, _WORKER = (list(COMMIT.fields or ()).index(name) for name in ("steps", "staleness", "worker"))

#: The commits and bytes of history that are kept in memory before they are moved to a file.
_MEMORY_COMMITS, _MEMORY_BYTES = 256, 4 << 20


class CommitLog:
    """All commits of a job, each once, with their history; `trainer.commits` and `trainer.history` are read from it.

    The latest are in memory, and the others in a temporary file; while the disk is full, all stay in memory.
    """

    def __init__(self) -> None:
        self._commits: list[tuple[float, ...]] = []
        self._history: list[np.ndarray] = []
        self._file = CommitFile(COMMIT)
        self._bytes = 0
        self._most_commits, self._most_bytes = _MEMORY_COMMITS, _MEMORY_BYTES
        #: Number of columns of the history; 0 before the first row.
        self.columns = 0
        self.batches = 0
        self.samples = 0
        #: Number of commits that were skipped for a NaN or infinity.
        self.skipped = 0
        #: Mini-batches that another worker than their partition's own one has trained.
        self.lent = 0
        #: Mini-batches whose records were lost with a damaged file; `batches` counts them.
        self.missing = 0
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._staleness: deque[float] = deque(maxlen=_RECENT)

    def add(self, commit: Commit, outcome: CommitOutcome, partition: int | None = None) -> None:
        """Record a commit of mini-batches of ``partition``; None: its worker's own."""
        row, history = _of_commit(commit) + outcome, commit.history
        if partition not in (None, commit.worker):  # which is the number of a loan
            row = (*row[:_WORKER], partition, *row[_WORKER + 1 :])
        self._commits.append(row)
        self._history.append(history)
        self._bytes += history.nbytes
        self.batches += int(row[_STEPS])
        self.lent += int(row[_STEPS]) if row[_WORKER] != outcome.trained_by >= 0 else 0
        skipped = outcome.skipped
        self.skipped += skipped
        if not skipped:
            self._staleness.append(row[_STALENESS])
        if history.size:
            self.columns = history.shape[1]
            # There are usually a few rows, which Python adds up faster than numpy; the center's lock is held.
            self.samples += int(sum(history[:, 1].tolist()))
            if not skipped and self.columns > len(FIXED_HISTORY):
                self._losses.append(sum(history[:, len(FIXED_HISTORY)].tolist()) / len(history))
        if len(self._commits) >= self._most_commits or self._bytes >= self._most_bytes:
            self._spill()

    @property
    def loss(self) -> float:
        """Return the mean loss of the latest commits; NaN before the first."""
        return sum(self._losses) / len(self._losses) if self._losses else float("nan")

    @property
    def staleness(self) -> float:
        """Return the mean staleness of the latest commits; NaN before the first."""
        return sum(self._staleness) / len(self._staleness) if self._staleness else float("nan")

    def __len__(self) -> int:
        return len(self._file) + len(self._commits)

    def read(self, start: int = 0, count: int | None = None) -> LogRows:
        """Return ``count`` commits from number ``start`` on (None: all of them), with their history."""
        end = len(self) if count is None else min(len(self), start + count)
        spilled = len(self._file)
        pieces = self._file.read(start, min(end, spilled) - start) if start < spilled else []
        if end > spilled:
            pieces.append(self._recent(max(0, start - spilled), end - spilled))
        return joined(pieces, COMMIT)

    def commits(self, start: int = 0, count: int | None = None) -> np.ndarray:
        """Return ``count`` commits from number ``start`` on (None: all of them), as `COMMIT` rows."""
        return self.read(start, count).commits

    def extend(self, rows: LogRows) -> None:
        """Append commits that `read` returned. This updates `batches`; `restore_totals` sets the other totals."""
        self.batches += int(rows.commits["steps"].sum())
        for block in rows.blocks():
            if not self._commits:
                with suppress(OSError):  # which `_spill` reports
                    self._file.append(block)
                    continue
            self._commits.extend(block.commits.tolist())
            self._history.extend(np.split(block.history, np.cumsum(block.lengths)[:-1]))
            self._bytes += block.history.nbytes
            self._spill()

    def totals(self) -> dict[str, Any]:
        """Return the totals over all commits, JSON-ready."""
        return {
            "batches": self.batches,
            "samples": self.samples,
            "skipped": self.skipped,
            "lent": self.lent,
            "columns": self.columns,
            "losses": list(self._losses),
            "staleness": list(self._staleness),
        }

    def restore_totals(self, totals: Mapping[str, Any]) -> None:
        """Set the values that `totals` returned, after `extend` has added the commits that could be read."""
        self.missing = totals["batches"] - self.batches
        for name in ("batches", "samples", "skipped", "lent", "columns"):
            setattr(self, name, totals[name])
        self._losses.extend(totals["losses"])
        self._staleness.extend(totals["staleness"])

    def _recent(self, start: int, end: int) -> LogRows:
        history = self._history[start:end]
        pieces = [rows for rows in history if rows.size]
        return LogRows(
            np.frombuffer(b"".join([_packed(*row) for row in self._commits[start:end]]), COMMIT),
            np.array([len(rows) for rows in history], np.int64),
            np.concatenate(pieces) if pieces else NO_ROWS,
        )

    def _spill(self) -> None:
        while self._commits:
            count = min(BLOCK_COMMITS, len(self._commits))
            try:
                self._file.append(self._recent(0, count))
            except OSError as error:
                if self._most_commits == _MEMORY_COMMITS:
                    report(
                        log,
                        "records",
                        "the file of commit records cannot be written, so the records stay in memory: %s",
                        error,
                    )
                self._most_commits, self._most_bytes = len(self._commits) + _MEMORY_COMMITS, self._bytes + _MEMORY_BYTES
                return
            del self._commits[:count], self._history[:count]
            self._bytes = sum(rows.nbytes for rows in self._history)
        self._most_commits, self._most_bytes = _MEMORY_COMMITS, _MEMORY_BYTES
