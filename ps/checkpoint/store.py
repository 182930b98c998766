"""Files of named arrays in one directory.

A file is written under another name and then moved, so that it is visible only when it is complete. A checksum over
all of its bytes detects damage by a broken disk::

    magic 8 | header 8 (big-endian length) | JSON | the arrays' raw bytes, one after the other | CRC-32 4

The JSON object has the caller's ``header`` and the table of the arrays (name, dtype, shape). `require_same_job`
compares the job in a header with the present job.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from distkeras.ps.errors import ConfigurationError, DifferentJobError, SnapshotError
from distkeras.ps.transport.deadlines import Backoff
from distkeras.ps.validate import check_field, invalid, require_integer
from distkeras.ps.world.files import Files, require_place, write_whole
from distkeras.ps.world.world import REAL, World

#: The digit is the version of the format, including the content of the headers.
_MAGIC = b"DKSTORE8"
_LENGTH = struct.Struct(">Q")
_CHECKSUM = struct.Struct(">I")
_SUFFIX, _DRAFT = ".dks", ".dks.part"
_DTYPES = ("|u1", "<i8", "<f4", "<f8")

#: The retries of a failed call: the first and the longest pause, and the total time, in seconds.
FIRST, LONGEST, PATIENCE = 0.1, 2.0, 10.0
#: That time for a job that begins.
PATIENCE_TO_BEGIN = 30.0
#: Errors of a check that will come again: the place itself is wrong.
_LASTING = (PermissionError, NotADirectoryError)

Arrays = Mapping[str, np.ndarray]
_T = TypeVar("_T")


class DamagedError(SnapshotError):
    """A file is missing or damaged, and reading it again will not help."""


def retried(
    call: Callable[[], _T],
    patience: float = PATIENCE,
    *,
    world: World = REAL,
    record_activity: Callable[[], object] = lambda: None,
    lasting: tuple[type[OSError], ...] = (),
) -> _T:
    """Return ``call()``, retried after a SnapshotError for ``patience`` seconds: a disk may be full for a while.

    A SnapshotError whose cause is one of ``lasting`` is raised at once.
    """
    backoff = Backoff(first=FIRST, longest=LONGEST, timeout=patience, world=world)
    while True:
        try:
            return call()
        except DamagedError:
            raise
        except SnapshotError as error:
            if isinstance(error.__cause__, lasting) or not backoff.pause():
                raise
            record_activity()


@dataclass(frozen=True)
class SavePlace:
    """A directory of files that a job saves at an interval of ``every``; it keeps ``keep``, at least ``keep_min``.

    A relative path is made absolute here, since other processes use it, and a caller may change the working directory.
    """

    keep_min: ClassVar[int] = 1

    uri: str
    every: int = 1
    keep: int = 3

    def __post_init__(self) -> None:
        uri = os.fspath(self.uri) if isinstance(self.uri, os.PathLike) else self.uri
        object.__setattr__(self, "uri", require_place("uri", uri, "a directory, or a URI"))
        check_field(self, "every", require_integer)
        check_field(self, "keep", require_integer, self.keep_min)

    @classmethod
    def of(cls, argument: str, value: Any) -> Self | None:
        """Return the place for the ``value`` of an ``argument``, None for None; raise ConfigurationError if invalid."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise invalid(argument, value, f"a directory, a URI, or `{cls.__name__}`")
        return cls(os.fspath(value))

    def check(self, world: World = REAL) -> None:
        """Check that files can be kept there, as `Store.check` does; a store may be unreachable for a while."""
        retried(lambda: Store(self.uri, world).check(), PATIENCE_TO_BEGIN, world=world, lasting=_LASTING)


