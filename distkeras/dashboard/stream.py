"""Server-sent events, of a journal's lines."""

from __future__ import annotations

from collections.abc import Sequence

from distkeras.dashboard.journal import Entry

STREAM_TYPE = "text/event-stream"


def as_events(entries: Sequence[Entry], retry_ms: int = 1000) -> bytes:
    """The lines as events, each with its id; without any, a comment that shows that the stream lives.

    Args:
        entries: lines of JSON, which have no line breaks.
        retry_ms: when a stream that has ended is to be asked for again.
    """
    parts = [f"id: {entry.id}\ndata: {entry.data}\n\n" for entry in entries] or [": alive\n\n"]
    return (f"retry: {retry_ms}\n\n" + "".join(parts)).encode()
