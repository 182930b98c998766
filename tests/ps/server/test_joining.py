"""A worker's first message to the server, over a connection that breaks."""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until
from support.ps.clocks import HandWorld
from support.ps.running_server import Running

from distkeras.ps.protocol.loop import CommitRecord
from distkeras.ps.protocol.messages import FetchModel, Hello, ModelFile, Waiting, Welcome
from distkeras.ps.rules import make
from distkeras.ps.server import dispatcher
from distkeras.ps.transport.worker_client import RestartFromCenter

pytestmark = pytest.mark.timeout(60)

#: Seconds of the manual clock.
LEASE = 1.0


@pytest.mark.parametrize("finished", [False, True])
def test_a_worker_reconnects_if_its_connection_breaks_before_the_welcome(finished: bool) -> None:
    with Running(make("downpour"), workers=1) as running:
        holder = running.client()
        holder.join()
        if finished:
            holder.leave()
        holder.close()
        late = running.client(attempt=1)
        late.request(FetchModel(), ModelFile)
        assert late.channel is not None
        late.channel.hang_up()
        welcome = late.join()
        assert (welcome.finished, welcome.held) == (finished, False)
        late.close()


def hello(attempt: int) -> Hello:
    return Hello(worker=0, attempt=attempt, size=3, moving_statistics=0, metrics="loss")


def test_a_holder_that_computes_longer_than_a_lease_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats keep the lease; otherwise two attempts whose windows outlast a lease would alternate forever."""
    world, deadlines = HandWorld(), dataclasses.replace(PATIENT, lease=LEASE)
    monkeypatch.setattr(dispatcher, "_LEASE_WAIT_SECONDS", 4 * LEASE)
    with Running(make("downpour"), workers=1, size=3, deadlines=deadlines, world=world) as running:
        holder = running.client(attempt=1, size=3, deadlines=dataclasses.replace(PATIENT, lease=0.2))
        rival = running.client(attempt=2, size=3, deadlines=PATIENT)
        with contextlib.closing(holder), contextlib.closing(rival), ThreadPoolExecutor(1) as pool:
            holder.join()
            holder.pull()
            (session,) = (session for session in running.server.sessions if session.lease is not None)
            # The rival waits for four leases, during which the holder sends no request.
            answer = pool.submit(rival.request, hello(2), (Welcome, Waiting))
            while not answer.done():
                world.now += LEASE / 2
                until(lambda: session.active_at == world.now or answer.done())  # A heartbeat has arrived.
            assert isinstance(answer.result(), Waiting)
            assert world.now >= 4 * LEASE
            holder.leave()
            assert rival.join().finished


def test_a_holder_that_is_silent_for_a_lease_loses_it() -> None:
    """A suspended process sends no heartbeats; here, its heartbeats are too rare."""
    lease = brief(0.5)
    with Running(make("downpour"), workers=1, size=3, deadlines=dataclasses.replace(PATIENT, lease=lease)) as running:
        holder, rival = running.client(attempt=1, size=3), running.client(attempt=2, size=3)
        # The interval of the heartbeats is a fraction of what the client takes for the lease.
        holder.deadlines = PATIENT
        with contextlib.closing(holder), contextlib.closing(rival):
            holder.join()
            assert not rival.join().finished


def test_a_holder_that_returns_after_another_attempt_restarts_from_the_center() -> None:
    """Its window began from a center that the other attempt has moved, perhaps with the same mini-batches."""
    deadlines = dataclasses.replace(PATIENT, lease=brief(0.5))
    with Running(make("downpour"), workers=1, size=3, deadlines=deadlines) as running:
        holder, rival = (running.client(attempt=attempt, size=3, deadlines=PATIENT) for attempt in (1, 2))
        with contextlib.closing(holder), contextlib.closing(rival):
            holder.join()
            holder.pull()
            assert holder.channel is not None
            holder.channel.hang_up()
            rival.join()
            rival.close()
            record = CommitRecord(0, 0, 0, False, True, 0.1, 1.0, (np.ones(3, np.float32),))
            with pytest.raises(RestartFromCenter) as caught:
                holder.commit(record)
            assert not caught.value.welcome.held


def test_a_holder_that_waits_for_an_answer_does_not_count_as_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends no heartbeats while it waits, because its connection is in use."""
    world, deadlines = HandWorld(), dataclasses.replace(PATIENT, lease=LEASE)
    monkeypatch.setattr(dispatcher, "_LEASE_WAIT_SECONDS", 4 * LEASE)
    with Running(make("averaging"), workers=2, size=3, deadlines=deadlines, world=world) as running:
        holder, rival, other = (
            running.client(worker, attempt, size=3, deadlines=PATIENT) for worker, attempt in ((0, 1), (0, 2), (1, 3))
        )
        with (
            contextlib.closing(holder),
            contextlib.closing(rival),
            contextlib.closing(other),
            ThreadPoolExecutor(2) as pool,
        ):
            holder.join()
            (session,) = (session for session in running.server.sessions if session.lease is not None)
            pulled = pool.submit(holder.pull)  # The pull waits until all workers have joined.
            until(lambda: session.asking)
            answer = pool.submit(rival.request, hello(2), (Welcome, Waiting))
            while not wait([answer], 0.01).done:
                world.now += LEASE / 2
            assert isinstance(answer.result(), Waiting)
            assert world.now >= 4 * LEASE
            other.join()
            pulled.result(patience(10))