class Store:
    """A directory of such files, at a local path or a URI. Without ``create``, one that does not exist has no files."""

    def __init__(
        self,
        uri: str,
        world: World = REAL,
        record_activity: Callable[[], object] = lambda: None,
        *,
        create: bool = True,
    ) -> None:
        self.uri, self._world, self._create = uri, world, create
        self._record_activity = record_activity
        #: Drafts that are being written, or that could not be removed after a failed write.
        self._stray: set[str] = set()
        #: The file that was written last: a list without it is not complete.
        self._written = ""
        try:
            self._files  # noqa: B018 - opened now, so that a wrong URI is refused
        except OSError as error:
            if create or not isinstance(error, FileNotFoundError):
                raise SnapshotError(
                    f"the directory {uri!r} cannot be opened: {error}. Check the URI and its permissions"
                ) from error

    @functools.cached_property
    def _files(self) -> Files:
        return self._world.files(self.uri, create=self._create)

    def check(self) -> None:
        """Write, list, read and delete a small file, before any work.

        Raises:
            ConfigurationError: the store does not do what the users of this class rely on.
            SnapshotError: it cannot be reached, or it does not allow one of the four.
        """
        # The folder of groups, too, takes a file of this name for one of a claim that was not completed.
        name, content = f"owner-probe-{self._world.token(4).hex()}{_DRAFT}", b"distkeras"
        must = f"the store of {self.uri!r} must"
        try:
            self._files.write(name, [content])
            listed, read = name in self._files.names(), b"".join(self._files.read(name))
            self._files.delete(name)
        except OSError as error:
            with contextlib.suppress(OSError):  # a full disk keeps an empty file
                self._files.delete(name)
            raise SnapshotError(f"{must} let files be written, listed, read and deleted. Received: {error}") from error
        if not listed:
            raise ConfigurationError(f"{must} list a file once it is written. Received: a list without {name}")
        if read != content:
            raise ConfigurationError(f"{must} return the bytes that were written: {content!r}. Received: {read!r}")

    def names(self) -> list[str]:
        """Return the names of the complete files, in alphabetical order.

        The proofs in `ownership` and `versions` need lists that are complete. So a list that lacks the file which was
        written last, while that can be read, is repeated for a while, and then refused.
        """
        backoff = Backoff(first=FIRST, longest=LONGEST, timeout=PATIENCE, world=self._world)
        while True:
            names = self._names_with(_SUFFIX)
            if not self._written or self._written in names or not self._exists(self._written):
                return names
            if not backoff.pause():
                raise SnapshotError(
                    f"a list of {self.uri!r} must have each file that was written before. Received: one without "
                    f"{self._written}, {PATIENCE:g} s after that was written"
                )

    def _exists(self, name: str) -> bool:
        """Return whether a file can be read: another owner may have deleted it."""
        try:
            self._content(name, enough=bool)
        except DamagedError:
            return False
        return True

    def drafts(self) -> list[str]:
        """Return the names of the incomplete files: their writers were killed, or are writing now."""
        return self._names_with(_DRAFT)

    def _names_with(self, suffix: str) -> list[str]:
        try:
            all_names = self._files.names()
        except OSError as error:
            if not self._create and isinstance(error, FileNotFoundError):
                return []
            raise SnapshotError(f"the directory {self.uri!r} cannot be read: {error}") from error
        return sorted(name[: -len(suffix)] for name in all_names if name.endswith(suffix))

    def save(self, name: str, header: Mapping[str, Any], arrays: Arrays) -> None:
        """Write one file, with arrays of float32, float64, int64 or uint8; replace a file of the same name."""
        table = [[key, array.dtype.str, list(array.shape)] for key, array in arrays.items()]
        text = json.dumps({"header": header, "arrays": table}).encode()
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()]
        pieces = [_MAGIC, _LENGTH.pack(len(text)), text, *flat]
        draft = name + _DRAFT
        self._stray.add(draft)
        try:
            write_whole(self._files, name + _SUFFIX, draft, _with_checksum(pieces))
            self._stray.discard(draft)
            self._written = name
        except OSError as error:
            raise SnapshotError(f"{name} cannot be written to {self.uri!r}: {error}") from error
        finally:
            self._stray = {stray for stray in self._stray if not self._discard(stray)}

    def load(self, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the header and the arrays of one file; DamagedError if it is damaged, SnapshotError for now."""
        content = self._content(name)
        body, checksum = memoryview(content)[: -_CHECKSUM.size], bytes(content[-_CHECKSUM.size :])
        if body[: len(_MAGIC)] != _MAGIC:
            magic = bytes(body[: len(_MAGIC)])
            raise DamagedError(
                f"{name} in {self.uri!r} is damaged, or of another version: it must begin with {_MAGIC!r}. "
                f"Received: {magic!r}"
            )
        if _CHECKSUM.pack(zlib.crc32(body)) != checksum:
            raise DamagedError(f"{name} in {self.uri!r} is damaged: its {len(content)} bytes have another checksum")
        start = len(_MAGIC) + _LENGTH.size
        (length,) = _LENGTH.unpack_from(body, len(_MAGIC))
        header = json.loads(bytes(body[start : start + length]))
        arrays, at = {}, start + length
        for key, dtype, shape in header["arrays"]:
            if dtype not in _DTYPES:
                raise DamagedError(f"{name} in {self.uri!r} must hold arrays of {_DTYPES}. Received: {dtype!r}")
            count = int(np.prod(shape, dtype=np.int64))
            arrays[key] = np.frombuffer(body, dtype, count, at).reshape(shape)
            at += arrays[key].nbytes
        return header["header"], arrays

    def header(self, name: str) -> dict[str, Any]:
        """Return the header of one file, without reading the rest or verifying the checksum."""
        start = len(_MAGIC) + _LENGTH.size

        def has_header(content: bytearray) -> bool:
            return len(content) >= start and len(content) >= start + _LENGTH.unpack_from(content, len(_MAGIC))[0]

        content = self._content(name, has_header)
        try:
            (length,) = _LENGTH.unpack_from(content, len(_MAGIC))
            header: dict[str, Any] = json.loads(bytes(content[start : start + length]))["header"]
        except (struct.error, ValueError, LookupError, TypeError) as error:
            raise DamagedError(f"{name} in {self.uri!r} has no header that can be read: {error}") from error
        return header

    def _content(self, name: str, enough: Callable[[bytearray], bool] = lambda content: False) -> bytearray:
        """Return a file's bytes, or its first bytes as soon as they are ``enough``."""
        content = bytearray()
        try:
            for piece in self._files.read(name + _SUFFIX):
                content += piece
                self._record_activity()
                if enough(content):
                    break
        except FileNotFoundError as error:
            raise DamagedError(f"there is no {name} in {self.uri!r}: {error}") from error
        except OSError as error:
            raise SnapshotError(f"{name} in {self.uri!r} cannot be read: {error}") from error
        return content

    def delete(self, names: Iterable[str]) -> None:
        """Delete these files; errors are ignored."""
        for name in names:
            if name == self._written:
                self._written = ""
            self._discard(name + _SUFFIX)

    def delete_drafts(self, names: Iterable[str]) -> None:
        """Delete these `drafts`; errors are ignored."""
        for name in names:
            self._discard(name + _DRAFT)

    def _discard(self, name: str) -> bool:
        """Delete a file; return whether it is gone."""
        try:
            self._files.delete(name)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _with_checksum(pieces: Iterable[Any]) -> Iterator[Any]:
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
        yield piece
    yield _CHECKSUM.pack(checksum)


#: Differences that an error names, and characters of each value.
_NAMED, _LONGEST_TEXT = 3, 120


def require_same_job(own: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Raise a DifferentJobError that names what differs, unless ``own`` and ``saved`` (JSON values) are the same job.

    Keys that only ``saved`` has are ignored. ``where`` names the saved job's directory.
    """
    differing = list(differences(own, {name: saved.get(name) for name in own}))
    if differing:
        path, ours, theirs = differing[0]
        others = [f"`{path}`" for path, _, _ in differing[1:_NAMED]]
        if len(differing) > _NAMED:
            others.append(f"{len(differing) - _NAMED} more")
        also = f"; also different: {', '.join(others)}" if others else ""
        raise DifferentJobError(
            f"`{path}` must be {_short(theirs)}, as in the job that {where!r} holds. Received: {_short(ours)}{also}"
        )


def differences(own: Any, saved: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each place in which two JSON values differ: its path, and both values."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        for name in {**own, **saved}:
            yield from differences(own.get(name), saved.get(name), f"{path}.{name}" if path else name)
    elif isinstance(own, list) and isinstance(saved, list) and len(own) == len(saved):
        for number, (ours, theirs) in enumerate(zip(own, saved, strict=True)):
            yield from differences(ours, theirs, f"{path}.{number}")
    elif own != saved:
        yield path, own, saved


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
