"""The driver's client for a center that is divided among shards.

Vectors and rows go to and come from the shards, at the same time, and everything else is exchanged with the sequencer.
What the driver reads or changes as a whole has a ticket, so that all shards do it at the same commit. Rows that
the driver reads in blocks are those at the latest ticket, or later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from distkeras.ps.errors import DistkerasError, LeaseLostError
from distkeras.ps.protocol import driver_messages, messages
from distkeras.ps.protocol.driver_messages import Inspect, InspectRows, PublishRows, RowsPublished, TableRows
from distkeras.ps.protocol.loop import NO_BYTES, NO_FLOATS
from distkeras.ps.protocol.messages import Ack, CenterReply, Message
from distkeras.ps.protocol.shard_messages import (
    AskTicket,
    DividedInspect,
    DividedRemoval,
    DividedReply,
    LatestTicket,
    ListShards,
    PublishSize,
    PublishSlice,
    ReadRows,
    Shards,
)
from distkeras.ps.protocol.tables import NO_IDS, Ids, TableShape, block_rows
from distkeras.ps.rules.base import Vector
from distkeras.ps.shards.cut import Cut
from distkeras.ps.shards.links import ZERO, ShardLink, ShardLinks
from distkeras.ps.transport.driver_client import DriverClient

_T = TypeVar("_T")
#: Bytes of the random number of a request; a ticket holds it exactly.
_REQUEST_BYTES = 6
#: How often a read is tried that shards have replaced by later ones.
_TRIES = 8


class SpreadDriverClient(DriverClient):
    """The driver's connections to the sequencer and to all shards; arguments as for `Client`."""

    _links: ShardLinks | None = None
    #: Whether the center was published when `_links` were made, so that they know its size.
    _published = False

    def close(self) -> None:
        self._close_links()
        super().close()

    def _close_links(self) -> None:
        links, self._links, self._published = self._links, None, False
        if links is not None:
            links.close()

    def _connected(self) -> ShardLinks:
        if self._links is None:
            timeout = self.deadlines.publish + self.reply_timeout
            shards = self.request(ListShards(), Shards, timeout)
            self._links = ShardLinks(shards, self.address, self.deadlines, name="driver", world=self.world)
        return self._links

    def _reading(self) -> ShardLinks:
        """Return the connections once the center is published; a restarted server may have none yet."""
        if not self._published:
            self.request(AskTicket(), LatestTicket, self.deadlines.publish + self.reply_timeout)
            self._close_links()
            links = self._connected()
            self._published = True
            return links
        return self._connected()

    def _each(self, call: Callable[[int, ShardLink], _T]) -> list[_T]:
        try:
            return self._connected().each(call)
        except BaseException:
            self._close_links()  # a link whose call has failed runs no further one
            raise

    def send_publication(self, message: driver_messages.Publish) -> None:
        center = message.center
        self.request(PublishSize(center.size), Ack)
        links = self._connected()
        cut = links.cut = Cut(center.size, len(links))  # rows may have been published before the size

        def publish(shard: int, link: ShardLink) -> None:
            (elements,) = cut.parts((center,), shard)
            link.request(PublishSlice(center.size, elements, message.moving_statistics.size, message.names), Ack)

        self._each(publish)
        self.request(replace(message, center=ZERO), Ack)
        self._published = True

    def publish_rows(self, tables: Sequence[tuple[TableShape, np.ndarray]]) -> None:
        cut = self._connected().cut

        def publish(shard: int, link: ShardLink) -> None:
            for number, (shape, array) in enumerate(tables):
                own, start, step = cut.own(shape.rows, shard), 0, block_rows(shape)
                while start < len(own):
                    rows = np.ascontiguousarray(array[own[start : start + step]], np.float32).reshape(-1)
                    start = link.request(PublishRows(number, start, rows), RowsPublished).rows

        self._each(publish)

    def publish_touched(self, number: int, shape: TableShape, blocks: Iterable[tuple[Ids, np.ndarray]]) -> None:
        cut, step = self._connected().cut, block_rows(shape)
        starts = [0] * cut.shards

        def publish(shard: int, link: ShardLink, ids: Ids, rows: np.ndarray) -> bool:
            """Return whether the shard has restored the table."""
            places = cut.rows(ids, shard)
            for first in range(0, len(places), step):
                part = places[first : first + step]
                flat = np.ascontiguousarray(rows[part], np.float32).reshape(-1)
                message = PublishRows(number, starts[shard], flat, ids[part])
                starts[shard] += len(part)
                if link.request(message, RowsPublished).rows > starts[shard]:
                    return True
            return False

        for ids, rows in blocks:
            if all(self._each(partial(publish, ids=ids, rows=rows))):
                return

    def center(self, moved_after: int = -1, wants: tuple[Ids, ...] = ()) -> CenterReply:
        for left in reversed(range(_TRIES)):
            try:
                return self._center(moved_after, wants)
            except LeaseLostError:  # shards keep the latest reads, and other clients of the driver read now
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _center(self, moved_after: int, wants: tuple[Ids, ...]) -> CenterReply:
        cut, request = self._reading().cut, 0
        if moved_after >= 0 or wants:
            request = self._new_request()
            self._each(
                lambda shard, link: link.request(
                    DividedInspect(moved_after, tuple(ids[cut.rows(ids, shard)] for ids in wants), request=request), Ack
                )
            )
        reply = self.request(DividedInspect(request=request), DividedReply)
        center = np.empty(cut.size, np.float32)

        def fetch(shard: int, link: ShardLink) -> CenterReply:
            (elements,) = cut.parts((center,), shard)
            return link.fetch(reply.ticket, (elements, NO_BYTES))

        moved, rows = _joined(self._each(fetch))
        fields = vars(reply) | {"center": center, "moved": moved, "rows": rows}
        del fields["ticket"]
        return CenterReply(**fields)

    def _new_request(self) -> int:
        return int.from_bytes(self.world.token(_REQUEST_BYTES), "big") + 1  # 0 is none

    def read_blocks(self, requests: Iterable[InspectRows], nbytes: int) -> Iterator[tuple[InspectRows, TableRows]]:
        """Yield each of ``requests`` with the rows that all shards have at these places of their own."""
        self._reading()
        ticket = self.request(AskTicket(), LatestTicket).ticket
        for message in requests:
            inner = ReadRows(message.table, message.start, message.count, message.changed, ticket=ticket)
            yield message, _together(self._each(partial(_rows_of, inner)))

    def _remove(self, message: driver_messages.RemoveRows) -> None:
        cut, request = self._reading().cut, self._new_request()
        number, ids = message.table, message.ids
        self._each(
            lambda shard, link: link.request(DividedRemoval(number, ids[cut.rows(ids, shard)], request=request), Ack)
        )
        self.request(DividedRemoval(number, NO_IDS, request=request), Ack)


