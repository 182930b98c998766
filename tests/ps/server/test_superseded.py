"""Messages of an attempt's older connection that arrive after the attempt has joined over a newer one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support.patience import patience, until
from support.ps.frames import some_commit
from support.ps.running_server import Running

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import DistkerasError, LeaseLostError
from distkeras.ps.protocol.loop import CommitRecord
from distkeras.ps.protocol.messages import Ack, CenterReply, Hello, Leave, Pull, Waiting, Welcome
from distkeras.ps.rules import make
from distkeras.ps.server import dispatcher
from distkeras.ps.transport.worker_client import WorkerClient

pytestmark = pytest.mark.timeout(60)

SIZE = 3
OLDER = "holds its lease over another connection"


def record(batch: int) -> CommitRecord:
    """Return a record of one mini-batch."""
    return CommitRecord(0, batch, batch, False, True, 0.1, 1.0, (np.ones(SIZE, np.float32),))


@contextlib.contextmanager
def clients(running: Running) -> Iterator[tuple[WorkerClient, WorkerClient, WorkerClient]]:
    """Yield an older and a newer connection of worker 0's attempt, which has pulled over the older, and worker 1's."""
    older, newer, other = (running.client(worker, attempt=1, size=SIZE) for worker in (0, 0, 1))
    with contextlib.closing(older), contextlib.closing(newer), contextlib.closing(other):
        older.join()
        other.join()
        older.pull()
        other.pull()
        assert newer.join().held
        yield older, newer, other


def staleness(running: Running, worker: int) -> list[int]:
    commits = running.driver.drain().commits.view(COMMIT)
    return commits["staleness"][commits["worker"] == worker].tolist()


def test_a_late_pull_does_not_move_the_clock_that_staleness_counts_from() -> None:
    with Running(make("dynsgd"), size=SIZE) as running, clients(running) as (older, newer, other):
        for batch in range(5):
            other.commit(record(batch))
        with pytest.raises(LeaseLostError, match=OLDER):
            older.request(Pull(0, 1, 1), CenterReply)
        newer.commit(record(0))
        assert staleness(running, worker=0) == [5]


@pytest.mark.parametrize("value", [1.0, np.nan])
def test_a_late_commit_is_refused(value: float) -> None:
    with Running(make("dynsgd"), size=SIZE, max_skipped=1) as running, clients(running) as (older, newer, other):
        other.commit(record(0))
        with pytest.raises(LeaseLostError, match=OLDER):
            older.request(some_commit(np.full(SIZE, value, np.float32), attempt=1), (CenterReply, Ack))
        assert running.driver.drain().total == 1  # This is the other worker's.
        newer.commit(record(0))
        assert staleness(running, worker=0) == [1]


def test_a_late_leave_is_refused() -> None:
    with Running(make("downpour"), size=SIZE) as running, clients(running) as (older, newer, _):
        with pytest.raises(LeaseLostError, match=OLDER):
            older.request(Leave(0, 1, 1), Ack)
        newer.commit(record(0))
        newer.leave()
        assert running.driver.observe(0, patience(5)).finished == 1


def test_a_late_hello_is_refused() -> None:
    """A Hello that was delayed in the network must not cost the attempt its lease."""
    with Running(make("downpour"), size=SIZE) as running:
        attempt = running.client(attempt=1, size=SIZE)
        late = running.client(attempt=1, size=SIZE)
        with contextlib.closing(attempt), contextlib.closing(late):
            attempt.join()
            attempt.close()
            attempt.join()
            hello = Hello(worker=0, attempt=1, size=SIZE, moving_statistics=0, metrics="loss", connection=1)
            with pytest.raises(LeaseLostError, match="has opened connection 2, which replaces"):
                late.request(hello, (Welcome, Waiting))
            attempt.pull()


def test_a_request_that_waits_for_a_round_is_refused_when_its_attempt_joins_again() -> None:
    with Running(make("averaging"), size=SIZE) as running:
        older, newer = (running.client(attempt=1, size=SIZE) for _ in range(2))
        with contextlib.closing(older), contextlib.closing(newer):
            older.join()
            errors: list[DistkerasError] = []

            def pull() -> None:
                try:
                    older.request(Pull(0, 1, 1), CenterReply)  # It waits for worker 1.
                except DistkerasError as error:
                    errors.append(error)

            thread = threading.Thread(target=pull, daemon=True)
            thread.start()
            (session,) = (session for session in running.server.sessions if session.lease is not None)
            until(lambda: session.asking)
            newer.join()
            thread.join(patience(10))
            assert [type(error) for error in errors] == [LeaseLostError]


def test_the_end_of_an_older_connection_does_not_cost_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt lives and uses its newer connection; a rival has to wait."""
    monkeypatch.setattr(dispatcher, "_LEASE_WAIT_SECONDS", 0.0)
    with Running(make("downpour"), size=SIZE) as running, clients(running) as (older, newer, _):
        sessions = len(running.server.sessions)
        older.close()
        until(lambda: len(running.server.sessions) < sessions)
        rival = running.client(attempt=2, size=SIZE)
        with contextlib.closing(rival):
            hello = Hello(worker=0, attempt=2, size=SIZE, moving_statistics=0, metrics="loss")
            assert isinstance(rival.request(hello, (Welcome, Waiting)), Waiting)
        newer.commit(record(0))
