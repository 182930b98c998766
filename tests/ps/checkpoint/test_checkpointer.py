"""The checkpointer: when snapshots are saved, what they cover, which ones are kept, and what is restored from them."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.patience import patience, until
from support.present import present
from support.ps.frames import some_commit
from support.ps.toy_model import ToyJob
from support.ps.watched_files import WatchedFiles, before_access

from distkeras.ps.checkpoint import checkpointer, ownership
from distkeras.ps.checkpoint.checkpointer import Checkpoint, Checkpointer
from distkeras.ps.checkpoint.ownership import Claim
from distkeras.ps.checkpoint.snapshots import LogFiles, SnapshotDirectory
from distkeras.ps.checkpoint.state import capture
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import (
    ConfigurationError,
    DifferentJobError,
    DistkerasError,
    NonFiniteError,
    OwnershipLostError,
    SnapshotError,
)
from distkeras.ps.rules import make
from distkeras.ps.world.files import LocalFiles
from distkeras.ps.world.world import REAL


def toy() -> ToyJob:
    data = [np.ones((2, 5))] * 2
    return ToyJob(make("downpour", window=1), np.zeros(5), data, dtype=np.float32, check_finite=True)


class Saving:
    """A checkpointer that saves the center of a toy job."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.toy, self.changed = toy(), threading.Condition()
        self.lost: list[DistkerasError] = []
        token, world = options.pop("token", "0000000a"), options.pop("world", REAL)
        self.directory = SnapshotDirectory(str(folder), token=token, world=world)
        saved = self.directory.take_over()
        self.toy.center.incarnation = self.directory.claim.incarnation
        if saved is not None:
            self.toy.center.leases.clear()
            self.directory.restore(self.toy.center, saved, same_attempts=True)
        self.checkpointer = Checkpointer(
            Checkpoint(str(folder), **options),
            self.directory,
            self.toy.center,
            self.changed,
            saved,
            world,
            self.lost.append,
        )
        self.checkpointer.start()

    def commit(self, count: int, value: float = 1.0) -> None:
        """Apply ``count`` commits under one hold of the lock, so that a snapshot contains all of them or none."""
        center = self.toy.center
        with self.changed:
            for _ in range(count):
                lease = center.leases[0]
                if lease.released is None:
                    center.release(0, 0)
                part = np.full(center.size, value, np.float32)
                commit = some_commit(
                    part,
                    incarnation=center.incarnation,
                    sequence=lease.sequence + 1,
                    first=lease.batch,
                    last=lease.batch,
                    history=np.array([[1.7e9, 5.0, 0.5]]),
                )
                center.commit(commit, [center.pool.adopt(part)])
                center.release(0, 0)
                self.checkpointer.committed(center.clock)

    def wait(self, condition: Callable[..., Any]) -> None:
        deadline = time.monotonic() + patience(20)
        with self.changed:
            while not condition():
                assert self.changed.wait(deadline - time.monotonic())

    def covered(self) -> None:
        with self.changed:
            mark = self.checkpointer.mark()
        self.wait(lambda: self.checkpointer.covers(mark))

    def __enter__(self) -> Saving:
        self.covered()  # the first snapshot, at clock 0
        return self

    def __exit__(self, *exc_info: None) -> None:
        self.checkpointer.close(patience(20))


def clocks(folder: Path) -> list[int]:
    return sorted(int(path.stem.split("-")[-1]) for path in folder.glob("snapshot-*.dks"))


def test_snapshots_are_saved_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    with Saving(tmp_path, every=10, keep=9) as saving:
        saving.commit(9)
        assert saving.checkpointer.durable == {0: 0, 1: 0}
        saving.commit(1)
        saving.wait(lambda: saving.checkpointer.durable[0] == 10)
        saving.commit(3)
    assert clocks(tmp_path) == [0, 10, 13]


def test_a_corrupt_center_is_not_saved(tmp_path: Path) -> None:
    with Saving(tmp_path, every=100) as saving:
        saving.commit(3)
        with pytest.raises(NonFiniteError):
            saving.commit(2, value=3e38)
    assert clocks(tmp_path) == [0]


def test_the_latest_snapshots_and_the_complete_log_are_kept(tmp_path: Path) -> None:
    with Saving(tmp_path, every=1, keep=2) as saving:
        for _ in range(6):
            saving.commit(1)
            saving.covered()
    assert clocks(tmp_path) == [5, 6]
    saved = SnapshotDirectory(str(tmp_path)).latest()
    assert saved is not None
    assert saved.log.commits()["clock"].tolist() == list(range(6))
    assert saved.log.commits().tobytes() == saving.toy.center.log.commits().tobytes()
    np.testing.assert_array_equal(saved.log.read().history, saving.toy.center.log.read().history)
    assert saved.log.totals() == saving.toy.center.log.totals()


