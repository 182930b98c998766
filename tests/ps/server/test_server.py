"""A real server and real clients over loopback sockets; its states, probes, and admission control."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until
from support.present import present
from support.ps.frames import some_commit
from support.ps.running_server import SIZE, Running, socket_of
from support.ps.toy_model import toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import (
    BadValueError,
    DeadlineError,
    JobStoppedError,
    LeaseLostError,
    LocalProtocolError,
    NonFiniteError,
    RemoteProtocolError,
    ServerLostError,
    ShapeError,
)
from distkeras.ps.protocol.driver_messages import Observe, Status
from distkeras.ps.protocol.loop import CommitRecord, ProbeRequest, Reply
from distkeras.ps.protocol.messages import Ack, CenterReply, Fault, Leave, Pull, error_of, fault_of
from distkeras.ps.rules import make
from distkeras.ps.server.admission import AdmissionControl, PendingConnection
from distkeras.ps.server.job_state import TRANSITIONS, JobCondition, ServerState
from distkeras.ps.transport.driver_client import DriverClient


def test_the_driver_receives_all_records_and_the_history() -> None:
    with Running(make("downpour", window=2)) as running:
        assert running.train(0, [np.ones(1)] * 5).ended() is None
        records = running.driver.drain()
        commits = records.commits.view(COMMIT)
        assert records.total == 3
        np.testing.assert_array_equal(commits["first_batch"], [0, 2, 4])
        np.testing.assert_array_equal(commits["last_batch"], [1, 3, 4])
        np.testing.assert_array_equal(commits["bytes"], [4 * SIZE] * 3)
        assert records.history[:, 1].tolist() == [1] * 5
        assert records.metrics == "loss"
        status = running.driver.observe(0, patience(5))
        assert (status.clock, status.finished, status.batches, status.samples) == (3, 1, 5, 5)
        assert running.driver.drain(start=2).commits.view(COMMIT)["clock"].tolist() == [2]


def test_only_the_same_center_may_be_published_again() -> None:
    """The answer to the first publication may have been lost, and the center may have moved meanwhile."""
    start = np.arange(SIZE, dtype=np.float32)
    with Running(make("downpour", window=1), start=start, workers=1) as running:
        assert running.train(0, [np.ones(1)]).ended() is None
        moved = running.driver.center().center.copy()
        running.driver.publish(start, model=b"the model")
        np.testing.assert_array_equal(running.driver.center().center, moved)
        for center, model in ((start + 1, b"the model"), (start, b"another")):
            with pytest.raises(RemoteProtocolError, match="published once"):
                DriverClient(running.address, PATIENT).publish(center, model=model)


def test_a_late_answer_is_not_taken_for_the_answer_to_a_later_request() -> None:
    """The answer arrives with the first commit, which is after the deadline."""
    with Running(make("downpour")) as running:
        with pytest.raises(DeadlineError, match="the server's answer to Observe"):
            running.driver.request(Observe(0, patience(300)), Status, timeout=brief(0.1))
        assert running.train(0, [np.ones(1)]).ended() is None
        assert running.driver.center().clock == 1


class TestLostReplies:
    def test_a_commit_whose_reply_was_lost_is_not_applied_twice(self) -> None:
        with Running(make("downpour")) as running:
            client = (worker := running.turns(0, [np.ones(1)] * 3)).client
            cut: list[bool] = []
            send = present(client.channel).send

            def send_then_cut(message: Any) -> None:
                send(message)
                if not cut:
                    cut.append(True)
                    assert running.driver.observe(0, patience(5)).clock == 1  # The commit is applied …
                    socket_of(present(client.channel)).shutdown(socket.SHUT_RDWR)  # … and its reply never arrives.

            present(client.channel).send = send_then_cut
            reply = worker.turn()
            assert cut == [True]
            np.testing.assert_allclose(present(reply.center)[0], -0.1)
            assert running.driver.center().clock == 1
            client.close()

    def test_a_commit_that_is_cut_off_halfway_is_not_applied_and_is_sent_again(self) -> None:
        with Running(make("downpour")) as running:
            client = (worker := running.turns(0, [np.ones(1)] * 3)).client
            connection = present(client.channel).connection
            whole = connection.send

            def half(message: Any) -> list[Any]:
                buffers = whole(message)
                connection.send = whole
                socket_of(present(client.channel)).sendall(bytes(buffers[0]) + bytes(buffers[1])[:1000])
                socket_of(present(client.channel)).shutdown(socket.SHUT_RDWR)
                return []

            connection.send = half
            reply = worker.turn()
            np.testing.assert_allclose(present(reply.center)[0], -0.1)
            assert running.driver.center().clock == 1
            client.close()

    def test_a_lost_server_is_reported_within_the_deadline(self) -> None:
        with Running(make("downpour")) as running:
            client = running.client(deadlines=replace(PATIENT, connect=brief(1), reconnect=brief(0.5)))
            client.join()
            running.server.close()
            with pytest.raises((ServerLostError, JobStoppedError)):
                client.pull()


class TestTakeover:
    def test_a_retried_attempt_continues_where_the_dead_attempt_ended(self) -> None:
        values = [np.full(1, float(2**i)) for i in range(6)]
        with Running(make("downpour"), workers=1) as running:
            first = running.turns(0, values, attempt=3)
            first.turn()
            first.turn()
            present(first.client.channel).close()  # It dies without a message.
            assert running.train(0, values, attempt=8).ended() is None
            np.testing.assert_allclose(running.driver.center().center[0], -0.1 * 63, rtol=1e-6)
            commits = running.driver.drain().commits.view(COMMIT)
            assert commits["first_batch"].tolist() == [0, 1, 2, 3, 4, 5]
            assert commits["attempt"].tolist() == [3, 3, 8, 8, 8, 8]

    def test_a_new_attempt_waits_while_another_attempt_holds_the_lease(self) -> None:
        with Running(make("downpour")) as running:
            holder = running.client(attempt=1)
            holder.join()
            newcomer = running.client(attempt=2)
            welcomed = threading.Event()

            def join() -> None:
                newcomer.join()
                welcomed.set()

            thread = threading.Thread(target=join, daemon=True)
            thread.start()
            assert running.driver.observe(-1, 0.2).joined == 1
            assert not welcomed.is_set()
            holder.close()
            assert welcomed.wait(patience(5))
            with pytest.raises(LeaseLostError, match="attempt 2 holds the lease"):
                running.driver.request(Pull(0, 1, 1), CenterReply)
            newcomer.close()


class TestRefusals:
    @pytest.mark.parametrize("message", [Pull(0, 0, 2), Leave(0, 0, 2)])
    def test_a_message_of_another_incarnation_is_refused(self, message: Pull | Leave) -> None:
        with Running(make("downpour")) as running:
            client = running.client()
            client.join()
            with pytest.raises(RemoteProtocolError, match=r"`incarnation` must be 1\. Received: incarnation=2"):
                client.request(message, (CenterReply, Ack))
            assert running.driver.observe(-1, patience(5)).finished == 0
            client.close()

    def test_another_model_size_is_refused(self) -> None:
        with Running(make("downpour")) as running:
            client = running.client(size=5)
            with pytest.raises(ShapeError, match=f"must have {SIZE} trainable"):
                client.join()
            client.close()

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_commit_that_is_not_finite_never_touches_the_center_and_ends_the_job(self, bad: float) -> None:
        with Running(make("downpour")) as running:
            worker = running.turns(1, [np.ones(1), np.full(1, bad)])
            worker.turn()
            with pytest.raises(NonFiniteError, match="a commit holds") as caught:
                worker.turn()
            assert (caught.value.worker, caught.value.step) == (1, 1)
            received = running.driver.center()
            assert received.clock == 1
            assert np.isfinite(received.center).all()
            with pytest.raises(NonFiniteError):
                running.driver.observe(0, patience(5))
            worker.client.close()

    def test_finite_commits_whose_sum_is_not_finite_end_the_job_with_an_error(self) -> None:
        with Running(make("downpour", window=1)) as running:
            values = [[np.full(1, -2e38)], [np.zeros(1), np.full(1, -2e38)]]
            first, second = (running.turns(worker, own, eta=1.0) for worker, own in enumerate(values))
            second.turn()
            first.turn()
            with pytest.raises(NonFiniteError, match="rule 'downpour' made the center non-finite") as caught:
                second.turn()
            assert (caught.value.worker, caught.value.step) == (1, 1)
            with pytest.raises(NonFiniteError):
                running.driver.observe(0, patience(5))
            second.client.close()

    def test_large_finite_numbers_are_no_fault(self) -> None:
        with Running(make("downpour")) as running:
            assert running.train(0, [np.full(1, 1e30)]).ended() is None


class TestFaults:
    def test_a_workers_fault_reaches_the_driver_and_the_other_workers(self) -> None:
        with Running(make("downpour")) as running:
            bad, good = running.client(0), running.client(1)
            bad.join()
            good.join()
            bad.report(BadValueError("no NaN", worker=0, column="x", step=7, remote_traceback="Traceback"))
            with pytest.raises(BadValueError, match="no NaN") as caught:
                running.driver.observe(0, patience(5))
            assert (caught.value.column, caught.value.step) == ("x", 7)
            assert caught.value.remote_traceback == "Traceback"
            with pytest.raises(JobStoppedError, match="no NaN"):
                good.pull()
            bad.close()
            good.close()

    def test_the_first_of_several_faults_is_reported(self) -> None:
        with Running(make("downpour")) as running:
            clients = [running.client(worker) for worker in range(2)]
            for client, text in zip(clients, ("first", "second"), strict=True):
                client.report(BadValueError(text))
            with pytest.raises(BadValueError, match="first"):
                running.driver.observe(0, patience(5))
            for client in clients:
                client.close()

    def test_every_request_after_a_stop_is_refused(self) -> None:
        with Running(make("downpour")) as running:
            client = running.client()
            client.join()
            client.pull()
            running.driver.stop("enough")
            with pytest.raises(JobStoppedError, match="enough"):
                client.request(some_commit(np.ones(SIZE, np.float32)), CenterReply)
            for request in (client.pull, client.occupied):
                with pytest.raises(JobStoppedError, match="enough"):
                    request()
            assert running.driver.center().clock == 0
            client.close()

    def test_too_few_workers_for_a_round_is_an_error_that_names_them(self) -> None:
        with Running(make("averaging"), workers=4, deadlines=replace(PATIENT, gather=brief(1))) as running:
            client = running.client()
            client.join()
            with pytest.raises(DeadlineError, match=r"1 of 4 workers got a slot|1 of 4 got a slot") as caught:
                client.pull()
            assert "[1, 2, 3]" in str(caught.value)
            client.close()

    def test_an_unknown_code_is_a_protocol_error(self) -> None:
        assert type(error_of(Fault(999, "x"))).__name__ == "RemoteProtocolError"


def test_closing_ends_every_thread() -> None:
    before = set(threading.enumerate())
    with Running(make("downpour")) as running:
        clients = [running.client(worker) for worker in range(2)]
        for client in clients:
            client.join()
    for client in clients:
        client.close()  # Its heartbeat thread ends shortly afterwards.
    until(lambda: set(threading.enumerate()) <= before)


def test_consecutive_replies_use_different_buffers() -> None:
    with Running(make("downpour")) as running:
        client = running.client()
        client.join()
        first = client.pull()
        second = client.pull()
        assert isinstance(first, Reply)
        assert first.center is not second.center
        client.close()


def fault() -> Fault:
    return fault_of(JobStoppedError("for a test"))


def test_every_state_is_in_the_table_and_is_reached() -> None:
    assert set(TRANSITIONS) == set(ServerState)
    reached, pending = set(), [ServerState.RUNNING]
    while pending:
        state = pending.pop()
        if state not in reached:
            reached.add(state)
            pending += TRANSITIONS[state]
    assert reached == set(ServerState)


@pytest.mark.parametrize("state", ServerState)
@pytest.mark.parametrize("following", ServerState)
def test_the_error_for_a_transition_that_the_table_lacks_names_both_states(
    state: ServerState, following: ServerState
) -> None:
    condition = JobCondition()
    condition.state = state
    with condition:
        if following in TRANSITIONS[state]:
            condition.move(following)
            assert condition.state is following
            return
        with pytest.raises(LocalProtocolError, match=f"{state.value} cannot become {following.value}"):
            condition.move(following)
    assert condition.state is state


@pytest.mark.parametrize("state", ServerState)
def test_every_event_is_accepted_in_every_state(state: ServerState) -> None:
    """Threads report failures, the driver's goodbye and the close in any order."""
    for event in ("fail", "report_corruption", "release", "close"):
        condition = JobCondition()
        condition.state = state
        arguments: dict[str, list[Any]] = {"fail": [fault()], "report_corruption": ["half a commit"]}
        getattr(condition, event)(*arguments.get(event, []))
        assert condition.state is state or condition.state in TRANSITIONS[state]


