"""A worker's client for a center that is divided among shards.

The loop, the lease and the reconnecting are those of a `WorkerClient`. Only commits and pulls differ: the vectors go to
and come from the shards, at the same time, and everything else is exchanged with the sequencer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol import messages
from distkeras.ps.protocol.compression import codec_of
from distkeras.ps.protocol.loop import NO_BYTES, NO_FLOATS
from distkeras.ps.protocol.messages import Ack, CenterReply, Commit, Message, Pull
from distkeras.ps.protocol.shard_messages import (
    AskRows,
    DividedCommit,
    DividedReply,
    Greet,
    ListShards,
    PartStored,
    SendPart,
    Shards,
)
from distkeras.ps.protocol.tables import Ids, TableShape
from distkeras.ps.shards.cut import Cut
from distkeras.ps.shards.links import ZERO, ShardLink, ShardLinks
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.worker_client import WorkerClient

_Answer = TypeVar("_Answer", bound=Message)
#: What answers a commit.
_DIVIDED: tuple[type[DividedReply | Ack], ...] = (DividedReply, Ack)


class SpreadWorkerClient(WorkerClient):
    """One worker's connections to the sequencer and to all shards; arguments as for `WorkerClient`."""

    def __init__(
        self,
        address: Address,
        *,
        size: int,
        tables: Sequence[TableShape] = (),
        wire_format: str = "float32",
        **options: Any,
    ) -> None:
        options["shared_parts"] = 0
        super().__init__(address, size=size, tables=tables, wire_format=wire_format, **options)
        self._shapes = tuple(tables)
        self._codec = codec_of(wire_format, size)
        self._links: ShardLinks | None = None

    def close(self) -> None:
        self._close_links()
        super().close()

    def _close_links(self) -> None:
        links, self._links = self._links, None
        if links is not None:
            links.close()

    def _join(self) -> messages.Welcome:
        self._close_links()  # parts are identified by the connection over which the lease is held
        return super()._join()

    def request(
        self, message: Message, expected: type[_Answer] | tuple[type[_Answer], ...], timeout: float | None = None
    ) -> _Answer:
        if isinstance(message, Commit):
            return cast(_Answer, self._commit_divided(message))
        if isinstance(message, Pull):
            return cast(_Answer, self._pull_divided(message, timeout))
        return super().request(message, expected, timeout)

    def _connected(self) -> ShardLinks:
        if self._links is None:
            shards = super().request(ListShards(), Shards, self.deadlines.publish + self.reply_timeout)
            hello = self.hello
            greeting = Greet(0, self.worker, self.attempt, hello.connection, self.incarnation, hello.wire_format)
            name = f"worker-{self.worker}"
            self._links = ShardLinks(
                shards, self.address, self.deadlines, greeting=greeting, name=name, world=self.world
            )
        return self._links

    def _commit_divided(self, commit: Commit) -> CenterReply | Ack:
        links = self._connected()
        touched, wants = links.cut.split(commit.touched), links.cut.split(commit.wants)
        stored = links.each(
            lambda number, link: self._send_part(links.cut, commit, touched[number], wants[number], number, link)
        )
        problem = next((receipt.problem for receipt in stored if receipt.problem), "")
        reply = super().request(without_payload(commit, problem), _DIVIDED)
        return reply if isinstance(reply, Ack) else self._assembled(links, reply, commit.wants, whole=False)

    def _send_part(
        self,
        cut: Cut,
        commit: Commit,
        touched: Sequence[np.ndarray],
        wants: Sequence[np.ndarray],
        shard: int,
        link: ShardLink,
    ) -> PartStored:
        """Send the part of ``shard``, whose rows are at these places of those that ``commit`` touches and wants."""
        packed = () if self._codec is None else cut.packed(commit.packed, shard, self._codec)
        rows = zip(self._shapes, commit.moved, touched, strict=True)
        part = SendPart(
            commit.sequence,
            commit.epoch,
            commit.first,
            commit.last,
            cut.parts(commit.parts, shard),
            packed,
            tuple(ids[places] for ids, places in zip(commit.touched, touched, strict=True)),
            tuple(moved.reshape(-1, shape.width)[places].reshape(-1) for shape, moved, places in rows),
            tuple(ids[places] for ids, places in zip(commit.wants, wants, strict=True)),
        )
        return link.request(part, PartStored)

    def _pull_divided(self, message: Pull, timeout: float | None) -> CenterReply:
        links = self._connected()
        wants = message.wants
        if wants:
            links.each(
                lambda shard, link: link.request(AskRows(tuple(ids[links.cut.rows(ids, shard)] for ids in wants)), Ack)
            )
        bare = Pull(message.worker, message.attempt, message.incarnation)
        reply = super().request(bare, DividedReply, timeout)
        return self._assembled(links, reply, wants, whole=True)

    def _assembled(self, links: ShardLinks, reply: DividedReply, wants: Sequence[Ids], *, whole: bool) -> CenterReply:
        """Return ``reply`` with the center and the rows, from the shards."""
        cut, codec, center, packed = links.cut, self._codec, self._spare_center(), NO_BYTES
        if codec is not None:
            if self._encoded_reply is None:
                self._encoded_reply = np.empty(codec.nbytes, np.uint8)
            packed = self._encoded_reply

        def fetch(shard: int, link: ShardLink) -> CenterReply:
            (elements,) = cut.parts((center,), shard)
            encoded = NO_BYTES if codec is None else cut.packed((packed,), shard, codec)[0]
            return link.fetch(reply.ticket, (elements, encoded), whole=whole)

        slices = links.each(fetch)
        encoded = any(piece.packed.size for piece in slices)
        fields = vars(reply) | {
            "center": NO_FLOATS if encoded else center,
            "packed": packed if encoded else NO_BYTES,
            "rows": self._rows_of(cut, slices, wants),
        }
        del fields["ticket"]
        return CenterReply(**fields)

    def _rows_of(self, cut: Cut, slices: Sequence[CenterReply], wants: Sequence[Ids]) -> tuple[np.ndarray, ...]:
        tables, all_places = [], cut.split(wants)
        for number, (shape, ids) in enumerate(zip(self._shapes, wants, strict=False)):
            rows = np.empty((ids.size, shape.width), np.float32)
            for shard, piece in enumerate(slices):
                places, received = all_places[shard][number], piece.rows[number] if piece.rows else NO_FLOATS
                if received.size != places.size * shape.width:
                    raise RemoteProtocolError(
                        f"shard {shard} must send {places.size} rows of {shape.width} elements of table "
                        f"{shape.name!r}. Received: {received.size} elements"
                    )
                rows[places] = received.reshape(-1, shape.width)
            tables.append(rows.reshape(-1))
        return tuple(tables)


def without_payload(commit: Commit, problem: str = "") -> DividedCommit:
    """Return ``commit`` for the sequencer: without vectors and rows, and with their sizes."""
    parts = (ZERO,) * len(commit.packed or commit.parts)
    fields = vars(commit) | {"parts": parts, "packed": (), "touched": (), "moved": (), "wants": ()}
    return DividedCommit(
        **fields,
        problem=problem,
        sent_bytes=commit.payload_bytes,
        sent_row_bytes=commit.row_bytes,
        sent_rows=commit.rows_moved,
        asked_rows=commit.rows_wanted,
    )
