"""Folders: their paths and URIs, and the files in one, which is local or opened by Arrow's filesystems.

A text is a URI if it begins with a scheme; everything else is a path of this machine, with any characters in it. In a
URI, characters are escaped (``%20``), as Arrow reads it.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import require_text

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://|file:")
_FILE = "file:"


def is_uri(place: str) -> bool:
    return _URI.match(place) is not None


def absolute(place: str) -> str:
    """Return a URI as it is, and a path as an absolute one, for processes with another working directory."""
    if "\0" in place:
        raise ConfigurationError(f"a folder must be a path or a URI without NUL characters. Received: {place!r}")
    if not is_uri(place):
        return str(Path(place).absolute())
    ignored = "#?" if place.startswith(_FILE) else "#"
    found = next((mark for mark in ignored if mark in place), None)
    if found is not None:  # Arrow would open the folder that the part before it names
        raise ConfigurationError(
            f"a URI must have {f'%{ord(found):02X}'!r} in place of {found!r}; or give a path without a scheme. "
            f"Received: {place!r}"
        )
    return place


def require_place(name: str, value: Any, expected: str) -> str:
    """Return a path or URI as `absolute` does; raise ConfigurationError, in which ``expected`` follows "must be"."""
    return absolute(require_text(name, value, expected))


def below(place: str, name: str) -> str:
    """Return the path or URI of ``name`` in a folder."""
    path, query = _split(place)
    return f"{path.rstrip('/')}/{name}{query}"


def apart(place: str) -> tuple[str, str]:
    """Return the folder that a path or URI is in, and its name there: what `below` joins."""
    path, query = _split(place)
    folder, _, name = path.rpartition("/")
    return f"{folder}{query}", name


def beside(place: str, suffix: str) -> str:
    """Return the path or URI of a folder whose name ends with ``suffix`` in addition."""
    path, query = _split(place)
    return f"{path.rstrip('/')}{suffix}{query}"


def _split(place: str) -> tuple[str, str]:
    path, mark, query = place.partition("?") if is_uri(place) else (place, "", "")
    return path, mark + query


#: Bytes of a piece that is read; activity is recorded after each piece.
_PIECE = 4 << 20
#: How often Arrow repeats a request to S3. It takes a store for silent after 3 s, so a call returns within 20 s; by the
#: default of a URI, which repeats it 30 times, after 100 s.
S3_RETRIES = 5


class Files(Protocol):
    """The files in one directory; every call raises an OSError if it fails."""

    def names(self) -> list[str]:
        """Return the names of all files, in no order."""

    def read(self, name: str) -> Iterator[bytes]:
        """Yield a file's bytes, in pieces."""

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """Write a file, and replace one of the same name; a call that fails may leave an incomplete file."""

    def sync(self, name: str = "") -> None:
        """Flush a file, or the list of names, to the disk, so that it survives a power cut."""

    def move(self, name: str, to: str) -> None:
        """Rename a file, atomically, and replace a file of that name."""

    def delete(self, name: str) -> None:
        """Delete a file."""


def open_files(uri: str, *, create: bool = True) -> Files:
    """Return the files in the directory ``uri``, a path or a URI; OSError if it cannot be made, or is missing."""
    filesystem, root = _located(uri)
    return LocalFiles(Path(root), create) if filesystem is None else ArrowFiles(filesystem, root, create)


def write_whole(files: Files, name: str, draft: str, pieces: Iterable[Any]) -> None:
    """Write a file under the name ``draft``, and then move it, so that it is visible only when it is complete."""
    files.write(draft, pieces)
    files.sync(draft)  # after a power cut, the moved name must not exist without the file's bytes
    files.move(draft, name)
    files.sync()


def remove_folder(uri: str) -> None:
    """Remove a directory with everything in it; an OSError if that fails."""
    filesystem, root = _located(uri)
    if filesystem is None:
        shutil.rmtree(root)
    else:
        with _arrow_errors_as_os_errors():
            filesystem.delete_dir(root)


