"""When snapshots are taken, which are kept, and what is read of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import patience
from support.toy_model import ToyJob

from distkeras.ps.checkpoint.checkpointer import Checkpoint, Checkpointer
from distkeras.ps.checkpoint.directory import SnapshotDirectory
from distkeras.ps.errors import ConfigurationError, SnapshotError
from distkeras.ps.rules import make


def toy() -> ToyJob:
    return ToyJob(make("downpour", window=1), np.zeros(5), [np.ones((50, 5))] * 2, dtype=np.float32)


class Saving:
    """A checkpointer at work on a toy's center."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.toy, self.changed = toy(), threading.Condition()
        checkpoint = Checkpoint(str(folder), **options)
        self.checkpointer = Checkpointer(checkpoint, SnapshotDirectory(str(folder)), self.toy.center, self.changed)
        self.checkpointer.start()

    def commit(self, count: int) -> None:
        for _ in range(count):
            with self.changed:
                self.toy.commit(0)
                self.checkpointer.committed(self.toy.center.clock)

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


def test_a_snapshot_every_so_many_commits_and_one_at_the_end(tmp_path: Path) -> None:
    with Saving(tmp_path, every=10, keep=9) as saving:
        saving.commit(9)
        assert saving.checkpointer.durable == {0: 0, 1: 0}
        saving.commit(1)
        saving.wait(lambda: saving.checkpointer.durable[0] == 10)
        saving.commit(3)
    assert clocks(tmp_path) == [0, 10, 13]


def test_the_last_few_are_kept_and_their_whole_log(tmp_path: Path) -> None:
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


def test_logs_of_incarnations_without_a_snapshot_are_removed(tmp_path: Path) -> None:
    with Saving(tmp_path, every=1, keep=1) as saving:
        saving.commit(4)
        saving.covered()
    directory = SnapshotDirectory(str(tmp_path))
    (tmp_path / "log-000001-000000000004-000000000009.dks").write_bytes(b"of a snapshot that was never finished")
    saved = directory.latest()
    assert saved is not None
    center = toy().center
    center.leases.clear()
    center.incarnation = directory.highest_incarnation() + 1
    directory.restore(center, saved, same_attempts=True)
    second = Checkpointer(Checkpoint(str(tmp_path), keep=1), directory, center, threading.Condition(), saved)
    second.start()
    second.close(20)
    names = sorted(path.stem for path in tmp_path.iterdir())
    assert names[-1] == "snapshot-000002-000000000004"
    assert "log-000001-000000000004-000000000009" not in names
    again = directory.latest()
    assert again is not None
    assert again.log.commits()["clock"].tolist() == [0, 1, 2, 3]


def test_nothing_is_read_where_nothing_is(tmp_path: Path) -> None:
    directory = SnapshotDirectory(str(tmp_path))
    assert directory.latest(fresh=True) is None
    assert directory.highest_incarnation() == 0


def test_only_damaged_snapshots_are_an_error(tmp_path: Path) -> None:
    with Saving(tmp_path, keep=3) as saving:
        saving.commit(1)
    for path in tmp_path.glob("snapshot-*.dks"):
        path.write_bytes(b"nonsense")
    with pytest.raises(SnapshotError, match="one of 2 snapshots must be readable"):
        SnapshotDirectory(str(tmp_path)).latest()


@pytest.mark.parametrize("bad", [{"every": 0}, {"keep": 0}, {"every": 1.5}])
def test_bad_numbers(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be a positive integer"):
        Checkpoint("folder", **bad)