def test_log_files_that_no_snapshot_needs_are_removed(tmp_path: Path) -> None:
    with Saving(tmp_path, every=1, keep=1) as saving:
        saving.commit(4)
        saving.covered()
    unfinished = "log-000001-0000000a-000900-000000000004.dks"
    (tmp_path / unfinished).write_bytes(b"of a snapshot that was never finished")
    with Saving(tmp_path, keep=1):
        pass
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in names if name.startswith("snapshot")] == [
        "snapshot-000002-0000000a-000001-000000000004.dks"
    ]
    assert [name for name in names if name.startswith("owner")] == ["owner-000002-0000000a.dks"]
    assert unfinished not in names
    reopened = SnapshotDirectory(str(tmp_path)).latest()
    assert reopened is not None
    assert reopened.log.commits()["clock"].tolist() == [0, 1, 2, 3]


def test_nothing_is_restored_from_an_empty_directory(tmp_path: Path) -> None:
    directory = SnapshotDirectory(str(tmp_path))
    assert directory.latest() is None
    assert directory.take_over(fresh=True) is None
    assert directory.claim == Claim(1, "00000000")
    reopened = SnapshotDirectory(str(tmp_path))
    assert reopened.take_over(fresh=True, epoch=1, after=6) is None
    assert reopened.claim.incarnation == 7


def test_the_number_of_log_files_is_bounded(tmp_path: Path) -> None:
    with Saving(tmp_path, every=1, keep=3) as saving:
        for _ in range(150):
            saving.commit(1)
            saving.covered()
        expected = saving.toy.center.log.read().commits.tobytes()
    assert (
        len(list(tmp_path.glob("log-*.dks"))) <= 7 * 3 + 8 + 3
    )  # three levels, and the files that older snapshots need
    saved = SnapshotDirectory(str(tmp_path)).latest()
    assert saved is not None
    assert len(saved.log_files.files) <= 7 * 3
    assert saved.log.read().commits.tobytes() == expected


@pytest.mark.parametrize("damage", ["flipped", "removed", "of another version"])
def test_a_damaged_log_file_loses_its_records_but_no_snapshot(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Saving(tmp_path, every=1) as saving:
        for _ in range(3):
            saving.commit(2)
            saving.covered()
        center = saving.toy.center.current.array.copy()
    oldest = min(tmp_path.glob("log-*.dks"))
    content = bytearray(oldest.read_bytes())
    content[len(content) // 2] ^= 1
    store = Store(str(tmp_path))
    header, arrays = store.load(oldest.stem)
    oldest.unlink()
    if damage == "flipped":
        oldest.write_bytes(content)
    elif damage == "of another version":
        store.save(oldest.stem, {"columns": [*header["columns"][1:], header["columns"][0]]}, arrays)
    with Saving(tmp_path, every=1) as saving:
        log = saving.toy.center.log
        np.testing.assert_array_equal(saving.toy.center.current.array, center)
        assert saving.toy.center.clock == 6
        assert log.commits()["clock"].tolist() == [2, 3, 4, 5]
        assert (log.missing, log.batches) == (2, 6)
        saving.commit(1)
    lost = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "records"]
    assert len(lost) == 1
    assert "the records of 2 commits are lost" in lost[0]
    assert oldest.stem in lost[0]
    saved = SnapshotDirectory(str(tmp_path)).latest()
    assert saved is not None
    assert saved.log.commits()["clock"].tolist() == [2, 3, 4, 5, 6]
    assert saved.log.missing == 2


def test_foreign_files_are_reported_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stems = ("snapshot", "snapshot-1", "log-a-b", "notes", "owner-000001")
    names = [*(f"{stem}.dks" for stem in stems), "notes.txt", "x.dks.part"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "snapshot-000009-0000000a-000001-000000000000.dks").mkdir()
    with Saving(tmp_path, every=1, keep=1) as saving:
        saving.commit(3)
    messages = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "snapshot"]
    assert len(messages) == 1
    assert "log-a-b, notes, owner-000001, snapshot, snapshot-1" in messages[0]
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_an_unexpected_exception_does_not_end_the_snapshots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Saving(tmp_path, every=1) as saving:
        with saving.changed:
            saving.toy.center.counters["broken"] = object()  # type: ignore[assignment]  # cannot be written as JSON
        saving.commit(1)
        until(lambda: saving.checkpointer.failure)
        assert isinstance(saving.checkpointer.failure, TypeError)
        assert "Traceback" in caplog.text
        with saving.changed:
            del saving.toy.center.counters["broken"]
        saving.covered()
        assert saving.checkpointer.failure is None
    assert clocks(tmp_path)[-1] == 1


