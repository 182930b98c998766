"""The files in one directory: a local one, or what any URI names that Arrow's filesystems open."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from distkeras.ps.errors import ConfigurationError


class Files(Protocol):
    """The files in one directory; every call raises an OSError where it fails."""

    def names(self) -> list[str]:
        """Of all files there, in no order."""

    def read(self, name: str) -> bytes:
        """All of a file."""

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """A file of these bytes, in place of one of that name; what fails may leave some of them."""

    def sync(self, name: str = "") -> None:
        """Has the system write a file out, or which names there are: then it survives a power cut."""

    def move(self, name: str, to: str) -> None:
        """Gives a file another name, at once and in place of one that has it."""

    def delete(self, name: str) -> None:
        """Removes a file."""


class ArrowFiles:
    """Files by way of Arrow.

    Args:
        uri: a local path, or a URI: ``file:``, ``hdfs:``, ``s3:``, ``gs:`` …; made if it is not there.

    Raises:
        ConfigurationError: nothing opens this URI.
        OSError: the directory cannot be made.
    """

    def __init__(self, uri: str) -> None:
        from pyarrow import ArrowException, fs

        try:
            if "://" in uri or uri.startswith("file:"):
                self._fs, self._root = fs.FileSystem.from_uri(uri)
            else:
                self._fs, self._root = fs.LocalFileSystem(), str(Path(uri).absolute())
        except (ArrowException, ValueError) as error:
            raise ConfigurationError(
                f"`checkpoint` must be a directory or a URI that Arrow opens. Received: {uri!r}: {error}"
            ) from error
        self._local = isinstance(self._fs, fs.LocalFileSystem)
        self._arrows = ArrowException
        with self._arrows_too():
            self._fs.create_dir(self._root, recursive=True)

    def names(self) -> list[str]:
        """Of all files there."""
        from pyarrow import fs

        with self._arrows_too():
            return [info.base_name for info in self._fs.get_file_info(fs.FileSelector(self._root))]

    def read(self, name: str) -> bytes:
        """All of a file."""
        with self._arrows_too(), self._fs.open_input_stream(self._path(name)) as stream:
            content: bytes = stream.read()
        return content

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """A file of these bytes."""
        with self._arrows_too(), self._fs.open_output_stream(self._path(name)) as stream:
            for piece in pieces:
                stream.write(piece)

    def sync(self, name: str = "") -> None:
        """Other filesystems than local ones have no such call: what was closed is there."""
        if not self._local:
            return
        descriptor = os.open(self._path(name) if name else self._root, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

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
