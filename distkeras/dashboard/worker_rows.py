"""A row for each worker: what it has done, where its time went, and when it was last heard of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from distkeras.dashboard.rounding import rounded
from distkeras.dashboard.time_split import TimeSplit

#: Where a worker is, by number.
WAITING, TRAINING, FINISHED = range(3)
#: How much of a worker's loss the latest commit is.
_SHARE = 0.2
_SUMS = ("commits", "samples", "skipped", "compute", "wait", "wire", "retries", "fenced")


class WorkerRows:
    """All workers of a job.

    Args:
        workers: their number.
    """

    def __init__(self, workers: int) -> None:
        self._sums = {name: np.zeros(workers) for name in _SUMS}
        self._epoch = np.zeros(workers, np.int64)
        self._attempt = np.full(workers, -1, np.int64)
        self._last = np.full(workers, np.nan)
        self._loss = np.full(workers, np.nan)
        self._state = np.full(workers, WAITING, np.int64)

    def add(self, commits: np.ndarray, samples: np.ndarray, split: TimeSplit) -> None:
        """Takes rows of the commit log in, with the samples behind each and where the time before it went."""
        workers = commits["worker"]
        added: dict[str, Any] = {"commits": 1.0, "samples": samples, "skipped": commits["skipped"]}
        added |= {"compute": split.compute, "wait": split.wait, "wire": split.wire}
        for name, values in added.items():
            np.add.at(self._sums[name], workers, values)
        # Of several commits of one worker, the last one stays.
        self._epoch[workers], self._last[workers] = commits["epoch"], commits["timestamp"]
        self._attempt[workers] = commits["attempt"]
        self._state[workers] = np.maximum(self._state[workers], TRAINING)

    def note_loss(self, workers: np.ndarray, losses: np.ndarray) -> None:
        """Takes the mean loss behind each of some commits in; NaN where there is none."""
        for worker, loss in zip(workers.tolist(), losses.tolist(), strict=True):
            if loss == loss:
                before = self._loss[worker]
                self._loss[worker] = loss if before != before else before + _SHARE * (loss - before)

    def note_event(self, worker: int, kind: str) -> None:
        """Counts an event that concerns a worker."""
        if 0 <= worker < len(self._state):
            self._sums["retries"][worker] += kind == "takeover"
            self._sums["fenced"][worker] += kind == "fenced"

    def forgetting_commits(self) -> WorkerRows:
        """The same workers before their first commit, with the events that concern them."""
        fresh = WorkerRows(len(self._state))
        for name in ("retries", "fenced"):
            fresh._sums[name] = self._sums[name]
        return fresh

    def set_table(self, table: np.ndarray) -> set[int]:
        """Takes in who has joined and has data left (`messages.WorkerTable`); returns whose row has changed."""
        there = table[:, 0].astype(np.int64)
        state, attempt = self._state.copy(), self._attempt.copy()
        gone = np.setdiff1d(np.flatnonzero(state == TRAINING), there)
        state[gone], state[there] = FINISHED, TRAINING
        attempt[there] = table[:, 1].astype(np.int64)
        changed = np.flatnonzero((state != self._state) | (attempt != self._attempt))
        self._state, self._attempt = state, attempt
        return set(changed.tolist())

    def finish(self) -> None:
        """Nobody trains any more."""
        self._state[self._state == TRAINING] = FINISHED

    def totals(self) -> tuple[int, int]:
        """Samples and commits of all."""
        return int(self._sums["samples"].sum()), int(self._sums["commits"].sum())

    def told(self, workers: Iterable[int], seconds: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
        """The rows of some workers, a list for each column, JSON-ready.

        Args:
            workers: whose.
            seconds: turns timestamps into the seconds of the page.
        """
        chosen = np.fromiter(workers, np.int64)
        times = self._last[chosen]
        last = np.where(np.isnan(times), np.nan, seconds(np.nan_to_num(times)))
        columns: dict[str, Any] = {"worker": chosen.tolist(), "state": self._state[chosen].tolist()}
        columns |= {"attempt": self._attempt[chosen].tolist(), "epoch": self._epoch[chosen].tolist()}
        columns |= {"last": [None if at != at else round(at, 1) for at in last.tolist()]}
        columns |= {"loss": rounded(self._loss[chosen])}
        counts = {name: self._sums[name][chosen].astype(np.int64).tolist() for name in _SUMS if name not in _SECONDS}
        return columns | counts | {name: rounded(self._sums[name][chosen]) for name in _SECONDS}


_SECONDS = ("compute", "wait", "wire")