def test_the_last_snapshot_is_retried_after_a_full_disk(tmp_path: Path) -> None:
    with Saving(tmp_path, every=100) as saving:
        saving.commit(1)
        draft = tmp_path / "log-000001-0000000a-000002-000000000000.dks.part"
        draft.symlink_to("/dev/full")  # can be opened, but every write fails
    assert clocks(tmp_path) == [0, 1]
    assert not draft.is_symlink()


class TestOwnership:
    """Of two servers with one directory, the newer one owns it, and the older one loses it."""

    def test_snapshots_of_the_older_server_are_ignored(self, tmp_path: Path) -> None:
        with Saving(tmp_path, every=1) as older:
            older.commit(2)
            older.covered()
            with Saving(tmp_path, every=1, keep=1, token="0000000b") as newer:
                assert newer.toy.center.clock == 2
                newer.commit(3)
                newer.covered()
                older.commit(5)
                until(lambda: older.lost)
                assert isinstance(older.lost[0], OwnershipLostError)
                assert "claim 000002-0000000b of process" in older.lost[0].message
                assert older.checkpointer.durable == {0: 2, 1: 0}
                assert clocks(tmp_path)[-1] >= 5
                newer.commit(1)
        saved = SnapshotDirectory(str(tmp_path)).latest()
        assert saved is not None
        assert saved.log.commits()["incarnation"].tolist() == [1, 1, 2, 2, 2, 2]
        assert clocks(tmp_path) == [6]

    def test_an_older_server_without_commits_detects_the_loss(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checkpointer, "_IDLE", 0.05)
        with Saving(tmp_path) as older, Saving(tmp_path, token="0000000b"):
            until(lambda: older.lost)

    def test_a_claim_that_is_withdrawn_takes_nothing(self, tmp_path: Path) -> None:
        with Saving(tmp_path, every=1) as owner:
            owner.covered()
            rival = SnapshotDirectory(str(tmp_path), token="0000000b")
            rival.take_over()
            owner.commit(2)
            until(lambda: isinstance(owner.checkpointer.failure, SnapshotError))
            assert "claim 000002-0000000b of process" in str(owner.checkpointer.failure)
            assert owner.checkpointer.durable == {0: 0, 1: 0}
            rival._ownership.withdraw()  # noqa: SLF001 - as a server does whose driver has ended
            owner.covered()
            assert owner.checkpointer.durable == {0: 2, 1: 0}
            assert not owner.lost

    def test_a_claim_that_is_not_withdrawn_counts_after_some_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ownership, "PROVISIONAL_SECONDS", 0.5)
        with Saving(tmp_path, every=1) as owner:
            SnapshotDirectory(str(tmp_path), token="0000000b").take_over()
            owner.commit(1)
            until(lambda: owner.lost)

    def test_a_restarted_server_can_claim_only_the_directory_of_its_own_job(self, tmp_path: Path) -> None:
        def directory(token: str) -> SnapshotDirectory:
            return SnapshotDirectory(str(tmp_path), token=token)

        first = directory("0000000a")
        first.take_over()
        reopened = directory("0000000a")
        reopened.take_over(epoch=1, after=1)
        assert reopened.claim == Claim(1, "0000000a", start=1)
        with pytest.raises(OwnershipLostError, match=r"claim 000001-0000000a[.]1 of process"):
            first.require_owned()
        directory("0000000b").take_over()
        with pytest.raises(OwnershipLostError, match="claim 000003-0000000b of process"):
            directory("0000000a").take_over(epoch=1, after=2)

    def test_a_job_that_lost_the_directory_before_it_began_learns_that(self, tmp_path: Path) -> None:
        """Its first server claimed the directory and died; the newer job's snapshots remove that claim's file."""
        SnapshotDirectory(str(tmp_path), token="0000000a").take_over(fresh=True)
        with Saving(tmp_path, every=1, token="0000000b") as newer:
            newer.commit(1)
            newer.covered()
        with pytest.raises(
            OwnershipLostError, match=r"earlier server of this job has lost .* to claim 000002-0000000b"
        ):
            SnapshotDirectory(str(tmp_path), token="0000000a").take_over(fresh=True)
        with pytest.raises(ConfigurationError, match="must be an empty directory"):
            SnapshotDirectory(str(tmp_path), token="0000000c").take_over(fresh=True)

    def test_a_claim_to_a_directory_that_was_not_empty_after_all_is_withdrawn(self, tmp_path: Path) -> None:
        def save() -> None:
            with Saving(tmp_path, every=1, token="0000000a") as older:
                older.covered()

        directory = SnapshotDirectory(str(tmp_path), token="0000000b", world=before_access("write", "owner", save))
        with pytest.raises(ConfigurationError, match="must be an empty directory"):
            directory.take_over(fresh=True)
        assert [path.name for path in tmp_path.glob("owner-*")] == ["owner-000001-0000000a.dks"]

    def test_a_server_that_cannot_continue_the_job_claims_nothing(self, tmp_path: Path) -> None:
        with Saving(tmp_path, every=1) as saving:
            with pytest.raises(ConfigurationError, match="must be an empty directory"):
                SnapshotDirectory(str(tmp_path), token="0000000b").take_over(fresh=True)
            with pytest.raises(DifferentJobError, match="`epochs` must be None"):
                SnapshotDirectory(str(tmp_path), {"epochs": 3}, "0000000c").take_over()
            saving.commit(1)
            saving.covered()
        assert saving.lost == []


