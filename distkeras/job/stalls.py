"""Who has been silent for too long: told once for each silence, and nothing else follows from it."""

from __future__ import annotations

import logging

import numpy as np

from distkeras.ps.events import Events

log = logging.getLogger(__name__)


class Stalls:
    """Finds stalled workers in the server's roll calls.

    Args:
        after: seconds without a commit that are too long.
        events: takes the stalls.
    """

    def __init__(self, after: float, events: Events) -> None:
        self.after = after
        #: Seconds from one roll call to the next.
        self.interval = max(1.0, after / 10)
        self._events = events
        self._told: dict[int, tuple[int, int]] = {}

    def look(self, roll: np.ndarray) -> None:
        """Takes in a `messages.WorkerTable`: float64 rows of worker, attempt, last commit, and seconds since."""
        for worker, attempt, sequence in roll[roll[:, 3] >= self.after, :3].astype(int).tolist():
            silence = (attempt, sequence)
            if self._told.get(worker) == silence:
                continue
            self._told[worker] = silence
            seconds = float(roll[roll[:, 0] == worker, 3][0])
            since = f"its commit {sequence}" if sequence else "it joined"
            text = "worker %d (attempt %d) has been silent for %.0f s, since %s"
            self._events.report(log, "stall", text, worker, attempt, seconds, since, worker=worker, attempt=attempt)
