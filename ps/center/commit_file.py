"""Commits and their history on disk: the part of a commit log that need not be in memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distkeras.ps.protocol.commit_record import NO_ROWS

#: Commits of one block of the file, at most: what is read to get at one of them.
BLOCK_COMMITS = 4096


class LogRows(NamedTuple):
    """Some commits with their history.

    Args:
        commits: rows of `commit_log.COMMIT`, in clock order.
        lengths: how many rows of history each has, int64.
        history: theirs, one after the other, float64 ``(rows, columns)``.
    """

    commits: np.ndarray
    lengths: np.ndarray
    history: np.ndarray

    def blocks(self) -> Iterator[LogRows]:
        """The same in pieces of at most `BLOCK_COMMITS`."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        for first in range(0, len(self.commits), BLOCK_COMMITS):
            last = min(first + BLOCK_COMMITS, len(self.commits))
            yield LogRows(self.commits[first:last], self.lengths[first:last], self.history[ends[first] : ends[last]])


def joined(pieces: list[LogRows], dtype: np.dtype) -> LogRows:
    """All of ``pieces``; their commits have ``dtype``."""
    if len(pieces) == 1:
        return pieces[0]
    history = [piece.history for piece in pieces if piece.history.size]
    return LogRows(
        np.concatenate([np.empty(0, dtype), *(piece.commits for piece in pieces)]),
        np.concatenate([np.empty(0, np.int64), *(piece.lengths for piece in pieces)]),
        np.concatenate(history) if history else NO_ROWS,
    )


class _Block(NamedTuple):
    """Where some commits lie: their numbers, the first byte, and the shape of their history."""

    first: int
    commits: int
    offset: int
    rows: int
    columns: int


class CommitFile:
    """A temporary file without a name, which the system removes with the process however that ends.

    Args:
        dtype: of a commit.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._descriptor = -1
        self._size = 0
        self._blocks: list[_Block] = []
        self._firsts: list[int] = []

    def __len__(self) -> int:
        return self._blocks[-1].first + self._blocks[-1].commits if self._blocks else 0

    def append(self, rows: LogRows) -> None:
        """Writes at most `BLOCK_COMMITS` commits down.

        Raises:
            OSError: the disk is full, or gone. Nothing has changed.
        """
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
        """``count`` commits from number ``first`` on, in pieces."""
        pieces, end = [], first + count
        place = max(0, bisect_right(self._firsts, first) - 1)
        while place < len(self._blocks) and self._blocks[place].first < end:
            block = self._blocks[place]
            pieces.append(self._read(block, max(0, first - block.first), min(block.commits, end - block.first)))
            place += 1
        return pieces

    def _read(self, block: _Block, low: int, high: int) -> LogRows:
        """Commits ``low`` to ``high`` of one block."""
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
    """The memory of ``array``, which is contiguous."""
    return memoryview(array).cast("B") if array.size else memoryview(b"")  # type: ignore[arg-type]  # any dtype has bytes
