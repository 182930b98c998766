"""A synthetic record of a job: commits with their history, without a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from distkeras.callbacks import Evaluation
from distkeras.dashboard.record import CurrentStatus, JobRecord
from distkeras.dashboard.watch import Journal
from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.events import Event
from distkeras.settings import JobFacts

BEGAN = 1_700_000_000.0


def commits(rows: list[dict[str, float]]) -> np.ndarray:
    """Return rows of the commit log that have the given values, and those of an ordinary commit otherwise."""
    found = np.zeros(len(rows), COMMIT)
    found["gap"], found["scale"], found["steps"] = np.nan, 1.0, 1
    for clock, row in enumerate(rows):
        found[clock]["clock"], found[clock]["sequence"] = clock, clock + 1
        own = row.get("worker", 0)
        for name, value in {"trained_by": own, "lease": own, **row}.items():
            found[clock][name] = value
    return found


def steps(rows: np.ndarray, losses: list[float] | np.ndarray, samples: int = 32) -> np.ndarray:
    """Return the history of commits of one mini-batch each."""
    return np.column_stack([rows["timestamp"], np.full(len(rows), samples), losses])


class RecordedJob:
    """Workers that each commit about once every ``pause`` seconds; the loss falls and the accuracy rises.

    Args:
        workers: the number of workers.
        seconds: the duration of the training.
        pause: the seconds between two commits of a worker.
        seed: the seed of all random numbers.
        died: when the driver died, and for how many seconds no worker trained.
        options: the options of the job, by name.
        metrics: the names of the metrics, the loss first.
        monitor: the metric that a callback monitors.
    """

    def __init__(
        self,
        workers: int = 4,
        seconds: float = 120.0,
        pause: float = 1.0,
        seed: int = 0,
        *,
        died: tuple[float, float] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        metrics: tuple[str, ...] = ("loss", "accuracy"),
        monitor: str = "",
    ) -> None:
        self.metrics = metrics
        rng = np.random.default_rng(seed)
        each = int(seconds / pause)
        speed = rng.uniform(0.9, 1.25, workers)
        times = (np.arange(1, each + 1)[:, None] * pause * speed + rng.uniform(0, 0.3 * pause, (each, workers))).ravel()
        worker = np.tile(np.arange(workers), each)
        order = np.argsort(times, kind="stable")
        order = order[times[order] <= seconds]
        times, worker = times[order], worker[order]
        count = len(times)
        self.workers = workers
        self.commits = np.zeros(count, COMMIT)
        rows = self.commits
        rows["trained_by"] = rows["lease"] = worker
        rows["worker"], rows["timestamp"], rows["clock"] = worker, BEGAN + times, np.arange(count)
        rows["attempt"], rows["incarnation"], rows["steps"] = worker, 1, 4
        by_worker = np.argsort(worker, kind="stable")
        nth = np.empty(count, np.int64)
        nth[by_worker] = np.arange(count) - np.searchsorted(worker[by_worker], worker[by_worker])
        rows["sequence"], rows["epoch"] = nth + 1, np.minimum(2 * nth // each, 1)
        rows["first_batch"], rows["last_batch"] = 4 * nth, 4 * nth + 3
        rows["staleness"] = rng.poisson(max(0, workers - 1), count)
        rows["wait"] = rng.gamma(3.0, 0.02 * pause, count)
        rows["gap"] = 0.02 * np.exp(-times / seconds) * rng.uniform(0.8, 1.2, count)
        rows["scale"], rows["learning_rate"] = 1.0 / (1.0 + rows["staleness"]), 0.01
        rows["bytes"] = 400_000
        at = np.repeat(times, 4)
        bias = np.repeat(rng.normal(0, 0.05, workers)[worker], 4)
        loss = 0.25 + 2.0 * np.exp(-4 * at / seconds) * (1 + bias) + rng.normal(0, 0.06, 4 * count) ** 2
        accuracy = np.clip(0.97 - 0.85 * np.exp(-4 * at / seconds) * (1 + bias), 0, 1)
        self.steps = np.column_stack([BEGAN + at, np.full(4 * count, 128.0), loss, accuracy][: 2 + len(metrics)])
        if died is not None:
            later = times > died[0]
            rows["timestamp"][later] += died[1]
            rows["incarnation"][later] = 2
            self.steps[np.repeat(later, 4), 0] += died[1]
        self.facts = JobFacts(
            rule="AGN(window=4, window_max=None)",
            workers=workers,
            epochs=2,
            batch_size=128,
            saved=True,
            options=dict(options),
            model="mnist_cnn",
            parameters=421_642,
            columns=("image", "label"),
            monitor=monitor,
        )

    def pieces(self, seconds: float = 1.0) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
        """Yield the records in time steps of so many seconds: the time, commits, and history."""
        times = self.commits["timestamp"]
        at, first = BEGAN, 0
        while first < len(times):
            at += seconds
            last = int(np.searchsorted(times, at, side="right"))
            yield at, self.commits[first:last], self.steps[4 * first : 4 * last]
            first = last

    def events(self) -> list[Event]:
        """Return events: an executor is lost, its partition is taken over, a request is refused, a snapshot fails."""
        return [
            Event(BEGAN + 31.0, "server", "snapshot", None, None, "a snapshot could not be written: no room"),
            Event(BEGAN + 36.0, "server", "snapshot", None, None, "snapshots are written again"),
            Event(
                BEGAN + 52.0,
                "server",
                "takeover",
                1,
                self.workers + 1,
                f"attempt {self.workers + 1} took partition 1 over from attempt 1, at mini-batch 96 of epoch 0",
            ),
            Event(
                BEGAN + 53.5,
                "server",
                "fenced",
                1,
                1,
                f"a request is refused: partition 1 belongs to attempt {self.workers + 1}",
            ),
        ]


def write_journal(path: Path, job: RecordedJob, *, state: str = "training", why: str = "") -> None:
    """Write the journal of a job that was observed once, at its end."""
    Journal(path).begin(record_of(job, state=state, why=why).whole())


def record_of(job: RecordedJob, *, state: str = "training", why: str = "") -> JobRecord:
    """Return all of a recorded job, with the results of its callbacks."""
    record = JobRecord(job.facts, job.metrics, BEGAN)
    record.add_commits(job.commits, job.steps)
    record.add_events(job.events())
    last = float(job.commits["timestamp"][-1])
    for at in np.arange(BEGAN + 10.0, last, 15.0):
        passed = (at - BEGAN) / (last - BEGAN)
        loss = 0.3 + 2.0 * np.exp(-4 * passed)
        values = {"loss": float(loss), "accuracy": float(0.95 - 0.85 * np.exp(-4 * passed))}
        record.add_evaluations([Evaluation(float(at), int(100 * passed), "EarlyStopping", values)])
    over = state not in ("starting", "training")
    if over:
        record.workers.finish()
    record.now = CurrentStatus(
        state,
        why,
        last + 0.5,
        2.0 if over else 1.4,
        job.workers,
        job.workers if over else 0,
        float(np.mean(job.steps[-40:, 2])),
        float(job.steps[:, 1].sum() / (last - BEGAN)),
        rate_seconds=30.0,
        left=float("nan") if over else 48.0,
    )
    return record
