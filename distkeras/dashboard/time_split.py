"""Where a worker's time goes, from what `trainer.commits` has: computing, waiting for others, and the exchange."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TimeSplit(NamedTuple):
    """Seconds of a worker from its commit before to each of some commits, float64 ``(commits,)``; 0 where not known.

    Args:
        compute: steps, and reading the data.
        wait: for other workers, in rounds; under a bound of staleness, `wire` has it.
        wire: the rest of the exchange: the way there and back, and the server's own work.
    """

    compute: np.ndarray
    wait: np.ndarray
    wire: np.ndarray


class TimeSplitter:
    """Splits the time between the commits of each worker.

    The column ``wait`` of a commit is how long its worker had waited for the reply to the exchange before it. In
    rounds, a reply is held until the round's last commit has come, and that is in the log as well.

    Args:
        workers: of the job.
        rounds: the rule has rounds.
    """

    def __init__(self, workers: int, *, rounds: bool) -> None:
        self._rounds = rounds
        self._time = np.full(workers, np.nan)
        self._attempt = np.full(workers, -1, np.int64)
        self._round = np.full(workers, -1, np.int64)
        #: When the latest rounds ended, by the clock that they began at.
        self._ends: dict[int, float] = {}

    def split(self, commits: np.ndarray) -> TimeSplit:
        """Of the next rows of the commit log, in its order."""
        workers, times = commits["worker"], commits["timestamp"]
        # What is fenced off, or comes from before a restart, is no neighbor of what follows it.
        attempts = commits["attempt"] * (1 << 32) + commits["incarnation"]
        rounds = commits["clock"] - commits["staleness"]
        order = np.argsort(workers, kind="stable")
        before = np.full(len(commits), -1)
        same = workers[order][1:] == workers[order][:-1]
        before[order[1:][same]] = order[:-1][same]
        first = before < 0
        began = np.where(first, self._time[workers], times[before])
        known = np.where(first, self._attempt[workers], attempts[before]) == attempts
        period = np.where(known, np.maximum(times - began, 0.0), 0.0)
        period = np.nan_to_num(period)
        exchange = np.minimum(np.nan_to_num(commits["wait"]), period)
        wait = np.minimum(self._held(rounds, times, first, before, workers) - began, exchange)
        wait = np.maximum(np.nan_to_num(wait), 0.0)
        last = order[np.append(~same, True)] if len(commits) else order
        self._time[workers[last]] = times[last]
        self._attempt[workers[last]], self._round[workers[last]] = attempts[last], rounds[last]
        return TimeSplit(period - exchange, wait, exchange - wait)

    def _held(
        self, rounds: np.ndarray, times: np.ndarray, first: np.ndarray, before: np.ndarray, workers: np.ndarray
    ) -> np.ndarray:
        """When the round ended that each commit's neighbor belonged to; NaN where it had none."""
        if not self._rounds:
            return np.full(len(rounds), np.nan)
        self._ends |= zip(rounds.tolist(), times.tolist(), strict=True)  # of those of one round, the last one stays
        of_neighbor = np.where(first, self._round[workers], rounds[before])
        held = np.array([self._ends.get(each, np.nan) for each in of_neighbor.tolist()])
        latest = sorted(self._ends)[-4:]
        self._ends = {each: self._ends[each] for each in latest}
        return held