def test_a_goodbye_and_a_close_are_both_recorded() -> None:
    for order in (("release", "close"), ("close", "release")):
        condition = JobCondition()
        for event in order:
            getattr(condition, event)()
        assert (condition.over, condition.closing) == (True, True)


def test_workers_look_for_another_server_if_theirs_closes_without_a_goodbye() -> None:
    """Another attempt may own the checkpoint, and a worker that received `JobStoppedError` would end a healthy job."""
    condition = JobCondition()
    condition.close()
    with pytest.raises(ServerLostError, match="is closing, and its job has not ended"):
        condition.require_running()
    condition.release()
    with pytest.raises(JobStoppedError, match="the job is over"):
        condition.require_running()


def test_a_corrupt_center_stays_corrupt_when_the_job_fails() -> None:
    condition = JobCondition()
    condition.report_corruption("half a commit")
    condition.fail(fault())
    assert condition.state is ServerState.FAILED
    assert condition.corruption == "half a commit"


def test_a_thread_that_waits_itself_wakes_those_that_it_has_notified() -> None:
    condition, turns = JobCondition(), list[str]()

    def answer() -> None:
        with condition:
            turns.append("waits")
            condition.notify_all()
            assert condition.wait(patience(20))
            turns.append("answers")
            condition.notify_all()

    thread = threading.Thread(target=answer)
    with condition:
        thread.start()
        while turns != ["waits"]:
            assert condition.wait(patience(20))
        condition.notify_all()
        assert condition.wait(patience(20))
    thread.join(patience(20))
    assert turns == ["waits", "answers"]


