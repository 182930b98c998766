"""The log records of a test, without those of threads that earlier tests have left."""

from __future__ import annotations

import logging

import pytest


def records(caplog: pytest.LogCaptureFixture, logger: str) -> list[logging.LogRecord]:
    """Return the records of a logger and of its children."""
    return [record for record in caplog.records if f"{record.name}.".startswith(f"{logger}.")]


def texts(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    return [record.getMessage() for record in records(caplog, logger)]
