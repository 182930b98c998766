"""Versions of a model that one training stream publishes and other processes predict with, in one directory.

A version is the center at the end of a micro-batch, and its name has the number of the micro-batch. A scoring stream
selects one version for each of its own micro-batches, and holds it with a reader file, whose name has the version's
number. Rules:

1. A version is written once. If a micro-batch ends again after a crash, its weights must be the same.
2. A version is published before Spark records that its micro-batch is done. So none is left out.
3. A scoring stream writes its reader file first, then checks that the version is still one of the latest two, and only
   then uses it. The publisher retains at least the latest two, and lists reader files and versions together. So either
   the publisher finds the reader file, or the scoring stream finds that the version is not among the latest two.
4. If a micro-batch of a scoring stream is repeated, it finds its reader file, and is scored with the same version.

Like `ownership`, this needs no lock and no conditional create, only that a list of files shows each file that was
complete before.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distkeras.ps.checkpoint.store import DamagedError, SavePlace, Store, require_same_job, retried
from distkeras.ps.errors import DeadlineError, DifferentJobError, NoVersionError, SnapshotError
from distkeras.ps.transport.deadlines import Backoff
from distkeras.ps.world.world import REAL, World

#: The number of latest versions that are never deleted.
LATEST = 2
#: Seconds for which a version is held at most, longer than a micro-batch takes.
HELD_SECONDS = 86_400
#: How often a micro-batch tries to hold a version while newer ones are published.
_ATTEMPTS = 10
#: The first and the longest pause of a wait for the first version, in seconds.
_FIRST, _LONGEST = 0.05, 1.0
#: The file with the model, as an archive; the versions contain only weights.
_MODEL = "model"
_VERSION = re.compile(r"version-(\d{10})-([0-9a-f]{16})-([0-9a-f]{16})")
_READER = re.compile(r"reader-([0-9a-f]{16})-(\d{10})-(\d{10})-(\d{10})")


@dataclass(frozen=True)
class Versions(SavePlace):
    """Where and how often a stream's versions are published.

    Args:
        uri: a directory, or a URI that Arrow's filesystems open; only one stream may use it.
        every: micro-batches from one version to the next, at least 1.
        keep: number of versions to keep, at least 2. A version that a scoring stream uses is kept in addition.

    Raises:
        ConfigurationError: ``uri`` is not a text, or a number is too small.
    """

    keep_min = LATEST


class Version(NamedTuple):
    """The name of a version: number of the micro-batch that it ends, digests of the stream and of the weights."""

    number: int
    stream: str
    digest: str

    def __str__(self) -> str:
        return f"version-{self.number:010d}-{self.stream}-{self.digest}"


class _VersionReader(NamedTuple):
    """The name of a reader file: query and micro-batch of the scoring stream, number of the held version, and time."""

    query: str
    batch: int
    number: int
    seconds: int

    def __str__(self) -> str:
        return f"reader-{self.query}-{self.batch:010d}-{self.number:010d}-{self.seconds:010d}"


class _Listed(NamedTuple):
    versions: list[Version]
    readers: list[_VersionReader]


def version_named(text: str) -> Version | None:
    """Return the version with the name ``text``; None if it is the name of another file."""
    match = _VERSION.fullmatch(text)
    return None if match is None else Version(int(match[1]), match[2], match[3])


def _reader_named(text: str) -> _VersionReader | None:
    match = _READER.fullmatch(text)
    return None if match is None else _VersionReader(match[1], int(match[2]), int(match[3]), int(match[4]))


def _short(*parts: Any) -> str:
    """Return 16 hexadecimal digits that identify ``parts``, which are bytes or arrays."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def model_key(identity: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits for the ``identity`` that a model's versions share; see `VersionFolder.take`."""
    return _short(json.dumps(identity, sort_keys=True).encode())


