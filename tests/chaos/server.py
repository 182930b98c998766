"""A parameter server with file faults that `store.Store` controls; it runs in place of `distkeras.ps`."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from distkeras.ps.__main__ import main
from distkeras.ps.world.files import Files, open_files
from distkeras.ps.world.world import World

_ORDERS = Path(os.environ["DISTKERAS_CHAOS_STORE"])


class TroubledFiles:
    """``files`` that are slow or failing while the orders say so."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def names(self) -> list[str]:
        """Return the names of all files."""
        _trouble()
        return self._files.names()

    def read(self, name: str) -> Iterator[bytes]:
        """Read all or a part of a file, in pieces."""
        for piece in self._files.read(name):
            yield piece
            _trouble()

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """Write all or a part of these bytes to a file."""
        content = b"".join(map(bytes, pieces))
        orders = _orders()
        if random.random() < orders.get("dying", 0.0):
            self._files.write(name, [content[: len(content) // 2]])
            os.kill(os.getpid(), signal.SIGKILL)
        if random.random() < orders.get("failing", 0.0):
            self._files.write(name, [content[: random.randrange(len(content))]])
            raise OSError(errno.EIO, "the store is torn")
        _trouble()
        self._files.write(name, [content])

    def sync(self, name: str = "") -> None:
        """Sync a file, or fail."""
        _trouble()
        self._files.sync(name)

    def move(self, name: str, to: str) -> None:
        """Rename a file; an error does not reveal whether that was done."""
        if random.random() < 0.5:
            _trouble()
        self._files.move(name, to)
        _trouble()

    def delete(self, name: str) -> None:
        """Delete a file, or fail."""
        _trouble()
        self._files.delete(name)


def _orders() -> dict[str, float]:
    try:
        orders: dict[str, float] = json.loads(_ORDERS.read_text())
    except FileNotFoundError:
        return {}
    return orders


def _trouble() -> None:
    orders = _orders()
    if orders.get("slow"):
        time.sleep(random.uniform(0.0, 2 * orders["slow"]))
    if random.random() < orders.get("failing", 0.0):
        raise OSError(errno.EIO, "the store is torn")


def _files(self: World, uri: str, *, create: bool = True) -> Files:
    return TroubledFiles(open_files(uri, create=create))


if __name__ == "__main__":
    World.files = _files  # type: ignore[method-assign]  # everything's own
    sys.exit(main(sys.argv[2:]))
