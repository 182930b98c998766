"""Files of arrays, complete or absent; and the ownership of a directory while another server claims it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ps.toy_model import ToyJob
from support.ps.watched_files import before_access

from distkeras.ps.checkpoint.ownership import Claim, Name, Ownership, parsed
from distkeras.ps.checkpoint.snapshots import LogFiles, SnapshotDirectory
from distkeras.ps.checkpoint.state import capture
from distkeras.ps.checkpoint.store import DamagedError, SavePlace, Store
from distkeras.ps.errors import ConfigurationError, OwnershipLostError, SnapshotError
from distkeras.ps.rules import make
from distkeras.ps.world.files import Files, open_files
from distkeras.ps.world.world import World

ARRAYS: dict[str, np.ndarray] = {
    "center": np.arange(7, dtype=np.float32),
    "matrix": np.ones((3, 2)),
    "empty": np.empty(0, np.float32),
    "bytes": np.arange(5, dtype=np.uint8),
    "strided": np.arange(10, dtype=np.int64)[::2],
}
HEADER = {"clock": 3, "members": {"0": {"epoch": 1}}, "none": None, "text": "θ"}


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_header_and_arrays_survive_saving_and_loading(tmp_path: Path, scheme: str) -> None:
    store = Store(scheme + str(tmp_path / "new" / "folder"))
    store.save("one", HEADER, ARRAYS)
    header, arrays = store.load("one")
    assert header == HEADER
    assert arrays.keys() == ARRAYS.keys()
    for key, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[key], array)
        assert (arrays[key].dtype, arrays[key].shape) == (array.dtype, array.shape)
    assert store.names() == ["one"]
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["one.dks"]


@given(data=st.data())
def test_any_changed_byte_and_any_truncation_is_detected(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = Store(str(folder))
    store.save("one", HEADER, ARRAYS)
    path = folder / "one.dks"
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    changed = data.draw(st.integers(0, 255), label="0: a truncation")
    content[place] ^= changed
    path.write_bytes(content if changed else content[:place])
    with pytest.raises(SnapshotError, match="is damaged"):
        store.load("one")


def test_a_file_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.save("one", {"life": 1}, {})
    store.save("one", {"life": 2}, {})
    assert store.load("one")[0] == {"life": 2}
    store.delete(["one", "never there"])
    assert store.names() == []


def test_only_the_owner_may_read_a_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "above" / "folder"))
    store.save("one", HEADER, ARRAYS)
    assert stat.S_IMODE((tmp_path / "above" / "folder").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "above" / "folder" / "one.dks").stat().st_mode) == 0o600


def test_a_file_gets_its_name_after_its_bytes_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is on the disk when `save` returns, so that a file is complete after a power cut."""
    order: list[int | str] = []
    fsync, replace = os.fsync, Path.replace

    def recorded_fsync(descriptor: int) -> None:
        order.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def recorded_replace(path: Path, to: Path) -> None:
        order.append("moved")
        replace(path, to)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    above, folder = tmp_path / "above", tmp_path / "above" / "folder"
    store = Store(str(folder))
    assert order == [tmp_path.stat().st_ino, above.stat().st_ino]
    order.clear()
    store.save("one", HEADER, ARRAYS)
    assert order == [(folder / "one.dks").stat().st_ino, "moved", folder.stat().st_ino]


def test_another_version_of_the_format_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.save("one", HEADER, ARRAYS)
    content = (tmp_path / "one.dks").read_bytes().replace(b"DKSTORE8", b"DKSTORE1")
    (tmp_path / "one.dks").write_bytes(content)
    with pytest.raises(SnapshotError, match=r"begin with b'DKSTORE8'\. Received: b'DKSTORE1'"):
        store.load("one")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.save("one", {"life": 1}, {})
    (tmp_path / "one.dks.part").symlink_to("/dev/full")  # the draft can be opened, but every write fails
    with pytest.raises(SnapshotError, match="one cannot be written"):
        store.save("one", {"life": 2}, ARRAYS)
    assert store.load("one")[0] == {"life": 1}
    store.save("one", {"life": 3}, ARRAYS)
    assert store.load("one")[0] == {"life": 3}


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="there is no missing"):
        Store(str(tmp_path)).load("missing")


def test_a_header_can_be_read_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.save("some", {"job": {"a": [1]}}, {"values": np.arange(3)})
    assert store.header("some") == {"job": {"a": [1]}}
    with pytest.raises(DamagedError, match="there is no other"):
        store.header("other")
    content = (tmp_path / "some.dks").read_bytes()
    for cut in (0, 10, 16, 30):
        (tmp_path / "some.dks").write_bytes(content[:cut])
        with pytest.raises(DamagedError, match=r"some in .* has no header"):
            store.header("some")


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="cannot be opened"):
        Store(str(tmp_path / "file" / "folder"))


def test_an_unknown_uri_scheme_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a URI that Arrow opens"):
        Store("gopher://host/path")


class TornOnce(World):
    """A world in which the first write fails half-way, and so does the removal of its draft."""

    def files(self, uri: str, *, create: bool = True) -> Files:
        files = open_files(uri)
        write, delete, errors = files.write, files.delete, [OSError(5, "torn"), OSError(5, "torn")]

        def write_half(name: str, pieces: Any) -> None:
            write(name, list(pieces)[: 1 if errors else None])
            if errors:
                raise errors.pop()

        def delete_later(name: str) -> None:
            if errors:
                raise errors.pop()
            delete(name)

        files.write, files.delete = write_half, delete_later
        return files


