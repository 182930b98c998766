"""Sequences of commits, snapshots, full disks, damaged files and restarts, drawn by hypothesis."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.ps.saved_tables import SavedTables, Taken, small_files

from distkeras.ps.errors import SnapshotError

SHAPES = [(23, 3), (5, 2)]

IDS = st.tuples(*(st.sets(st.integers(0, rows - 1), max_size=6) for rows, _ in SHAPES))
SNAPSHOTS = st.fixed_dictionaries(
    {
        "meanwhile": st.lists(IDS, max_size=4),
        "every": st.integers(1, 6),
        "room": st.none() | st.none() | st.integers(0, 6),
        "keep": st.integers(1, 4),
        "merge": st.booleans(),
    }
)
STEPS = st.one_of(
    st.tuples(st.just("commit"), IDS),
    st.tuples(st.just("commit"), IDS),
    st.tuples(st.just("snapshot"), SNAPSHOTS),
    st.tuples(st.just("snapshot"), SNAPSHOTS),
    st.tuples(st.just("damage"), st.tuples(st.integers(0, 99), st.sampled_from(["torn", "gone", "changed"]))),
    st.tuples(st.just("restart"), st.none()),
)


class Job:
    """A job whose server is restarted, and the expected state of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.starts = folder, itertools.count(1)
        self.damaged: set[str] = set()
        self.taken: list[Taken] = []
        self.start()

    def start(self) -> None:
        """Start a new server from the latest snapshot that can be read."""
        self.server = SavedTables(self.folder, SHAPES, token=f"{next(self.starts):08x}")
        self.server.taken = self.taken

    def readable(self) -> list[Taken]:
        """Return the snapshots that exist with all their files, the latest last."""
        return [
            taken
            for taken in self.taken
            if (self.folder / f"{taken.name}.dks").exists() and not self.damaged & {taken.name, *taken.files}
        ]

    def commit(self, ids: Any) -> None:
        self.server.commit(*ids)

    def snapshot(self, options: dict[str, Any]) -> None:
        holds, commits = itertools.count(1), iter(options["meanwhile"])

        def meanwhile() -> None:
            if next(holds) % options["every"] == 0:
                self.server.commit(*next(commits, [[], []]))

        self.server.world.room = options["room"]
        with suppress(SnapshotError):  # the disk is full
            self.server.snapshot(meanwhile, keep=options["keep"], merge=options["merge"])
        self.server.world.room = None

    def damage(self, what: tuple[int, str]) -> None:
        files = sorted([*self.folder.glob("table-*.dks"), *self.folder.glob("snapshot-*.dks")])
        if not files:
            return
        path = files[what[0] % len(files)]
        content = bytearray(path.read_bytes())
        self.damaged.add(path.stem)
        if what[1] == "gone":
            path.unlink()
            return
        content[len(content) // 2] ^= 1
        path.write_bytes(content if what[1] == "changed" else content[: len(content) // 2])

    def restart(self, nothing: None) -> None:
        readable = self.readable()
        if readable:
            self.start()
            assert bits(self.server.rows) == bits(readable[-1].rows)
        elif not list(self.folder.glob("snapshot-*.dks")):
            self.start()  # without a snapshot, the job begins
        # Otherwise no snapshot can be read, and the old server continues.

    def check(self) -> None:
        """Compare every readable snapshot, the latest first."""
        for taken in reversed(self.readable()):
            assert bits(self.server.read()) == bits(taken.rows)
            (self.folder / f"{taken.name}.dks").unlink()


def bits(tables: list[Any]) -> list[bytes]:
    return [rows.tobytes() for rows in tables]


@examples(50)
@given(steps=st.lists(STEPS, min_size=1, max_size=40))
def test_every_snapshot_that_can_be_read_has_the_rows_at_its_clock(steps: list[tuple[str, Any]]) -> None:
    with small_files(width=3), tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        for name, argument in steps:
            getattr(job, name)(argument)
        job.check()
