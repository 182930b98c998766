"""Snapshots of a divided center: a ticket makes all shards write the elements and rows of the same moment.

The sequencer issues the ticket at the moment of which it takes its own state. It writes the snapshot, which names the
files of the shards, once all of them are written. So a snapshot that exists is complete, and a shard that dies while it
writes leaves the one before.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.parts import PartFile
from distkeras.ps.checkpoint.row_files import RowFile
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.checkpoint.state import State, capture
from distkeras.ps.checkpoint.table_files import TableFiles
from distkeras.ps.errors import DeadlineError, SnapshotError
from distkeras.ps.protocol.shard_messages import PartSaved
from distkeras.ps.server.job_state import JobCondition
from distkeras.ps.shards.sequencer import SequencingCenter
from distkeras.ps.shards.tickets import Kind, Ticket
from distkeras.ps.world.world import Condition, World

#: Seconds that all shards may take to write their elements.
_WRITING_SECONDS = 600.0
#: Seconds that an idle thread waits at a time.
_IDLE = 60.0


class PartsOfShards:
    """The sequencer's end: `SavedParts` that are written by ``shards`` shards."""

    def __init__(self, shards: int, changed: JobCondition, center: Callable[[], SequencingCenter]) -> None:
        self._shards, self._changed, self._center = shards, changed, center
        self._number = 0
        #: The files of the snapshot that is being written, by shard, or why a shard could not write them.
        self._saved: dict[int, PartFile | str] = {}

    def begin(self) -> int:
        self._number += 1
        self._saved = {}
        center = self._center()
        center.issue(Ticket(Kind.SAVE, clock=center.clock, number=self._number))
        return self._number

    def note(self, message: PartSaved) -> None:
        """Note that a shard has written its file; the caller holds the lock."""
        if message.number == self._number:
            rows = tuple(filter(None, message.rows.tobytes().decode().split("\n")))
            part = PartFile(message.name, message.start, message.stop, rows)
            self._saved[message.shard] = message.problem or part
            self._changed.notify_all()

    def files(self, marker: int) -> Sequence[PartFile]:
        changed = self._changed
        with changed:
            deadline = changed.world.monotonic() + _WRITING_SECONDS
            while len(self._saved) < self._shards:
                changed.require_readable()  # the last snapshot of a failed job is written, too
                if self._center().corrupt:
                    raise SnapshotError("a shard has failed within a ticket, and takes no further ones")
                if not changed.wait_for_change(deadline, lambda: False):
                    missing = sorted(set(range(self._shards)) - set(self._saved))
                    raise SnapshotError(f"waited {_WRITING_SECONDS:g} s for shards {missing} to save snapshot {marker}")
            parts = list[PartFile]()
            for shard, saved in sorted(self._saved.items()):
                if isinstance(saved, str):
                    raise SnapshotError(f"shard {shard} cannot save its elements: {saved}")
                parts.append(saved)
        return parts


class PartWriter:
    """The shard's end: a thread that writes states of its ``center``, one at a time.

    Args:
        directory: where the shard writes under the sequencer's claim.
        changed: guards the center.
        row_files: see `SavedSlice`.
        stretch: the shard's elements of the whole vectors.
        report: receives the message once a state is written, or cannot be.
    """

    def __init__(
        self,
        directory: SnapshotDirectory,
        center: Center,
        changed: Condition,
        row_files: Sequence[RowFile],
        shard: int,
        stretch: slice,
        report: Callable[[PartSaved], None],
        world: World,
    ) -> None:
        self._directory, self._center, self._shard = directory, center, shard
        self._rows = TableFiles(directory, center, changed, row_files)
        self._stretch, self._report = stretch, report
        self._changed, self._closed = world.condition(), False
        #: The state that is due, or is being written: number of the snapshot, state, and shapes of the saved tables.
        self._due: tuple[int, State, list[list[int]]] | None = None
        self._thread = world.thread(self._run, f"shard-{shard}-saving")
        self._thread.start()

    def save(self, number: int) -> None:
        """Write the present state, of snapshot ``number``, soon; the caller holds the center's lock."""
        with self._changed:
            if self._due is None:
                self._rows.begin()
                shapes = [[table.count, table.shape.width] for table in self._center.saved_tables]
                self._due = number, capture(self._center), shapes
                self._changed.notify_all()
                return
            problem = f"it is still writing snapshot {self._due[0]}"  # for which the sequencer does not wait any more
        self._send(number, problem=problem)

    def close(self, timeout: float) -> None:
        """End the thread, after the file that it is writing; raise a DeadlineError if it hangs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise DeadlineError(f"waited {timeout:g} s for thread {self._thread.name} to end")

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._due or self._closed):
                    self._changed.wait(_IDLE)
                if self._closed or self._due is None:
                    return
                number, state, shapes = self._due
            name, files, problem = "", list[RowFile](), ""
            try:
                files = self._save_rows()
                name = self._directory.save_part(self._shard, state, shapes, files)
            except Exception as error:  # noqa: BLE001 - the sequencer reports it, and tries again
                problem = error.message if isinstance(error, SnapshotError) else traceback.format_exc()
            finally:
                state.drop()
                self._rows.end()
            with self._changed:
                self._due = None
            self._send(number, name, files, problem)

    def _save_rows(self) -> list[RowFile]:
        # After the former snapshot, the sequencer has removed the files that it does not name.
        if not self._rows.merge():
            raise SnapshotError("a file with earlier rows is damaged, and the next snapshot writes these rows again")
        return [*self._rows.save()]

    def _send(self, number: int, name: str = "", files: Sequence[RowFile] = (), problem: str = "") -> None:
        names = np.frombuffer("\n".join(file.name for file in files).encode(), np.uint8)
        self._report(PartSaved(self._shard, number, name, self._stretch.start, self._stretch.stop, problem, names))
