"""What the server writes down of every commit, and the history rows that came with it."""

from __future__ import annotations

import typing
from collections import deque
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from distkeras.ps.protocol.commit_record import FIXED_HISTORY, NO_ROWS
from distkeras.ps.protocol.messages import Commit


class CommitOutcome(NamedTuple):
    """What the server adds to a commit when it applies it, or skips it.

    Args:
        clock: commits applied before this one. A skipped commit has the clock of the one that comes after it.
        staleness: commits applied since the worker was sent what it computed the payload from.
        timestamp: seconds since the epoch.
        learning_rate: in force: the server's for gradient rules, else the worker optimizer's.
        gap: ``||center - sent|| / sqrt(size)``; NaN where it was not measured.
        scale: mean scale factor of the payload, that of the worker's half or of the server's.
        skipped: it was left out for its numbers, and has not moved the center.
    """

    clock: int
    staleness: int
    timestamp: float
    learning_rate: float
    gap: float
    scale: float
    skipped: bool = False


#: Columns that are the commit's own, and its attributes. The `CommitOutcome` follows.
_OF_COMMIT = {
    "worker": "worker",
    "attempt": "attempt",
    "incarnation": "incarnation",
    "sequence": "sequence",
    "epoch": "epoch",
    "first_batch": "first",
    "last_batch": "last",
    "steps": "steps",
    "bytes": "payload_bytes",
    "wait": "waited",
}
_of_commit = attrgetter(*_OF_COMMIT.values())
_FORMATS = {int: "<i8", bool: "<i8", float: "<f8"}

#: One row a commit, in clock order.
COMMIT = np.dtype(
    [(column, "<f8" if column == "wait" else "<i8") for column in _OF_COMMIT]
    + [(column, _FORMATS[kind]) for column, kind in typing.get_type_hints(CommitOutcome).items()]
)

_RECENT = 64
_STEPS, _STALENESS, _SKIPPED = (list(COMMIT.fields or ()).index(name) for name in ("steps", "staleness", "skipped"))


class CommitLog:
    """All commits of a job, each once, with their history: what `trainer.commits` and `trainer.history` are made of."""

    def __init__(self) -> None:
        self._commits: list[tuple[float, ...]] = []
        self._history: list[np.ndarray] = []
        #: Columns of the history; 0 before there is any.
        self.columns = 0
        self.batches = 0
        self.samples = 0
        #: Commits that were left out for their numbers.
        self.skipped = 0
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._staleness: deque[float] = deque(maxlen=_RECENT)

    def add(self, commit: Commit, outcome: CommitOutcome) -> None:
        """Writes one commit down."""
        self._append(_of_commit(commit) + outcome, commit.history)

    def _append(self, row: tuple[float, ...], history: np.ndarray) -> None:
        self._commits.append(row)
        self._history.append(history)
        self.batches += int(row[_STEPS])
        skipped = bool(row[_SKIPPED])
        self.skipped += skipped
        if not skipped:
            self._staleness.append(row[_STALENESS])
        if not history.size:
            return
        self.columns = history.shape[1]
        # A few rows at most times: Python adds them up faster than numpy, and a lock is held.
        self.samples += int(sum(history[:, 1].tolist()))
        if not skipped and self.columns > len(FIXED_HISTORY):
            self._losses.append(sum(history[:, len(FIXED_HISTORY)].tolist()) / len(history))

    @property
    def loss(self) -> float:
        """Mean loss behind the latest commits; NaN before the first."""
        return sum(self._losses) / len(self._losses) if self._losses else float("nan")

    @property
    def staleness(self) -> float:
        """Mean staleness of the latest commits; NaN before the first."""
        return sum(self._staleness) / len(self._staleness) if self._staleness else float("nan")

    def __len__(self) -> int:
        return len(self._commits)

    def commits(self, start: int = 0, count: int | None = None) -> np.ndarray:
        """``count`` commits from number ``start`` on (all others, if None), as `COMMIT` rows."""
        return np.array(self._commits[start : None if count is None else start + count], COMMIT)

    def lengths(self, start: int, count: int) -> np.ndarray:
        """How many rows of history each of ``count`` commits from number ``start`` on has, int64."""
        return np.array([len(rows) for rows in self._history[start : start + count]], np.int64)

    def history(self, start: int, count: int) -> np.ndarray:
        """The history behind ``count`` commits from number ``start`` on, float64 ``(rows, columns)``."""
        pieces = [rows for rows in self._history[start : start + count] if rows.size]
        return np.concatenate(pieces) if pieces else NO_ROWS

    def extend(self, commits: np.ndarray, lengths: np.ndarray, history: np.ndarray) -> None:
        """Takes back what `commits`, `lengths` and `history` gave."""
        pieces = np.split(history, np.cumsum(lengths)[:-1])
        for row, piece in zip(commits.tolist(), pieces, strict=True):
            self._append(row, piece)
