"""Processes that this process has started, found by their command lines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


def descendants(word: str, of: psutil.Process | None = None) -> Iterator[psutil.Process]:
    """Yield the living descendants of a process with ``word`` at the end of a part of their command lines.

    Processes may end meanwhile: one that has ended, or waits to be reaped, has no command line.
    """
    for process in (of or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(part.endswith(word) for part in process.cmdline()):
                yield process
