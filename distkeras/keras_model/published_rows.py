"""The rows of the versions that a stream publishes: all rows from time to time, and between them the changes.

They are in a folder within that of the versions. A version has a list of files for each table: see `stored_rows`.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distkeras.keras_model.stored_rows import Block, SavedRows, listed_files, write_files, write_list
from distkeras.ps.errors import ConfigurationError, DistkerasError, SnapshotError
from distkeras.ps.protocol.driver_messages import ALL_ROWS
from distkeras.ps.protocol.tables import NO_IDS, Ids, TableShape
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.files import below, open_files

log = logging.getLogger(__name__)

#: All rows are written again when the changes have more than this share of as many rows.
SHARE = 0.5
_FOLDER, _PREFIX = "rows", "rows-"
#: Digits of a version's number in the names of its files.
_DIGITS = 10


def published_rows(uri: str, rows: Mapping[str, Any], table: str) -> SavedRows:
    """Return where the rows of a table are, by what `PublishedRows.write` has returned for a version in ``uri``."""
    name, checksum = rows["lists"][table]
    return SavedRows(below(below(uri, _FOLDER), name), checksum)


class PublishedRows:
    """Writes the rows of ``tables``, with their numbers, for the versions in the directory ``uri``."""

    def __init__(self, uri: str, tables: Sequence[tuple[int, TableShape]]) -> None:
        self.tables, self._uri = tables, uri

    def write(self, driver: DriverClient, number: int, before: Mapping[str, Any]) -> dict[str, Any]:
        """Write the rows of version ``number``, and return what its header has of them, JSON-ready.

        Args:
            before: the same of the version before; empty: there is none.

        Raises:
            SnapshotError: a file cannot be written, or one of the version before cannot be read now.
        """
        earlier: dict[str, list[dict[str, Any]]] = {}
        try:
            earlier = {table.name: self._files_of(before, table) for _, table in self.tables} if before else {}
        except ConfigurationError as error:
            log.warning("the next version has all rows, because the one before is damaged: %s", error.message)
        begun = driver.begin_changes(before["clock"] if earlier else ALL_ROWS)
        lists = {}
        try:
            files = open_files(below(self._uri, _FOLDER))
            for place, table in self.tables:
                prefix = f"{_PREFIX}{number:0{_DIGITS}d}-{place}-{uuid.uuid4().hex[:8]}"
                if not begun.known or _whole_is_due(earlier[table.name]):
                    listed = list(write_files(files, prefix, driver.touched(place, table)))
                else:
                    gone: list[Ids] = []
                    changed = _changed(driver, place, table, gone)
                    listed = [*earlier[table.name], *write_files(files, prefix, changed, change=True)]
                    ids = np.concatenate([NO_IDS, *gone])
                    blocks = [(ids, np.empty((len(ids), 0), np.float32))] if len(ids) else []
                    listed += write_files(files, f"{prefix}-gone", blocks, change=True, gone=True)
                name = f"{prefix}.json"
                lists[table.name] = name, write_list(files, name, listed)
        except OSError as error:
            if isinstance(error, DistkerasError):  # a lost server is both
                raise
            raise SnapshotError(f"rows cannot be written to {self._uri!r}: {error}") from error
        return {"clock": begun.clock, "lists": lists}

    def prune(self, number: int, kept: Sequence[Mapping[str, Any]]) -> None:
        """Delete the files of versions before ``number`` that none of those ``kept`` needs; errors are ignored."""
        with contextlib.suppress(SnapshotError, ConfigurationError, OSError):
            needed = {name for rows in kept for name, _ in rows["lists"].values()}
            for rows in kept:
                for _, table in self.tables:
                    needed.update(entry["name"] for entry in self._files_of(rows, table))
            files = open_files(below(self._uri, _FOLDER))
            for name in files.names():
                digits = name.removeprefix(_PREFIX)[:_DIGITS]
                if name not in needed and digits.isdecimal() and int(digits) < number:
                    files.delete(name)

    def _files_of(self, rows: Mapping[str, Any], table: TableShape) -> list[dict[str, Any]]:
        """Return the entries of a version's files; SnapshotError if they cannot be read now."""
        try:
            return listed_files(published_rows(self._uri, rows, table.name), table)
        except ConfigurationError as error:
            if isinstance(error.__cause__, OSError):
                raise SnapshotError(error.message) from error
            raise


def _whole_is_due(listed: Sequence[Mapping[str, Any]]) -> bool:
    changed = sum(int(entry["rows"]) for entry in listed if entry.get("change"))
    return changed > SHARE * sum(int(entry["rows"]) for entry in listed if not entry.get("change"))


def _changed(driver: DriverClient, place: int, table: TableShape, gone: list[Ids]) -> Iterator[Block]:
    """Yield the rows that have changed, and append the ids that are gone to ``gone``."""
    for ids, rows, lost in driver.changes(place, table):
        gone.append(lost)
        if len(ids):
            yield ids, rows