def _rows_of(message: ReadRows, shard: int, link: ShardLink) -> TableRows:
    return link.request(message, TableRows)


def _together(answers: Sequence[TableRows]) -> TableRows:
    """Return the rows of all shards in the order of their numbers."""
    ids = np.concatenate([answer.ids for answer in answers])
    order = np.argsort(ids)
    blocks = [answer.rows.reshape(len(answer.ids), -1) for answer in answers if len(answer.ids)]
    rows = np.concatenate(blocks)[order].reshape(-1) if blocks else NO_FLOATS
    gone = np.concatenate([answer.gone for answer in answers])
    return TableRows(answers[0].clock, max(answer.count for answer in answers), rows, ids[order], np.sort(gone))


class WholeDriverClient(SpreadDriverClient):
    """Answers what the driver asks one server, with what the sequencer and the shards answer."""

    def exchange(self, message: Message, timeout: float) -> Message:
        try:
            if type(message) is Inspect:
                return self.center(message.moved_after, message.wants)
            if type(message) is InspectRows:
                ((_, answer),) = self.read_blocks([message], 0)
                return answer
            if type(message) is driver_messages.RemoveRows:
                self._remove(message)
                return Ack(0, 0, 0, 0)
        except DistkerasError as error:
            if self.lost(error):
                raise
            return messages.fault_of(error)
        return super().exchange(message, timeout)


def _joined(pieces: Sequence[CenterReply]) -> tuple[tuple[Ids, ...], tuple[Vector, ...]]:
    """Return the numbers of the rows of each table in ascending order, and the rows, flat."""
    tables, joined = zip(*(piece.moved for piece in pieces), strict=True), list[Ids]()
    rows = list[Vector]()
    for number, several in enumerate(tables):
        ids = np.concatenate(several)
        order = np.argsort(ids)
        blocks = [
            piece.rows[number].reshape(len(own), -1) for own, piece in zip(several, pieces, strict=True) if own.size
        ]
        joined.append(ids[order])
        rows.append(np.concatenate(blocks)[order].reshape(-1) if blocks else NO_FLOATS)
    return tuple(joined), tuple(rows)
