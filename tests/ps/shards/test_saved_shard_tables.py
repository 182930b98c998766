"""Snapshots of divided tables: any number of servers continues with the rows that another number has saved."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.patience import PATIENT, patience, until
from support.present import present
from support.ps.divided_center import DividedCenter, commit_for
from support.ps.running_server import KEY, Running, Turns, WorkerThread
from support.ps.saved_tables import small_files
from support.ps.served_job import ServedJob
from support.ps.toy_tables import TableBatch, ToyTables, gradient_of, table_worker

from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint import table_files
from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.checkpoint.parts import PartFile, Share, bare_state, joined_parts
from distkeras.ps.checkpoint.row_files import RowFiles
from distkeras.ps.checkpoint.snapshots import LogFiles, SnapshotDirectory
from distkeras.ps.checkpoint.state import capture, restore, rule_json
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.checkpoint.table_files import TableFiles
from distkeras.ps.errors import DifferentJobError
from distkeras.ps.protocol.driver_messages import ALL_ROWS
from distkeras.ps.protocol.shard_messages import PartSaved
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import make
from distkeras.ps.server.process import StartRequest
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards.processes import build
from distkeras.ps.shards.saving import PartWriter
from distkeras.ps.shards.sequencer import ELEMENTS
from distkeras.ps.shards.spread_client import SpreadWorkerClient
from distkeras.ps.shards.spread_driver import SpreadDriverClient
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.world.world import REAL

SHAPES = (
    TableShape("whole", 40, 2, 6),
    TableShape("partial", 60, 2, 9, seed=1, scale=0.5),
    TableShape("living", 30, 2, 6, seed=2, scale=0.5, admit=2, expire_commits=5, tracked=True),
    TableShape("timed", 30, 2, 6, seed=3, scale=0.5, expire_seconds=4.0),
)
RULE, LIVING = make("downpour", window=2), 2
NAMES = itertools.count(1)


def contents(centers: list[Center]) -> list[dict[int, list[float]]]:
    """Return the rows of each table that a driver is sent by one server, or by all shards."""
    result: list[dict[int, list[float]]] = [{} for _ in SHAPES]
    for center in centers:
        for rows, table in zip(result, center.tables, strict=True):
            ids, values = table.present(slice(0, table.count))
            numbers = range(len(values)) if ids is None else ids.tolist()
            assert not rows.keys() & numbers
            rows |= dict(zip(numbers, values.tolist(), strict=True))
    return result


def changes(centers: list[Center]) -> tuple[dict[int, list[float]], set[int]]:
    """Return the changed rows of a table, and the numbers of those that are gone."""
    changed, lost = dict[int, list[float]](), set[int]()
    for center in centers:
        table = center.living[0]
        ids, rows, gone = table.changed(slice(0, table.marks.count))
        changed |= dict(zip(ids.tolist(), rows.tolist(), strict=True))
        lost |= set(gone.tolist())
    return changed, lost


def counts(centers: list[Center]) -> list[list[int]]:
    return np.sum([[table.counts for table in center.living] for center in centers], axis=0).tolist()


def moments(center: Center) -> list[Any]:
    """Return what is equal at one server and at all shards, apart from rows."""
    return [
        {name: value for name, value in table.state().items() if name not in ("admitted", "expired", "removed")}
        for table in center.living
    ]


class SavedCenter:
    """A center of one server and of shards, both of which are saved to folders and restored from one of them."""

    def __init__(self, shards: int, seed: int, saved: Path | None = None, read_at: int = ALL_ROWS) -> None:
        self.center = DividedCenter(RULE, 30, 2, shards, seed, tables=SHAPES)
        self.lock = threading.Condition()
        self._reports: queue.Queue[PartSaved] = queue.Queue()
        self._number, self._attempt = 0, seed
        #: The clock at which the driver has read changes last.
        self.read_at = read_at
        #: The rows of the latest snapshot, and that clock.
        self.saved: tuple[Any, int] = [], ALL_ROWS
        self._row_files = [()] * shards if saved is None else self._restore(saved)
        self._connect()

    def _restore(self, folder: Path) -> list[Any]:
        """Restore one server, the sequencer and the shards; return the files that the shards go on with."""
        center, row_files = self.center, list[Any]()
        one = present(SnapshotDirectory(str(folder)).latest())
        restore(center.one, one.state, same_attempts=True)
        bare = present(SnapshotDirectory(str(folder), whole=False).latest())
        restore(center.sequencer, bare_state(bare.state, ELEMENTS), same_attempts=True)
        for number, shard in enumerate(center.shards):
            piece = SnapshotDirectory(str(folder), whole=False).slice_of(one.name, self._share(number))
            assert piece.size == center.size
            restore(shard.center, piece.state, same_attempts=True)
            row_files.append(piece.row_files)
        return row_files

    def _share(self, number: int) -> Share:
        cut = self.center.cut
        return Share(number, cut.shards, lambda size: cut.slices[number], lambda ids: cut.owners(ids) == number)

    @property
    def pieces(self) -> list[Center]:
        return [shard.center for shard in self.center.shards]

    def _connect(self) -> None:
        self._attempt += 1
        for worker in range(2):
            self.center.join(worker, self._attempt, self._attempt)
            self._pull(worker)

    def _pull(self, worker: int) -> None:
        wants = self.center.some_rows()
        self.center.want(worker, self._attempt, wants)
        expected, received = self.center.release(worker, self._attempt, wants)
        np.testing.assert_array_equal(received, expected.buffer.array)
        expected.buffer.drop()

    def act(self, actions: list[str]) -> None:
        """Perform the actions, each under the lock; and check that shards and one server are equal."""
        for action in actions:
            with self.lock:
                self._act(action)
        with self.lock:
            self.center.assert_equal()
            assert contents([self.center.one]) == contents(self.pieces)
            for piece in self.pieces:
                assert moments(piece) == moments(self.center.one)

    def _act(self, action: str) -> None:
        center = self.center
        if action == "wait":
            center.seconds += 2
        elif action == "remove":
            center.remove(LIVING, center.some_rows()[LIVING])
        elif action == "changes":
            known = center.begin_changes(self.read_at)
            assert known == (self.read_at != ALL_ROWS)
            self.read_at = center.one.clock
            center.deliver()
            if known:
                assert changes([center.one]) == changes(self.pieces)
        else:
            worker, wants = int(action), center.some_rows()
            bare = commit_for(center.one, worker, self._attempt, 1, wants_center=True, overlapped=False)
            commit, vectors = center.with_rows(bare, wants), center.payload()
            center.prepare(commit, vectors)
            assert center.commit(commit, vectors)
            self._pull(worker)
        center.deliver()

    def save(self, folder: Path, batches: list[list[str]], *, divided: bool) -> None:
        """Save one server, or the sequencer and the shards, after each of the ``batches`` of actions."""
        job = {"rule": rule_json(RULE)}
        directory = SnapshotDirectory(str(folder), job, token=f"{next(NAMES):08x}")
        directory.take_over()
        one = TableFiles(directory, self.center.one, self.lock)
        writers = self.writers(folder, str(directory.claim)) if divided else []
        for batch in batches:
            self.act(batch)
            with self.lock:
                state = capture(self.center.sequencer if divided else self.center.one)
                self._number += 1
                for writer in writers:
                    writer.save(self._number)
                if not divided:
                    one.begin()
                self.saved = contents(self.pieces), self.read_at
            self.act(["0", "1", "remove", "changes"])  # while the writers write
            if divided:
                parts = parts_of(self.received())
                directory.save(state, LogFiles(), parts=parts)
                named = [name for part in parts for name in part.rows]
            else:
                files = one.save()
                directory.save(state, LogFiles(), row_files=files)
                named = [file.name for file in files]
            state.drop()
            directory.prune(1, LogFiles(), directory.require_owned())
            assert sorted(path.stem for path in folder.glob("table-*.dks")) == sorted(named)
        for writer in writers:
            writer.close(patience(10))

    def writers(self, folder: Path, claim: str) -> list[PartWriter]:
        writers, shards = list[PartWriter](), len(self.pieces)
        for number, piece in enumerate(self.pieces):
            directory = SnapshotDirectory(str(folder))
            directory.adopt(claim, number, shards)
            files, stretch = self._row_files[number], self.center.cut.slices[number]
            writers.append(PartWriter(directory, piece, self.lock, files, number, stretch, self._reports.put, REAL))
        return writers

    def report(self) -> PartSaved:
        """Return the next report of a writer."""
        return self._reports.get(timeout=patience(30))

    def received(self) -> list[PartSaved]:
        """Return the next report of each shard."""
        return sorted((self.report() for _ in self.pieces), key=lambda report: report.shard)


def parts_of(reports: list[PartSaved]) -> list[PartFile]:
    assert [report.problem for report in reports] == [""] * len(reports)
    return [
        PartFile(report.name, report.start, report.stop, tuple(report.rows.tobytes().decode().split()))
        for report in reports
    ]


ACTIONS = st.lists(st.sampled_from(["0", "0", "1", "1", "wait", "remove", "changes"]), max_size=12)


@examples(12)
@given(
    batches=st.lists(st.lists(ACTIONS, min_size=1, max_size=5), min_size=2, max_size=2),
    shards=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    divided=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 1 << 20),
)
def test_saved_tables_are_continued_by_any_number_of_servers(
    batches: list[list[list[str]]],
    shards: tuple[int, int, int],
    divided: tuple[bool, bool],
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, several = tmp_path_factory.mktemp("saved"), None
    with small_files(2):
        several = SavedCenter(shards[0], seed)
        for later, batch, of_shards in zip(shards[1:], batches, divided, strict=True):
            several.save(folder, batch, divided=of_shards)
            expected, read_at = several.saved
            several = SavedCenter(later, seed, folder, read_at)
            assert contents([several.center.one]) == contents(several.pieces) == expected
            assert counts([several.center.one]) == counts(several.pieces)
            several.act(["0", "changes", "1", "0", "1", "changes"])


def test_a_shard_may_begin_behind_the_end_of_the_first_part() -> None:
    whole, parts = np.arange(30), [PartFile("first", 0, 8), PartFile("second", 8, 30)]
    joined = joined_parts(parts, lambda part: {"center": whole[part.start : part.stop]}, slice(16, 30))
    np.testing.assert_array_equal(joined["center"], whole[16:])


def test_rows_of_a_damaged_file_are_written_again(tmp_path: Path) -> None:
    """Files are merged at the beginning of a snapshot. It is not taken if it would lack rows of a damaged one."""
    several = SavedCenter(1, 0)
    directory = SnapshotDirectory(str(tmp_path), token="0000000a")
    directory.take_over()
    (writer,) = several.writers(tmp_path, str(directory.claim))

    def saved(number: int) -> PartSaved:
        several.act(["0"])
        with several.lock:
            writer.save(number)
        return several.report()

    with small_files(2), mock.patch.multiple(table_files, SMALL=1 << 20, MERGED=100):
        (part,) = [parts_of([saved(number)]) for number in range(3)][-1]
        files = RowFiles.of({}, Store(str(tmp_path)).header(part.name)["row_files"]).files
        _, changed = table_files.partial_files(files, 0)
        (tmp_path / f"{changed.name}.dks").write_bytes(b"no rows")
        table_files.MERGED = 2
        assert "the next snapshot writes these rows again" in saved(4).problem
        parts = parts_of([saved(5)])
    writer.close(patience(10))
    directory.save(capture(several.center.sequencer), LogFiles(), parts=parts)
    assert contents([SavedCenter(1, 0, tmp_path).center.one]) == contents(several.pieces)


def test_a_shard_refuses_a_snapshot_while_it_writes_an_earlier_one(tmp_path: Path) -> None:
    several = SavedCenter(1, 0)
    directory = SnapshotDirectory(str(tmp_path), token="0000000a")
    directory.take_over()
    (writer,) = several.writers(tmp_path, str(directory.claim))
    with several.lock:  # the writer needs it to read rows
        writer.save(1)
        writer.save(2)
    reports = {report.number: report.problem for report in (several.report(), several.report())}
    assert reports == {1: "", 2: "it is still writing snapshot 1"}
    with several.lock:
        writer.save(3)
    assert several.report().problem == ""
    writer.close(patience(10))


#: The tables of a job with processes; the first one is kept whole.
SERVED = (
    TableShape("whole", 40, 3, 8),
    TableShape("partial", 1 << 40, 2, 8, seed=3, scale=0.5),
    TableShape("living", 50, 2, 8, seed=4, scale=0.5, admit=2, expire_commits=6, tracked=True),
)
BATCHES = 80


def some_model() -> ToyTables:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(40, 3)), np.empty((0, 2)), np.empty((0, 2))
    return ToyTables(rng.normal(size=5).astype(np.float32), SERVED, rows)


def some_batches() -> list[TableBatch]:
    rng = np.random.default_rng(2)
    ids = [tuple(rng.integers(0, 30, 4) for _ in SERVED) for _ in range(BATCHES)]
    return [TableBatch(0, index, index == BATCHES - 1, own, rng.normal(size=4)) for index, own in enumerate(ids)]


def read(driver: DriverClient) -> list[Any]:
    """Return the center, and the rows of each table."""
    rows = [
        {
            row: values
            for ids, block in driver.touched(number, SERVED[number])
            for row, values in zip(ids.tolist(), block.tolist(), strict=True)
        }
        for number in (1, 2)
    ]
    return [driver.center().center.tolist(), driver.table(0, SERVED[0]).tolist(), *rows]


def expected_rows() -> list[Any]:
    """Return what one server has at the end, if nothing is killed."""
    model = some_model()
    with Running(RULE, start=model.dense, workers=1, tables=model, deadlines=PATIENT) as server:
        connected = table_worker(server.address, RULE, model, some_batches(), deadlines=PATIENT)
        worker = Turns(connected)
        while not worker.over:
            worker.turn()
        return read(server.driver)


class Job(ServedJob):
    """The processes of a model with tables, and their snapshots; the worker waits at mini-batch `limit`."""

    def __init__(self, folder: Path, shards: int, **options: Any) -> None:
        self.model, self.limit, self.shards = some_model(), BATCHES, shards
        super().__init__(settings_of(folder, shards), **options)

    def connect(self) -> None:
        kind = SpreadDriverClient if self.shards > 1 else DriverClient
        self.driver = kind(self.process.address, PATIENT)
        self.publish(self.driver)

    def publish(self, driver: DriverClient) -> None:
        driver.publish(self.model.dense, np.empty(0, np.float32), b"the model", (), self.model.whole_rows())

    def start(self, attempt: int = 0) -> None:
        gradient = gradient_of(self.model.dense.size, SERVED)

        def gated_gradient(theta: np.ndarray, batch: TableBatch) -> np.ndarray:
            until(lambda: batch.index < self.limit)
            return gradient(theta, batch)

        connect = SpreadWorkerClient if self.shards > 1 else WorkerClient
        options: dict[str, Any] = {"attempt": attempt, "gradient": gated_gradient, "connect": connect}
        self.workers.append(
            WorkerThread(
                lambda: table_worker(
                    self.process.address, RULE, self.model, some_batches(), deadlines=PATIENT, **options
                )
            )
        )

    def kill_one(self, victim: str) -> None:
        if victim == "sequencer":
            self.kill()
        else:
            os.kill(psutil.Process(self.process.pid).children()[0].pid, signal.SIGKILL)
            assert self.process.exited(patience(60))

    def __exit__(self, *exc_info: object) -> None:
        self.limit = BATCHES
        super().__exit__(*exc_info)


def settings_of(folder: Path, shards: int, tables: tuple[TableShape, ...] = SERVED) -> ServerSettings:
    checkpoint = Checkpoint(str(folder), every=3)
    return ServerSettings(RULE, workers=1, deadlines=PATIENT, checkpoint=checkpoint, tables=tables, shards=shards)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param("sequencer", marks=pytest.mark.slow), "shard"])
def test_a_killed_process_loses_no_row(victim: str, tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        job.limit = 20
        job.start()
        until(lambda: job.driver.observe(-1, 0.0).saved_clock > 0)
        job.limit = 40
        job.at_clock(18)
        job.kill_one(victim)
        job.revive()
        assert present(job.process.resumed).clock > 0
        job.limit = BATCHES
        job.join()
        assert read(job.driver) == expected_rows()
        assert job.batches_of(0) == [(0, batch) for batch in range(BATCHES)]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1), (3, 2)])
def test_saved_rows_are_continued_by_another_number_of_shards(before: int, after: int, tmp_path: Path) -> None:
    with Job(tmp_path, before) as job:
        job.limit = 40
        job.start(attempt=100)
        job.at_clock(20)
        rows = read(job.driver)
        job.process.close()
    with Job(tmp_path, after, resume=True) as job:
        assert present(job.process.resumed).clock == 20
        assert read(job.driver) == rows
        job.start()
        job.join()
        assert read(job.driver) == expected_rows()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_tables_of_another_job_are_refused(before: int, after: int, tmp_path: Path) -> None:
    """The processes are not started: the sequencer has the shapes of all tables."""
    several = SavedCenter(before, 0)
    several.save(tmp_path, [[]], divided=before > 1)
    narrow = (*SHAPES[1:], TableShape("another", 40, 3, 6))
    for tables in (SHAPES[1:], narrow):
        settings = replace(settings_of(tmp_path, after, tables), workers=2)
        request = StartRequest(settings, KEY, mode=StartMode(fresh=False), token="0000000c")
        with pytest.raises(DifferentJobError, match="the snapshot must have tables of these rows and widths"):
            build(request)
