"""What the server writes down of every commit, and the history rows that came with it."""

from __future__ import annotations

from collections import deque

import numpy as np

from distkeras.ps.protocol.messages import Commit

#: One row a commit, in clock order. ``gap`` is NaN where it was not measured. A commit that was ``skipped`` for its
#: numbers has the clock of the one that comes after it, and has not moved the center.
COMMIT = np.dtype(
    [
        ("clock", "<i8"),
        ("worker", "<i8"),
        ("attempt", "<i8"),
        ("incarnation", "<i8"),
        ("sequence", "<i8"),
        ("epoch", "<i8"),
        ("first_batch", "<i8"),
        ("last_batch", "<i8"),
        ("steps", "<i8"),
        ("staleness", "<i8"),
        ("bytes", "<i8"),
        ("timestamp", "<f8"),
        ("learning_rate", "<f8"),
        ("gap", "<f8"),
        ("scale", "<f8"),
        ("wait", "<f8"),
        ("skipped", "<i8"),
    ]
)

#: History columns that every row has, before the metrics.
FIXED_HISTORY = ("timestamp", "samples")

_RECENT = 64
_STEPS, _STALENESS, _SKIPPED = (list(COMMIT.fields or ()).index(name) for name in ("steps", "staleness", "skipped"))


class CommitLog:
    """All commits of a job, each once, with their history: what `trainer.commits` and `trainer.history` are made of."""

    def __init__(self) -> None:
        self._commits: list[tuple] = []
        self._history: list[np.ndarray] = []
        self.batches = 0
        self.samples = 0
        #: Commits that were left out for their numbers.
        self.skipped = 0
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._staleness: deque[int] = deque(maxlen=_RECENT)

    def add(
        self,
        commit: Commit,
        *,
        clock: int,
        staleness: int,
        timestamp: float,
        eta: float,
        gap: float,
        scale: float,
        skipped: bool = False,
    ) -> None:
        """Writes one commit down: applied, or ``skipped``."""
        size = sum([part.nbytes for part in commit.packed or commit.parts])
        self._commits.append(
            (
                clock,
                commit.worker,
                commit.attempt,
                commit.incarnation,
                commit.sequence,
                commit.epoch,
                commit.first,
                commit.last,
                commit.steps,
                staleness,
                size,
                timestamp,
                eta,
                gap,
                scale,
                commit.waited,
                int(skipped),
            )
        )
        self._note(commit.history, commit.steps, staleness, skipped)

    def _note(self, history: np.ndarray, steps: int, staleness: int, skipped: bool) -> None:
        self._history.append(history)
        self.batches += steps
        if skipped:
            self.skipped += 1
            if history.size:
                self.samples += int(history.reshape(steps, -1)[:, 1].sum())
            return
        self._staleness.append(staleness)
        if history.size:
            rows = history.reshape(steps, -1)
            # A few rows at most times: Python adds them up faster than numpy, and a lock is held.
            self.samples += int(sum(rows[:, 1].tolist()))
            if rows.shape[1] > len(FIXED_HISTORY):
                self._losses.append(sum(rows[:, len(FIXED_HISTORY)].tolist()) / len(rows))

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
        """How many numbers of history each of ``count`` commits from number ``start`` on has, int64."""
        return np.array([rows.size for rows in self._history[start : start + count]], np.int64)

    def extend(self, commits: np.ndarray, lengths: np.ndarray, history: np.ndarray) -> None:
        """Takes back what `commits`, `lengths` and `history` gave."""
        pieces = np.split(history, np.cumsum(lengths)[:-1])
        for commit, piece in zip(commits.tolist(), pieces, strict=True):
            self._commits.append(commit)
            self._note(piece, commit[_STEPS], commit[_STALENESS], bool(commit[_SKIPPED]))

    def history(self, start: int, count: int) -> np.ndarray:
        """The history rows behind ``count`` commits from number ``start`` on, flat."""
        rows = self._history[start : start + count]
        return np.concatenate(rows) if rows else np.empty(0, np.float64)
