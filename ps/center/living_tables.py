"""Tables whose rows are admitted after some touches, expire, and can be removed, and whose changes are known.

A *touch* of a row is a commit that names it. For each row that was touched, the server keeps a mark: the number of
touches, and the center's clock after the last one. A row is *live* if it has as many touches as its table asks for,
and its last touch is not too old. A row that is not live has its initial value, for workers and for the driver; a
touch that does not make it live does not move it. A touch of an expired row is its first one.

So whether a row is live depends on the order of commits alone (and on their times, if rows expire after seconds), and
not on when the memory of dead rows is freed, which commits do bit by bit.

The *changes* since a moment are the live rows that were touched since, and the rows that have ceased to be live. The
mark of a dead row stays until a later moment's changes have named it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from distkeras.ps.center.tables import PartialTable, Table
from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.driver_messages import NO_CHANGES
from distkeras.ps.protocol.tables import NO_IDS, Ids, TableShape, initial_rows
from distkeras.ps.rules.base import Chunk, Vector

#: The columns of a mark: touches, at most as many as admit a row; the clock after the last one; and one more than the
#: clock of the last one with which the row was live, 0 if it never was.
_COUNT, _CLOCK, _LIVED = 0, 1, 2
#: The steps of time that are distinguished in the span after which rows expire.
_STEPS = 1000
#: Later than every clock.
_LATEST = 1 << 62
#: Marks that are searched for dead rows, for each row of a commit.
_SEARCHED = 4


class CommitTimes:
    """The times of commits, by which those older than ``span`` seconds are found, to within a thousandth of it."""

    def __init__(self, span: float) -> None:
        self._span = span
        #: Times and clocks, ascending; commits that are less than a step apart share the first one's time.
        self.points: list[tuple[float, int]] = []

    def note(self, clock: int, seconds: float) -> int:
        """Note the commit after which the clock is ``clock``; return the first clock that is not too old."""
        points = self.points
        if not points or seconds >= points[-1][0] + self._span / _STEPS:
            points.append((seconds, clock))
        limit = max(seconds, points[-1][0]) - self._span  # a system's clock may go back
        while len(points) > 1 and points[1][0] <= limit:
            points.pop(0)
        return points[1][1] if len(points) > 1 and points[0][0] <= limit else 0


class Moment(NamedTuple):
    """The clock at which a driver has read the rows or their changes, and `LivingTable.alive_from` then."""

    clock: int
    alive_from: int


class LivingTable(PartialTable):
    """A partial table whose rows are admitted, expire and can be removed; see `Table`.

    Attributes:
        marks: the marks of the rows that were touched, int64 ``(rows, 3)``; snapshots save them like a table.
        alive_from: a row whose last touch is before this clock has expired.
        admitted, expired, removed: rows since the job began, and those that it was given. An expired row counts when it
            is touched again, or when its memory is freed.
    """

    def __init__(self, shape: TableShape) -> None:
        super().__init__(shape)
        self.marks = PartialTable(TableShape(shape.name, shape.rows, 3, 1, seed=0), np.int64)
        self.alive_from = 0
        self.admitted = self.expired = self.removed = 0
        self._times = CommitTimes(shape.expire_seconds)
        self._cursor = 0
        #: The moment since which the driver reads changes, and the latest one that it may go on from; None: none.
        self._since: Moment | None = None
        self._read_at: Moment | None = None

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The rows that are kept, and since the job began those that were admitted, have expired and were removed."""
        kept = self.admitted - self.expired - self.removed
        return kept, self.admitted, self.expired, self.removed

    def _are_live(self, marks: np.ndarray) -> np.ndarray:
        live: np.ndarray = (marks[:, _COUNT] >= self.shape.admit) & (marks[:, _CLOCK] >= self.alive_from)
        return live

    def is_live(self, ids: Ids) -> np.ndarray:
        """Return whether each row is live, boolean ``(ids,)``."""
        places = self.marks.find(ids)
        live: np.ndarray = places >= 0
        live[live] = self._are_live(self.marks.array[places[live]])
        return live

    def tick(self, clock: int, seconds: float) -> None:
        shape, first = self.shape, self.alive_from
        if shape.expire_commits:
            first = max(first, clock - shape.expire_commits + 1)
        if shape.expire_seconds:
            first = max(first, self._times.note(clock, seconds))
        self.alive_from = first

    def apply(self, ids: Ids, moved: Vector, kernel: Callable[[Chunk], float | None], clock: int = 0) -> float | None:
        live = self._touch(ids, clock)
        every, rows = live.all(), moved.reshape(-1, self.shape.width)
        share = super().apply(ids[live], moved if every else rows[live].reshape(-1), kernel, clock)
        self._sweep(_SEARCHED * ids.size)
        return float(np.count_nonzero(live) * self.shape.width) if share is None and not every else share

    def _touch(self, ids: Ids, clock: int) -> np.ndarray:
        """Count a touch of each row; return which ones are live now. Those that were not have their initial values."""
        places = self.marks.add(ids)
        marks = self.marks.array[places]
        old = marks[:, _CLOCK] < self.alive_from
        before = marks[:, _COUNT] >= self.shape.admit
        self.expired += int(np.count_nonzero(before & old))
        counts = np.minimum(np.where(old, 0, marks[:, _COUNT]) + 1, self.shape.admit)
        live: np.ndarray = counts >= self.shape.admit
        lived = np.where(live, clock + 1, marks[:, _LIVED])
        self.marks.set(places, np.stack([counts, np.full(len(ids), clock), lived], axis=1))
        new = live & (old | ~before)
        self.admitted += int(np.count_nonzero(new))
        again = ids[new & (marks[:, _LIVED] > 0)]  # the memory of some is not freed yet
        if len(again):
            self.set(self.add(again), initial_rows(self.shape, again))
        return live

    def gather(self, ids: Ids, out: Vector | None = None) -> Vector:
        out = np.empty(ids.size * self.shape.width, self.array.dtype) if out is None else out
        live, rows = self.is_live(ids), out.reshape(-1, self.shape.width)
        if live.all():
            return super().gather(ids, out)
        rows[live] = self.array[self.find(ids[live])]
        rows[~live] = initial_rows(self.shape, ids[~live])
        return out

    def remove(self, ids: Ids, clock: int) -> None:
        """Make rows, unique, what they were before their first touch."""
        places = self.marks.find(ids)
        places = places[places >= 0]
        marks = self.marks.array[places]
        live = self._are_live(marks)
        self.removed += int(np.count_nonzero(live))
        self.expired += int(np.count_nonzero((marks[:, _COUNT] >= self.shape.admit) & ~live))
        zeros = np.zeros(len(places), np.int64)
        self.marks.set(places, np.stack([zeros, zeros + clock, marks[:, _LIVED]], axis=1))

    def _sweep(self, most: int) -> None:
        """Free the memory of dead rows among the next ``most`` marks, unless a snapshot is being written."""
        count = self.marks.count
        if self.changes.active or self.marks.changes.active or not count:
            return
        places = np.arange(self._cursor, self._cursor + min(most, count)) % count
        self._cursor = (self._cursor + len(places)) % count
        ids, marks = self.marks.ids_of(places), self.marks.array[places]
        until = self._since or self._read_at or Moment(_LATEST, self.alive_from)
        old = marks[:, _CLOCK] < min(until.alive_from, self.alive_from)
        removed = (marks[:, _COUNT] == 0) & (marks[:, _CLOCK] <= until.clock)
        dead = (ids >= 0) & (old | removed)
        if not dead.any():
            return
        self.expired += int(np.count_nonzero((marks[:, _COUNT] >= self.shape.admit) & dead))
        ids = ids[dead]
        self.marks.forget(ids)
        self.forget(ids[self.find(ids) >= 0])

    def put(self, start: int, ids: Ids, rows: np.ndarray) -> None:
        super().put(start, ids, rows)
        places = self.marks.add(ids)
        self.admitted += int(np.count_nonzero(self.marks.array[places, _COUNT] == 0))  # a block may be sent again
        self.marks.set(places, [self.shape.admit, 0, 1])

    def present(self, places: slice) -> tuple[Ids | None, np.ndarray]:
        ids, rows = super().present(places)
        live = self.is_live(NO_IDS if ids is None else ids)
        return None if ids is None else ids[live], rows[live]

    def begin_changes(self, since: int, clock: int) -> bool:
        """Note that a driver reads the changes since clock ``since``, at which it has read before, or all rows.

        Return False if the changes are not known, so that it must read all rows; see `driver_messages.BeginChanges`.
        """
        if since == NO_CHANGES:
            self._since = self._read_at = None
            return False
        if self._read_at is not None and self._read_at.clock == since:
            self._since = self._read_at
        known = self._since is not None and self._since.clock == since
        self._read_at = Moment(clock, self.alive_from)
        return known

    def changed(self, places: slice) -> tuple[Ids, np.ndarray, Ids]:
        """Return the changes among the marks at ``places``: ids and rows that have changed, and ids that are gone.

        Raises:
            RemoteProtocolError: `begin_changes` has not come first, in the life of this server.
        """
        if self._since is None:
            raise RemoteProtocolError("changes must be begun before they are read. Received: a request for changes")
        ids, marks = self.marks.ids_of(places), self.marks.array[places]
        live, touched = self._are_live(marks), marks[:, _CLOCK] > self._since.clock
        changed = ids[(ids >= 0) & live & touched]
        was_live = (marks[:, _LIVED] > self._since.alive_from) & (touched | (marks[:, _COUNT] >= self.shape.admit))
        gone = ids[(ids >= 0) & ~live & was_live]
        return changed, self.gather(changed).reshape(-1, self.shape.width), gone

    def state(self) -> dict[str, Any]:
        """Return what a snapshot has apart from the rows and their marks, JSON-ready."""
        counts = {name: getattr(self, name) for name in COUNTS}
        moments = {"since": self._since, "read_at": self._read_at}
        return {"alive_from": self.alive_from, "times": list(self._times.points), **counts, **moments}

    def restore_state(self, saved: Mapping[str, Any]) -> None:
        """Take over `state`."""
        self.alive_from = saved["alive_from"]
        self._times.points = [(seconds, clock) for seconds, clock in saved["times"]]
        for name in COUNTS:
            setattr(self, name, saved[name])
        self._since, self._read_at = (
            None if saved[name] is None else Moment(*saved[name]) for name in ("since", "read_at")
        )


#: What a table counts, as attributes and in `LivingTable.state`.
COUNTS = ("admitted", "expired", "removed")


def make_table(shape: TableShape) -> Table:
    """Return a new table of this shape: all rows are zero, or none is touched."""
    return (LivingTable if shape.living else PartialTable if shape.partial else Table)(shape)
