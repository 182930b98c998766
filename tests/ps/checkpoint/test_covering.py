"""The commits that a slow snapshot covers."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from support.patience import patience, until
from support.present import present
from support.ps.toy_model import ToyJob

from distkeras.ps.checkpoint.checkpointer import Checkpoint, Checkpointer
from distkeras.ps.checkpoint.snapshots import LogFiles, SnapshotDirectory
from distkeras.ps.checkpoint.state import capture
from distkeras.ps.rules import make
from distkeras.ps.world.files import LocalFiles
from distkeras.ps.world.world import World


class SlowDisk(World):
    """A world whose disk writes snapshots only when the gate is open."""

    def __init__(self) -> None:
        self.gate, self.writing = threading.Event(), threading.Event()

    def files(self, uri: str, *, create: bool = True) -> LocalFiles:
        world = self

        class Slow(LocalFiles):
            def write(self, name: str, pieces: Iterable[Any]) -> None:
                if name.startswith("snapshot") and not world.gate.is_set():
                    world.writing.set()
                    assert world.gate.wait(patience(20))
                super().write(name, pieces)

        return Slow(Path(uri))


def test_a_snapshot_does_not_cover_commits_that_arrive_while_it_is_written(tmp_path: Path) -> None:
    world, changed = SlowDisk(), threading.Condition()
    toy = ToyJob(make("downpour", window=1), np.zeros(5), [np.ones((4, 5))], dtype=np.float32)
    directory = SnapshotDirectory(str(tmp_path), world=world)
    directory.take_over()
    checkpointer = Checkpointer(Checkpoint(str(tmp_path), every=100), directory, toy.center, changed, world=world)
    checkpointer.start()
    assert world.writing.wait(patience(20))
    with changed:
        toy.commit(0)
        mark = checkpointer.mark()
    assert checkpointer.saved is None
    world.gate.set()
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
