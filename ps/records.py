"""What the server writes down of every commit, and the history rows that came with it."""

from __future__ import annotations

from collections import deque

import numpy as np

from distkeras.ps.messages import Commit

#: One row a commit, in clock order. ``gap`` is NaN where it was not measured.
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
    ]
)

#: History columns that every row has, before the metrics.
FIXED_HISTORY = ("timestamp", "samples")

_RECENT = 64


class Log:
    """All commits of a job, each once, with their history: what `trainer.commits` and `trainer.history` are made of."""

    def __init__(self) -> None:
        self._commits: list[tuple] = []
        self._history: list[np.ndarray] = []
        self.batches = 0
        self.samples = 0
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._staleness: deque[int] = deque(maxlen=_RECENT)

    def add(
        self, commit: Commit, *, clock: int, staleness: int, timestamp: float, eta: float, gap: float, scale: float
    ) -> None:
        """Writes one applied commit down."""
        size = sum([part.nbytes for part in commit.parts])
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
            )
        )
        self._history.append(commit.history)
        self.batches += commit.steps
        self._staleness.append(staleness)
        if commit.history.size:
            rows = commit.history.reshape(commit.steps, -1)
            self.samples += int(rows[:, 1].sum())
            if rows.shape[1] > len(FIXED_HISTORY):
                self._losses.append(float(rows[:, len(FIXED_HISTORY)].mean()))

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

    def history(self, start: int, count: int) -> np.ndarray:
        """The history rows behind ``count`` commits from number ``start`` on, flat."""
        rows = self._history[start : start + count]
        return np.concatenate(rows) if rows else np.empty(0, np.float64)