def _located(uri: str) -> tuple[Any, str]:
    """Return the file system of a path or URI, one of Arrow's or None for a local one, and the path in it."""
    uri = absolute(uri)
    if not is_uri(uri):
        return None, uri

    from pyarrow import ArrowException, fs

    try:
        filesystem, root = fs.FileSystem.from_uri(re.sub("^s3a:", "s3:", uri))  # Hadoop's name for the same
    except (ArrowException, ValueError) as error:
        raise ConfigurationError(
            f"a directory must be given as a path or a URI that Arrow opens. Received: {uri!r}: {error}"
        ) from error
    if filesystem.type_name == "s3":  # a URI cannot name the retries
        _, (options,) = filesystem.__reduce__()
        filesystem = fs.S3FileSystem(**options, retry_strategy=fs.AwsDefaultS3RetryStrategy(S3_RETRIES))
    return None if isinstance(filesystem, fs.LocalFileSystem) else filesystem, root


def file_system(uri: str) -> tuple[Any, str]:
    """Return the file system of a path or URI, one of Arrow's, and the path in it.

    Raises:
        ConfigurationError: Arrow knows no such file system.
        OSError: the file system cannot be reached.
    """
    from pyarrow import fs

    system, path = _located(uri)
    return system or fs.LocalFileSystem(), path


@contextmanager
def _arrow_errors_as_os_errors() -> Iterator[None]:
    """Raise those errors of Arrow that are not an OSError as an OSError."""
    from pyarrow import ArrowException

    try:
        yield
    except ArrowException as error:
        if isinstance(error, OSError):
            raise
        raise OSError(str(error)) from error


class LocalFiles:
    """Files of this system that no other user may read: a new directory has mode 0700, each file 0600."""

    def __init__(self, root: Path, create: bool = True) -> None:
        self._root = root
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
        if missing and not create:
            raise FileNotFoundError(f"there is no folder {root}")
        for folder in reversed(missing):
            folder.mkdir(0o700 if folder == root else 0o777, exist_ok=True)
            _sync(folder.parent)  # so that the directory survives a power cut
        if not root.is_dir():
            raise NotADirectoryError(f"{root} must be a directory. Received: a file")

    def names(self) -> list[str]:
        with os.scandir(self._root) as entries:
            return [entry.name for entry in entries if not entry.is_dir()]

    def read(self, name: str) -> Iterator[bytes]:
        with Path(self._root, name).open("rb", buffering=0) as stream:
            while piece := stream.read(_PIECE):
                yield piece

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        descriptor = os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            for piece in pieces:
                stream.write(piece)

    def sync(self, name: str = "") -> None:
        _sync(self._root / name)

    def move(self, name: str, to: str) -> None:
        Path(self._root, name).replace(self._root / to)

    def delete(self, name: str) -> None:
        Path(self._root, name).unlink()


class ArrowFiles:
    """Files of a `pyarrow.fs` filesystem; ``create`` makes the directory ``root`` if it does not exist."""

    def __init__(self, filesystem: Any, root: str, create: bool = True) -> None:
        self._fs, self._root = filesystem, root
        if create:
            with _arrow_errors_as_os_errors():
                self._fs.create_dir(self._root, recursive=True)

    def names(self) -> list[str]:
        from pyarrow import fs

        with _arrow_errors_as_os_errors():
            entries = self._fs.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        return [info.base_name for info in entries if info.type != fs.FileType.Directory]

    def read(self, name: str) -> Iterator[bytes]:
        at = failed = 0
        while True:
            try:
                with _arrow_errors_as_os_errors(), self._fs.open_input_file(self._path(name)) as stream:
                    stream.seek(at)
                    while piece := stream.read(_PIECE):
                        at += len(piece)
                        yield piece
                return
            except FileNotFoundError:
                raise
            except OSError:  # Arrow does not repeat a request whose error is longer than the bytes that it asked for
                if failed == S3_RETRIES:
                    raise
                time.sleep(0.05 * 2**failed)
                failed += 1

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        with _arrow_errors_as_os_errors(), self._fs.open_output_stream(self._path(name)) as stream:
            for piece in pieces:
                stream.write(piece)

    def sync(self, name: str = "") -> None:
        """Do nothing: these filesystems have no such call, and a closed file is durable."""

    def move(self, name: str, to: str) -> None:
        with _arrow_errors_as_os_errors():
            self._fs.move(self._path(name), self._path(to))

    def delete(self, name: str) -> None:
        with _arrow_errors_as_os_errors():
            self._fs.delete_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def scratch(size: int) -> memoryview:
    """Return ``size`` bytes of an unnamed temporary file, mapped into memory; see `World.scratch`."""
    with tempfile.TemporaryFile() as file:
        if hasattr(os, "posix_fallocate"):  # else a write to the mapping would kill the process if the disk is full
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return memoryview(mmap.mmap(file.fileno(), size))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
