"""The record of a job for the dashboard: it has a bounded size, and every kind of page is made from it."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from distkeras.callbacks import Evaluation
from distkeras.ps.checkpoint.checkpointer import SNAPSHOT_FAILED, SNAPSHOTS_RESUMED
from distkeras.ps.events import Event
from distkeras.ps.protocol.loop import FIXED_HISTORY
from distkeras.results import MicroBatchProgress
from distkeras.settings import JobFacts

#: Seconds of the narrowest bucket.
_BUCKET_SECONDS_MIN = 1.0
#: Most bins of a histogram.
_BINS = 64


class Buckets:
    """Sums of several quantities in buckets of time, which all have the same width.

    A time beyond the last bucket merges each two neighbors into one, and so doubles the width.

    Args:
        rows: the number of rows of each quantity, by its name.
        most: the largest number of buckets; even.

    Attributes:
        width: seconds of a bucket.
        used: number of buckets up to the latest one that has a value.
        changed: the first bucket that has changed since `mark_sent`; ``used`` if none has.
        folded: whether the width has changed since `mark_sent`.
    """

    def __init__(self, rows: Mapping[str, int], most: int) -> None:
        self._sums = {name: np.zeros((count, most)) for name, count in rows.items()}
        self._most = most
        self.width = _BUCKET_SECONDS_MIN
        self.used = self.changed = 0
        self.folded = False

    def place(self, seconds: np.ndarray) -> np.ndarray:
        """Return the bucket of each time in seconds, the first one for times before 0; make room for the latest."""
        if not len(seconds):
            return np.zeros(0, np.int64)
        while seconds.max() >= self.width * self._most:
            self._fold()
        places = np.maximum(seconds / self.width, 0.0).astype(np.int64)
        self.used = max(self.used, int(places.max()) + 1)
        self.changed = min(self.changed, int(places.min()))
        return places

    def add(self, name: str, rows: np.ndarray | int, places: np.ndarray, values: np.ndarray | float) -> None:
        """Add values to the buckets that `place` has returned."""
        cells: Any = (rows, places)
        np.add.at(self._sums[name], cells, values)

    def sums(self, name: str, first: int = 0) -> np.ndarray:
        """Return the sums of a quantity, float64 ``(rows, used - first)``."""
        return self._sums[name][:, first : self.used]

    def mark_sent(self) -> None:
        """Mark all buckets as sent."""
        self.changed, self.folded = self.used, False

    def _fold(self) -> None:
        half = self._most // 2
        for sums in self._sums.values():
            sums[:, :half] = sums.reshape(len(sums), half, 2).sum(axis=2)
            sums[:, half:] = 0.0
        self.width *= 2.0
        self.used, self.changed, self.folded = (self.used + 1) // 2, 0, True


class Histogram:
    """Counts whole numbers from 0 on in at most 64 bins, whose ``width`` doubles when needed."""

    def __init__(self) -> None:
        self.width = 1
        self.counts = np.zeros(_BINS, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Count numbers, of int64."""
        if not len(values):
            return
        while values.max() >= self.width * _BINS:
            self.counts[: _BINS // 2] = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts[_BINS // 2 :] = 0
            self.width *= 2
        self.counts += np.bincount(np.maximum(values, 0) // self.width, minlength=_BINS)


class TimeSplit(NamedTuple):
    """The parts of the seconds between two commits of a worker, float64 ``(commits,)``; 0 if they are unknown.

    Args:
        compute: seconds of the steps, and of reading the data.
        wait: seconds of waiting for other workers in a round; a wait for a bound of staleness is part of `wire`.
        wire: the other seconds of the exchange: the network in both directions, and the server's own work.
    """

    compute: np.ndarray
    wait: np.ndarray
    wire: np.ndarray


def trained_by(commits: np.ndarray, workers: int) -> np.ndarray:
    """Return the worker that trained each row of the commit log, of so many that a page shows, helpers included.

    A job that was resumed may have had more helpers before: their rows count for the worker whose partition it was.
    """
    return np.where(commits["trained_by"] < workers, commits["trained_by"], commits["worker"])


class TimeSplitter:
    """Splits the time between the commits of each worker.

    The column ``wait`` of a commit has the seconds for which its worker waited for the reply to the previous exchange.
    In a round, the server holds the reply until the round's last commit, which is in the log, too.
    """

    def __init__(self, workers: int, *, rounds: bool) -> None:
        self._rounds = rounds
        self._time = np.full(workers, np.nan)
        #: Numbers of lease, attempt and incarnation together, and that of each worker's latest commit.
        self._chains: dict[tuple[int, ...], int] = {}
        self._chain = np.full(workers, -1, np.int64)
        self._round = np.full(workers, -1, np.int64)
        #: The times at which the latest rounds ended, by the clock at which each round began.
        self._ends: dict[int, float] = {}

    def split(self, commits: np.ndarray) -> TimeSplit:
        """Split the time before each of the next rows of the commit log."""
        workers, times = trained_by(commits, len(self._time)), commits["timestamp"]
        # A commit is a neighbor of the next one only if no other lease, attempt or server came between them.
        names = ["lease", "attempt", "incarnation"]
        chains = np.array([self._chains.setdefault(row, len(self._chains)) for row in commits[names].tolist()], int)
        rounds = commits["clock"] - commits["staleness"]
        order = np.argsort(workers, kind="stable")
        before = np.full(len(commits), -1)
        same = workers[order][1:] == workers[order][:-1]
        before[order[1:][same]] = order[:-1][same]
        first = before < 0
        began = np.where(first, self._time[workers], times[before])
        known = np.where(first, self._chain[workers], chains[before]) == chains
        period = np.where(known, np.maximum(times - began, 0.0), 0.0)
        period = np.nan_to_num(period)
        exchange = np.minimum(np.nan_to_num(commits["wait"]), period)
        wait = np.minimum(self._held(rounds, times, first, before, workers) - began, exchange)
        wait = np.maximum(np.nan_to_num(wait), 0.0)
        last = order[np.append(~same, True)] if len(commits) else order
        self._time[workers[last]] = times[last]
        self._chain[workers[last]], self._round[workers[last]] = chains[last], rounds[last]
        return TimeSplit(period - exchange, wait, exchange - wait)

    def _held(
        self, rounds: np.ndarray, times: np.ndarray, first: np.ndarray, before: np.ndarray, workers: np.ndarray
    ) -> np.ndarray:
        """Return when the round of the commit before each commit ended; NaN if it had none."""
        if not self._rounds:
            return np.full(len(rounds), np.nan)
        self._ends |= zip(rounds.tolist(), times.tolist(), strict=True)  # the last commit of a round ends it
        of_neighbor = np.where(first, self._round[workers], rounds[before])
        held = np.array([self._ends.get(each, np.nan) for each in of_neighbor.tolist()])
        latest = sorted(self._ends)[-4:]
        self._ends = {each: self._ends[each] for each in latest}
        return held


_DIGITS = 4


def rounded(values: np.ndarray) -> Any:
    """Return ``values`` as nested lists with four significant digits, and None for a NaN or infinity."""
    values = np.asarray(values, np.float64)
    with np.errstate(all="ignore"):
        magnitude = np.floor(np.log10(np.abs(values)))
        # Decimals below the point; whole numbers are kept as they are.
        decimals = np.clip(np.nan_to_num(_DIGITS - 1 - magnitude, nan=0.0, posinf=0.0, neginf=0.0), 0, 300)
        factor = 10.0**decimals
        # Powers of ten above 22 are inexact.
        rounded_values = np.where(decimals > 22, values, np.round(values * factor) / factor)
    as_objects = rounded_values.astype(object)
    as_objects[~np.isfinite(rounded_values)] = None
    return as_objects.tolist()


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return ``above / below``, and NaN where ``below`` is 0."""
    with np.errstate(all="ignore"):
        return np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)


def number(value: float | None) -> float | None:
    """Return one number, rounded."""
    finite: float | None = None if value is None else rounded(np.asarray(value))
    return finite


#: The states of a worker, as numbers.
WAITING, TRAINING, FINISHED = range(3)
#: The weight of the latest commit in the moving average of a worker's loss.
_SHARE = 0.2
_SUMS = ("commits", "samples", "skipped", "compute", "wait", "wire", "retries", "fenced")


class WorkerRows:
    """The rows of a job's table of workers, and of helpers, whose numbers follow.

    A row has what its worker has trained, of its own partition and of others.
    """

    def __init__(self, workers: int, helpers: int = 0) -> None:
        self._workers = workers
        workers += helpers
        self._sums = {name: np.zeros(workers) for name in _SUMS}
        self._epoch = np.zeros(workers, np.int64)
        self._attempt = np.full(workers, -1, np.int64)
        self._last = np.full(workers, np.nan)
        self._loss = np.full(workers, np.nan)
        self._state = np.full(workers, WAITING, np.int64)
        self._first_epoch = 0.0
        self._lent = False

    def rows(self, *, done: bool) -> float:
        """Return the number of rows, as the first epoch counts them.

        It is NaN before its end, which is the job's if any were lent, or if its history is lost.
        """
        passed = not self._lent and (self._epoch[: self._workers] > 0).all()
        return self._first_epoch if done or passed else math.nan

    def add(self, commits: np.ndarray, samples: np.ndarray, split: TimeSplit) -> None:
        """Add rows of the commit log, with the samples of each and the parts of the time before it."""
        workers = trained_by(commits, len(self._state))
        self._lent |= bool((workers != commits["worker"]).any())
        added: dict[str, Any] = {"commits": 1.0, "samples": samples, "skipped": commits["skipped"]}
        added |= {"compute": split.compute, "wait": split.wait, "wire": split.wire}
        for name, values in added.items():
            np.add.at(self._sums[name], workers, values)
        first = commits["epoch"] == 0
        # A commit without samples is one whose history was lost, after which the rows are unknown.
        self._first_epoch += float(np.where(samples[first] > 0, samples[first], np.nan).sum())
        # If a worker has several commits, numpy keeps the values of the last one.
        self._epoch[workers], self._last[workers] = commits["epoch"], commits["timestamp"]
        self._attempt[workers] = commits["attempt"]
        self._state[workers] = np.maximum(self._state[workers], TRAINING)

    def note_loss(self, workers: np.ndarray, losses: np.ndarray) -> None:
        """Add the mean loss of each commit's mini-batches; NaN if there is none."""
        for worker, loss in zip(workers.tolist(), losses.tolist(), strict=True):
            if loss == loss:
                before = self._loss[worker]
                self._loss[worker] = loss if before != before else before + _SHARE * (loss - before)

    def note_event(self, worker: int, kind: str) -> None:
        """Count an event that concerns a worker."""
        if 0 <= worker < self._workers:
            self._sums["retries"][worker] += kind == "takeover"
            self._sums["fenced"][worker] += kind == "fenced"

    def forgetting_commits(self) -> WorkerRows:
        """Return the same workers before their first commit, with the events that concern them."""
        fresh = WorkerRows(self._workers, len(self._state) - self._workers)
        for name in ("retries", "fenced"):
            fresh._sums[name] = self._sums[name]
        return fresh

    def set_table(self, table: np.ndarray) -> set[int]:
        """Note which workers train, from a `WorkerTable` message; return the workers whose state has changed."""
        table = table[table[:, 0] < len(self._state)]
        joined = table[:, 0].astype(np.int64)
        state, attempt = self._state.copy(), self._attempt.copy()
        finished = np.setdiff1d(np.flatnonzero(state == TRAINING), joined)
        state[finished], state[joined] = FINISHED, TRAINING
        attempt[joined] = table[:, 1].astype(np.int64)
        changed = np.flatnonzero((state != self._state) | (attempt != self._attempt))
        self._state, self._attempt = state, attempt
        return set(changed.tolist())

    def finish(self) -> None:
        """Count no worker as training any more."""
        self._state[self._state == TRAINING] = FINISHED

    def totals(self) -> tuple[int, int]:
        """Return the samples and commits of all workers."""
        return int(self._sums["samples"].sum()), int(self._sums["commits"].sum())

    def columns(self, workers: Iterable[int], seconds: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
        """Return the rows of some workers, a list for each column, JSON-ready; ``seconds`` converts timestamps."""
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


#: The largest and the smallest limit of the number of buckets. Jobs with many workers have the smaller one.
_BUCKETS_MAX, _BUCKETS_MIN = 600, 100
#: The most numbers that the lines of all workers have together, so that a page stays small.
_CELLS = 300_000
_METRICS_MAX = 8
_EVENTS, _EVALUATIONS = 500, 1000
#: The shortest pause before another driver or server continues a job that the record notes, in seconds; the shortest
#: pause that the page shortens; and the share of the time before it to which the page shortens it.
_PAUSE, _LONG_PAUSE, _PAUSE_SHARE = 5.0, 60.0, 0.03
#: The most pauses that a page shows: the latest ones.
_PAUSES_MAX = 50
#: Sums over all workers in each bucket. A name in the plural is the number of values in the sum before it.
_OF_JOB = (
    *("commits", "samples", "staleness", "gap", "gaps", "scale", "scales", "compute", "wait", "wire"),
    *("lag", "lags", "micro_batch", "micro_batches"),
)


@dataclass(frozen=True)
class CurrentStatus:
    """The current status of a job.

    Args:
        state: "starting", "training", "done", "stopped", "failed" or "interrupted".
        why: the reason of the end, or the phase of the start.
        timestamp: seconds since the epoch.
        epochs: completed epochs, a mean over the partitions.
        joined, finished: numbers of workers.
        loss: the mean over the latest commits.
        rate: samples per second; NaN if it is unknown.
        rate_seconds: seconds over which ``rate`` is the mean.
        left: estimated seconds until the end; NaN if they are unknown.
        saved_clock: number of commits in the latest snapshot; -1: there is none.
        saved_seconds: seconds since the latest snapshot.
        micro_batch: the latest micro-batch of a stream.
        tables: of each table whose rows come and go, by name: the rows that are kept, and those that were admitted,
            have expired and were removed.
    """

    state: str = "starting"
    why: str = ""
    timestamp: float = 0.0
    epochs: float = 0.0
    joined: int = 0
    finished: int = 0
    loss: float = math.nan
    rate: float = math.nan
    rate_seconds: float = math.nan
    left: float = math.nan
    saved_clock: int = -1
    saved_seconds: float = math.nan
    micro_batch: MicroBatchProgress | None = None
    tables: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass
class _Sent:
    """The parts of a record that have been sent."""

    events: int = 0
    evaluations: int = 0
    whole: bool = True
    workers: set[int] = field(default_factory=set)


class _CommitSums:
    """Everything that the record knows from commits. If all commits are read again, it starts empty again."""

    def __init__(self, facts: JobFacts, metrics: Sequence[str]) -> None:
        workers, lines = facts.workers + facts.helpers, len(metrics)
        most = min(_BUCKETS_MAX, max(_BUCKETS_MIN, _CELLS // (workers * lines)))
        of_worker = {f"{kind} {name}": workers for kind in ("sum", "weight") for name in metrics}
        self.buckets = Buckets(of_worker | dict.fromkeys(_OF_JOB, 1), most - most % 2)
        self.staleness = Histogram()
        self.splitter = TimeSplitter(workers, rounds=facts.rounds)
        self.commits = 0
        self.last_commit: np.ndarray | None = None
        self.origin: float | None = None  #: The time of the first commit.
        #: The time at which each long pause ended, and the seconds by which the page shortens it.
        self.cuts: list[tuple[float, float]] = []
        #: The times of the last commit before each pause and of the first one after it.
        self.pauses: deque[tuple[float, float]] = deque(maxlen=_PAUSES_MAX)


class JobRecord:
    """One job: its lines over time, its workers, its events.

    It is not thread-safe. Time is kept in buckets, so the size has a bound for any number of commits. Time on the page
    begins with the first commit.
    """

    def __init__(self, facts: JobFacts, metrics: Sequence[str], began: float) -> None:
        self.facts, self.metrics = facts, tuple(metrics[:_METRICS_MAX]) or ("loss",)
        self.began = began
        self.now = CurrentStatus(why="starting the server", timestamp=began)
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        self._kinds: Counter[str] = Counter()
        self._events_seen = 0
        #: The commits that snapshots had when one failed; None: none has, or they are written again.
        self._failed_after: int | None = None
        self._evaluations: list[Evaluation] = []
        self.workers = WorkerRows(facts.workers, facts.helpers)
        self._sums = _CommitSums(self.facts, self.metrics)
        self._sent = _Sent()

    def clear(self) -> None:
        """Forget all commits; they are read again from the first one on."""
        self._sums = _CommitSums(self.facts, self.metrics)
        self.workers = self.workers.forgetting_commits()
        self._sent = _Sent()

    def skip(self, commits: int) -> None:
        """Skip this number of rows of the commit log."""
        self._sums.commits += commits

    @property
    def commits(self) -> int:
        """Return the number of rows of the commit log that were read."""
        return self._sums.commits

    @property
    def last_commit(self) -> np.ndarray | None:
        """Return the last of these rows, as an array of one row; None before the first row."""
        return self._sums.last_commit

    def add_commits(self, commits: np.ndarray, steps: np.ndarray) -> None:
        """Add the next rows of the commit log, and float64 ``(mini-batches, 2 + metrics)``, their history."""
        if not len(commits):
            return
        self._sums.commits += len(commits)
        split = self._sums.splitter.split(commits)
        self._note_pauses(commits)
        self._sums.last_commit = commits[-1:].copy()
        places = self._sums.buckets.place(self._seconds(commits["timestamp"]))
        applied = commits["skipped"] == 0
        self._sums.staleness.add(commits["staleness"][applied])
        samples = self._add_steps(commits, steps, places, applied)
        ones = np.ones(len(commits))
        of_job = {"commits": ones, "samples": samples, "staleness": commits["staleness"] * applied}
        of_job |= {"compute": split.compute, "wait": split.wait, "wire": split.wire}
        for name, values in (("gap", commits["gap"]), ("scale", commits["scale"])):
            valid = np.isfinite(values) & applied
            of_job |= {name: np.where(valid, values, 0.0), f"{name}s": valid.astype(np.float64)}
        for name, values in of_job.items():
            self._sums.buckets.add(name, 0, places, values)
        self.workers.add(commits, samples, split)
        self._sent.workers.update(trained_by(commits, self.facts.workers + self.facts.helpers).tolist())

    def _add_steps(self, commits: np.ndarray, steps: np.ndarray, places: np.ndarray, applied: np.ndarray) -> np.ndarray:
        """Add the metrics of the mini-batches, and return the samples of each commit."""
        counts, workers = commits["steps"], trained_by(commits, self.facts.workers + self.facts.helpers)
        if len(steps) != counts.sum():  # a resumed job whose records were lost in part
            return np.zeros(len(commits))
        commit = np.repeat(np.arange(len(commits)), counts)
        weights = steps[:, 1]
        for column, name in enumerate(self.metrics, start=len(FIXED_HISTORY)):
            if column >= steps.shape[1]:
                break
            values = steps[:, column]
            good = np.isfinite(values) & applied[commit]
            # There are more steps than commits, so the steps of each commit are added up first.
            sums = np.bincount(commit[good], values[good] * weights[good], len(commits))
            total = np.bincount(commit[good], weights[good], len(commits))
            self._sums.buckets.add(f"sum {name}", workers, places, sums)
            self._sums.buckets.add(f"weight {name}", workers, places, total)
            if column == len(FIXED_HISTORY):
                self.workers.note_loss(workers, ratio(sums, total))
        return np.bincount(commit, weights, len(commits))

    def add_events(self, events: Sequence[Event]) -> None:
        """Add the events that have come since the last call, in order of time."""
        for event in events:
            self._events.append(event)
            self._kinds[event.kind] += 1
            self._events_seen += 1
            if event.text.startswith(SNAPSHOT_FAILED):
                self._failed_after = self.now.saved_clock
            elif event.text == SNAPSHOTS_RESUMED:
                self._failed_after = None
            if event.worker is not None and event.worker < self.facts.workers:
                self.workers.note_event(event.worker, event.kind)
                self._sent.workers.add(event.worker)

    def add_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Add evaluations of the center."""
        for evaluation in evaluations:
            self._evaluations.append(evaluation)
            if len(self._evaluations) > _EVALUATIONS:
                del self._evaluations[1::2]
                self._sent.whole = True

    def set_micro_batch(self, progress: MicroBatchProgress | None) -> None:
        """Note the latest micro-batch of a stream; if it is a new one, add its seconds and its lag."""
        before = self.now.micro_batch
        self.now = replace(self.now, micro_batch=progress)
        if progress is None or (before is not None and progress.batch == before.batch):
            return
        place = self._sums.buckets.place(self._seconds(np.array([self.now.timestamp])))
        values = {"micro_batch": progress.seconds, "lag": progress.lag}
        for (name, value), count in zip(values.items(), ("micro_batches", "lags"), strict=True):
            if value is not None:
                self._sums.buckets.add(name, 0, place, value)
                self._sums.buckets.add(count, 0, place, 1.0)

    def set_table(self, table: np.ndarray) -> None:
        """Note which workers train, from rows of `driver_messages.WorkerTable`."""
        self._sent.workers.update(self.workers.set_table(table))

    def whole(self) -> dict[str, Any]:
        """Return all of the record, JSON-ready; `more` continues from there."""
        self._sent = _Sent(self._events_seen, len(self._evaluations), whole=False)
        facts = asdict(self.facts) | {"options": {name: _json_of(value) for name, value in self.facts.options.items()}}
        entry = {"kind": "whole", "facts": facts, "metrics": list(self.metrics), "began": self.began}
        entry |= self._lines(0) | self._rest()
        entry["workers"] = self.workers.columns(range(self.facts.workers + self.facts.helpers), self._seconds)
        entry["events"] = self._event_rows(len(self._events))
        entry["evaluations"] = self._evaluation_rows(0)
        self._sums.buckets.mark_sent()
        return entry

    def more(self) -> dict[str, Any] | None:
        """Return what has changed since `whole` or the last `more`; None if `whole` must be sent again."""
        sent, buckets = self._sent, self._sums.buckets
        if sent.whole or buckets.folded:
            return None
        new = min(self._events_seen - sent.events, len(self._events))
        answer = {"kind": "more"} | self._lines(buckets.changed) | self._rest()
        answer["workers"] = self.workers.columns(sorted(sent.workers), self._seconds)
        answer["events"] = self._event_rows(new)
        answer["evaluations"] = self._evaluation_rows(sent.evaluations)
        self._sent = _Sent(self._events_seen, len(self._evaluations), whole=False)
        buckets.mark_sent()
        return answer

    def _event_rows(self, latest: int) -> list[list[Any]]:
        events = list(self._events)[len(self._events) - latest :]
        return [[self._moment(at), source, *rest] for at, source, *rest in events]

    def _evaluation_rows(self, first: int) -> list[list[Any]]:
        return [
            [self._moment(one.timestamp), one.clock, one.source, {name: number(at) for name, at in one.values.items()}]
            for one in self._evaluations[first:]
        ]

    def _lines(self, first: int) -> dict[str, Any]:
        def sums(name: str) -> np.ndarray:
            return self._sums.buckets.sums(name, first)

        workers = {name: rounded(ratio(sums(f"sum {name}"), sums(f"weight {name}"))) for name in self.metrics}
        means = {
            name: rounded(ratio(sums(f"sum {name}").sum(axis=0), sums(f"weight {name}").sum(axis=0)))
            for name in self.metrics
        }
        job = {name: rounded(sums(name)[0]) for name in ("commits", "samples", "compute", "wait", "wire")}
        per_commit = {"staleness": "commits", "gap": "gaps", "scale": "scales"}
        per_commit |= {"lag": "lags", "micro_batch": "micro_batches"}
        job |= {name: rounded(ratio(sums(name)[0], sums(count)[0])) for name, count in per_commit.items()}
        width, used = self._sums.buckets.width, self._sums.buckets.used
        return {"width": width, "used": used, "from": first, "lines": workers, "means": means, "job": job}

    def _rest(self) -> dict[str, Any]:
        now = self.now
        entry: dict[str, Any] = {"state": now.state, "why": now.why, "at": self._moment(now.timestamp)}
        entry |= {"joined": now.joined, "finished": now.finished, "timestamp": round(now.timestamp, 3)}
        numbers = ("epochs", "loss", "rate", "rate_seconds", "left", "saved_seconds")
        entry |= {name: number(getattr(now, name)) for name in numbers}
        progress = now.micro_batch
        entry["micro_batch"] = None if progress is None else asdict(progress) | {"loss": number(progress.loss)}
        entry["tables"] = dict(now.tables)
        entry["rows"] = number(self.workers.rows(done=now.state == "done"))
        entry["start"] = None if self._sums.origin is None else round(max(0.0, self._sums.origin - self.began), 1)
        failed = self._failed_after
        entry["snapshots_fail"] = failed is not None and now.saved_clock <= failed  # another server reports no success
        entry["saved_commits"] = now.saved_clock if now.saved_clock >= 0 else None
        entry["samples"], entry["commits"] = self.workers.totals()
        used = int(np.flatnonzero(self._sums.staleness.counts).max(initial=0)) + 1
        histogram = {"width": self._sums.staleness.width, "counts": self._sums.staleness.counts[:used].tolist()}
        pauses = [[self._moment(start), self._moment(end), round(end - start, 1)] for start, end in self._sums.pauses]
        return {"now": entry, "staleness": histogram, "kinds": dict(self._kinds), "pauses": pauses}

    def _moment(self, timestamp: float) -> float:
        return round(float(self._seconds(np.array([timestamp]))[0]), 2)

    def _seconds(self, timestamps: np.ndarray) -> np.ndarray:
        """Return the seconds since the first commit, or, before it, since the job began; long pauses are shortened."""
        origin = self.began if self._sums.origin is None else self._sums.origin
        seconds = timestamps - origin
        for end, shortened in self._sums.cuts:
            origin += shortened
            # Times within a pause are shown at its end at the latest.
            seconds = np.where(timestamps >= end, timestamps - origin, np.minimum(seconds, end - origin))
        return seconds

    def _note_pauses(self, commits: np.ndarray) -> None:
        """Note the pauses before another driver or server has continued the job, which may last for days."""
        times = commits["timestamp"]
        if self._sums.origin is None:
            self._sums.origin = float(times[0])
            # Their times were sent as seconds since the job began.
            self._sent.whole |= bool(self._events or self._evaluations)
        rows = commits if self.last_commit is None else np.concatenate([self.last_commit, commits])
        times, incarnations = rows["timestamp"], rows["incarnation"]
        for place in np.flatnonzero((np.diff(incarnations) != 0) & (np.diff(times) > _PAUSE)):
            start, end = float(times[place]), float(times[place + 1])
            self._sums.pauses.append((start, end))
            shown_seconds = max(1.0, _PAUSE_SHARE * self._moment(start))
            if end - start > max(_LONG_PAUSE, shown_seconds):
                self._sums.cuts.append((end, end - start - shown_seconds))


def _json_of(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
