"""Watches a job from its driver, and writes its journal: a file with its record and all changes.

A browser continues after the last line that it has.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distkeras.callbacks import Callback, CallbackContext, Evaluation, JobLink, JobOver, TrainingSetup
from distkeras.dashboard.record import CurrentStatus, JobRecord
from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.events import Events
from distkeras.ps.protocol.loop import FIXED_HISTORY
from distkeras.settings import JobFacts

if TYPE_CHECKING:
    from distkeras.results import JobOutcome, JobResults

log = logging.getLogger(__name__)

#: Seconds from one look at the job to the next, and the largest share of time that looks take: a slow look is followed
#: by a longer interval.
_EVERY, _SHARE = 1.0, 0.01
#: The commits of one request, which must be few because the server answers no other request meanwhile; and the requests
#: of one look.
_COMMITS, _PIECES = 1024, 8
#: Seconds over which the rate is measured; more if looks are rarer.
_RATE_SECONDS = 30.0


class JobWatch(Callback):
    """Reads the commits, events and evaluations of a job once a second, and writes its journal.

    This takes at most a hundredth of the time of one core of the driver: if it takes longer, it is done less often.
    Without a path, the journal is in a temporary folder, which is deleted with this object.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(every_seconds=_EVERY)
        if path is None:
            folder = tempfile.mkdtemp(prefix="distkeras-dashboard-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            path = Path(folder, "journal.jsonl")
        self.changed = threading.Condition()
        self._journal = Journal(path)
        self._lock = threading.Lock()
        self._record: JobRecord | None = None
        self._events = Events()
        self._seen = self._evaluations = 0
        self._outcome: JobOutcome | None = None
        self._found: list[Evaluation] = []
        self._living: tuple[str, ...] = ()
        self._rates: deque[tuple[float, int]] = deque()
        self._first: tuple[float, float] | None = None
        self._next_look = -math.inf
        self._quiet = False

    @property
    def path(self) -> Path:
        """Return the path of the journal."""
        return self._journal.path

    def on_begin(self, setup: TrainingSetup) -> None:
        """Begin the journal of a new job."""
        assert setup.facts is not None, "a trainer gives them"
        self._outcome, self._found, self._living = setup.outcome, [], setup.living
        self._begin(setup.facts, setup.metrics, setup.events, time.time())

    def take(self, outcome: JobOutcome) -> None:
        """Write the journal of a job that ended before this object watched, if there was one."""
        if outcome.facts is not None and outcome.records is not None:
            rows = outcome.records.commits_array
            began, ended = rows["timestamp"][[0, -1]].tolist() if len(rows) else (time.time(), time.time())
            self._begin(outcome.facts, outcome.records.metrics, outcome.events, began)
            self.end(outcome, ended)

    def _begin(self, facts: JobFacts, metrics: Sequence[str], events: Events, began: float) -> None:
        with self._lock:
            self._events, self._seen, self._evaluations = events, 0, 0
            self._rates.clear()
            self._first, self._next_look = None, -math.inf
            self._record = JobRecord(facts, metrics, began)
            self._write(whole=True)

    def on_center(self, context: CallbackContext) -> None:
        """Look at the job, unless the last look took too long."""
        if time.monotonic() < self._next_look:
            return
        began = time.thread_time()
        try:
            with self._lock:
                self._look(context)
        except JobOver:
            raise
        except Exception:
            log.exception("the dashboard has failed, and shows no further records of this job")
            self._next_look = math.inf
            return
        self._next_look = time.monotonic() + (time.thread_time() - began) / _SHARE

    def on_end(self, context: CallbackContext) -> None:
        """Keep the list of evaluations, to which later callbacks still add."""
        if context.link is not None:
            self._found = context.link.evaluations
        with self._lock:
            if self._record is not None:
                self._record.set_micro_batch(context.micro_batch)

    def on_success(self, results: JobResults) -> None:
        """Write the end of the job, with the last of its records."""
        if self._outcome is not None:
            self.end(self._outcome)

    def on_failure(self, error: BaseException) -> None:
        """Write the end of the job, with the records that arrived before it."""
        if self._outcome is not None:
            self.end(self._outcome)

    def _look(self, context: CallbackContext) -> None:
        record, link = self._record, context.link
        assert record is not None, "`on_begin` comes first"
        if link is not None:
            if context.status.joined:
                for _ in range(_PIECES):
                    if not self._follow(record, link):
                        break
                record.set_table(link.list_workers())
            self._found = link.evaluations
            self._take_evaluations(record)
        self._take_status(record, context)
        self._take_events(record)
        self._write()

    def _follow(self, record: JobRecord, link: JobLink) -> bool:
        """Add the new commits; return whether there are more.

        A server that was started again may have lost the latest commits. The request therefore includes the last known
        commit: if the server has another one in its place, all commits are read again.
        """
        known = record.last_commit
        records = link.drain(record.commits - (known is not None), _COMMITS)
        commits, steps = records.commits.view(COMMIT), records.history
        if known is not None:
            if not len(commits) or commits[0].tobytes() != known[0].tobytes():
                record.clear()
                return True
            steps, commits = steps[commits["steps"][0] :], commits[1:]
        record.add_commits(commits, steps.reshape(-1, max(steps.shape[-1], len(FIXED_HISTORY))))
        return bool(len(commits)) and record.commits < records.total

    def _take_status(self, record: JobRecord, context: CallbackContext) -> None:
        status, now = context.status, time.time()
        phase = "" if record.commits else "building the model, first steps" if status.joined else "spreading the data"
        state = "starting" if phase else "training"
        status_now = CurrentStatus(state, phase, now, status.epochs, status.joined, status.finished, status.loss)
        status_now = replace(status_now, saved_clock=status.saved_clock, saved_seconds=status.saved_seconds)
        self._rates.append((now, status.samples))
        while self._rates[0][1] > status.samples or (len(self._rates) > 1 and now - self._rates[1][0] >= _RATE_SECONDS):
            self._rates.popleft()
        since, samples = self._rates[0]
        seconds = now - since
        if seconds > 0:
            status_now = replace(status_now, rate=(status.samples - samples) / seconds, rate_seconds=seconds)
        if status.batches and (self._first is None or self._first[1] > status.epochs):
            self._first = now, status.epochs
        if self._first is not None and status.epochs > self._first[1] and not record.facts.stream:
            passed = (status.epochs - self._first[1]) / (now - self._first[0])
            status_now = replace(status_now, left=max(0.0, record.facts.epochs - status.epochs) / passed)
        counts = [list(map(int, row)) for row in status.tables.tolist()]
        tables = dict(zip(self._living, counts, strict=False))  # none before the center
        record.now = replace(status_now, micro_batch=record.now.micro_batch, tables=tables)
        record.set_micro_batch(context.micro_batch)

    def _take_evaluations(self, record: JobRecord) -> None:
        new = self._found[self._evaluations :]
        record.add_evaluations(new)
        self._evaluations += len(new)

    def _take_events(self, record: JobRecord) -> None:
        new, self._seen = self._events.since(self._seen)
        record.add_events(new)

    def end(self, outcome: JobOutcome, ended: float | None = None) -> None:
        """Write the outcome of the job, with its last records and evaluations; ``ended`` is the time, None for now."""
        with self._lock:
            record = self._record
            if record is None:
                return
            if outcome.records is not None:
                self._take_rest(record, outcome)
            self._take_evaluations(record)
            self._take_events(record)
            if outcome.failure is None:
                record.workers.finish()
            state, why = _end_of(outcome)
            record.now = replace(record.now, state=state, why=why, timestamp=ended or time.time(), left=math.nan)
            if state == "done":
                workers = record.facts.workers
                epochs = float(record.facts.epochs)
                record.now = replace(record.now, epochs=epochs, joined=workers, finished=workers)
            self._write(whole=True)

    def _take_rest(self, record: JobRecord, outcome: JobOutcome) -> None:
        """Add the records since the last look."""
        assert outcome.records is not None
        commits, steps = outcome.records.commits_array, outcome.records.steps_array
        known, start = record.last_commit, outcome.records.start
        at = record.commits - start
        if at < 0:  # no look has read the last commits of earlier micro-batches
            record.skip(-at)
        elif known is not None and at and (at > len(commits) or commits[at - 1].tobytes() != known[0].tobytes()):
            record.clear()
            record.skip(start)
        for first in range(record.commits - start, len(commits), _COMMITS):
            before = int(commits["steps"][:first].sum())
            piece = commits[first : first + _COMMITS]
            record.add_commits(piece, steps[before : before + int(piece["steps"].sum())])

    def _write(self, *, whole: bool = False) -> None:
        """Write the journal. If there is no room for it, training continues, and the next look tries again."""
        record = self._record
        assert record is not None
        try:
            more = None if whole or self._journal.full else record.more()
            if more is None:
                self._journal.begin(record.whole())
            else:
                self._journal.add(more)
            self._quiet = False
        except OSError as error:
            if not self._quiet:
                log.warning("the dashboard's journal cannot be written, and will be tried again: %s", error)
            self._quiet = True
        with self.changed:
            self.changed.notify_all()


def _end_of(outcome: JobOutcome) -> tuple[str, str]:
    """Return the state of a job that has ended, and the reason."""
    if outcome.failure is None:
        return ("stopped", outcome.stopped) if outcome.stopped else ("done", "")
    return ("interrupted" if outcome.failure.startswith("KeyboardInterrupt") else "failed"), outcome.failure


STREAM_TYPE = "text/event-stream"


def as_events(entries: Sequence[Entry]) -> bytes:
    """Return the lines as server-sent events with ids; without lines, a comment that keeps the connection open.

    One second after the end of the stream, a browser requests it again.
    """
    parts = [f"id: {entry.id}\ndata: {entry.data}\n\n" for entry in entries] or [": alive\n\n"]
    return ("retry: 1000\n\n" + "".join(parts)).encode()


#: The least bytes of changes after which the file is written again.
_SINCE_MIN = 256 << 10
_ID = re.compile(r"([0-9a-f]{16})-(\d{1,12})")


class Entry(NamedTuple):
    """A line of a journal: its JSON, and the id by which a reader asks for the lines after it."""

    id: str
    data: str


class Journal:
    """Writes the journal of a job: a line with the name of the edition, a line with the whole record, and the changes.

    When the changes are longer than the whole record, a new edition begins. The file therefore has at most about twice
    the bytes of the record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._since, self._most = 0, 0

    @property
    def full(self) -> bool:
        """Return whether a new edition is due."""
        return self._since >= self._most

    def begin(self, whole: Mapping[str, Any]) -> None:
        """Replace the file by a new edition; a reader finds either of the two. After an OSError, a new one is due."""
        line = _line(whole)
        self._since, self._most = 0, 0
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_bytes(_line({"edition": secrets.token_hex(8)}) + line)
        partial.chmod(0o600)
        partial.replace(self.path)
        self._most = max(_SINCE_MIN, len(line))

    def add(self, more: Mapping[str, Any]) -> None:
        """Append changes. After an OSError, a new edition is due."""
        line = _line(more)
        try:
            with self.path.open("ab") as file:
                file.write(line)
        except OSError:
            self._most = 0
            raise
        self._since += len(line)


def read_since(path: Path, last_id: str = "") -> list[Entry]:
    """Return the lines of a journal after the one with ``last_id``, or all if that is of another edition."""
    try:
        with path.open("rb") as file:
            head = file.readline()
            edition = _edition(head)
            match = _ID.fullmatch(last_id)
            offset = len(head)
            if match is not None and match[1] == edition:
                offset = max(offset, int(match[2]))
            file.seek(offset)
            rest = file.read()
    except FileNotFoundError:
        return []
    entries = []
    for line in rest[: rest.rfind(b"\n") + 1].splitlines(keepends=True):
        offset += len(line)
        entries.append(Entry(f"{edition}-{offset}", line.decode("utf-8").rstrip("\n")))
    return entries


def _edition(head: bytes) -> str:
    try:
        return str(json.loads(head)["edition"])
    except (ValueError, KeyError, TypeError):
        return ""


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"
