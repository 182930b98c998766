"""The rows of tables that a worker's windows touch: those that it requests, and those that it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from distkeras.ps.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from distkeras.ps.protocol.loop import Reply
from distkeras.ps.protocol.tables import NO_IDS, Ids, TableShape, put_rows, spans
from distkeras.ps.rules.base import BatchLike, Rule, Vector


class Window(NamedTuple):
    """The mini-batches of one communication window, and the rows that they touch.

    Args:
        batches: in order; the ids in them are local: row numbers in the replica's small table.
        rows: of each table, strictly ascending, at most its `TableShape.most`.
        places: for each of the ``rows``, its number in the small table, int64; empty: they are in the same order.
    """

    batches: Sequence[BatchLike]
    rows: tuple[Ids, ...]
    places: tuple[np.ndarray, ...] = ()


class TableWindows:
    """Follows the windows of one loop, one window ahead: the reply to a commit contains the next window's rows.

    The replica and the worker half of the rule see one flat vector: the dense variables, then each table as a small
    table of `TableShape.most` rows, which begins with the window's rows and is filled up with zeros.

    Args:
        windows: the windows, of the rule's length; none crosses the end of an epoch.
        outgoing: returns such a vector as memory for the next commit; None: all commits use the same memory.
    """

    def __init__(
        self,
        shapes: Sequence[TableShape],
        dense: int,
        windows: Iterator[Window],
        outgoing: Callable[[], Vector] | None = None,
    ) -> None:
        self._shapes, self._dense, self._spans = tuple(shapes), dense, spans(dense, shapes)
        #: Elements of the vector.
        self.size = self._spans[-1].stop if self._spans else dense
        self._windows = windows
        self._present: Window | None = None
        self._next: Window | None = None
        self._looked_ahead = False
        #: The remaining mini-batches of the present window.
        self._left = 0
        # Two vectors: the rule still reads the previous one while the next one is written.
        self._vectors = [np.zeros(self.size, np.float32), np.zeros(self.size, np.float32)]
        #: The end of the rows in each vector, table by table.
        self._ends = [[span.start for span in self._spans] for _ in self._vectors]
        self._payload = (np.zeros(self.size, np.float32),)
        memory = np.empty(0 if outgoing else self.size, np.float32)
        self._outgoing: Callable[[], Vector] = outgoing or (lambda: memory)

    def __iter__(self) -> Iterator[BatchLike]:
        while (window := self._look_ahead()) is not None:
            self._present, self._next, self._looked_ahead = window, None, False
            self._left = len(window.batches)
            for batch in window.batches:
                self._left -= 1
                yield batch

    def _look_ahead(self) -> Window | None:
        if not self._looked_ahead:
            self._next, self._looked_ahead = next(self._windows, None), True
        return self._next

    @property
    def touched(self) -> tuple[Ids, ...]:
        """The rows of the present window; raise LocalProtocolError if the window is not complete."""
        if self._present is None or self._left:
            raise LocalProtocolError(
                f"a window must be committed at its end. Received: a commit with {self._left} mini-batches left in it"
            )
        return self._present.rows

    @property
    def wants(self) -> tuple[Ids, ...]:
        """The rows of the next window; empty arrays if the data ends."""
        window = self._look_ahead()
        return tuple(NO_IDS for _ in self._shapes) if window is None else window.rows

    def vector(self, reply: Reply) -> Vector:
        """Return the dense center and the rows of ``reply`` as one vector; the previous vector does not change."""
        assert reply.center is not None, "the driver of the loop must answer a pull with the center"
        window = self._present if reply.refused else self._look_ahead()
        asked = self.touched if reply.refused else self.wants
        expected = [ids.size * span.width for ids, span in zip(asked, self._spans, strict=True)]
        if [rows.size for rows in reply.rows] != expected:
            raise RemoteProtocolError(
                f"a reply must have {expected} elements of rows, table by table. "
                f"Received: {[rows.size for rows in reply.rows]}"
            )
        vector, ends = self._vectors[0], self._ends[0]
        self._vectors.reverse()
        self._ends.reverse()
        vector[: self._dense] = reply.center
        for number, (span, rows) in enumerate(zip(self._spans, reply.rows, strict=True)):
            end = span.start + rows.size
            if window is None or not window.places:
                vector[span.start : end] = rows
            else:
                own, width = vector[span.start : end], span.width
                put_rows(own.reshape(-1, width), window.places[number], rows.reshape(-1, width))
            vector[end : ends[number]] = 0
            ends[number] = end
        return vector

    def payload(self) -> tuple[Vector, ...]:
        return self._payload

    def moved(self, part: Vector) -> tuple[Vector, tuple[Vector, ...]]:
        """Return copies of the dense part of a payload and of its `touched` rows of each table, to be sent."""
        touched, out, moved = self.touched, self._outgoing(), list[Vector]()
        out[: self._dense] = part[: self._dense]
        for number, (span, ids) in enumerate(zip(self._spans, touched, strict=True)):
            end = span.start + ids.size * span.width
            own, rows = part[span.start : end], out[span.start : end]
            if self._present is None or not self._present.places:
                rows[...] = own
            else:
                places, shape = self._present.places[number], (-1, span.width)
                np.take(own.reshape(shape), places, axis=0, out=rows.reshape(shape), mode="clip")
            moved.append(rows)
        return out[: self._dense], tuple(moved)


def require_table_windows(rule: Rule, *, overlap: bool) -> None:
    """Raise a ConfigurationError unless a worker may send tables by rows under ``rule``."""
    if not rule.traits.rows or overlap or not isinstance(rule.window, int):
        raise ConfigurationError(
            "tables travel by rows for rules with the trait `rows`, a window in steps, and without overlap. "
            f"Received: rule={rule}, overlap={overlap}"
        )
