"""A man in the middle that changes bytes between worker and server: without TLS, the tags reveal it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from support.patience import brief
from support.ps.relay import Relay
from support.ps.running_server import Running

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import ServerLostError
from distkeras.ps.protocol.framing import TAGGED_BYTES_MAX
from distkeras.ps.protocol.loop import CommitRecord
from distkeras.ps.rules import make
from distkeras.ps.transport.worker_client import WorkerClient

pytestmark = pytest.mark.timeout(60)

ONES = np.full(8, 1.0, np.float32).tobytes()
FORGED = np.full(8, -1000.0, np.float32).tobytes()
#: Elements of a vector that a tag covers, and of one that is too long for it.
SHORT, LONGER = TAGGED_BYTES_MAX // 8, 2 * TAGGED_BYTES_MAX


@contextlib.contextmanager
def attacked(size: int, changes: int) -> Iterator[tuple[Running, Relay, WorkerClient]]:
    with Running(make("downpour"), workers=1, size=size) as running:
        relay = Relay(running.server.address)
        relay.change, relay.left = (ONES, FORGED), changes
        client = WorkerClient(relay.address, worker=0, attempt=0, size=size, deadlines=running.deadlines)
        with contextlib.closing(relay), contextlib.closing(client):
            client.join()
            client.pull()
            yield running, relay, client


def ones(size: int) -> CommitRecord:
    return CommitRecord(0, 0, 0, False, True, 0.1, 1.0, (np.ones(size, np.float32),))


def test_a_changed_commit_is_refused_and_sent_again() -> None:
    size = SHORT
    with attacked(size, changes=1) as (running, relay, client):
        reply = client.commit(ones(size))
        assert relay.left == 0
        np.testing.assert_array_equal(reply.center, np.ones(size, np.float32))
        records = running.driver.drain().commits.view(COMMIT)
        assert records["sequence"].tolist() == [1]
        (refusal,) = running.server.admission.refusals
        assert "the tag of a frame does not match" in refusal.reason


def test_an_attacker_who_changes_every_commit_ends_the_task_but_does_not_change_the_center() -> None:
    with attacked(SHORT, changes=10**9) as (running, _, client):
        client.deadlines = dataclasses.replace(client.deadlines, reconnect=brief(0.5))
        with pytest.raises(ServerLostError):
            client.commit(ones(SHORT))
        assert running.driver.center().clock == 0
        assert running.server.fault is None