class BlockedCommit:
    """A center whose commits block: it sets `entered` and then waits for `go`."""

    def __init__(self, running: Running) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self._commit = present(running.server.center).commit
        present(running.server.center).commit = cast("Any", self)

    def __call__(self, *args: Any) -> bool:
        self.entered.set()
        assert self.go.wait(patience(20))
        return self._commit(*args)


class TestProbes:
    def test_the_server_is_occupied_while_another_workers_commit_is_blocked(self) -> None:
        with Running(make("zealous_downpour")) as running:
            prober = running.client(1)
            prober.join()
            assert not prober.occupied()
            held = BlockedCommit(running)
            worker = running.train(0, [np.ones(1)])
            assert held.entered.wait(patience(20))
            assert prober.occupied()
            held.go.set()
            assert worker.ended() is None
            assert not prober.occupied()
            prober.close()

    def test_the_server_is_occupied_while_a_commit_waits_for_the_lock(self) -> None:
        with Running(make("downpour")) as running:
            prober = running.client(1)
            prober.join()
            worker = running.turns(0, [np.ones(1)])
            thread = threading.Thread(target=worker.turn, daemon=True)
            deadline = time.monotonic() + patience(20)
            with running.server.dispatcher.changed:
                thread.start()
                while not prober.occupied():  # The commit has not arrived yet.
                    assert time.monotonic() < deadline
                assert present(running.server.center).clock == 0
            thread.join(patience(20))
            assert not prober.occupied()
            prober.close()

    def test_a_commit_that_waits_for_its_round_does_not_occupy_the_server(self) -> None:
        with Running(make("averaging", window=1)) as running:
            prober = running.client(1)
            prober.join()
            worker = running.train(0, [np.ones(1)] * 2)
            assert running.driver.observe(0, patience(5)).clock == 1
            assert not prober.occupied()
            prober.leave()  # This ends the round.
            assert worker.ended() is None
            prober.close()

    def test_a_worker_adds_gradients_while_the_server_is_occupied(self) -> None:
        with Running(make("zealous_downpour", window=3)) as running:
            client, welcome, begin = toy_client(
                running.address, running.rule, [np.ones(1)] * 9, worker=1, size=SIZE, deadlines=PATIENT
            )
            loop = begin(welcome)
            next(loop)
            reply: Reply | None = client.pull()
            held = BlockedCommit(running)
            worker = running.train(0, [np.ones(1)])
            assert held.entered.wait(patience(20))
            probes = 0
            while not isinstance(request := loop.send(reply), CommitRecord):
                reply = None
                if isinstance(request, ProbeRequest):
                    probes += 1
                    reply = Reply(occupied=client.occupied())
            assert (probes, request.first, request.last) == (2, 0, 2)
            np.testing.assert_allclose(request.parts[0][0], -0.3, rtol=1e-6)
            held.go.set()
            assert worker.ended() is None
            client.close()

    def test_a_worker_with_probes_commits_every_mini_batch_once(self) -> None:
        values = [np.full(1, float(2**i)) for i in range(6)]
        with Running(make("zealous_downpour"), workers=1) as running:
            assert running.train(0, values).ended() is None
            np.testing.assert_allclose(running.driver.center().center[0], -0.1 * 63, rtol=1e-6)
            assert running.driver.drain().commits.view(COMMIT)["steps"].tolist() == [1] * 6

    def test_a_probe_survives_a_lost_connection(self) -> None:
        with Running(make("zealous_downpour")) as running:
            client = running.client()
            client.join()
            socket_of(present(client.channel)).shutdown(socket.SHUT_RDWR)
            assert not client.occupied()
            assert present(client.pull().center).shape == (SIZE,)  # The client has joined again and holds its lease.
            client.close()


