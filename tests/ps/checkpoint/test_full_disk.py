"""A full disk, with a manual clock, and a machine without memory."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import patience, until
from support.ps.toy_model import ToyJob

from distkeras.ps.checkpoint.checkpointer import Checkpoint, Checkpointer
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.errors import SnapshotError
from distkeras.ps.rules import make
from distkeras.ps.world.files import LocalFiles
from distkeras.ps.world.world import World

#: Seconds until the disk has room.
FULL = 90.0


class FullDisk(World):
    """A world whose disk is full at first; its clock advances when a thread sleeps."""

    def __init__(self, full: float = FULL) -> None:
        self.seconds, self.full = 0.0, full

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def files(self, uri: str, *, create: bool = True) -> LocalFiles:
        world = self

        class Full(LocalFiles):
            def write(self, name: str, pieces: Iterable[Any]) -> None:
                if world.seconds < world.full:
                    raise OSError(errno.ENOSPC, "No space left on device")
                super().write(name, pieces)

        return Full(Path(uri))


def test_a_restarted_server_waits_for_room_and_reports_activity(tmp_path: Path) -> None:
    world, activity = FullDisk(), []
    directory = SnapshotDirectory(str(tmp_path), world=world, record_activity=lambda: activity.append(world.seconds))
    assert directory.take_over(epoch=3, after=3) is None
    assert directory.claim.incarnation == 4
    gaps = [later - earlier for earlier, later in zip([0.0, *activity], activity, strict=False)]
    assert world.seconds >= FULL
    assert max(gaps) < 10.0  # the driver would give up the server after 30


def test_a_fresh_server_fails_soon(tmp_path: Path) -> None:
    world = FullDisk()
    with pytest.raises(SnapshotError, match="No space left"):
        SnapshotDirectory(str(tmp_path), world=world).take_over(fresh=True)
    assert world.seconds < 15.0


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
