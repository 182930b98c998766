"""Messages over connections that break, of older connections, and to a server without a center or all workers."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until
from support.present import present
from support.ps.clocks import HandWorld, SteppedWorld
from support.ps.frames import some_commit
from support.ps.running_server import Running
from support.ps.virtual_centers import center_of, commit_of, send

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.checkpoint.state import capture, restore
from distkeras.ps.errors import DeadlineError, DistkerasError, LeaseLostError
from distkeras.ps.protocol.driver_messages import Publish
from distkeras.ps.protocol.loop import CommitRecord
from distkeras.ps.protocol.messages import (
    Ack,
    AskForWork,
    CenterReply,
    Commit,
    FetchModel,
    Hello,
    Leave,
    Loan,
    Message,
    ModelFile,
    OfferRows,
    Pull,
    Waiting,
    Welcome,
)
from distkeras.ps.protocol.shared_slots import SharedSlots
from distkeras.ps.rules import make
from distkeras.ps.server import dispatcher
from distkeras.ps.server.job_state import PeerVectors
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.worker_client import RestartFromCenter, WorkerClient

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


KEY = bytes(range(32))
REQUESTS: dict[str, Callable[[DriverClient], Any]] = {
    "center": lambda driver: driver.center().center.tolist(),
    "drain": lambda driver: driver.drain().total,
    "list_workers": lambda driver: driver.list_workers().tolist(),
    "finish": lambda driver: driver.finish("enough"),
    # Of a worker that has no work left, whose server was restarted.
    "offer rows": lambda driver: driver.request(OfferRows(0, 1, "127.0.0.1", 1, 4, 2, 7), Ack).sequence,
    "ask for work": lambda driver: driver.request(AskForWork(0, 1), Loan).over,
}
ANSWERS = {
    **{"center": [0.0, 0.0], "drain": 0, "list_workers": [], "finish": None},
    **{"offer rows": 0, "ask for work": True},  # this job does not lend
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_about_the_center_waits_until_the_center_is_published(name: str) -> None:
    settings = ServerSettings(make("downpour"), workers=1, deadlines=PATIENT)
    answers: list[Any] = []
    with ParameterServer(settings, KEY) as server:
        address = Address(*server.address, KEY)
        requesting, publishing = (DriverClient(address, PATIENT) for _ in range(2))

        def send_request() -> None:
            try:
                answers.append(REQUESTS[name](requesting))
            except Exception as error:  # noqa: BLE001 - compared with the expected answer
                answers.append(error)

        requesting.ping()
        thread = threading.Thread(target=send_request, daemon=True)
        thread.start()
        publishing.publish(np.zeros(2, np.float32))
        thread.join(patience(20))
        requesting.close()
        publishing.close()
    assert answers == [ANSWERS[name]]


@pytest.mark.parametrize("name", REQUESTS)
def test_the_wait_for_a_published_center_has_a_deadline(name: str) -> None:
    settings = ServerSettings(make("downpour"), workers=1, deadlines=replace(PATIENT, publish=0.05))
    with ParameterServer(settings, KEY) as server:
        client = DriverClient(Address(*server.address, KEY), PATIENT)
        with pytest.raises(DeadlineError, match="the driver to publish the center"):
            REQUESTS[name](client)
        client.close()


class QuietPeer:
    """A connection without bytes, which stays open."""

    def __init__(self) -> None:
        self.lease: tuple[int, int] | None = None
        self.active_at, self.asking = 0.0, False
        self.vectors = PeerVectors()

    def hung_up(self) -> bool:
        return False

    def share(self, slots: SharedSlots | None) -> None:
        assert slots is None


def test_a_worker_of_a_resumed_round_waits_for_others_to_join_and_then_for_their_windows() -> None:
    """The others may join shortly before the first deadline, and then compute for longer than is left of it."""
    saved = center_of("averaging")
    for worker in range(2):
        saved.join(worker, 0)
    saved.release(0, 0)
    send(saved, commit_of(0, value=2.0))
    world = SteppedWorld()
    settings = ServerSettings(make("averaging"), workers=2, deadlines=Deadlines(gather=20.0, reply=30.0))
    server = dispatcher.Dispatcher(settings, world=world)
    server.answer(QuietPeer(), Publish(np.zeros(SIZE, np.float32)))
    restore(present(server.center), capture(saved), same_attempts=False)
    arrived, late = QuietPeer(), QuietPeer()

    def join_late() -> None:
        server.answer(late, Hello(1, 0, SIZE, 0))
        server.answer(late, Pull(1, 0, 1))

    def commit_late() -> None:
        commit = commit_of(1, value=4.0)
        late.vectors.allocate(Commit, commit.parts[0].dtype, SIZE)
        server.answer(late, commit)

    world.actions = {19.0: join_late, 48.0: commit_late}
    server.answer(arrived, Hello(0, 0, SIZE, 0))
    answer = server.answer(arrived, Pull(0, 0, 1))
    assert isinstance(answer, CenterReply)
    assert (answer.center.tolist(), world.now) == ([3.0] * SIZE, 48.0)


def test_a_pull_waits_for_longer_than_its_server_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the worker would join again, and the server's error, which names the others, would not reach it."""
    with Running(make("downpour"), size=SIZE) as running, contextlib.closing(running.client(size=SIZE)) as client:
        client.join()
        exchange, timeouts = client.exchange, []

        def recorded(message: Message, timeout: float) -> Message:
            timeouts.append(timeout)
            return exchange(message, timeout)

        monkeypatch.setattr(client, "exchange", recorded)
        client.pull()
        (timeout,) = timeouts
        assert timeout > PATIENT.after_restart().gather + PATIENT.reply
