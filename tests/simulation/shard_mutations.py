"""Faults planted in a center that is divided among shards: in tickets, parts, and connections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from distkeras.ps.protocol.messages import Ack
from distkeras.ps.protocol.shard_messages import DividedReply, TakeTickets
from distkeras.ps.shards.links import ShardLink
from distkeras.ps.shards.shard import Shard
from distkeras.ps.shards.shard_server import ShardDispatcher
from distkeras.ps.shards.spread_client import SpreadWorkerClient, without_payload
from distkeras.ps.shards.spread_driver import SpreadDriverClient
from distkeras.ps.transport.worker_client import WorkerClient
from simulation.planting import Patch, mutation


@mutation
def _a_worker_commits_before_the_shards_have_its_parts() -> list[Patch]:
    """A commit is decided before every shard has its part."""

    def commit(self: SpreadWorkerClient, commit: Any) -> Any:
        links = self._connected()
        touched, wants = links.cut.split(commit.touched), links.cut.split(commit.wants)
        reply = WorkerClient.request(self, without_payload(commit), (DividedReply, Ack))
        links.each(lambda shard, link: self._send_part(links.cut, commit, touched[shard], wants[shard], shard, link))
        if isinstance(reply, Ack):
            return reply
        return self._assembled(links, reply, commit.wants, whole=False)  # type: ignore[arg-type]  # it is a reply

    return [(SpreadWorkerClient, "_commit_divided", commit)]


@mutation
def _a_ticket_that_comes_twice_is_applied_twice() -> list[Patch]:
    """A shard asks again for the last ticket that it has applied, and applies it again."""
    apply = ShardDispatcher._apply  # noqa: SLF001 - a fault within

    def again(self: ShardDispatcher, rows: np.ndarray) -> TakeTickets:
        request = apply(self, rows)
        return replace(request, after=request.after - 1) if len(rows) > 1 else request

    return [(ShardDispatcher, "_apply", again)]


@mutation
def _parts_are_identified_without_the_connection() -> list[Patch]:
    """A part that a worker has sent before it lost its lease is taken for that of its next commit."""
    put, take = Shard.put, Shard._take  # noqa: SLF001 - a fault within

    def put_first(self: Shard, part: Any) -> bool:
        key = part.key._replace(connection=0)
        if key in self._parts:
            part.drop()
            return True
        part.key = key
        return put(self, part)

    def take_any(self: Shard, ticket: Any) -> Any:
        return take(self, ticket._replace(connection=0))

    return [(Shard, "put", put_first), (Shard, "_take", take_any)]


@mutation
def _a_link_ends_with_its_first_error() -> list[Patch]:
    """A client that has lost its connection to a shard cannot use another one."""

    def close(self: ShardLink) -> None:
        super(ShardLink, self).close()
        if self.posting is not None:
            self.posting.close()

    return [(ShardLink, "close", close), (SpreadDriverClient, "_each", lambda self, call: self._connected().each(call))]
