"""Worlds in which something happens before a file is accessed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from distkeras.ps.world.files import LocalFiles
from distkeras.ps.world.world import World


class WatchedFiles(World):
    """The system's world, except that ``before(method, name)`` runs before each access to a file, and may raise.

    Args:
        syncs: whether files are flushed to the disk, which is slow, and of use only at a power cut.
    """

    def __init__(self, before: Callable[[str, str], object], *, syncs: bool = True) -> None:
        self.before, self.syncs = before, syncs

    def files(self, uri: str, *, create: bool = True) -> LocalFiles:
        return _Watched(self, Path(uri), create)


def before_access(method: str, prefix: str, happens: Callable[[], object], times: int = 1) -> WatchedFiles:
    """Return a world in which ``happens`` runs before the first calls of a method with a name of this prefix."""
    left = [happens] * times

    def before(called: str, name: str) -> None:
        if left and called == method and name.startswith(prefix):
            left.pop()()

    return WatchedFiles(before)


class _Watched(LocalFiles):
    def __init__(self, world: WatchedFiles, root: Path, create: bool) -> None:
        super().__init__(root, create)
        self._world = world

    def names(self) -> list[str]:
        self._world.before("names", "")
        return super().names()

    def read(self, name: str) -> Iterator[bytes]:
        self._world.before("read", name)
        return super().read(name)

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        self._world.before("write", name)
        super().write(name, pieces)

    def sync(self, name: str = "") -> None:
        if self._world.syncs:
            super().sync(name)

    def move(self, name: str, to: str) -> None:
        self._world.before("move", name)
        super().move(name, to)

    def delete(self, name: str) -> None:
        self._world.before("delete", name)
        super().delete(name)
