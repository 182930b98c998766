"""Vectors that are rounded on the wire: a real server, real clients, and connections that break."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.cases import rest_slow
from support.patience import PATIENT, patience
from support.present import present
from support.ps.frames import some_commit
from support.ps.running_server import KEY, SIZE, Running, socket_of
from support.ps.toy_model import toy_client

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.errors import ConfigurationError, JobStoppedError, NonFiniteError, RemoteProtocolError, ShapeError
from distkeras.ps.protocol.compression import codec_of
from distkeras.ps.protocol.layout import Layout
from distkeras.ps.protocol.loop import NO_FLOATS, CommitRecord
from distkeras.ps.protocol.messages import Ack, Commit, Hello, Welcome, fault_of
from distkeras.ps.rules import center_rules, make
from distkeras.ps.rules.base import BLOCK
from distkeras.ps.transport.client import Address, Channel
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker

LAYOUTS = (Layout(("first/kernel", "first/bias"), ((SIZE - 5,), (5,))), Layout((), ()))
FORMATS = ("bfloat16", "int8")


def normal(seed: int | tuple[int, int], scale: float = 1.0, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=scale, size=size).astype(np.float32)


def request(number: int, part: np.ndarray, *, moving_statistics: np.ndarray = NO_FLOATS) -> CommitRecord:
    return CommitRecord(
        epoch=0,
        first=number,
        last=number,
        epoch_end=False,
        wants_center=True,
        learning_rate=0.1,
        scale=1.0,
        parts=(part,),
        moving_statistics=moving_statistics,
        history=np.zeros((1, 3)),
    )


def center_of(running: Running) -> np.ndarray:
    return present(running.server.center).current.array.copy()


def through_bfloat16(vector: np.ndarray) -> np.ndarray:
    return vector.astype(bfloat16).astype(np.float32)


def step_of(vector: np.ndarray) -> float:
    """Return the int8 scale of one block with this range."""
    return float(np.abs(vector).max()) / 127


def joined(running: Running, worker: int = 0, **options: Any) -> WorkerClient:
    client = running.client(worker, **options)
    client.join()
    return client


class TestBFloat16:
    def test_both_directions_round_each_vector_once(self) -> None:
        start = normal(0)
        with Running(make("downpour"), start=start) as running:
            client = joined(running, wire_format="bfloat16")
            np.testing.assert_array_equal(client.pull().center, through_bfloat16(start))
            exact = start
            for number in range(5):
                payload = normal(number + 1, 0.01)
                reply = client.commit(request(number, payload))
                exact = exact + through_bfloat16(payload)
                np.testing.assert_array_equal(center_of(running), exact)  # It is rounded on the wire only.
                np.testing.assert_array_equal(reply.center, through_bfloat16(exact))
            records = running.driver.drain().commits.view(COMMIT)
            assert records["bytes"].tolist() == [2 * SIZE] * 5
            np.testing.assert_array_equal(running.driver.center().center, exact)  # The driver's center is not rounded.
            client.close()


class TestInt8:
    def test_the_workers_vector_does_not_drift_from_the_center(self) -> None:
        with Running(make("downpour"), start=normal(0)) as running:
            clients = [joined(running, worker, wire_format="int8") for worker in range(2)]
            for client in clients:
                assert present(client.pull().center).tobytes() == center_of(running).tobytes()
            known = [center_of(running)] * 2
            for number in range(60):
                for worker, client in enumerate(clients):
                    reply = client.commit(request(number, normal((worker, number), 0.01)))
                    center = center_of(running)
                    bound = 0.51 * step_of(center - known[worker]) + 2e-7 * np.abs(center)
                    assert (np.abs(reply.center - center) <= bound).all(), number
                    assert bound.max() < 4e-4  # The center is spread over [-5, 5].
                    known[worker] = present(reply.center).copy()
            records = running.driver.drain().commits.view(COMMIT)
            assert set(records["bytes"].tolist()) == {SIZE + 4 * -(-SIZE // BLOCK)}
            for client in clients:
                client.close()

    def test_the_sum_of_what_is_applied_approximates_the_sum_of_the_payloads(self) -> None:
        with Running(make("downpour")) as running:
            client = joined(running, wire_format="int8")
            client.pull()
            meant, largest = np.zeros(SIZE), 0.0
            for number in range(60):
                payload = normal(number)
                meant += payload
                largest = max(largest, float(np.abs(payload).max()))
                client.commit(request(number, payload))
                # The residual of a commit, whose payload included the residual of the previous one.
                assert np.abs(center_of(running) - meant).max() < 0.55 * largest / 126
            client.close()

    def test_the_vector_of_a_reply_does_not_change_with_the_next_reply(self) -> None:
        with Running(make("downpour"), start=normal(0)) as running:
            client = joined(running, wire_format="int8")
            reply = client.pull()
            for number in range(5):
                delivered, before = reply.center, present(reply.center).copy()
                reply = client.commit(request(number, normal(number + 1, 0.01)))
                np.testing.assert_array_equal(delivered, before)
                assert not np.array_equal(present(reply.center), before)
            client.close()

    def test_a_pull_is_exact_and_later_differences_refer_to_it(self) -> None:
        with Running(make("downpour"), start=normal(0)) as running:
            client, other = joined(running, wire_format="int8"), joined(running, 1)
            client.pull()
            client.commit(request(0, normal(1)))
            other.pull()
            other.commit(request(0, normal(2, 100.0)))
            exact = center_of(running)
            np.testing.assert_array_equal(client.pull().center, exact)
            reply = client.commit(request(1, normal(3, 1e-3)))
            assert np.abs(reply.center - center_of(running)).max() < 1e-4
            client.close()
            other.close()

    def test_a_worker_that_joins_again_receives_a_whole_center(self) -> None:
        with Running(make("downpour"), start=normal(0)) as running:
            client = joined(running, wire_format="int8")
            client.pull()
            client.commit(request(0, normal(1)))
            client.join()  # It uses the same connection.
            reply = client.commit(request(1, normal(2)))
            np.testing.assert_array_equal(reply.center, center_of(running))
            client.close()

    @pytest.mark.parametrize("applied", [True, False])
    @pytest.mark.parametrize("wire_format", FORMATS)
    def test_a_cut_connection_does_not_change_the_result(self, wire_format: str, applied: bool) -> None:
        """The connection is cut before commit 3 or its reply has arrived; the result is as without the cut."""

        def train(cut: bool) -> np.ndarray:
            with Running(make("downpour"), start=normal(0), deadlines=PATIENT) as running:
                client = joined(running, wire_format=wire_format)
                client.pull()
                for number in range(6):
                    if cut and number == 3:
                        before = present(client.channel)
                        before.send = breaking(running, before)
                    reply = client.commit(request(number, normal(number + 1, 0.01)))
                    if wire_format == "bfloat16":
                        np.testing.assert_array_equal(reply.center, through_bfloat16(center_of(running)))
                    elif cut and number == 3:
                        assert client.channel is not before
                        np.testing.assert_array_equal(reply.center, center_of(running))
                    else:
                        np.testing.assert_allclose(present(reply.center), center_of(running), rtol=0, atol=3e-4)
                client.close()
                assert present(running.server.center).clock == 6
                return center_of(running)

        def breaking(running: Running, channel: Channel) -> Callable[..., Any]:
            send = channel.send

            def send_and_cut(message: Commit) -> None:
                if applied:
                    send(message)
                    assert running.driver.observe(3, patience(5)).clock == 4
                else:
                    buffers = [bytes(buffer) for buffer in channel.connection.send(message)]
                    socket_of(channel).sendall(buffers[0] + buffers[1][:1000])
                socket_of(channel).shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError("cut by the test")

            return send_and_cut

        np.testing.assert_array_equal(train(cut=True), train(cut=False))


@pytest.mark.parametrize("wire_format", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_commit_that_is_not_finite_is_refused_and_its_element_is_named(wire_format: str, bad: float) -> None:
    with Running(make("downpour"), layouts=LAYOUTS) as running:
        client = joined(running, wire_format=wire_format)
        client.pull()
        client.commit(request(0, np.ones(SIZE, np.float32)))
        before, payload = center_of(running), np.ones(SIZE, np.float32)
        payload[SIZE - 2] = bad
        with pytest.raises(NonFiniteError, match=rf"first/bias \(element {SIZE - 2}\) \(1 such elements\)"):
            client.commit(request(1, payload))
        np.testing.assert_array_equal(center_of(running), before)
        client.close()


def test_a_skipped_commit_resets_the_residual() -> None:
    # The residuals of 0.6 and of the commit with the NaN would be visible in the center.
    payloads = [np.full(3, 0.6), np.array([1.0, np.nan, 0.3]), np.array([127.0, 1.0, -1.0])]
    with Running(make("downpour"), size=3, max_skipped=1) as running:
        client, welcome, begin = toy_client(
            running.address, running.rule, [-p for p in payloads], worker=0, size=3, eta=1.0, wire_format="int8"
        )
        begun = []
        run_worker(client, welcome, lambda welcome: begun.append(welcome) or begin(welcome))
        assert len(begun) == 2
        expected = np.full(3, np.float32(127) * np.float32(np.float32(0.6) / 127)) + np.array([127, 1, -1], np.float32)
        np.testing.assert_allclose(center_of(running), expected, rtol=1e-6)
        client.close()


#: Rates of rules whose step at the server has the length of the rate, however far the workers move.
SERVER_RATES = {"fadas": {"server_rate": 0.1}, "fedopt": {"server_rate": 0.5}}


@pytest.mark.parametrize("wire_format", FORMATS)
@pytest.mark.parametrize(
    "name", rest_slow((name for name in center_rules() if not make(name).traits.keeps_replica), "downpour", "dana_zero")
)
def test_every_rule_without_replica_trains_or_refuses_the_format(name: str, wire_format: str) -> None:
    rule = make(name, **SERVER_RATES.get(name, {}))
    with Running(rule, size=33, start=np.linspace(-1, 1, 33), eta=0.02) as running:
        options: dict[str, Any] = {"size": 33, "eta": 0.02, "wire_format": wire_format}
        workers = [
            running.train(worker, range(50), gradient=lambda theta, _: theta - 0.5, **options) for worker in range(2)
        ]
        errors = [worker.ended() for worker in workers]
        if rule.traits.keeps_sent or (name, wire_format) == ("averaging", "int8"):
            assert {type(error) for error in errors} == {ConfigurationError}
            return
        assert errors == [None, None]
        assert running.driver.observe(-1, patience(1)).batches == 100
        error = np.abs(center_of(running) - 0.5)
        assert error.max() < 1.3  # It was 1.5 at the start.


@pytest.mark.parametrize("wire_format", FORMATS)
@pytest.mark.parametrize("cut", [False, True])
def test_a_commit_travels_while_the_next_window_is_computed(wire_format: str, cut: bool) -> None:
    clients: list[WorkerClient] = []
    values, taken = np.linspace(1, 2, 20, dtype=np.float32), itertools.count(1)

    def gradient(theta: np.ndarray, value: float) -> np.ndarray:
        if cut and next(taken) == 9:
            present(clients[0].channel).hang_up()
        return np.full(theta.shape, value)

    with Running(make("downpour", window=2), workers=1, start=normal(0)) as running:
        client, welcome, begin = toy_client(
            running.address,
            running.rule,
            values,
            worker=0,
            size=SIZE,
            eta=1.0,
            gradient=gradient,
            deadlines=running.deadlines,
            overlap=True,
            wire_format=wire_format,
        )
        clients.append(client)
        run_worker(client, welcome, begin)
        client.close()
        assert present(running.server.center).clock == 10
        # All elements of a difference are nearly equal: int8 has them exactly, bfloat16 each within 2^-9.
        np.testing.assert_allclose(center_of(running), normal(0) - values.sum(), rtol=0, atol=0.06)


@pytest.mark.parametrize("wire_format", FORMATS)
def test_moving_statistics_may_have_the_size_of_the_center(wire_format: str) -> None:
    """The vector and the moving statistics have one size and arrive together, but are distinguished."""
    size, start = 6, normal(0, size=6)
    with Running(make("downpour"), size=size, start=start, moving_statistics=size) as running:
        client = joined(running, size=size, moving_statistics=size, wire_format=wire_format)
        client.pull()
        for number in range(3):
            seen = normal(number + 7, size=size)
            reply = client.commit(request(number, normal(number + 1, size=size), moving_statistics=seen))
            np.testing.assert_allclose(reply.moving_statistics, seen, rtol=1e-6)
            np.testing.assert_allclose(present(reply.center), center_of(running), rtol=2**-8, atol=0.05)
        client.close()


def test_moving_statistics_may_have_the_size_of_an_unrounded_center() -> None:
    with Running(make("downpour"), size=6, start=normal(0, size=6), moving_statistics=6) as running:
        client = joined(running, size=6, moving_statistics=6)
        reply = client.pull()
        np.testing.assert_array_equal(reply.center, normal(0, size=6))
        np.testing.assert_array_equal(reply.moving_statistics, np.zeros(6))
        client.close()


class TestRefused:
    @pytest.mark.parametrize("wire_format", FORMATS)
    @pytest.mark.parametrize("name", ["adag", "aeasgd", "dana_dc", "dc_asgd", "eamsgd", "easgd"])
    def test_a_rule_that_relies_on_the_sent_center_refuses_rounding(self, name: str, wire_format: str) -> None:
        with Running(make(name)) as running:
            with pytest.raises(ConfigurationError, match="`wire_format` must be 'float32': rule"):
                joined(running, wire_format=wire_format)
            assert running.server.fault is None
            assert present(running.server.center).leases == {}

    def test_an_unknown_wire_format_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="`wire_format` must be one of"):
            WorkerClient(Address("localhost", 1, KEY), worker=0, attempt=0, size=SIZE, wire_format="int4")
        with Running(make("downpour")) as running:
            with pytest.raises(RemoteProtocolError, match=r"`wire_format` must be one of .*'int4'"):
                running.driver.request(Hello(0, 0, SIZE, 0, "loss", "int4"), Welcome)
            assert present(running.server.center).leases == {}

    @pytest.mark.parametrize(
        ("agreed", "plain", "packed"),
        [
            ("int8", [SIZE], []),
            ("int8", [SIZE], ["int8"]),
            ("int8", [], ["bfloat16"]),
            ("int8", [], [SIZE]),
            ("int8", [], ["int8", "int8"]),
            ("int8", [], []),
            ("bfloat16", [], ["int8"]),
            ("float32", [], ["int8"]),
            ("float32", [SIZE], ["int8"]),
            ("float32", [SIZE], [0]),
        ],
    )
    def test_parts_of_another_format_than_agreed_are_refused(
        self, agreed: str, plain: list[int], packed: list[Any]
    ) -> None:
        with Running(make("downpour"), start=normal(0)) as running:
            client = joined(running, wire_format=agreed)
            client.pull()
            sizes = [present(codec_of(kind, SIZE)).nbytes if isinstance(kind, str) else kind for kind in packed]
            parts = [np.ones(n, np.float32) for n in plain]
            commit = some_commit(*parts, history=np.zeros((1, 3)), packed=tuple(np.ones(n, np.uint8) for n in sizes))
            with pytest.raises(ShapeError, match="a commit must have 1 parts of"):
                client.request(commit, Ack)
            client.close()
            assert present(running.server.center).clock == 0
            np.testing.assert_array_equal(center_of(running), normal(0))


def test_the_buffers_of_a_refused_request_are_released() -> None:
    with Running(make("downpour")) as running:
        client = joined(running, wire_format="int8")
        client.pull()
        running.server.dispatcher.changed.fail(fault_of(JobStoppedError("enough")))
        for _ in range(5):
            with pytest.raises(JobStoppedError, match="the job was ended"):
                client.commit(request(0, np.ones(SIZE, np.float32)))
        (session,) = [session for session in running.server.sessions if session.lease]
        assert session.vectors.in_use == 0
        client.close()