def time_out() -> None:
    raise TimeoutError("the store does not answer")


@pytest.mark.parametrize("kind", ["snapshot", "log"])
def test_a_read_that_times_out_is_retried(tmp_path: Path, kind: str) -> None:
    """The latest snapshot is not skipped in favor of the previous one, and the log is not lost."""
    with Saving(tmp_path, every=1) as saving:
        saving.commit(1)
        saving.covered()
        saving.commit(1)
    saved = SnapshotDirectory(str(tmp_path), world=before_access("read", kind, time_out, times=2)).latest()
    assert saved is not None
    assert saved.state.header["clock"] == 2
    assert len(saved.log) == 2
    assert saved.log.missing == 0


def test_a_directory_with_damaged_snapshots_only_is_an_error(tmp_path: Path) -> None:
    with Saving(tmp_path, keep=3) as saving:
        saving.commit(1)
    for path in tmp_path.glob("snapshot-*.dks"):
        path.write_bytes(b"nonsense")
    with pytest.raises(SnapshotError, match="none of 2 snapshots can be read"):
        SnapshotDirectory(str(tmp_path)).latest()


def test_a_snapshot_does_not_cover_commits_that_arrive_while_it_is_written(tmp_path: Path) -> None:
    gate, writing, changed = threading.Event(), threading.Event(), threading.Condition()

    def wait_for_gate() -> None:
        writing.set()
        assert gate.wait(patience(20))

    world = before_access("write", "snapshot", wait_for_gate)
    toy = ToyJob(make("downpour", window=1), np.zeros(5), [np.ones((4, 5))], dtype=np.float32)
    directory = SnapshotDirectory(str(tmp_path), world=world)
    directory.take_over()
    checkpointer = Checkpointer(Checkpoint(str(tmp_path), every=100), directory, toy.center, changed, world=world)
    checkpointer.start()
    assert writing.wait(patience(20))
    with changed:
        toy.commit(0)
        mark = checkpointer.mark()
    assert checkpointer.saved is None
    gate.set()
    until(lambda: 0 in checkpointer.durable)
    with changed:  # the checkpointer changes its fields together, under this lock
        assert checkpointer.durable == {0: 0}
        assert present(checkpointer.saved)[0] == 0
        assert not checkpointer.covers(mark)  # this requests a further snapshot
    until(lambda: checkpointer.durable == {0: 1})
    with changed:
        assert present(checkpointer.saved)[0] == 1
    checkpointer.close(patience(20))


def test_a_restored_snapshot_is_not_durable_before_the_server_saves_its_own(tmp_path: Path) -> None:
    def toy() -> ToyJob:
        return ToyJob(make("downpour", window=1), np.zeros(5), [np.ones((4, 5))], dtype=np.float32)

    job, older = toy(), SnapshotDirectory(str(tmp_path), token="0000000a")
    older.take_over()
    job.commit(0)
    older.save(capture(job.center), older.save_log(job.center.log.read(), LogFiles()))
    center, newer = toy().center, SnapshotDirectory(str(tmp_path), token="0000000b")
    saved = newer.take_over()
    assert saved is not None
    center.leases.clear()
    newer.restore(center, saved, same_attempts=True)
    checkpointer = Checkpointer(Checkpoint(str(tmp_path)), newer, center, threading.Condition(), saved)
    assert checkpointer.durable == {}
    checkpointer.start()
    until(lambda: checkpointer.durable == {0: 1})
    checkpointer.close(patience(20))


#: Seconds until the disk has room.
FULL = 90.0


