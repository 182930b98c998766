"""The files in one directory: a local one, or what any URI names that Arrow's filesystems open."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from distkeras.ps.errors import ConfigurationError

#: Bytes of a piece that is read: activity is recorded after each.
_PIECE = 4 << 20


class Files(Protocol):
    """The files in one directory; every call raises an OSError where it fails."""

    def names(self) -> list[str]:
        """Of all files there, in no order."""

    def read(self, name: str) -> Iterator[bytes]:
        """All of a file, in pieces."""

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """A file of these bytes, in place of one of that name; what fails may leave some of them."""

    def sync(self, name: str = "") -> None:
        """Has the system write a file out, or which names there are: then it survives a power cut."""

    def move(self, name: str, to: str) -> None:
        """Gives a file another name, at once and in place of one that has it."""

    def delete(self, name: str) -> None:
        """Removes a file."""


def open_files(uri: str) -> Files:
    """The files in the directory ``uri``.

    Args:
        uri: a local path, or a URI: ``file:``, ``hdfs:``, ``s3:``, ``gs:`` …; made if it is not there.

    Raises:
        ConfigurationError: nothing opens this URI.
        OSError: the directory cannot be made.
    """
    if "://" not in uri and not uri.startswith("file:"):
        return LocalFiles(Path(uri).absolute())

    from pyarrow import ArrowException, fs

    try:
        filesystem, root = fs.FileSystem.from_uri(uri)
    except (ArrowException, ValueError) as error:
        raise ConfigurationError(
            f"`checkpoint` must be a directory or a URI that Arrow opens. Received: {uri!r}: {error}"
        ) from error
    return LocalFiles(Path(root)) if isinstance(filesystem, fs.LocalFileSystem) else ArrowFiles(filesystem, root)


class LocalFiles:
    """Files of this system that no other user may read: a new directory has mode 0700, each file 0600.

    Args:
        root: the directory; made if it is not there. One that is keeps its mode.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(0o700 if folder == root else 0o777, exist_ok=True)
            _sync(folder.parent)  # or a power cut takes it away with all that is in it
        if not root.is_dir():
            raise NotADirectoryError(f"{root} must be a directory. Received: a file")

    def names(self) -> list[str]:
        """Of all files there."""
        with os.scandir(self._root) as entries:
            return [entry.name for entry in entries if not entry.is_dir()]

    def read(self, name: str) -> Iterator[bytes]:
        """All of a file, in pieces."""
        with Path(self._root, name).open("rb", buffering=0) as stream:
            while piece := stream.read(_PIECE):
                yield piece

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """A file of these bytes."""
        descriptor = os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            for piece in pieces:
                stream.write(piece)

    def sync(self, name: str = "") -> None:
        """Has the system write it out."""
        _sync(self._root / name)

    def move(self, name: str, to: str) -> None:
        """Gives a file another name."""
        Path(self._root, name).replace(self._root / to)

    def delete(self, name: str) -> None:
        """Removes a file."""
        Path(self._root, name).unlink()


class ArrowFiles:
    """Files by way of Arrow.

    Args:
        filesystem: of `pyarrow.fs`.
        root: the directory; made if it is not there.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        from pyarrow import ArrowException

        self._fs, self._root = filesystem, root
        self._arrows = ArrowException
        with self._arrows_too():
            self._fs.create_dir(self._root, recursive=True)

    def names(self) -> list[str]:
        """Of all files there."""
        from pyarrow import fs

        with self._arrows_too():
            entries = self._fs.get_file_info(fs.FileSelector(self._root))
        return [info.base_name for info in entries if info.type != fs.FileType.Directory]

    def read(self, name: str) -> Iterator[bytes]:
        """All of a file, in pieces."""
        with self._arrows_too(), self._fs.open_input_stream(self._path(name)) as stream:
            while piece := stream.read(_PIECE):
                yield piece

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """A file of these bytes."""
        with self._arrows_too(), self._fs.open_output_stream(self._path(name)) as stream:
            for piece in pieces:
                stream.write(piece)

    def sync(self, name: str = "") -> None:
        """These filesystems have no such call: what was closed is there."""

    def move(self, name: str, to: str) -> None:
        """Gives a file another name."""
        with self._arrows_too():
            self._fs.move(self._path(name), self._path(to))

    def delete(self, name: str) -> None:
        """Removes a file."""
        with self._arrows_too():
            self._fs.delete_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _arrows_too(self) -> Iterator[None]:
        """Arrow's own errors, of which not all are one, as an OSError."""
        try:
            yield
        except self._arrows as error:
            if isinstance(error, OSError):
                raise
            raise OSError(str(error)) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
