"""The journal of a job: a file with its record and all changes. A browser continues after its last line."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STREAM_TYPE = "text/event-stream"


def as_events(entries: Sequence[Entry]) -> bytes:
    """Return the lines as server-sent events with ids; without lines, a comment that keeps the connection open.

    One second after the end of the stream, a browser requests it again.
    """
    parts = [f"id: {entry.id}\ndata: {entry.data}\n\n" for entry in entries] or [": alive\n\n"]
    return ("retry: 1000\n\n" + "".join(parts)).encode()


#: The least bytes of changes after which the file is written again.
_SINCE_MIN = 256 << 10
_ID = re.compile(r"([0-9a-f]{16})-(\d{1,12})")


class Entry(NamedTuple):
    """A line of a journal: its JSON, and the id by which a reader asks for the lines after it."""

    id: str
    data: str


class Journal:
    """Writes the journal of a job: a line with the name of the edition, a line with the whole record, and the changes.

    When the changes are longer than the whole record, a new edition begins. The file therefore has at most about twice
    the bytes of the record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._since, self._most = 0, 0

    @property
    def full(self) -> bool:
        """Return whether a new edition is due."""
        return self._since >= self._most

    def begin(self, whole: Mapping[str, Any]) -> None:
        """Replace the file by a new edition; a reader finds either of the two. After an OSError, a new one is due."""
        line = _line(whole)
        self._since, self._most = 0, 0
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_bytes(_line({"edition": secrets.token_hex(8)}) + line)
        partial.chmod(0o600)
        partial.replace(self.path)
        self._most = max(_SINCE_MIN, len(line))

    def add(self, more: Mapping[str, Any]) -> None:
        """Append changes. After an OSError, a new edition is due."""
        line = _line(more)
        try:
            with self.path.open("ab") as file:
                file.write(line)
        except OSError:
            self._most = 0
            raise
        self._since += len(line)


def read_since(path: Path, last_id: str = "") -> list[Entry]:
    """Return the lines of a journal after a known one, or all lines if that line is from another edition.

    Args:
        path: the path of the file; a missing file has no lines.
        last_id: the id of the last known line.
    """
    try:
        with path.open("rb") as file:
            head = file.readline()
            edition = _edition(head)
            match = _ID.fullmatch(last_id)
            offset = len(head)
            if match is not None and match[1] == edition:
                offset = max(offset, int(match[2]))
            file.seek(offset)
            rest = file.read()
    except FileNotFoundError:
        return []
    entries = []
    for line in rest[: rest.rfind(b"\n") + 1].splitlines(keepends=True):
        offset += len(line)
        entries.append(Entry(f"{edition}-{offset}", line.decode("utf-8").rstrip("\n")))
    return entries


def _edition(head: bytes) -> str:
    try:
        return str(json.loads(head)["edition"])
    except (ValueError, KeyError, TypeError):
        return ""


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"