class VersionFolder:
    """The versions in the directory ``uri``; without ``create``, one that does not exist has none."""

    def __init__(self, uri: str, world: World = REAL, *, create: bool = False) -> None:
        self.uri, self._world = uri, world
        self._store = Store(uri, world, create=create)
        self._key = ""

    def take(self, identity: Mapping[str, Any], archive: Callable[[], bytes]) -> None:
        """Begin to publish: write the model, unless it exists; remove the incomplete versions of an earlier publisher.

        All versions share ``identity`` (JSON values); ``archive`` returns the model as a ``.keras`` archive.
        """
        self._store.check()
        if _MODEL in self._store.names():
            header, _ = self._read(_MODEL)
            require_same_job(identity, header["identity"], self.uri)
        else:
            self._store.save(_MODEL, {"identity": identity}, {"archive": np.frombuffer(archive(), np.uint8)})
        self._key = model_key(identity)
        drafts = self._store.drafts()
        self._store.delete_drafts(name for name in drafts if version_named(name) is not None)

    def require_stream(self, stream: str, number: int) -> list[Version]:
        """Return all versions, after a check that they belong to ``stream`` and to micro-batches up to ``number``."""
        versions = self._list().versions
        own = _short(stream.encode())
        other = next((version for version in versions if version.stream != own), None)
        if other is not None:
            raise DifferentJobError(
                f"`publish` must be a directory for this stream only. Received: {self.uri!r} with version "
                f"{other.number} of another stream"
            )
        if versions and versions[-1].number > number:
            raise DifferentJobError(
                f"`publish` must have versions up to micro-batch {number}, which is the present one. "
                f"Received: {self.uri!r} with version {versions[-1].number}. Publish to another directory"
            )
        return versions

    def publish(
        self,
        stream: str,
        number: int,
        center: np.ndarray,
        moving_statistics: np.ndarray,
        rows: Callable[[Version | None], Mapping[str, Any]] | None = None,
    ) -> Version:
        """Write a version of micro-batch ``number``, unless it exists; retried for a while.

        ``rows`` writes the rows of tables, given the version before, and returns what `rows_of` returns later.
        """
        version = Version(number, _short(stream.encode()), _short(center.data, moving_statistics.data))
        versions = retried(lambda: self.require_stream(stream, number), world=self._world)
        if versions and versions[-1].number == number:
            if versions[-1] != version:
                raise DifferentJobError(
                    f"version {number} in {self.uri!r} must have the weights that the stream has at the end of "
                    "that micro-batch. They differ, because the checkpoint went back to an older snapshot. Publish to "
                    "another directory"
                )
            return version
        header: dict[str, Any] = {"model": self._key}
        if rows is not None:
            before, write_rows = versions[-1] if versions else None, rows
            header["rows"] = retried(lambda: write_rows(before), world=self._world)
        arrays = {"center": center, "moving_statistics": moving_statistics}
        retried(lambda: self._store.save(str(version), header, arrays), world=self._world)
        return version

    def prune(self, keep: int) -> None:
        """Delete all versions except the latest ``keep`` and those that are held; delete expired reader files."""
        oldest = int(self._world.time()) - HELD_SECONDS
        versions, readers = self._list()
        held = {reader.number for reader in readers if reader.seconds >= oldest}
        doomed: list[object] = [version for version in versions[:-keep] if version.number not in held]
        self._store.delete(map(str, [*doomed, *(reader for reader in readers if reader.seconds < oldest)]))
        drafts = {text: _reader_named(text) for text in self._store.drafts()}
        self._store.delete_drafts(text for text, reader in drafts.items() if reader and reader.seconds < oldest)

    def versions(self) -> list[Version]:
        return self._list().versions

    def latest(self, timeout: float = 0.0) -> Version:
        """Return the latest version; NoVersionError if none is published within ``timeout`` seconds."""
        backoff = Backoff(first=_FIRST, longest=_LONGEST, timeout=timeout, world=self._world)
        while True:
            versions = self.versions()
            if versions:
                return versions[-1]
            if not backoff.pause():
                waited = f" after {timeout:g} s" if timeout else ""
                raise NoVersionError(
                    f"{self.uri!r} must have a version of a model. Received: none{waited}. A training stream publishes "
                    "the first one at the end of a micro-batch"
                )

    def hold(self, query: str, batch: int) -> Version:
        """Return the version for micro-batch ``batch`` of the scoring stream ``query``: the latest at the first call.

        It is not deleted until this is called for the query's next micro-batch, or `HELD_SECONDS` have passed.
        """
        query = _short(query.encode())
        for _ in range(_ATTEMPTS):
            versions, readers = self._list()
            own = [reader for reader in readers if reader.query == query]
            since = int(self._world.time()) - HELD_SECONDS // 2  # long before the publisher treats it as expired
            held = {reader.number for reader in own if reader.batch == batch and reader.seconds >= since}
            again = next((version for version in versions if version.number in held), None)
            if again is not None:
                return again
            version = versions[-1] if versions else self.latest()
            reader = _VersionReader(query, batch, version.number, int(self._world.time()))
            self._store.save(str(reader), {}, {})
            if version in self._list().versions[-LATEST:]:
                self._store.delete(str(old) for old in own if old.batch < batch)
                return version
            self._store.delete([str(reader)])
        raise DeadlineError(
            f"no version of {self.uri!r} could be chosen in {_ATTEMPTS} tries: each time, newer ones were published. "
            "Publish less often (`Versions(every=…)`)"
        )

    def load(self, version: Version, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return center and moving statistics of a version, float32; ``key`` is that of the model that predicts."""
        header, arrays = self._read(str(version))
        if header["model"] != key:
            raise DifferentJobError(
                f"version {version.number} in {self.uri!r} must be of the model that predicts. Received: a version of "
                "another model. Make the scoring model again"
            )
        return arrays["center"], arrays["moving_statistics"]

    def rows_of(self, version: Version) -> Mapping[str, Any]:
        """Return what is known of the rows of tables in a version; empty: it has none."""
        try:
            header = retried(lambda: self._store.header(str(version)), world=self._world)
        except DamagedError as error:  # as in `_read`
            raise SnapshotError(error.message) from error
        found: Mapping[str, Any] = header.get("rows", {})
        return found

    def model(self) -> tuple[bytes, str]:
        """Return the model as a ``.keras`` archive, and its `model_key`."""
        header, arrays = self._read(_MODEL)
        return arrays["archive"].tobytes(), model_key(header["identity"])

    def _read(self, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        try:
            return retried(lambda: self._store.load(name), world=self._world)
        except DamagedError as error:  # it is not in `ERRORS`, so it would lose its type on the way from a task
            raise SnapshotError(error.message) from error

    def _list(self) -> _Listed:
        names = self._store.names()
        versions = sorted(version for version in map(version_named, names) if version is not None)
        return _Listed(versions, [reader for reader in map(_reader_named, names) if reader is not None])
