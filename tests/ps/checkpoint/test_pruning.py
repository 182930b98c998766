"""Pruning keeps the log files of the kept snapshots; a server that reads meanwhile finds a newer snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.ps.toy_model import ToyJob

from distkeras.ps.checkpoint.snapshots import LogFiles, SnapshotDirectory
from distkeras.ps.checkpoint.state import capture
from distkeras.ps.errors import SnapshotError
from distkeras.ps.rules import make
from distkeras.ps.world.files import Files, LocalFiles
from distkeras.ps.world.world import World


class BeforeReading(World):
    """The real world, but ``happens`` is called just before each of the first ``times`` reads of a snapshot."""

    def __init__(self, happens: Callable[[], object], times: int) -> None:
        self.happens, self.left = happens, times

    def files(self, uri: str, *, create: bool = True) -> Files:
        world = self

        class InterruptedFiles(LocalFiles):
            def read(self, name: str) -> Iterator[bytes]:
                if name.startswith("snapshot-") and world.left:
                    world.left -= 1
                    world.happens()
                return super().read(name)

        return InterruptedFiles(Path(uri))


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
    other = SnapshotDirectory(str(tmp_path), token="0000000b", world=BeforeReading(save_and_prune, times))
    saved = other.take_over()
    assert saved is not None
    assert saved.state.header["clock"] == job.center.clock == 1 + times


def test_a_directory_with_damaged_snapshots_only_is_an_error(tmp_path: Path) -> None:
    job = ToyJob(make("downpour", window=1), np.zeros(5), [np.ones((1, 5))], dtype=np.float32)
    owner = SnapshotDirectory(str(tmp_path), token="0000000a")
    owner.take_over()
    owner.save(capture(job.center), LogFiles())
    (snapshot,) = tmp_path.glob("snapshot-*")
    snapshot.write_bytes(snapshot.read_bytes()[:-1])
    with pytest.raises(SnapshotError, match="none of 1 snapshots can be read"):
        SnapshotDirectory(str(tmp_path), token="0000000b").take_over()
