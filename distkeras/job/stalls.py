"""Who has been silent for too long: reported once for each silence, and nothing else follows from it."""

from __future__ import annotations

import logging

import numpy as np

from distkeras.ps.events import Events

log = logging.getLogger(__name__)


class StallDetector:
    """Finds stalled workers in the server's tables of workers.

    Args:
        after: seconds without a commit that are too long.
        events: takes the stalls.
    """

    def __init__(self, after: float, events: Events) -> None:
        self.after = after
        #: Seconds from one table to the next.
        self.interval = max(1.0, after / 10)
        self._events = events
        self._reported: dict[int, tuple[int, int]] = {}

    def check(self, workers: np.ndarray) -> None:
        """Takes in a `messages.WorkerTable`: float64 rows of worker, attempt, last commit, and seconds since."""
        for worker, attempt, sequence in workers[workers[:, 3] >= self.after, :3].astype(int).tolist():
            silence = (attempt, sequence)
            if self._reported.get(worker) == silence:
                continue
            self._reported[worker] = silence
            seconds = float(workers[workers[:, 0] == worker, 3][0])
            since = f"its commit {sequence}" if sequence else "it joined"
            text = "worker %d (attempt %d) has been silent for %.0f s, since %s"
            self._events.report(log, "stall", text, worker, attempt, seconds, since, worker=worker, attempt=attempt)
