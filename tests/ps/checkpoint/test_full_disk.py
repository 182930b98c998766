"""A disk without room, in a time that the test turns."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from distkeras.ps.checkpoint.directory import SnapshotDirectory
from distkeras.ps.errors import SnapshotError
from distkeras.ps.world.files import LocalFiles
from distkeras.ps.world.world import World

#: Seconds until there is room.
FULL = 90.0


class FullDisk(World):
    """Nothing can be written for a while; time passes when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def files(self, uri: str) -> LocalFiles:
        world = self

        class Full(LocalFiles):
            def write(self, name: str, pieces: Iterable[Any]) -> None:
                if world.seconds < FULL:
                    raise OSError(errno.ENOSPC, "No space left on device")
                super().write(name, pieces)

        return Full(Path(uri))


def test_a_server_that_is_started_again_waits_for_room_and_says_that_it_lives(tmp_path: Path) -> None:
    world, heard = FullDisk(), []
    directory = SnapshotDirectory(str(tmp_path), world=world, heard=lambda: heard.append(world.seconds))
    assert directory.take_over(after=3) is None
    assert directory.epoch == 4
    gaps = [later - earlier for earlier, later in zip([0.0, *heard], heard, strict=False)]
    assert world.seconds >= FULL
    assert max(gaps) < 10.0  # its driver would give it up after 30


def test_a_first_one_says_so_soon(tmp_path: Path) -> None:
    world = FullDisk()
    with pytest.raises(SnapshotError, match="No space left"):
        SnapshotDirectory(str(tmp_path), world=world).take_over(fresh=True)
    assert world.seconds < 15.0
