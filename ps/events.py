"""Events: log records with a kind, and their way from process to process.

An event is a log record with three more fields: ``event``, its kind, and the ``worker`` and ``attempt`` that it
concerns. So the log has all events, and `Events` collects them for a table. A server in a separate process writes each
record as one line of JSON (`JsonFormatter`), which its driver reads (`record_from_json`).
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from typing import NamedTuple

#: Characters of a line that are read at most, far more than any record has.
_LONGEST = 64 * 1024


class Event(NamedTuple):
    """One event: seconds since the epoch, the process where it happened, its kind, worker and attempt, and a text."""

    timestamp: float
    source: str
    kind: str
    worker: int | None
    attempt: int | None
    text: str


def report(
    log: logging.Logger,
    kind: str,
    text: str,
    *args: object,
    worker: int | None = None,
    attempt: int | None = None,
    level: int = logging.WARNING,
) -> None:
    """Log an event; ``text`` and ``args`` are as for `logging.Logger.log`."""
    log.log(level, text, *args, extra={"event": kind, "worker": worker, "attempt": attempt}, stacklevel=2)


class JsonFormatter(logging.Formatter):
    """Formats each record as one line of JSON, with the traceback in the text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, which `record_from_json` reads."""
        values = {
            "name": record.name,
            "level": record.levelno,
            "time": record.created,
            "text": super().format(record),
            "event": getattr(record, "event", None),
            "worker": getattr(record, "worker", None),
            "attempt": getattr(record, "attempt", None),
        }
        return json.dumps(values)


def record_from_json(line: str) -> logging.LogRecord | None:
    """Return the record that `JsonFormatter` wrote; None for another line."""
    try:
        values = json.loads(line[:_LONGEST])
        fields = {
            "name": str(values["name"]),
            "levelno": int(values["level"]),
            "levelname": logging.getLevelName(int(values["level"])),
            "created": float(values["time"]),
            "msg": str(values["text"]),
        }
        fields |= {name: values[name] for name in ("event", "worker", "attempt")}
    except (ValueError, TypeError, KeyError, IndexError, OverflowError):
        return None
    return logging.makeLogRecord(fields)


class Events:
    """The latest events of one job, at most ``most``, oldest first; thread-safe."""

    def __init__(self, most: int = 10_000) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=most)
        self._count = 0

    def add(self, record: logging.LogRecord, source: str) -> None:
        """Add ``record``, if it is an event."""
        kind = getattr(record, "event", None)
        if kind is not None:
            worker, attempt = getattr(record, "worker", None), getattr(record, "attempt", None)
            with self._lock:
                self._events.append(Event(record.created, source, kind, worker, attempt, record.getMessage()))
                self._count += 1

    def report(
        self,
        log: logging.Logger,
        kind: str,
        text: str,
        *args: object,
        worker: int | None = None,
        attempt: int | None = None,
        level: int = logging.WARNING,
    ) -> None:
        """Log an event of the driver and collect it, regardless of the levels of the loggers."""
        fields = {"event": kind, "worker": worker, "attempt": attempt}
        record = log.makeRecord(log.name, level, __file__, 0, text, args, None, extra=fields)
        self.add(record, "driver")
        handle(record)

    def all(self) -> list[Event]:
        with self._lock:
            return sorted(self._events, key=lambda event: event.timestamp)

    def since(self, count: int) -> tuple[list[Event], int]:
        """Return the retained events after the first ``count``, and the total number of events so far."""
        with self._lock:
            new = min(self._count - count, len(self._events))
            return list(self._events)[len(self._events) - new :] if new else [], self._count


def handle(record: logging.LogRecord) -> None:
    """Pass a record from another process to the logger of its name."""
    log = logging.getLogger(record.name)
    if log.isEnabledFor(record.levelno):
        log.handle(record)
