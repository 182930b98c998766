"""The ends of a shard's connections and threads while a thread is still busy."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience
from support.present import present
from support.ps.divided_server import DividedServer

from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.errors import DeadlineError, ServerLostError
from distkeras.ps.protocol.messages import Ack
from distkeras.ps.protocol.shard_messages import DividedInspect, ListShards, PartSaved, Shards
from distkeras.ps.rules import make
from distkeras.ps.shards.links import ShardLink, ShardLinks
from distkeras.ps.shards.saving import PartWriter
from distkeras.ps.transport.client import Channel, Client
from distkeras.ps.world.world import REAL

RULE, START = make("downpour"), np.zeros(4, np.float32)
REQUEST = DividedInspect(-1, (), request=1)


def descriptor(channel: Channel) -> int:
    return channel.stream.sock.fileno()  # type: ignore[attr-defined]  # it is a socket's


@pytest.mark.slow
def test_a_connection_that_a_thread_still_uses_is_hung_up_and_closed_by_that_thread() -> None:
    """Another connection of the process may get its descriptor as soon as it is closed."""
    short = brief(0.5)
    deadlines = replace(PATIENT, connect=short, handshake=short, frame=short, gather=short, reply=short)
    busy, go, seen = list[Channel](), threading.Event(), list[int]()

    def call(number: int, link: ShardLink) -> None:
        link.request(REQUEST, Ack)
        if number == 0:
            busy.append(present(link.channel))
            assert go.wait(patience(20))
            seen.append(descriptor(busy[0]))

    with DividedServer(RULE, START, shards=2) as many:
        shards = Client(many.address, PATIENT).request(ListShards(), Shards)
        links = ShardLinks(shards, many.address, deadlines, name="test")
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "test-shard-0"]
        with pytest.raises(ServerLostError, match="for shard 0"):
            links.each(call)
        links.close()
        assert busy[0].hung_up()
        go.set()
        thread.join(patience(20))
        assert (min(seen) >= 0, descriptor(busy[0])) == (True, -1)


def test_a_link_that_has_ended_makes_no_connection_that_lasts() -> None:
    """Its thread may still be connecting."""
    with DividedServer(RULE, START, shards=1) as many:
        link = ShardLink(replace(many.address, port=many.shards[0].address[1]), PATIENT, REAL, None)
        link.request(REQUEST, Ack)
        link.end()
        with pytest.raises(ServerLostError, match=r"has not answered|closed the connection"):
            link.request(REQUEST, Ack)
        assert link.channel is None


def test_a_thread_that_still_writes_at_the_end_is_an_error(tmp_path: Path) -> None:
    reported, go = threading.Event(), threading.Event()

    def report(message: PartSaved) -> None:
        reported.set()
        assert go.wait(patience(20))

    center, lock = Center(RULE, START, workers=1), threading.Condition()
    writer = PartWriter(SnapshotDirectory(str(tmp_path)), center, lock, (), 0, slice(0, 4), report, REAL)
    with lock:
        writer.save(1)
    assert reported.wait(patience(20))
    with pytest.raises(DeadlineError, match="for thread shard-0-saving to end"):
        writer.close(brief(0.1))
    go.set()
    writer.close(patience(20))
