"""What a job says of itself while it trains: lines of JSON, which the server only reads."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from distkeras.callbacks import Callback, CallbackContext, TrainingSetup

#: Seconds from one look at the job to the next.
_EVERY = 1.0


class ProgressLines(Callback):
    """Writes a line when training begins, one every second while there is news, and one at its end.

    Args:
        path: of the file, which is gone on with.
        attempt: which driver of the job this is.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        super().__init__(every_seconds=_EVERY)
        self._path = path
        self._attempt = attempt
        self._clock = -1

    def on_begin(self, setup: TrainingSetup) -> None:
        """Tells that the job is about to train."""
        append(self._path, {"kind": "training", "attempt": self._attempt, "metrics": list(setup.metrics)})

    def on_center(self, context: CallbackContext) -> None:
        """Tells how it gets on."""
        if context.status.clock != self._clock:
            self._tell(context)

    def on_end(self, context: CallbackContext) -> None:
        """Tells how it ended."""
        self._tell(context)

    def _tell(self, context: CallbackContext) -> None:
        status = context.status
        self._clock = status.clock
        names = ("clock", "batches", "samples", "loss", "staleness", "joined", "finished", "epochs")
        row = {name: getattr(status, name) for name in names}
        append(self._path, {"kind": "status", "seconds": context.seconds, "final": context.final} | row)


class EventLines(logging.Handler):
    """Writes a line for each event of the trainer and of its parameter server; see `distkeras.ps.events`.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record, if it is an event."""
        kind = getattr(record, "event", None)
        if kind is not None:
            about = {name: getattr(record, name, None) for name in ("worker", "attempt")}
            append(self._path, {"kind": "event", "event": kind, "text": record.getMessage()} | about)


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a line in one piece, even while other processes add lines."""
    row = {"time": time.time()} | {name: _finite(value) for name, value in row.items()}
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(row).encode() + b"\n")
    finally:
        os.close(file)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
