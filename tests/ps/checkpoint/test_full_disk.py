"""A disk without room, in a time that the test turns; and a machine without memory."""

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

#: Seconds until there is room.
FULL = 90.0


class FullDisk(World):
    """A world in which nothing can be written for a while; its time passes when a thread sleeps."""

    def __init__(self, full: float = FULL) -> None:
        self.seconds, self.full = 0.0, full

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def files(self, uri: str) -> LocalFiles:
        world = self

        class Full(LocalFiles):
            def write(self, name: str, pieces: Iterable[Any]) -> None:
                if world.seconds < world.full:
                    raise OSError(errno.ENOSPC, "No space left on device")
                super().write(name, pieces)

        return Full(Path(uri))


def test_a_server_that_is_started_again_waits_for_room_and_says_that_it_lives(tmp_path: Path) -> None:
    world, heard = FullDisk(), []
    directory = SnapshotDirectory(str(tmp_path), world=world, record_activity=lambda: heard.append(world.seconds))
    assert directory.take_over(epoch=3, after=3) is None
    assert directory.claim.incarnation == 4
    gaps = [later - earlier for earlier, later in zip([0.0, *heard], heard, strict=False)]
    assert world.seconds >= FULL
    assert max(gaps) < 10.0  # its driver would give it up after 30


def test_a_first_one_says_so_soon(tmp_path: Path) -> None:
    world = FullDisk()
    with pytest.raises(SnapshotError, match="No space left"):
        SnapshotDirectory(str(tmp_path), world=world).take_over(fresh=True)
    assert world.seconds < 15.0


def test_one_that_may_have_a_job_to_go_on_with_has_more_patience(tmp_path: Path) -> None:
    world = FullDisk(40.0)
    assert SnapshotDirectory(str(tmp_path), world=world).take_over() is None
    assert 40.0 <= world.seconds < 45.0


def test_one_exception_after_another_does_not_end_the_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starving, names = [4], LocalFiles.names

    def starved(files: LocalFiles) -> list[str]:
        if starving[0] and threading.current_thread().name == "ps-checkpointer":
            starving[0] -= 1
            raise MemoryError
        return names(files)

    monkeypatch.setattr(LocalFiles, "names", starved)
    toy = ToyJob(make("downpour"), np.zeros(5), [np.ones((2, 5))], dtype=np.float32)
    directory = SnapshotDirectory(str(tmp_path))
    directory.take_over()
    checkpointer = Checkpointer(Checkpoint(str(tmp_path)), directory, toy.center, threading.Condition())
    checkpointer.start()
    until(lambda: checkpointer.covers(0))
    checkpointer.close(patience(20))
    assert starving == [0]
