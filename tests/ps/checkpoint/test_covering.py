"""What a snapshot covers that takes its time."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from support.patience import patience, until
from support.toy_model import ToyJob

from distkeras.ps.checkpoint.checkpointer import Checkpoint, Checkpointer
from distkeras.ps.checkpoint.directory import SnapshotDirectory
from distkeras.ps.rules import make
from distkeras.ps.world.files import LocalFiles
from distkeras.ps.world.world import World


class SlowDisk(World):
    """Writes no snapshot while its gate is shut."""

    def __init__(self) -> None:
        self.gate, self.writing = threading.Event(), threading.Event()

    def files(self, uri: str) -> LocalFiles:
        world = self

        class Slow(LocalFiles):
            def write(self, name: str, pieces: Iterable[Any]) -> None:
                if name.startswith("snapshot") and not world.gate.is_set():
                    world.writing.set()
                    assert world.gate.wait(patience(20))
                super().write(name, pieces)

        return Slow(Path(uri))


def test_a_snapshot_does_not_cover_what_came_while_it_was_written(tmp_path: Path) -> None:
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
    world.gate.set()
    until(lambda: 0 in checkpointer.durable)
    assert checkpointer.durable == {0: 0}
    with changed:
        assert not checkpointer.covers(mark)  # but now there is to be one
    until(lambda: checkpointer.durable == {0: 1})
    checkpointer.close(patience(20))