def test_a_draft_that_could_not_be_removed_is_removed_later(tmp_path: Path) -> None:
    store = Store(str(tmp_path), TornOnce())
    with pytest.raises(SnapshotError, match="torn"):
        store.save("one", HEADER, ARRAYS)
    assert store.drafts() == ["one"]
    store.save("two", HEADER, ARRAYS)
    assert store.drafts() == []


def test_the_new_owner_continues_from_the_latest_owned_snapshot(tmp_path: Path) -> None:
    job = ToyJob(make("downpour", window=1), np.zeros(5), [np.ones((2, 5))], dtype=np.float32)
    older = SnapshotDirectory(str(tmp_path), token="0000000a")
    older.take_over()

    def save() -> None:
        log_files = older.save_log(job.center.log.read(), LogFiles()) if job.center.clock else LogFiles()
        older.save(capture(job.center), log_files)
        older.require_owned()  # the snapshot is valid: workers may rely on it

    save()

    def commit_and_save() -> None:
        job.commit(0)
        save()

    saved = SnapshotDirectory(
        str(tmp_path), token="0000000b", world=before_access("write", "owner-", commit_and_save)
    ).take_over()
    assert saved is not None
    assert saved.state.header["clock"] == len(saved.log) == 1


@pytest.mark.parametrize("epoch", [0, 1])
def test_simultaneous_attempts_have_different_claims(tmp_path: Path, epoch: int) -> None:
    """Each attempt lists the files before the others write their claims."""
    store = Store(str(tmp_path))
    before = [Name("owner", Claim(1, "0000000a"))] if epoch else []
    attempts = [Ownership(store, "0000000a") for _ in range(3)]
    for number, attempt in enumerate(attempts, 5):
        attempt.write(before, epoch, epoch, number)
    claims = [attempt.claim for attempt in attempts]
    assert len({claim.incarnation for claim in claims}) == 3
    names = [name for name in map(parsed, store.names()) if name is not None]
    for attempt in attempts[:-1]:
        with pytest.raises(OwnershipLostError):
            attempt.require(names)
        assert attempt.lost_to_own_job
    attempts[-1].require(names)


def test_a_restarted_server_does_not_take_the_directory_from_a_newer_job(tmp_path: Path) -> None:
    """The restarted server lists the files before the newer job claims, and writes its own claim after that."""
    newer = SnapshotDirectory(str(tmp_path), token="0000000b")
    SnapshotDirectory(str(tmp_path), token="ffffffff").take_over()
    restarted = SnapshotDirectory(
        str(tmp_path), token="ffffffff", world=before_access("write", "owner-", newer.take_over)
    )
    with pytest.raises(OwnershipLostError, match="claim 000002-0000000b of process"):
        restarted.take_over(epoch=1, after=1)
    newer.require_owned()
    assert not list(tmp_path.glob("owner-000001-ffffffff.1*"))  # the claim that was lost is removed


def test_only_drafts_of_earlier_owners_are_removed(tmp_path: Path) -> None:
    """The draft of a newer owner is about to become its snapshot."""
    older, newer = (SnapshotDirectory(str(tmp_path), token=token) for token in ("0000000a", "0000000b"))
    drafts = []
    for directory in (older, newer):
        directory.take_over()
        drafts.append(tmp_path / f"snapshot-{directory.claim}-000001-000000000007.dks.part")
        drafts[-1].write_bytes(b"half")
    older.sweep()
    assert [draft.exists() for draft in drafts] == [True, True]
    newer.sweep()
    assert [draft.exists() for draft in drafts] == [False, True]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the machine has no device that is always full")
def test_a_check_on_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk keeps the name of a file, and refuses its content."""
    names = iter(["61" * 4])
    monkeypatch.setattr(World, "token", lambda self, size: bytes.fromhex(next(names)))
    store = Store(str(tmp_path))
    full = tmp_path / "owner-probe-61616161.dks.part"
    full.symlink_to("/dev/full")
    with pytest.raises(SnapshotError, match="No space left on device"):
        store.check()
    assert list(tmp_path.iterdir()) == []


class HurriedWorld(World):
    """One whose clock advances by the pauses alone; the files can be written once ``free`` seconds have passed."""

    def __init__(self, free: float) -> None:
        self.now, self.free = 0.0, free

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def files(self, uri: str, *, create: bool = True) -> Files:
        if self.now < self.free:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().files(uri, create=create)


def test_a_job_that_begins_waits_until_a_disk_has_room(tmp_path: Path) -> None:
    SavePlace(str(tmp_path)).check(HurriedWorld(free=15.0))
    with pytest.raises(SnapshotError, match="No space left on device"):
        SavePlace(str(tmp_path)).check(HurriedWorld(free=60.0))


def test_a_job_does_not_wait_for_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    world = HurriedWorld(free=0.0)
    with pytest.raises(SnapshotError, match="cannot be opened"):
        SavePlace(str(tmp_path / "file" / "folder")).check(world)
    assert world.now == 0.0
