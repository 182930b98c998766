"""Files in memory that record what was synced, with faults: incomplete writes, lost data, a full or a slow disk."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from distkeras.ps.world.world import World
from simulation.scheduler import Process, Scheduler

#: The ends of the names of the threads that save, and for which there may be no memory.
_SAVERS = ("ps-checkpointer", "-saving")


class _File:
    """A file's bytes, and those that survive a power cut: the last synced ones, or None if none were."""

    def __init__(self, writer: Process | None = None) -> None:
        self.content = b""
        self.synced: bytes | None = None
        #: The process that has written the file.
        self.writer = writer


class Disk:
    """One disk, as all processes of a run see it.

    Args:
        scheduler: of the run.
        on_operation: called before each operation.
        on_write: called with the name of a file that was written.
        on_removal: called before a file is removed or overwritten, with its name and the process that wrote it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        on_operation: Callable[[], None],
        on_write: Callable[[str], None] = lambda name: None,
        on_removal: Callable[[str, Process | None], None] = lambda name, writer: None,
    ) -> None:
        self.scheduler = scheduler
        self.on_operation, self.on_write, self.on_removal = on_operation, on_write, on_removal
        #: Seconds that an operation takes, and the time until which the disk is full.
        self.seconds = 0.001
        self.full_until = 0.0
        #: The number of checkpointers' operations that fail for lack of memory.
        self.starving = 0
        self._entries: dict[str, _File] = {}
        self._synced: dict[str, _File] = {}

    def files(self, uri: str) -> VirtualFiles:
        """Return the files of one directory."""
        return VirtualFiles(self, uri + "/")

    def put(self, name: str, content: bytes) -> None:
        """Add a file that is already synced."""
        file = self._entries[name] = self._synced[name] = _File()
        file.content = file.synced = content

    def cut_power(self, writers: Sequence[Process]) -> None:
        """Lose all or a part of what some processes have written and not synced.

        Processes of other hosts continue, and what they have written is kept.
        """
        draw = self.scheduler.random.random
        names = sorted(self._entries.keys() | self._synced.keys())
        entries = {}
        for name in names:
            now, then = self._entries.get(name), self._synced.get(name)
            others = now is not None and now.writer not in writers
            kept = now if now is then or others or draw() < 0.5 else then
            if kept is not None:
                entries[name] = kept
        for file in {id(file): file for file in entries.values()}.values():
            if file.writer in writers and file.content != file.synced:
                whole = file.content if file.synced is None or draw() < 0.5 else file.synced
                file.content = whole[: int(draw() * (len(whole) + 1))] if file.synced is None else whole
        self._entries, self._synced = entries, dict(entries)

    def rot(self, kind: str, share: float) -> bool:
        """Flip a bit in the latest, or any, file of a kind; return False if there is no such file.

        Args:
            kind: the start of its name.
            share: the place in the file, in [0, 1).
        """
        whole = (name for name in self._entries if name.endswith(".dks"))
        names = sorted(name for name in whole if name.rpartition("/")[2].startswith(kind))
        if not names:
            return False
        draw = self.scheduler.random.random
        file = self._entries[names[-1] if draw() < 0.5 else names[int(draw() * len(names))]]
        content = bytearray(file.content)
        content[int(share * len(content))] ^= 1 << int(8 * draw())
        file.synced = file.content = bytes(content)
        return True

    def operate(self, *, writes: bool) -> None:
        """Run one operation, which takes its time and may fail."""
        self.scheduler.require_alive()
        self.on_operation()
        self.scheduler.wait(None, self.seconds)
        if self.starving and self.scheduler.current.name.endswith(_SAVERS):
            self.starving -= 1
            raise MemoryError
        if writes and self.scheduler.now < self.full_until:
            raise OSError(errno.ENOSPC, "No space left on device")

    @property
    def entries(self) -> dict[str, _File]:
        """Return the files by their full names."""
        return self._entries

    def sync_names(self, prefix: str) -> None:
        """Make the names in a directory survive a power cut from now on."""
        others = {name: file for name, file in self._synced.items() if not name.startswith(prefix)}
        self._synced = others | {name: file for name, file in self._entries.items() if name.startswith(prefix)}


class VirtualFiles:
    """The simulated `world.files.Files`."""

    def __init__(self, disk: Disk, prefix: str) -> None:
        self._disk, self._prefix = disk, prefix

    def names(self) -> list[str]:
        """See `Files`."""
        self._disk.operate(writes=False)
        return [name[len(self._prefix) :] for name in self._disk.entries if name.startswith(self._prefix)]

    def read(self, name: str) -> Iterator[bytes]:
        """See `Files`."""
        self._disk.operate(writes=False)
        yield self._file(name).content

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """See `Files`."""
        self._disk.operate(writes=True)
        self._replace(name)
        file = self._disk.entries[self._prefix + name] = _File(self._disk.scheduler.current.process)
        content = b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces)
        half = len(content) // 2
        file.content = content[:half]
        self._disk.operate(writes=True)
        file.content = content
        self._disk.on_write(name)

    def sync(self, name: str = "") -> None:
        """See `Files`."""
        self._disk.operate(writes=True)
        if name:
            file = self._file(name)
            file.synced = file.content
        else:
            self._disk.sync_names(self._prefix)

    def move(self, name: str, to: str) -> None:
        """See `Files`."""
        self._disk.operate(writes=True)
        file = self._file(name)
        self._replace(to)
        del self._disk.entries[self._prefix + name]
        self._disk.entries[self._prefix + to] = file

    def delete(self, name: str) -> None:
        """See `Files`."""
        self._disk.operate(writes=False)
        self._disk.on_removal(name, self._file(name).writer)
        del self._disk.entries[self._prefix + name]

    def _replace(self, name: str) -> None:
        there = self._disk.entries.get(self._prefix + name)
        if there is not None:
            self._disk.on_removal(name, there.writer)

    def _file(self, name: str) -> _File:
        file = self._disk.entries.get(self._prefix + name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return file


class StillWorld(World):
    """A world in which a check reads the files of a disk at once, and changes nothing."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def files(self, uri: str, *, create: bool = True) -> Any:
        """See `World`."""
        return _StillFiles(self._disk, uri + "/")


class _StillFiles(VirtualFiles):
    def read(self, name: str) -> Iterator[bytes]:
        yield self._file(name).content