class FullDisk(WatchedFiles):
    """A world whose disk is full at first; its clock advances when a thread sleeps."""

    def __init__(self, full: float = FULL) -> None:
        super().__init__(self.refuse)
        self.seconds, self.full = 0.0, full

    def refuse(self, method: str, name: str) -> None:
        if method == "write" and self.seconds < self.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_a_restarted_server_waits_for_room_and_reports_activity(tmp_path: Path) -> None:
    world, activity = FullDisk(), []
    directory = SnapshotDirectory(str(tmp_path), world=world, record_activity=lambda: activity.append(world.seconds))
    assert directory.take_over(epoch=3, after=3) is None
    assert directory.claim.incarnation == 4
    gaps = [later - earlier for earlier, later in zip([0.0, *activity], activity, strict=False)]
    assert world.seconds >= FULL
    assert max(gaps) < 10.0  # the driver would give up the server after 30


def test_a_fresh_server_waits_half_a_minute(tmp_path: Path) -> None:
    world = FullDisk()
    with pytest.raises(SnapshotError, match="No space left"):
        SnapshotDirectory(str(tmp_path), world=world).take_over(fresh=True)
    assert 20.0 < world.seconds < 35.0


def test_a_resuming_server_waits_longer(tmp_path: Path) -> None:
    world = FullDisk(40.0)
    assert SnapshotDirectory(str(tmp_path), world=world).take_over() is None
    assert 40.0 <= world.seconds < 45.0


def test_repeated_exceptions_do_not_end_the_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures_left, names = [4], LocalFiles.names

    def out_of_memory(files: LocalFiles) -> list[str]:
        if failures_left[0] and threading.current_thread().name == "ps-checkpointer":
            failures_left[0] -= 1
            raise MemoryError
        return names(files)

    monkeypatch.setattr(LocalFiles, "names", out_of_memory)
    toy = ToyJob(make("downpour"), np.zeros(5), [np.ones((2, 5))], dtype=np.float32)
    directory = SnapshotDirectory(str(tmp_path))
    directory.take_over()
    checkpointer = Checkpointer(Checkpoint(str(tmp_path)), directory, toy.center, threading.Condition())
    checkpointer.start()
    until(lambda: checkpointer.covers(0))
    checkpointer.close(patience(20))
    assert failures_left == [0]


def test_the_log_files_of_a_kept_snapshot_are_kept_after_they_were_merged(tmp_path: Path) -> None:
    job = ToyJob(make("downpour", window=1), np.zeros(5), [np.ones((2, 5))], dtype=np.float32)
    directory = SnapshotDirectory(str(tmp_path), token="0000000a")
    directory.take_over()
    files = LogFiles()
    for replaced in (0, 1):
        job.commit(0)
        files = directory.save_log(job.center.log.read(), files, replaced=replaced)
        directory.save(capture(job.center), files)
    directory.prune(2, files, directory.require_owned())
    latest = max(tmp_path.glob("snapshot-*"))
    latest.write_bytes(latest.read_bytes()[:-1])
    saved = SnapshotDirectory(str(tmp_path)).latest()
    assert saved is not None
    assert (saved.state.header["clock"], len(saved.log), saved.log.missing) == (1, 1, 0)


@pytest.mark.parametrize("times", [1, 3])
def test_the_owner_saves_and_prunes_while_another_server_reads(tmp_path: Path, times: int) -> None:
    job = ToyJob(make("downpour", window=1), np.zeros(5), [np.ones((5, 5))], dtype=np.float32)
    owner = SnapshotDirectory(str(tmp_path), token="0000000a")
    owner.take_over()

    def save_and_prune() -> None:
        job.commit(0)
        owner.save(capture(job.center), LogFiles())
        owner.prune(1, LogFiles(), owner.require_owned())

    save_and_prune()
    other = SnapshotDirectory(
        str(tmp_path), token="0000000b", world=before_access("read", "snapshot-", save_and_prune, times)
    )
    saved = other.take_over()
    assert saved is not None
    assert saved.state.header["clock"] == job.center.clock == 1 + times


@pytest.mark.parametrize("bad", [{"every": 0}, {"keep": 0}, {"every": 1.5}])
def test_bad_numbers_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be a positive integer"):
        Checkpoint("folder", **bad)


@pytest.mark.parametrize("bad", ["", 5, None, b"folder"])
def test_a_value_that_is_not_a_directory_or_a_uri_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^`uri` must be a directory, or a URI"):
        Checkpoint(bad)


def test_a_path_is_accepted_as_a_directory() -> None:
    assert Checkpoint(cast("Any", Path("some") / "folder")).uri == str(Path("some", "folder").absolute())