pytestmark = pytest.mark.timeout(60)


def arrive_long_ago(admission: AdmissionControl, address: str, number: int, evicted: list[Any]) -> None:
    for index in range(number):
        connections: list[PendingConnection] = []
        connections.append(admission.arrive(address, hang_up_of(admission, connections, evicted, (address, index))))
        connections[0].arrived -= 10


def hang_up_of(
    admission: AdmissionControl, connections: list[Any], evicted: list[Any], name: str | tuple[str, int]
) -> Callable[..., Any]:
    def leave() -> None:
        evicted.append(name)
        # In a thread of its own, as a session leaves.
        threading.Thread(target=admission.leave, args=connections).start()

    return leave


def test_the_oldest_connection_of_the_most_crowded_address_is_evicted_first() -> None:
    evicted: list[Any] = []
    admission = AdmissionControl(pending_max=4)
    arrive_long_ago(admission, "honest", 1, evicted)
    arrive_long_ago(admission, "crowd", 3, evicted)
    admission.arrive("other", lambda: None)
    admission.arrive("another", lambda: None)
    assert evicted == [("crowd", 0), ("crowd", 1)]


def test_no_connection_is_evicted_within_a_tenth_of_a_second() -> None:
    evicted: list[Any] = []
    admission = AdmissionControl(pending_max=1)
    connections: list[PendingConnection] = []
    connections.append(admission.arrive("a", hang_up_of(admission, connections, evicted, "a")))
    admission.arrive("b", lambda: None)
    assert evicted == ["a"]
    assert connections[0].evicted is not None
    assert connections[0].evicted - connections[0].arrived >= 0.1


def test_a_refused_address_is_recorded_once_and_the_list_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    admission = AdmissionControl(addresses_max=3)
    with caplog.at_level(logging.WARNING, "distkeras.ps.server.admission"):
        for number in range(10):
            for _ in range(5):
                admission.refuse(admission.arrive(f"10.0.0.{number}", lambda: None), RemoteProtocolError("noise"))
    assert admission.refused == 50
    assert [refusal.address for refusal in admission.refusals] == [
        "10.0.0.0",
        "10.0.0.1",
        "10.0.0.2",
        "further addresses",
    ]
    assert len(caplog.records) == 4
    assert admission.refusals[0].reason == "noise"


def test_an_evicted_connection_is_not_admitted() -> None:
    admission = AdmissionControl()
    connection = admission.arrive("a", lambda: None)
    admission.evict_oldest()
    with pytest.raises(RemoteProtocolError, match="to make room for newer ones"):
        admission.admit(connection)
